"""What one step of a plan moves and computes: bytes of memory and operations on floating-point numbers.

For reports. Symbolic sizes have typical values.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torchkiln.graph.operators import flops
from torchkiln.ir import expr as ex
from torchkiln.ir import index as ix
from torchkiln.ir.index import Extent, Index, Var
from torchkiln.ir.program import Buffer, ExternCall, StridedView
from torchkiln.schedule.dependencies import tensors_of
from torchkiln.schedule.kernel import Accumulate, Kernel, Store
from torchkiln.schedule.plan import Launch, Plan, Step

_NO_ARITHMETIC = ("cast", "narrow", "rounded")


@dataclass(frozen=True)
class Traffic:
    """Bytes read and written, each element once; operations, where a function such as ``exp`` counts as one."""

    bytes: int = 0
    operations: int = 0


def traffic_of(step: Step, plan: Plan) -> Traffic:
    if isinstance(step, Launch):
        return _of_launch(step, plan)
    if isinstance(step, ExternCall):
        return _of_call(step, plan)
    return Traffic()


def only_moves(kernel: Kernel) -> bool:
    """Whether a kernel copies elements from one place to another and computes nothing."""
    statements = kernel.nest.statements
    return bool(statements) and all(isinstance(s, Store) and _is_moved(s.value) for s in statements)


def _is_moved(value: ex.Expr) -> bool:
    parts = value.parts if isinstance(value, ex.Interleaved) else (value,)
    return all(isinstance(part, ex.FlatLoad) for part in parts)


def _of_launch(step: Launch, plan: Plan) -> Traffic:
    """An element that several points read is counted once: no more bytes than the buffer has."""
    nest = step.kernel.nest
    sizes: dict[Any, Index] = {own: ix.as_index(given) for own, given in zip(nest.sizes, step.sizes, strict=True)}

    def points(variables: Iterable[Var]) -> int:
        return math.prod(ix.hint_of(ix.substitute_extent(v.extent, sizes)) for v in variables)

    read, written = [0] * len(step.buffers), [0] * len(step.buffers)
    operations = 0
    everywhere = points((*nest.rows, *nest.columns))
    for phase in nest.phases:
        statements = (*phase.before, *phase.inside)
        for node in ex.walk(tuple(statement.value for statement in statements)):
            if isinstance(node, ex.FlatLoad) and isinstance(node.memory, ex.Parameter):
                read[node.memory.number] += points(node.variables)
            elif isinstance(node, ex.Op) and node.dtype.is_floating_point and node.name not in _NO_ARITHMETIC:
                operations += points(node.variables)
        for statement in statements:
            if isinstance(statement, Accumulate):
                operations += everywhere
            elif isinstance(statement.memory, ex.Parameter):
                together = len(statement.value.parts) if isinstance(statement.value, ex.Interleaved) else 1
                written[statement.memory.number] += points(statement.offset.variables()) * together
    moved = 0
    for k, name in enumerate(step.buffers):
        itemsize, most = nest.parameters[k].itemsize, ix.hint_of(plan.program.buffers[name].nbytes)
        moved += min(most, read[k] * itemsize) + min(most, written[k] * itemsize)
    return Traffic(moved, operations)


def _of_call(step: ExternCall, plan: Plan) -> Traffic:
    views = dict.fromkeys(tensors_of(step.arguments))
    results = [None if name is None else plan.program.buffers[name] for name in step.results]
    moved = sum(_bytes(view) for view in views)
    moved += sum(_bytes(buffer) for buffer in results if buffer is not None)
    moved += sum(_bytes(plan.program.buffers[name]) for name in step.mutates)
    # Few elements of a sparse tensor are there; a weight that oneDNN packed has all of them.
    if any(view.opaque for view in views) and getattr(step.target, "namespace", "") != "mkldnn":
        return Traffic(moved)
    first = results[0] if results else None
    return Traffic(moved, flops(step.target, _shapes(step.arguments), () if first is None else sizes_of(first.shape)))


def sizes_of(shape: Iterable[Extent]) -> tuple[int, ...]:
    """A shape in numbers, typical ones where sizes are symbolic."""
    return tuple(ix.hint_of(size) for size in shape)


def _bytes(tensor: StridedView | Buffer) -> int:
    """Elements along a dimension with stride 0 are one. Nothing is known of an opaque tensor."""
    if tensor.opaque:
        return 0
    sizes = zip(sizes_of(tensor.shape), tensor.strides, strict=True)
    return math.prod(size for size, stride in sizes if stride != 0) * tensor.dtype.itemsize


def _shapes(argument: Any) -> Any:
    """Arguments of an extern call with shapes in place of tensors, in numbers."""
    if isinstance(argument, StridedView):
        return sizes_of(argument.shape)
    if isinstance(argument, Index):
        return ix.hint_of(argument)
    return tuple(map(_shapes, argument)) if isinstance(argument, tuple) else argument
