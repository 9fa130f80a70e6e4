"""One kernel for all groups that are alike: the layers of a network differ in the buffers they touch, in nothing else.

In the canonical form of a group, buffers and streams of random numbers are named by the order they come in; each launch
passes its own. Kernels are built from that form alone, so groups with an equal one share a kernel.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from torchkiln.ir import expr as ex
from torchkiln.ir import index as ix
from torchkiln.ir import ops
from torchkiln.ir.expr import Constant, Expr, IndexValue, Load, Op
from torchkiln.ir.index import Size
from torchkiln.ir.program import NO_ORIGIN, Buffer, Loop
from torchkiln.schedule.build import BuiltKernel, KernelBuilder
from torchkiln.schedule.group import FusedGroup

_MOST_STREAMS = 2**63 - 1


@dataclass(frozen=True)
class _Canonical:
    """A group without names: equal for equal work. Buffers and stored targets are in the order they come in."""

    group: FusedGroup
    buffers: tuple[Buffer, ...]
    stored: tuple[str, ...]


class SameKernels:
    """Builds the kernels of one program with ``builder``, each once."""

    def __init__(self, buffers: Mapping[str, Buffer], builder: KernelBuilder) -> None:
        self._buffers = buffers
        self._builder = builder
        self._built: dict[_Canonical, BuiltKernel] = {}

    def build(self, group: FusedGroup, stored: set[str]) -> BuiltKernel:
        """As the builder does. ``stored`` names the targets that are read outside the group."""
        names = _Names()
        members = tuple(map(names.loop, group.members))
        canonical = _Canonical(
            FusedGroup(group.rows, group.columns, members),
            tuple(replace(self._buffers[old], name=new) for old, new in names.buffers.items()),
            tuple(new for old, new in names.buffers.items() if old in stored),
        )
        built = self._built.get(canonical)
        if built is None:
            buffers = {buffer.name: buffer for buffer in canonical.buffers}
            built = self._builder.build(canonical.group, buffers, set(canonical.stored))
            self._built[canonical] = built
        old_names = {new: old for old, new in names.buffers.items()}
        streams: dict[Size | int, int] = {size: stream for stream, size in names.streams.items()}
        sizes = tuple(streams.get(size, size) for size in built.sizes)
        return replace(built, buffers=tuple(old_names[name] for name in built.buffers), sizes=sizes)


class _Names:
    """Names of the buffers and random streams of one group, by the order they come in."""

    def __init__(self) -> None:
        self.buffers: dict[str, str] = {}
        self.streams: dict[int, Size] = {}
        self._memo: dict[Expr, Expr] = {}

    def loop(self, member: Loop) -> Loop:
        value = self._value(member.value)
        store = tuple(ix.substitute(s, {}, self._value) if ex.index_operands(s) else s for s in member.store)
        return replace(member, value=value, store=store, target=self._buffer(member.target), origin=NO_ORIGIN)

    def _value(self, value: Expr) -> Expr:
        for drawn in ex.walk((value,), self._memo):
            if isinstance(drawn, Op) and drawn.name in ops.RANDOM:
                seed, stream, *more = map(self._rewritten, drawn.args)
                assert isinstance(stream, Constant)
                number = int(stream.value)
                size = self.streams.setdefault(number, Size(f"stream{len(self.streams)}", 0, _MOST_STREAMS, 0))
                args = (seed, IndexValue(ix.of(size), stream.dtype), *more)
                self._memo[drawn] = Op(drawn.name, args, drawn.dtype)
        return self._rewritten(value)

    def _rewritten(self, value: Expr) -> Expr:
        return ex.rewrite(value, self._leaf, {}, self._memo)

    def _leaf(self, node: Expr) -> Expr | None:
        return Load(self._buffer(node.buffer), node.subscripts, node.dtype) if isinstance(node, Load) else None

    def _buffer(self, name: str) -> str:
        return self.buffers.setdefault(name, f"b{len(self.buffers)}")
