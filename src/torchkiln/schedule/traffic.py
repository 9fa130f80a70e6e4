"""What one step of a plan moves and computes: bytes of memory and operations on floating-point numbers.

For reports. Where sizes are known only at run time, typical ones are taken.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torchkiln.ir import expr as ex
from torchkiln.ir import index as ix
from torchkiln.ir.index import Extent, Index, Var
from torchkiln.ir.program import WIDE_PRODUCTS, Buffer, ExternCall, StridedView
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
    statements = [s for phase in kernel.phases for s in (*phase.before, *phase.inside)]
    return bool(statements) and all(isinstance(s, Store) and isinstance(s.value, ex.Load) for s in statements)


class _Points:
    """Numbers of iterations, for the sizes of one launch."""

    def __init__(self, step: Launch) -> None:
        self._sizes: dict[Any, Index] = {
            own: ix.as_index(given) for own, given in zip(step.kernel.sizes, step.sizes, strict=True)
        }

    def of(self, variables: Iterable[Var]) -> int:
        return math.prod(ix.hint_of(ix.substitute_extent(v.extent, self._sizes)) for v in variables)


def _of_launch(step: Launch, plan: Plan) -> Traffic:
    """An element that several points read is counted once: no more bytes than the buffer has."""
    kernel, points = step.kernel, _Points(step)
    read, written = [0] * len(step.buffers), [0] * len(step.buffers)
    operations = 0
    everywhere = points.of((*kernel.rows, *kernel.columns))
    for phase in kernel.phases:
        statements = (*phase.before, *phase.inside)
        for node in ex.walk(tuple(statement.value for statement in statements)):
            if isinstance(node, ex.Load) and node.buffer.startswith("%"):
                read[int(node.buffer[1:])] += points.of(node.variables)
            elif isinstance(node, ex.Op) and node.dtype.is_floating_point and node.name not in _NO_ARITHMETIC:
                operations += points.of(node.variables)
        for statement in statements:
            if isinstance(statement, Accumulate):
                operations += everywhere
            elif isinstance(statement.parameter, int):
                written[statement.parameter] += points.of(statement.offset.variables())
    moved = 0
    for k, name in enumerate(step.buffers):
        itemsize, most = kernel.parameters[k].dtype.itemsize, ix.hint_of(plan.program.buffers[name].nbytes)
        moved += min(most, read[k] * itemsize) + min(most, written[k] * itemsize)
    return Traffic(moved, operations)


def _of_call(step: ExternCall, plan: Plan) -> Traffic:
    views = dict.fromkeys(tensors_of(step.arguments))
    results = [None if name is None else plan.program.buffers[name] for name in step.results]
    moved = sum(_bytes(view) for view in views)
    moved += sum(_bytes(buffer) for buffer in results if buffer is not None)
    moved += sum(_bytes(plan.program.buffers[name]) for name in step.mutates)
    return Traffic(moved, _operations_of_call(step, results))


# Where the query is among the arguments, and how many products of the size of query × key are taken.
_ATTENTION: dict[object, tuple[int, int]] = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: (0, 2),
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: (1, 5),
}


def _operations_of_call(step: ExternCall, results: Sequence[Buffer | None]) -> int:
    """By torch's own formulas, which leave out groups in the backward of a convolution, and attention on the CPU."""
    target = step.target
    if not isinstance(target, torch._ops.OpOverload):
        return 0
    if target.overloadpacket in _ATTENTION:
        first, products = _ATTENTION[target.overloadpacket]
        query, key = (sizes_of(view.shape) for view in step.arguments[first : first + 2])
        return products * 2 * math.prod(query) * key[-2]
    if target in WIDE_PRODUCTS:
        left, right, _ = step.arguments
        return 2 * math.prod(sizes_of(left.shape)) * ix.hint_of(right.shape[-1])
    if target is torch.ops.aten.convolution_backward.default:
        gradient, x, weight, _, _, _, _, transposed, _, _, wanted = step.arguments
        # A product of each element of the smaller side with the weights that it meets, once for each gradient.
        ends, channels = (x, x.shape[1]) if transposed else (gradient, gradient.shape[1])
        met = math.prod(sizes_of(weight.shape)) // max(ix.hint_of(channels), 1)
        return 2 * math.prod(sizes_of(ends.shape)) * met * sum(map(bool, wanted[:2]))
    # Only a profile needs it, and it is not loaded with torch.
    from torch.utils.flop_counter import flop_registry

    if target.overloadpacket not in flop_registry or any(view.opaque for view in tensors_of(step.arguments)):
        return 0
    given = [(a, _without_memory(value)) for a, value in zip(target._schema.arguments, step.arguments, strict=True)]
    arguments = [value for a, value in given if not a.kwarg_only]
    keywords = {a.name: value for a, value in given if a.kwarg_only}
    returned = [None if buffer is None else _without_memory(buffer) for buffer in results]
    answer = returned[0] if len(target._schema.returns) == 1 else tuple(returned)
    return int(flop_registry[target.overloadpacket](*arguments, **keywords, out_val=answer))


def tensors_of(argument: Any) -> list[StridedView]:
    """The tensors among the arguments of an extern call, in order."""
    if isinstance(argument, StridedView):
        return [argument]
    if isinstance(argument, (tuple, list)):
        return [view for item in argument for view in tensors_of(item)]
    return []


def sizes_of(shape: Iterable[Extent]) -> tuple[int, ...]:
    """A shape in numbers, typical ones where they are known only at run time."""
    return tuple(ix.hint_of(size) for size in shape)


def _bytes(tensor: StridedView | Buffer) -> int:
    """Of the elements that are there: those along a dimension with stride 0 are one. Nothing is known of an opaque
    tensor."""
    if tensor.opaque:
        return 0
    sizes = zip(sizes_of(tensor.shape), tensor.strides, strict=True)
    return math.prod(size for size, stride in sizes if stride != 0) * tensor.dtype.itemsize


def _without_memory(argument: Any) -> Any:
    """An argument as a formula of torch's counter wants it: tensors without memory, numbers as such."""
    if isinstance(argument, (StridedView, Buffer)):
        return torch.empty(sizes_of(argument.shape), dtype=argument.dtype, device="meta")
    if isinstance(argument, Index):
        return ix.hint_of(argument)
    if isinstance(argument, tuple):
        return [_without_memory(item) for item in argument]
    return argument
