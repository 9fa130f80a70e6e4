"""Inlining: a pointwise value is computed where it is read instead of being stored, when that costs less."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from torchkiln.actions import Actions
from torchkiln.ir import expr as ex
from torchkiln.ir import index as ix
from torchkiln.ir.expr import Expr, Load
from torchkiln.ir.program import Loop, Operation, Program
from torchkiln.schedule.dependencies import extent_product, iteration_points, pinned_buffers, positions, reads, writes
from torchkiln.schedule.limits import Limits


def inline_pointwise(program: Program, limits: Limits, *, most_nodes: int, actions: Actions | None = None) -> Program:
    """Substitute pointwise loops into their readers, up to expressions of ``most_nodes``; ``actions`` counts them."""
    pinned = pinned_buffers(program)
    readers, writers = positions(program.operations, reads), positions(program.operations, writes)
    definitions: dict[str, Loop] = {}
    kept: list[Operation] = []
    for position, operation in enumerate(program.operations):
        if not isinstance(operation, Loop):
            kept.append(operation)
            continue
        loop = _substitute(operation, definitions)
        users = readers.get(loop.target, [])
        if loop.target not in pinned and not users:
            continue  # nobody reads it
        if (
            loop.target not in pinned
            and loop.value.size <= most_nodes
            and _can_inline(loop, position, users, writers)
            and _worth_inlining(loop, users, program, limits)
            and (actions is None or actions.take("fusion", partial(_described, loop)))
        ):
            definitions[loop.target] = loop
        else:
            kept.append(loop)
    return replace(program, operations=tuple(kept))


def _described(loop: Loop) -> tuple[str, str | None]:
    return f"{', '.join(loop.origin.nodes)} computed where it is read", loop.origin.source


def _substitute(loop: Loop, definitions: dict[str, Loop]) -> Loop:
    def leaf(node: Expr) -> Expr | None:
        if isinstance(node, Load) and node.buffer in definitions:
            producer = definitions[node.buffer]
            mapping = dict(zip(producer.ranges, node.subscripts, strict=True))
            return ex.rewrite(producer.value, lambda _: None, mapping, {})
        return None

    value = ex.rewrite(loop.value, leaf, {}, {})
    return loop if value is loop.value else replace(loop, value=value)


def _can_inline(loop: Loop, position: int, users: list[int], writers: dict[str, list[int]]) -> bool:
    if loop.reducer is not None:
        return False
    if loop.store != tuple(map(ix.of, loop.ranges)) or len(writers[loop.target]) > 1:
        return False  # others write to parts of it
    # A source that is overwritten before the last reader must be read now.
    return not any(position < write <= max(users) for source in reads(loop) for write in writers.get(source, ()))


def _worth_inlining(loop: Loop, users: list[int], program: Program, limits: Limits) -> bool:
    sources = reads(loop)
    work = ex.cost(loop.value)
    size = max(1, ix.hint_of(program.buffers[loop.target].nbytes))
    needed = sum(ix.hint_of(program.buffers[source].nbytes) for source in sources)
    if work <= limits.trivial_cost and (len(sources) <= 1 or needed <= limits.as_much * size):
        return True
    much_larger = bool(sources) and 2 * needed <= size and size >= limits.expanded_bytes
    if len(users) > 1 and much_larger and work <= limits.expanded_cost:
        return True
    points = max(1, ix.hint_of(extent_product(loop.ranges)))
    repeated = _evaluations(loop.target, users, program) > limits.as_much * points
    return not repeated or (len(users) == 1 and work <= limits.broadcast_cost)


def _evaluations(name: str, users: list[int], program: Program) -> int:
    """How often a value would be computed where it is read."""
    total = 0
    for user in users:
        reader = program.operations[user]
        assert isinstance(reader, Loop)
        places = {load.subscripts for load in ex.loads(reader.value) if load.buffer == name}
        total += len(places) * ix.hint_of(iteration_points(reader))
    return total
