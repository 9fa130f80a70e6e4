"""How loop nests run on a GPU: values of a thread, threads of a row, rows of a block.

Accesses of 16 bytes move memory fastest, so neighbouring values go to one thread. A row that is reduced is shared by
the threads of a warp or of a block, few enough that each has several accesses under way, and stays in registers from
its first phase to its last.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

from torchkiln.ir import expr as ex
from torchkiln.ir import index as ix
from torchkiln.ir.expr import FlatLoad
from torchkiln.ir.index import Extent, Index, Var
from torchkiln.schedule.dependencies import extent_product
from torchkiln.schedule.kernel import Accumulate, GpuMapping, LoopNest, Store
from torchkiln.schedule.tiles import tiled_accesses

WARP = 32
# Bytes that one access of a thread moves at the most, and the alignment that needs.
ACCESS_BYTES = 16
_THREADS = 256
MOST_THREADS = 1024
MOST_BLOCKS = 2**31 - 1
PROCESSOR_REGISTERS = 1 << 16
# Shared memory that a kernel may declare, on every card; more would have to be asked for when it is launched.
SHARED_BYTES = 48 << 10
# Values of one row that a thread of a warp keeps in registers, of float32, and with each number of threads to a row,
# of all operands that several phases read. (Layer norm backward, 2 of its 3 operands: 96 registers with 32 values of a
# row, 104 of float32; in a block of 1,024 threads, which have 64 registers, none are spilled with 16, 220 bytes with
# 32.)
_KEPT, _KEPT_OF_ALL = 32, {WARP: 112, 256: 112, 512: 80, MOST_THREADS: 48}
# What a thread reads at a time in a loop, so that latency times bandwidth, 22 KiB of each processor of an H200, is
# under way even where half of its 2,048 threads are there; and how much code is repeated for it, by cost of
# expressions.
_BYTES_UNDER_WAY, _MOST_STEPS, _STEPS_COST = 32, 8, 256
_MOST_ITEMS = 4
# Bytes of the tiles of a block: eight blocks of them fit the 228 KiB of a processor, and fill it with threads.
_TILE_BYTES = 28 << 10
# A square of a tile is at least half full.
_FEWEST_IN_TILES = WARP // 2
_WORD = 4  # bytes of a bank of shared memory
# Threads that share an iteration along the lanes at the most: each step of combining what they have passes two
# barriers.
_SHARERS = 16
# Threads that fill a card a few times over: with fewer, more threads are worth more than longer accesses.
_BUSY = 1 << 17


def map_to_gpu(nest: LoopNest, tile: Var | None = None) -> GpuMapping:
    """Divide ``nest`` among threads. Its ``tile`` variable is the last row but for the lane variable."""
    if tile is not None:
        return _in_tiles(nest, tile)
    if nest.lane is not None and nest.lane in nest.columns:
        mapping = _rows_shared(nest)
    else:
        mapping = _threads_alone(nest)
        if nest.columns and nest.lane is not None:
            mapping = _columns_shared(nest, mapping)
    return replace(mapping, steps=_steps(nest, mapping))


def _steps(nest: LoopNest, mapping: GpuMapping) -> int:
    """Turns of a loop over columns whose reads fill what a thread has under way, where code does not grow too much."""
    if not nest.columns or mapping.parts:
        return 1
    if nest.lane in nest.columns:
        assert nest.lane is not None
        innermost, apart = nest.lane, mapping.lanes * mapping.lane_threads
    else:
        innermost = nest.columns[-1]
        apart = mapping.row_threads if innermost is shared_column(nest) else 1
    loads = [n for n in ex.walk(tuple(s.value for s in nest.statements)) if isinstance(n, FlatLoad)]
    narrowest = min((n.dtype.itemsize for n in loads if innermost in n.offset.variables()), default=ACCESS_BYTES)
    turns = ix.hint_of(innermost.extent) // apart
    cost = sum(ex.cost(statement.value) for statement in nest.statements)
    steps = min(_MOST_STEPS, _BYTES_UNDER_WAY // (narrowest * mapping.lanes), turns, _STEPS_COST // max(1, cost))
    return 1 << max(0, steps.bit_length() - 1)


def has_tiles(nest: LoopNest, tile: Var) -> bool:
    """Whether what crosses the lanes of ``nest`` along ``tile`` goes through shared memory."""
    reduces = any(isinstance(statement, Accumulate) for statement in nest.statements)  # one value of a column
    if nest.columns or reduces or nest.lane is None or ix.hint_of(nest.lane.extent) < _FEWEST_IN_TILES:
        return False
    return _tile_bytes(nest, tile, 1) <= _TILE_BYTES


def tile_pitch(side: int) -> int:
    """Elements from one lane to the next in a tile in shared memory: odd, so neighbouring lanes have other banks."""
    return side + 1


def _tile_bytes(nest: LoopNest, tile: Var, lanes: int) -> int:
    side = WARP * lanes
    return sum(side * tile_pitch(side) * itemsize for itemsize in tiled_accesses(nest, tile).itemsizes())


def _in_tiles(nest: LoopNest, tile: Var) -> GpuMapping:
    """Squares in which each line of a warp's accesses has 128 bytes, of the widest operand that crosses the lanes."""
    assert nest.lane is not None
    lanes = max(1, _WORD // max(tiled_accesses(nest, tile).itemsizes()))
    shorter = min(ix.hint_of(nest.lane.extent), ix.hint_of(tile.extent))
    while lanes > 1 and (_tile_bytes(nest, tile, lanes) > _TILE_BYTES or WARP * lanes >= 2 * shorter):
        lanes //= 2
    side = WARP * lanes
    outer = nest.rows[:-2]
    blocks = ix.ceil_divide(nest.lane.extent, side)
    iterations = ix.product((extent_product(outer), ix.ceil_divide(tile.extent, side), blocks))
    return GpuMapping(lanes, _THREADS, _THREADS, 0, len(outer), blocks, side, iterations, tile)


def shared_column(nest: LoopNest) -> Var:
    """The column outside of the lanes whose values threads take in turns: the longest."""
    return max((v for v in nest.columns if v is not nest.lane), key=lambda v: ix.hint_of(v.extent))


def _threads_alone(nest: LoopNest) -> GpuMapping:
    """Every thread computes by itself, all columns of its rows one after the other."""
    lane, outer = nest.lane, nest.rows
    lanes = 1
    blocks: Extent = 1
    count = extent_product(nest.rows)
    if lane is not None and lane in nest.rows:
        outer = nest.rows[:-1]
        lanes = _lanes(nest, alone=not outer)
        while lanes > 1 and ix.hint_of(count) < lanes * _BUSY:
            lanes //= 2
        blocks = ix.ceil_divide(lane.extent, lanes)
    iterations = ix.product((extent_product(outer), blocks))
    items = _items(nest, lanes, iterations)
    return GpuMapping(lanes, _THREADS, 1, 0, len(outer), blocks, lanes, iterations, items=items)


def _items(nest: LoopNest, lanes: int, iterations: Extent) -> int:
    """Iterations of a thread without columns: as many as fill an access, where its lanes cannot be more.

    The threads are still as many as fill a card twice.
    """
    if nest.columns or nest.lane is None:
        return 1
    widest = max((access.itemsize for access in _accesses(nest)), default=ACCESS_BYTES)
    cost, items = sum(ex.cost(statement.value) for statement in nest.statements), 1
    while (
        2 * items * lanes * widest <= ACCESS_BYTES
        and 2 * items * cost <= _STEPS_COST
        and ix.hint_of(iterations) >= 4 * items * _BUSY
        and items < _MOST_ITEMS
    ):
        items *= 2
    return items


def _columns_shared(nest: LoopNest, alone: GpuMapping) -> GpuMapping:
    """The same with several threads for each iteration, where those of the iterations do not fill a card.

    The threads of a warp stay side by side along the lanes. Those that share an iteration meet at barriers, so that
    none may take another way: lanes are all there or not at all.
    """
    assert nest.lane is not None
    length, results = ix.hint_of(shared_column(nest).extent), ix.hint_of(extent_product(nest.rows))
    lanes = _lanes(nest, alone=False)
    while lanes > 1 and results * min(_SHARERS, length // 2) < lanes * _BUSY:
        lanes //= 2
    sharers = 1
    while sharers < _SHARERS and results * sharers < lanes * _BUSY and length >= 4 * sharers:
        sharers *= 2
    if sharers == 1:
        return alone
    outer = nest.rows[: alone.parallel_rows]
    blocks = ix.ceil_divide(nest.lane.extent, lanes)
    threads = max(_THREADS, WARP * sharers)
    tasks = ix.product((extent_product(outer), blocks))
    return GpuMapping(lanes, threads, sharers, 0, len(outer), blocks, lanes, tasks)


def _rows_shared(nest: LoopNest) -> GpuMapping:
    """The threads of a warp or of a block share a row."""
    assert nest.lane is not None
    lanes = _lanes(nest, alone=False)
    length, others = nest.lane.extent, [v for v in nest.columns if v is not nest.lane]
    runs, operands = max(1, ix.hint_of(length) // lanes), _read_again(nest)
    if runs * lanes <= WARP * min(_KEPT, _KEPT_OF_ALL[WARP] // operands):
        row_threads = min(WARP, _power(runs))
    else:  # half as many values for each thread, so that the processor has room for more blocks
        row_threads = max(2 * WARP, min(MOST_THREADS, _power(-(-runs // max(1, _KEPT // (2 * lanes))))))
    parts = -(-runs // row_threads)
    budget = next(values for threads, values in _KEPT_OF_ALL.items() if row_threads <= threads)
    whole = isinstance(length, int) and not others
    kept = whole and parts * lanes <= _KEPT and parts * lanes * operands <= budget
    iterations, parts = extent_product(nest.rows), parts if kept else 0
    groups = _groups(nest, row_threads, iterations) if others else 1
    sharers = row_threads * groups
    threads = _THREADS if sharers <= WARP else sharers
    return GpuMapping(lanes, threads, sharers, parts, len(nest.rows), 1, 1, iterations, groups=groups)


def _groups(nest: LoopNest, lane_threads: int, iterations: Extent) -> int:
    """Groups of threads that share the columns outside of the lanes, where those of the rows do not fill a card."""
    groups, length, threads = 1, ix.hint_of(shared_column(nest).extent), ix.hint_of(iterations) * lane_threads
    while lane_threads * groups < MOST_THREADS and groups * threads < _BUSY and length >= 4 * groups:
        groups *= 2
    return groups


def _read_again(nest: LoopNest) -> int:
    """Operands along the lanes that several phases read, 1 at the least."""
    phases: Counter[FlatLoad] = Counter()
    for phase in nest.phases:
        nodes = ex.walk(tuple(s.value for s in phase.inside))
        phases.update({n for n in nodes if isinstance(n, FlatLoad) and nest.lane in n.offset.variables()})
    return max(1, sum(count > 1 for count in phases.values()))


@dataclass(frozen=True)
class _Access:
    offset: Index
    itemsize: int


def _accesses(nest: LoopNest) -> Iterator[_Access]:
    """What moves along the lanes."""
    assert nest.lane is not None
    lane = nest.lane
    for statement in nest.statements:
        if isinstance(statement, Store) and lane in statement.offset.variables():
            yield _Access(statement.offset, statement.value.dtype.itemsize)
    for node in ex.walk(tuple(s.value for s in nest.statements)):
        if isinstance(node, FlatLoad) and lane in node.offset.variables():
            yield _Access(node.offset, node.dtype.itemsize)


def _lanes(nest: LoopNest, *, alone: bool) -> int:
    """Values that fill an access of the narrowest operand; of lanes ``alone``, without rows, the last may be fewer."""
    assert nest.lane is not None
    accesses = list(_accesses(nest))
    side_by_side = [a for a in accesses if a.offset.coefficient(nest.lane) == 1]
    if not side_by_side or len(side_by_side) < len(accesses):
        return 1  # what is scattered over memory moves best where neighbours in a warp are neighbours in memory
    lanes = min(ACCESS_BYTES // 2, ACCESS_BYTES // min(a.itemsize for a in side_by_side))
    while lanes > 1 and not all(_is_aligned(access, lanes, nest.lane) for access in accesses):
        lanes //= 2  # what begins between would be read element by element
    length = nest.lane.extent
    if alone:
        return lanes
    if not isinstance(length, int):
        return 1
    return math.gcd(lanes, length)


def _is_aligned(access: _Access, lanes: int, lane: Var) -> bool:
    wanted = min(ACCESS_BYTES, lanes * access.itemsize)
    return alignment_of(access.offset, access.itemsize, lanes, lane) >= wanted


def alignment_of(offset: Index, itemsize: int, lanes: int, lane: object) -> int:
    """Of the first of ``lanes`` elements, in bytes, where the memory itself is aligned to ``ACCESS_BYTES``."""
    common = offset.const
    for monomial, coefficient in offset.terms.items():
        common = math.gcd(common, coefficient * lanes if monomial == (lane,) else coefficient)
    if common == 0:
        return ACCESS_BYTES
    return min(ACCESS_BYTES, itemsize * (common & -common))


def _power(number: int) -> int:
    """The least power of two that is not below ``number``."""
    return 1 << max(0, number - 1).bit_length()
