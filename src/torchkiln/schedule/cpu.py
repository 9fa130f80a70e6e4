"""How loop nests run on a CPU: vector lanes, tiles, and parallel iterations.

Sizes decide how a nest is split, never the number of threads: results are the same bit for bit on any number of them.
"""

from __future__ import annotations

from collections.abc import Sequence

from torchkiln.ir import expr as ex
from torchkiln.ir import index as ix
from torchkiln.ir import ops
from torchkiln.ir.expr import FlatLoad, IndexValue, Interleaved, Op
from torchkiln.ir.index import Extent, Var
from torchkiln.schedule.dependencies import extent_product
from torchkiln.schedule.kernel import CpuMapping, LoopNest, Phase
from torchkiln.schedule.limits import Limits
from torchkiln.schedule.tiles import block_of, tiled_accesses


def map_to_cpu(
    nest: LoopNest, limits: Limits, vector_bits: int, parallel_threshold: int, tile: Var | None
) -> CpuMapping:
    """Split ``nest``. Its ``tile`` variable, if it is a row, is the last one but for the lane variable.

    ``parallel_threshold`` is the work, in simple operations on one element, that pays for a thread.
    """
    lanes = _choose_lanes(nest, vector_bits)
    if tile is not None and not nest.columns:
        widest = max(tiled_accesses(nest, tile).itemsizes())
        lanes = max(limits.tile, min(lanes, limits.tile_row_bytes // widest))
    outer, blocked, block = _blocking(nest, tile, limits)
    blocks: Extent = 1 if blocked is None else ix.ceil_divide(blocked.extent, block)
    depth = len(outer)  # blocks are counted inside all rows
    if blocks == 1:
        points = (ix.hint_of(extent_product(outer[:k])) for k in range(len(outer)))
        depth = next((k for k, count in enumerate(points) if count >= limits.enough_iterations), len(outer))
    iterations = ix.product((extent_product(outer[:depth]), blocks))
    grain = _grain(nest, iterations, parallel_threshold)
    return CpuMapping(lanes, tile, depth, blocks, block, iterations, grain)


def _blocking(nest: LoopNest, tile: Var | None, limits: Limits) -> tuple[Sequence[Var], Var | None, int]:
    """The rows outside of blocks, the variable that is split into blocks, if any, and the length of a block."""
    lane = nest.lane
    if tile is not None and tile in nest.rows:
        outer = tuple(v for v in nest.rows if v not in (tile, lane))
        return outer, tile, block_of(tiled_accesses(nest, tile).itemsizes(), limits)
    if lane is None or lane not in nest.rows:
        return nest.rows, None, 1
    outer, length = nest.rows[:-1], lane.extent
    if nest.columns:
        return outer, lane, min(length, limits.register_block) if isinstance(length, int) else limits.register_block
    if ix.hint_of(extent_product(outer)) < limits.enough_iterations and ix.hint_of(length) > limits.block:
        return outer, lane, limits.block
    return outer, None, 1


def _grain(nest: LoopNest, iterations: Extent, threshold: int) -> Extent:
    points = extent_product((*nest.rows, *nest.columns))
    weight = max(1, len([p for p in nest.phases if p.inside])) * _weight(nest.phases)
    if isinstance(iterations, int) and isinstance(points, int):
        work = points * weight // max(iterations, 1)
        least = max(1, threshold // max(work, 1))
        return 0 if iterations <= least else least
    if points == 0:
        return 0
    # Per iteration at least one point runs: how many is a division by sizes, done at each launch.
    return ix.extent(ix.as_index(ix.product((iterations, max(1, threshold // weight)))) // points)


def _weight(phases: Sequence[Phase]) -> int:
    """How many plain operations one point costs, roughly: transcendental functions count for more."""
    roots = tuple(s.value for p in phases for s in p.inside) or tuple(s.value for p in phases for s in p.before)
    total = sum(ops.OPS[n.name].cost if n.name in ops.MATH else 1 for n in ex.walk(roots) if isinstance(n, Op))
    return max(1, total // 8)


def most_lanes(nest: LoopNest, vector_bits: int) -> int:
    """Lanes per value: about four registers, fewer for crowded loops.

    Four registers per value give independent chains that hide latency (layer norm + gelu: 286 µs against 403 µs
    at one). With many streams at once registers run out, so the width shrinks.
    """
    lane = nest.lane
    if lane is None:
        return 1
    widest, streams = 4, 0
    for node in ex.walk(tuple(s.value for s in nest.statements)):
        if lane not in node.variables or isinstance(node, IndexValue):
            continue
        if isinstance(node, FlatLoad):
            streams += 1
        if not ex.compares_indices(node):
            widest = max(widest, node.dtype.itemsize)
    streams += sum(len(p.inside) for p in nest.phases)
    registers = 4 if streams <= 10 else 2 if streams <= 20 else 1
    together = max((len(s.value.parts) for s in nest.statements if isinstance(s.value, Interleaved)), default=1)
    registers = max(1, registers // round_up_power(together))
    return max(1, vector_bits * registers // (8 * widest))


def _choose_lanes(nest: LoopNest, vector_bits: int) -> int:
    """The lanes for which the loop takes least."""
    lane, most = nest.lane, most_lanes(nest, vector_bits)
    if lane is None:
        return 1
    length = ix.hint_of(lane.extent)

    def price(lanes: int) -> int:
        """Lanes computed in all (masked ones included) plus a share per trip for loop overhead."""
        full, rest = divmod(length, lanes)
        return full * (lanes + 2) + (round_up_power(rest) + 4 if rest else 0)

    halves = (most >> k for k in range(most.bit_length()))
    return min((lanes for lanes in halves if lanes >= min(most, 4)), key=price)


def round_up_power(number: int) -> int:
    """The least power of two that is not below ``number``."""
    return 1 << max(0, number - 1).bit_length()
