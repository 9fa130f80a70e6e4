"""One kernel for all groups that are alike: the layers of a network differ in the buffers they touch, in nothing else.

A group is written with its buffers named by the order they come in, and so are the streams that its random numbers come
from: each launch passes its own. What is built is built from that alone, so groups that are equal then share a kernel
by construction, and building costs as much as there are different groups.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from torchkiln.ir import expr as ex
from torchkiln.ir import index as ix
from torchkiln.ir import ops
from torchkiln.ir.expr import Constant, Expr, IndexValue, Load, Op
from torchkiln.ir.index import Index, Size
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

    @property
    def distinct(self) -> int:
        """How many kernels were built."""
        return len(self._built)

    def build(self, group: FusedGroup, stored: set[str]) -> BuiltKernel:
        """As the builder does. ``stored`` names the targets that are read outside the group."""
        canonical, names, streams = _canonical(group, self._buffers, stored)
        built = self._built.get(canonical)
        if built is None:
            buffers = {buffer.name: buffer for buffer in canonical.buffers}
            built = self._builder.build(canonical.group, buffers, set(canonical.stored))
            self._built[canonical] = built
        sizes = tuple(streams.get(size, size) for size in built.sizes)
        return replace(built, buffers=tuple(names[name] for name in built.buffers), sizes=sizes)


def _canonical(
    group: FusedGroup, buffers: Mapping[str, Buffer], stored: set[str]
) -> tuple[_Canonical, dict[str, str], dict[Size | int, int]]:
    """``group`` with names by order, the buffers those names stand for, and the streams likewise."""
    numbered: dict[str, str] = {}
    streams: dict[int, Size] = {}
    memo: dict[Expr, Expr] = {}

    def number(name: str) -> str:
        return numbered.setdefault(name, f"b{len(numbered)}")

    def leaf(node: Expr) -> Expr | None:
        return Load(number(node.buffer), node.subscripts, node.dtype) if isinstance(node, Load) else None

    def value(node: Expr) -> Expr:
        for drawn in ex.walk((node,), memo):
            if isinstance(drawn, Op) and drawn.name in ops.RANDOM:
                seed, stream, *more = drawn.args
                assert isinstance(stream, Constant)
                number = IndexValue(ix.of(stream_size(int(stream.value))), stream.dtype)
                memo[drawn] = Op(drawn.name, (rewritten(seed), number, *map(rewritten, more)), drawn.dtype)
        return rewritten(node)

    def rewritten(node: Expr) -> Expr:
        return ex.rewrite(node, leaf, {}, memo)

    def stream_size(stream: int) -> Size:
        return streams.setdefault(stream, Size(f"stream{len(streams)}", 0, _MOST_STREAMS, 0))

    def store(index: Index) -> Index:
        return ix.substitute(index, {}, value) if ex.index_operands(index) else index

    members: list[Loop] = []
    for member in group.members:
        members.append(
            replace(
                member,
                value=value(member.value),
                store=tuple(store(s) for s in member.store),
                target=number(member.target),
                origin=NO_ORIGIN,
            )
        )
    unnamed = tuple(replace(buffers[old], name=new) for old, new in numbered.items())
    kept = tuple(new for old, new in numbered.items() if old in stored)
    canonical = _Canonical(replace(group, members=tuple(members)), unnamed, kept)
    names = {new: old for old, new in numbered.items()}
    return canonical, names, {size: stream for stream, size in streams.items()}
