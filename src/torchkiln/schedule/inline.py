"""Inlining: a pointwise value is computed where it is read instead of being stored, when that costs less."""

from __future__ import annotations

from dataclasses import replace

from torchkiln.ir import expr as ex
from torchkiln.ir import index as ix
from torchkiln.ir import ops
from torchkiln.ir.expr import Expr, Load
from torchkiln.ir.program import Loop, Operation, Program
from torchkiln.schedule.dependencies import extent_product, iteration_points, pinned_buffers, reads, writes

# A value read by several loops is repeated in each only when it is next to nothing (a conversion, a negation, a mask
# from positions, a product with something small), or when all but one read only few elements of it, as a loss by class
# does. Anything more is left for fusion, which computes it once for all of them.
_TRIVIAL_COST = 3
# What counts as the same amount of reading or computing.
_AS_MUCH = 1.125
# Work beyond which a value is not recomputed for every point of a larger iteration space.
_BROADCAST_COST = 8
# A value made of much smaller ones is repeated in each reader when it is no dearer than this and too large for a cache:
# its readers then read the small ones. (Gradients of 512 x 512 distances in 64 dimensions, summed over one side and
# over the other: a step of 10.6 ms with the 64 MiB of products in memory, 3.7 ms without, on one thread.)
_EXPANDED_COST = 24
_EXPANDED_BYTES = 1 << 20


def inline_pointwise(program: Program, *, limit: int) -> Program:
    """Substitute pointwise loops into their readers. ``limit`` bounds the size of one fused expression."""
    pinned = pinned_buffers(program)
    readers: dict[str, list[int]] = {}
    last_write: dict[str, list[int]] = {}
    for position, operation in enumerate(program.operations):
        for name in reads(operation):
            readers.setdefault(name, []).append(position)
        for name in writes(operation):
            last_write.setdefault(name, []).append(position)

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
        if loop.target not in pinned and _worth_inlining(loop, position, users, program, last_write, limit):
            definitions[loop.target] = loop
        else:
            kept.append(loop)
    return replace(program, operations=tuple(kept))


def _substitute(loop: Loop, definitions: dict[str, Loop]) -> Loop:
    def leaf(node: Expr) -> Expr | None:
        if isinstance(node, Load) and node.buffer in definitions:
            producer = definitions[node.buffer]
            mapping = dict(zip(producer.ranges, node.subscripts, strict=True))
            return ex.rewrite(producer.value, _keep, mapping, {})
        return None

    value = ex.rewrite(loop.value, leaf, {}, {})
    return loop if value is loop.value else replace(loop, value=value)


def _keep(_: Expr) -> None:
    return None


def _worth_inlining(
    loop: Loop, position: int, users: list[int], program: Program, last_write: dict[str, list[int]], limit: int
) -> bool:
    if loop.reducer is not None or loop.value.size > limit:
        return False
    if tuple(loop.store) != tuple(_identity(loop)) or len(last_write[loop.target]) > 1:
        return False  # others write to parts of it
    sources = {load.buffer for load in ex.loads(loop.value)}
    last_user = max(users)
    for source in sources:
        # A source that is overwritten before the last reader must be read now.
        if any(position < write <= last_user for write in last_write.get(source, ())):
            return False
    work = ops.cost(loop.value)
    size = max(1, ix.hint_of(program.buffers[loop.target].nbytes))
    needed = sum(ix.hint_of(program.buffers[source].nbytes) for source in sources)
    if work <= _TRIVIAL_COST and (len(sources) <= 1 or needed <= _AS_MUCH * size):
        return True
    if len(users) > 1 and sources and work <= _EXPANDED_COST and 2 * needed <= size and size >= _EXPANDED_BYTES:
        return True
    repeated = _evaluations(loop.target, users, program) > _AS_MUCH * max(1, ix.hint_of(extent_product(loop.ranges)))
    return not repeated or (len(users) == 1 and work <= _BROADCAST_COST)


def _evaluations(name: str, users: list[int], program: Program) -> int:
    """How often a value would be computed where it is read."""
    total = 0
    for user in users:
        reader = program.operations[user]
        assert isinstance(reader, Loop)
        places = {load.subscripts for load in ex.loads(reader.value) if load.buffer == name}
        total += len(places) * ix.hint_of(iteration_points(reader))
    return total


def _identity(loop: Loop) -> list[object]:
    return [ix.of(v) for v in loop.ranges]
