"""Which operation must run before which: reads after writes, writes after reads, writes after writes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from torchkiln.graph.effects import is_ordered_effect
from torchkiln.ir import expr as ex
from torchkiln.ir.higher_order import HigherOrder
from torchkiln.ir.program import ExternCall, Loop, Operation, Program, StridedView


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
        return {load.buffer for load in ex.loads((operation.value,))}
    return set(extern_reads(operation))


def writes(operation: Operation) -> set[str]:
    if isinstance(operation, Loop):
        return {operation.target}
    return {r for r in operation.results if r is not None} | set(operation.mutates)


def predecessors(operations: Sequence[Operation]) -> list[set[int]]:
    """For each operation, the earlier ones it must follow directly."""
    last_write: dict[str, int] = {}
    readers: dict[str, list[int]] = {}
    result: list[set[int]] = []
    effect: int | None = None
    for position, operation in enumerate(operations):
        before: set[int] = set()
        for name in reads(operation):
            if name in last_write:
                before.add(last_write[name])
            readers.setdefault(name, []).append(position)
        for name in writes(operation):
            if name in last_write:
                before.add(last_write[name])
            before.update(readers.pop(name, ()))
            last_write[name] = position
        if isinstance(operation, ExternCall) and has_effect(operation):
            # Random and other stateful operators keep their order among themselves.
            if effect is not None:
                before.add(effect)
            effect = position
        before.discard(position)
        result.append(before)
    return result


def has_effect(call: ExternCall) -> bool:
    """Whether a call does more than compute its results (draws random numbers, mutates, prints)."""
    if isinstance(call.target, HigherOrder):
        return call.target.effect
    if is_ordered_effect(call.target):
        return True
    return call.target._schema.is_mutable or torch.Tag.nondeterministic_seeded in call.target.tags or not call.results


def output_buffers(program: Program) -> set[str]:
    return {o.buffer for o in program.outputs if isinstance(o, StridedView)}


def pinned_buffers(program: Program) -> set[str]:
    """Buffers that must exist in memory: inputs, constants, outputs, and whatever an extern call touches."""
    pinned = output_buffers(program)
    pinned.update(i.buffer for i in program.inputs if i.buffer is not None)
    pinned.update(name for name, _ in program.constants)
    for operation in program.operations:
        if isinstance(operation, ExternCall):
            pinned.update(extern_reads(operation))
            pinned |= writes(operation)
    return pinned


def iteration_points(loop: Loop) -> int:
    return extent_product(loop.ranges) * extent_product(loop.reduced)


def extent_product(variables: Iterable[Any]) -> int:
    total = 1
    for variable in variables:
        total *= variable.extent
    return total
