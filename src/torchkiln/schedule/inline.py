"""Inlining: a pointwise value is computed where it is read instead of being stored, when that costs less."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch

from torchkiln.actions import Actions
from torchkiln.ir import expr as ex
from torchkiln.ir import index as ix
from torchkiln.ir.expr import Expr, Load
from torchkiln.ir.program import Loop, Operation, Program
from torchkiln.schedule.decisions import FusionDecision
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
        reason = "its caller or a library call reads it from memory" if loop.target in pinned else ""
        reason = reason or _why_not_inlined(loop, position, users, writers, program, limits, most_nodes)
        if not reason and actions is not None and not actions.take("fusion", partial(_described, loop)):
            reason = "a limit on fusions"
        if actions is not None:
            actions.watch("fusions", partial(_decisions, operation, users, program, reason))
        if reason:
            kept.append(loop)
        else:
            definitions[loop.target] = loop
    return replace(program, operations=tuple(kept))


def _decisions(loop: Loop, users: list[int], program: Program, reason: str) -> list[FusionDecision]:
    """What was decided about ``loop`` and each of its readers."""
    found = (program.operations[user].origin.nodes for user in users)
    return [FusionDecision("inline", reader, loop.origin.nodes, not reason, reason) for reader in found]


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
    if value is loop.value:
        return loop
    inlined = (definitions[name].origin for name in sorted(reads(loop)) if name in definitions)
    nodes = dict.fromkeys(node for origin in (*inlined, loop.origin) for node in origin.nodes)
    return replace(loop, value=value, origin=replace(loop.origin, nodes=tuple(nodes)))


def _why_not_inlined(
    loop: Loop,
    position: int,
    users: list[int],
    writers: dict[str, list[int]],
    program: Program,
    limits: Limits,
    most_nodes: int,
) -> str:
    """Empty where ``loop`` is to be computed where it is read."""
    if loop.value.size > most_nodes:
        return f"it computes more than {most_nodes} operations at a point"
    if loop.reducer is not None:
        return "it is a reduction"
    if loop.store != tuple(map(ix.of, loop.ranges)) or len(writers[loop.target]) > 1:
        return "others write to parts of it"
    device = program.buffers[loop.target].device
    if any(program.buffers[name].device != device for user in users for name in writes(program.operations[user])):
        return "it is computed on another device"
    if any(position < write <= max(users) for source in reads(loop) for write in writers.get(source, ())):
        return "a source is overwritten before the last reader"
    return "" if _worth_inlining(loop, users, program, limits) else "it would be computed more often than it is stored"


def _worth_inlining(loop: Loop, users: list[int], program: Program, limits: Limits) -> bool:
    sources = reads(loop)
    work = ex.cost(loop.value)
    size = max(1, ix.hint_of(program.buffers[loop.target].nbytes))
    needed = sum(ix.hint_of(program.buffers[source].nbytes) for source in sources)
    if work <= limits.trivial_cost and (len(sources) <= 1 or needed <= limits.as_much * size):
        return True
    if not sources and loop.value.dtype == torch.int64 and work <= limits.broadcast_cost:
        return True  # indices computed from indices: stored, nothing would be known of them
    much_larger = bool(sources) and 2 * needed <= size and size >= limits.expanded_bytes
    if len(users) > 1 and much_larger and work <= limits.expanded_cost:
        return True
    points = max(1, ix.hint_of(extent_product(loop.ranges)))
    places = [_places(loop.target, user, program) for user in users]
    evaluations = sum(count * ix.hint_of(iteration_points(reader)) for count, reader in places)
    repeated = evaluations > limits.as_much * points
    return not repeated or (len(users) == 1 and places[0][0] * work <= limits.broadcast_cost)


def _places(name: str, user: int, program: Program) -> tuple[int, Loop]:
    """At how many places a point of a loop reads a value, and the loop."""
    reader = program.operations[user]
    assert isinstance(reader, Loop)
    return len({load.subscripts for load in ex.loads(reader.value) if load.buffer == name}), reader
