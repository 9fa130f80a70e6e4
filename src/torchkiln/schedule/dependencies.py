"""Which operation must run before which: reads after writes, writes after reads, writes after writes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torchkiln.ir import expr as ex
from torchkiln.ir import index as ix
from torchkiln.ir.index import Extent, Index, Size
from torchkiln.ir.native_calls import is_check
from torchkiln.ir.program import CheckFits, CheckSizes, ExternCall, Loop, Operation, Program, ReadNumber, StridedView


def extern_reads(call: ExternCall) -> list[str]:
    """Buffers an extern call reads, through any nesting of its arguments."""
    found: list[str] = []

    def visit(argument: Any) -> None:
        if isinstance(argument, StridedView):
            found.append(argument.buffer)
        elif isinstance(argument, tuple):
            for item in argument:
                visit(item)

    visit(call.arguments)
    return found


def reads(operation: Operation) -> set[str]:
    if isinstance(operation, Loop):
        return {load.buffer for load in ex.loads(operation.value)}
    if isinstance(operation, ReadNumber):
        return {operation.view.buffer}
    if isinstance(operation, (CheckSizes, CheckFits)):
        return set()
    return set(extern_reads(operation))


def writes(operation: Operation) -> set[str]:
    if isinstance(operation, Loop):
        return {operation.target}
    if isinstance(operation, (ReadNumber, CheckSizes, CheckFits)):
        return set()
    return {r for r in operation.results if r is not None} | set(operation.mutates)


def predecessors(operations: Sequence[Operation]) -> list[set[int]]:
    """For each operation, the earlier ones it must follow directly."""
    last_write: dict[str, int] = {}
    readers: dict[str, list[int]] = {}
    result: list[set[int]] = []
    effect: int | None = None
    check: int | None = None
    decided: dict[Size, int] = {}
    for position, operation in enumerate(operations):
        before: set[int] = set()
        if decided:
            before.update(decided[size] for size in sizes_used(operation) if size in decided)
        decided.update((size, position) for size in sizes_decided(operation))
        overwrites = any(name in last_write or name in readers for name in writes(operation))
        for name in reads(operation):
            if name in last_write:
                before.add(last_write[name])
            readers.setdefault(name, []).append(position)
        for name in writes(operation):
            if name in last_write:
                before.add(last_write[name])
            before.update(readers.pop(name, ()))
            last_write[name] = position
        checked = isinstance(operation, (CheckSizes, CheckFits))
        if checked or (isinstance(operation, ExternCall) and operation.has_effect):
            # Random and other stateful operators keep their order among themselves, and so do checks.
            if effect is not None:
                before.add(effect)
            effect = position
        if check is not None and (overwrites or isinstance(operation, ExternCall)):
            # What eager would not have come to must not raise first, or have written into an input.
            before.add(check)
        if isinstance(operation, ExternCall) and is_check(operation):
            check = position
        before.discard(position)
        result.append(before)
    return result


def sizes_decided(operation: Operation) -> list[Size]:
    """Sizes that are known once the operation has run."""
    if isinstance(operation, ReadNumber):
        return [operation.size]
    return [bound.size for bound in operation.binds] if isinstance(operation, ExternCall) else []


def sizes_used(operation: Operation) -> set[Size]:
    """Every size that must be known for the operation to run."""
    found: set[Size] = set()

    def add(*extents: Extent) -> None:
        for extent in extents:
            found.update(ix.sizes_in(extent))

    def visit(argument: Any) -> None:
        if isinstance(argument, StridedView):
            add(*argument.shape, *argument.strides, argument.offset)
        elif isinstance(argument, Index):
            add(argument)
        elif isinstance(argument, (tuple, list)):
            for item in argument:
                visit(item)

    if isinstance(operation, Loop):
        add(*(v.extent for v in (*operation.ranges, *operation.reduced)), *operation.store)
        for node in ex.walk((operation.value,)):
            if isinstance(node, ex.Load):
                add(*node.subscripts)
            elif isinstance(node, ex.IndexValue):
                add(node.index)
    elif isinstance(operation, ReadNumber):
        visit(operation.view)
    elif isinstance(operation, CheckSizes):
        add(operation.condition.left, operation.condition.right)
    elif isinstance(operation, CheckFits):
        add(operation.value)
    else:
        visit(operation.arguments)
        found.difference_update(bound.size for bound in operation.binds)
    return found


def output_buffers(program: Program) -> set[str]:
    return {o.buffer for o in program.outputs if isinstance(o, StridedView)}


def handed_out_bytes(program: Program) -> int:
    """How much memory of its own a call of ``program`` returns; sizes known only at run time have typical values."""
    given = {i.buffer for i in program.inputs} | {name for name, _ in program.constants}
    return sum(ix.hint_of(program.buffers[name].nbytes) for name in output_buffers(program) - given)


def pinned_buffers(program: Program) -> set[str]:
    """Buffers that must exist in memory: inputs, constants, outputs, and whatever an extern call touches."""
    pinned = output_buffers(program)
    pinned.update(i.buffer for i in program.inputs if i.buffer is not None)
    pinned.update(name for name, _ in program.constants)
    for operation in program.operations:
        if not isinstance(operation, Loop):
            pinned |= reads(operation) | writes(operation)
    return pinned


def iteration_points(loop: Loop) -> Extent:
    return extent_product((*loop.ranges, *loop.reduced))


def extent_product(variables: Iterable[Any]) -> Extent:
    return ix.product(variable.extent for variable in variables)
