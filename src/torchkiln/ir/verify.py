"""The rules of programs and of the expressions in them. What breaks one raises :class:`VerificationError`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from torchkiln.errors import VerificationError
from torchkiln.ir import index as ix
from torchkiln.ir.expr import Expr, Interleaved, Masked, Op, loads, walk
from torchkiln.ir.index import Extent, Index, Size, Var
from torchkiln.ir.ops import OPS
from torchkiln.ir.program import (
    REDUCERS,
    Buffer,
    CheckFits,
    CheckSizes,
    ExternCall,
    Loop,
    Number,
    PassInput,
    Program,
    ReadNumber,
    StridedView,
    reduced_dtype,
)


def verify_program(program: Program) -> None:
    """Every read is written before, subscripts are in range, dtypes agree, and sizes are known where they are used."""
    known = _Known(program)
    for operation in program.operations:
        if isinstance(operation, Loop):
            known.loop(operation)
        elif isinstance(operation, ExternCall):
            known.call(operation)
        elif isinstance(operation, ReadNumber):
            known.view(operation.view, operation)
            require(known.buffers[operation.view.buffer].device == "cpu", "a number read on a card", operation)
            known.sizes.add(operation.size)
        elif isinstance(operation, CheckSizes):
            known.extents((operation.left, operation.right), operation)
        elif isinstance(operation, CheckFits):
            known.extents((operation.value,), operation)
    for output in program.outputs:
        if isinstance(output, StridedView):
            known.view(output, output)
        elif isinstance(output, PassInput):
            require(0 <= output.position < len(program.inputs), "there is no such input", output)
        elif isinstance(output, Number):
            known.extents((output.value,), output)


def verify_value(value: Expr, variables: Collection[Var], where: object) -> None:
    """Operations are of the vocabulary, take what they are given, and depend on loops around them only."""
    require(value.variables <= frozenset(variables), lambda: _unbound(value.variables, variables), where)
    for node in walk((value,)):
        if isinstance(node, Op):
            require(node.name in OPS, f"there is no operation {node.name}", where)
            mistake = OPS[node.name].mistake(tuple(a.dtype for a in node.args), node.dtype)
            require(mistake is None, mistake or "", where)
        elif isinstance(node, Masked):
            require(node.condition.dtype == torch.bool, f"a mask of {node.condition.dtype}", where)
        elif isinstance(node, Interleaved):
            require(len({part.dtype for part in node.parts}) == 1, "values of several dtypes interleaved", where)


def _unbound(used: Iterable[Var], bound: Collection[Var]) -> str:
    return f"no loop binds {', '.join(sorted(v.name for v in used if v not in frozenset(bound)))}"


def require(condition: bool, mistake: str | Callable[[], str], where: object) -> None:
    """Raise VerificationError unless ``condition`` holds. ``where`` and a callable ``mistake`` are text only then."""
    if condition:
        return
    try:
        said = mistake if isinstance(mistake, str) else mistake()
        place = str(where)
    except RecursionError:  # expressions may be deeper than Python's stack
        said, place = "a rule is broken", f"in a {type(where).__name__} too deep to print"
    raise VerificationError(f"{said}: {place}")


class _Known:
    """What has been written, and which sizes are known, up to one operation of a program."""

    def __init__(self, program: Program) -> None:
        self.buffers = program.buffers
        self.written: set[str] = set()
        self.sizes: set[Size] = {source.size for source in program.sizes}
        for name, buffer in program.buffers.items():
            require(name == buffer.name, f"a buffer under the name {name}", str(buffer))
            require(buffer.opaque or len(buffer.shape) == len(buffer.strides), "strides of another rank", str(buffer))
            require(program.card is not None or buffer.device != "cuda", "a buffer on no card", str(buffer))
        for given in program.inputs:
            if given.buffer is not None:
                require(given.buffer in self.buffers, "an input without a buffer", f"input {given.name}")
                self.written.add(given.buffer)
        for name, tensor in program.constants:
            require(name in self.buffers, "a constant without a buffer", name)
            same = self.buffers[name].opaque or self.buffers[name].dtype == tensor.dtype
            require(same, f"the constant is {tensor.dtype}", str(self.buffers[name]))
            self.written.add(name)

    def extents(self, extents: Iterable[Extent], where: object) -> None:
        for extent in extents:
            missing = {size for size in ix.sizes_in(extent) if size not in self.sizes}
            require(not missing, f"size {', '.join(map(str, missing))} is not known yet", where)

    def readable(self, name: str) -> bool:
        """Whether a buffer has been written, or has nothing to write."""
        return name in self.written or 0 in self.buffers[name].shape

    def buffer(self, name: str, where: object) -> Buffer:
        require(name in self.buffers, f"there is no buffer {name}", where)
        return self.buffers[name]

    def loop(self, loop: Loop) -> None:
        target = self.buffer(loop.target, loop)
        require(not target.opaque, "a loop into an opaque buffer", loop)
        variables = (*loop.ranges, *loop.reduced)
        self.extents((variable.extent for variable in variables), loop)
        verify_value(loop.value, variables, loop)
        require(loop.reducer is not None or not loop.reduced, "loops of a reduction without one", loop)
        require(loop.reducer is None or loop.reducer in REDUCERS, f"there is no reduction {loop.reducer}", loop)
        wanted = reduced_dtype(loop.reducer, loop.value.dtype)
        require(wanted == target.dtype, f"{wanted} into {target.dtype}", loop)
        stored = frozenset().union(*(s.variables() for s in loop.store))
        require(stored <= frozenset(loop.ranges), lambda: _unbound(stored, loop.ranges), loop)
        if any(ix.bounds_of(variable.extent)[1] <= 0 for variable in variables):
            self.written.add(loop.target)
            return  # no point is computed
        self._in_range(target, loop.store, loop)
        masked = {load for node in walk((loop.value,)) if isinstance(node, Masked) for load in loads(node.body)}
        for load in loads(loop.value):
            source = self.buffer(load.buffer, loop)
            require(self.readable(load.buffer), f"{load.buffer} is read before it is written", loop)
            require(load.dtype == source.dtype, f"{load.dtype} is read of {source.dtype}", loop)
            here = source.device == target.device or (source.device == "cpu" and not source.shape)
            require(here, f"{source.device} memory is read on {target.device}", loop)
            if load not in masked:
                self._in_range(source, load.subscripts, loop)
        self.written.add(loop.target)

    def _in_range(self, buffer: Buffer, subscripts: tuple[Index, ...], where: object) -> None:
        require(len(subscripts) == len(buffer.shape), lambda: f"{len(subscripts)} subscripts of {buffer}", where)
        for subscript, size in zip(subscripts, buffer.shape, strict=True):
            self.extents((subscript,), where)
            if isinstance(size, int) and not ix.sizes_in(subscript):
                low, high = subscript.bounds
                said = partial("subscript {} of {} is not in {}".format, subscript, buffer.name, size)
                require(low >= 0 and high < size, said, where)

    def view(self, view: StridedView, where: object) -> None:
        buffer = self.buffer(view.buffer, where)
        require(self.readable(view.buffer), f"{view.buffer} is read before it is written", where)
        require(view.opaque == buffer.opaque, "a view of memory of an opaque buffer, or the other way", where)
        self.extents((*view.shape, *view.strides, view.offset), where)
        numbers = (*view.shape, *view.strides, view.offset, buffer.elements)
        if view.opaque or 0 in view.shape or not all(isinstance(number, int) for number in numbers):
            return
        end: Any = view.end
        most: Any = buffer.elements
        inside = 0 < end <= most * buffer.dtype.itemsize // view.dtype.itemsize
        require(inside, lambda: f"{view} reaches beyond {buffer}", where)

    def call(self, call: ExternCall) -> None:
        for argument in tree_leaves(call.arguments):
            if isinstance(argument, StridedView):
                self.view(argument, call)
            elif isinstance(argument, Index):
                self.extents((argument,), call)
        for name in call.mutates:
            require(self.readable(name), f"{name} is changed before it is written", call)
        for result in call.results:
            if result is not None:
                self.buffer(result, call)
                require(result not in self.written, f"{result} is the result of a second operation", call)
        self.written.update(result for result in call.results if result is not None)
        for bound in call.binds:
            require(bound.buffer in call.results, f"the size of {bound.buffer}, which is no result", call)
            self.sizes.add(bound.size)
