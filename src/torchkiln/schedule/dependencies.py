"""Which operation must run before which: reads after writes, writes after reads, writes after writes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from torchkiln.ir import expr as ex
from torchkiln.ir import index as ix
from torchkiln.ir.index import Extent, Index, Size, Var
from torchkiln.ir.native_calls import is_check
from torchkiln.ir.program import CheckFits, CheckSizes, ExternCall, Loop, Operation, Program, ReadNumber, StridedView


def tensors_of(argument: Any) -> list[StridedView]:
    """The tensors among the arguments of an extern call, in order."""
    if isinstance(argument, StridedView):
        return [argument]
    return [view for item in argument for view in tensors_of(item)] if isinstance(argument, (tuple, list)) else []


def reads(operation: Operation) -> set[str]:
    if isinstance(operation, Loop):
        return {load.buffer for load in ex.loads(operation.value)}
    if isinstance(operation, ReadNumber):
        return {operation.view.buffer}
    return {view.buffer for view in tensors_of(operation.arguments)} if isinstance(operation, ExternCall) else set()


def writes(operation: Operation) -> set[str]:
    if isinstance(operation, Loop):
        return {operation.target}
    if not isinstance(operation, ExternCall):
        return set()
    return {name for name in (*operation.results, *operation.mutates) if name is not None}


def positions(operations: Iterable[Operation], names: Callable[[Operation], set[str]]) -> dict[str, list[int]]:
    """Where in ``operations`` each buffer is among the ``names`` of one, such as :func:`reads`."""
    found: dict[str, list[int]] = {}
    for position, operation in enumerate(operations):
        for name in names(operation):
            found.setdefault(name, []).append(position)
    return found


def predecessors(operations: Sequence[Operation]) -> list[set[int]]:
    """For each operation, the earlier ones it must follow directly."""
    memory = _MemoryOrder()
    decided: dict[Size, int] = {}
    effect = check = -1  # the last one of each
    result: list[set[int]] = []
    for position, operation in enumerate(operations):
        overwrites = memory.holds_any(writes(operation))
        before = memory.add(position, operation)
        if decided:
            before.update(decided[size] for size in sizes_used(operation) if size in decided)
        decided.update((size, position) for size in sizes_decided(operation))
        call = operation if isinstance(operation, ExternCall) else None
        if (call and call.has_effect) or isinstance(operation, (CheckSizes, CheckFits)):
            # Random and other stateful operators keep their order among themselves, and so do checks.
            before.add(effect)
            effect = position
        if overwrites or call:
            # What eager would not have come to must not raise first, or have written into an input.
            before.add(check)
        if call and is_check(call):
            check = position
        result.append(before - {-1})
    return result


class _MemoryOrder:
    """Who wrote and who reads each buffer, as operations are added."""

    def __init__(self) -> None:
        self._last_write: dict[str, int] = {}
        self._readers: dict[str, list[int]] = {}  # since the last write

    def holds_any(self, names: Iterable[str]) -> bool:
        """Whether one of the buffers was written or read before."""
        return any(name in self._last_write or name in self._readers for name in names)

    def add(self, position: int, operation: Operation) -> set[int]:
        """The operations that the one at ``position`` must follow."""
        read, written = reads(operation), writes(operation)
        before = {self._last_write[name] for name in read | written if name in self._last_write}
        for name in written:
            before.update(self._readers.pop(name, ()))
            self._last_write[name] = position
        for name in read - written:
            self._readers.setdefault(name, []).append(position)
        return before


def sizes_decided(operation: Operation) -> list[Size]:
    """Sizes that are known once the operation has run."""
    if isinstance(operation, ReadNumber):
        return [operation.size]
    return [bound.size for bound in operation.binds] if isinstance(operation, ExternCall) else []


def sizes_used(operation: Operation) -> set[Size]:
    """Every size that must be known for the operation to run."""
    found: set[Size] = set().union(*map(ix.sizes_in, _extents_used(operation)))
    return found.difference(sizes_decided(operation))


def _extents_used(operation: Operation) -> Iterator[Extent]:
    match operation:
        case Loop():
            yield from (v.extent for v in (*operation.ranges, *operation.reduced))
            yield from operation.store
            for node in ex.walk((operation.value,)):
                if isinstance(node, ex.Load):
                    yield from node.subscripts
                elif isinstance(node, ex.IndexValue):
                    yield node.index
        case ExternCall():
            yield from _argument_extents(operation.arguments)
        case ReadNumber():
            yield from _argument_extents(operation.view)
        case CheckSizes():
            yield from (operation.left, operation.right)
        case CheckFits():
            yield operation.value


def _argument_extents(argument: Any) -> Iterator[Extent]:
    if isinstance(argument, StridedView):
        yield from (*argument.shape, *argument.strides, argument.offset)
    elif isinstance(argument, Index):
        yield argument
    elif isinstance(argument, (tuple, list)):
        for item in argument:
            yield from _argument_extents(item)


def output_buffers(program: Program) -> set[str]:
    return {o.buffer for o in program.outputs if isinstance(o, StridedView)}


def visible_buffers(program: Program) -> set[str]:
    """Buffers whose contents the caller sees: inputs and outputs."""
    return output_buffers(program).union(i.buffer for i in program.inputs if i.buffer is not None)


def pinned_buffers(program: Program) -> set[str]:
    """Buffers that must exist in memory: inputs, constants, outputs, and whatever an extern call touches."""
    pinned = visible_buffers(program).union(name for name, _ in program.constants)
    others = (operation for operation in program.operations if not isinstance(operation, Loop))
    return pinned.union(*(reads(operation) | writes(operation) for operation in others))


def iteration_points(loop: Loop) -> Extent:
    return extent_product((*loop.ranges, *loop.reduced))


def extent_product(variables: Iterable[Var]) -> Extent:
    return ix.product(variable.extent for variable in variables)
