"""How a kernel is cut into parallel iterations. Sizes decide alone, never the number of threads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torchkiln.ir import expr as ex
from torchkiln.ir import index as ix
from torchkiln.ir import ops
from torchkiln.ir.expr import Op
from torchkiln.ir.index import Extent, Var
from torchkiln.schedule.dependencies import extent_product
from torchkiln.schedule.kernel import Phase
from torchkiln.schedule.loops import LoopNest

_ENOUGH_TASKS = 64
_BLOCK = 2048
_REGISTER_BLOCK = 64  # results whose accumulators stay in registers while the reduced axis is walked
_TILE = 16


@dataclass(frozen=True)
class Parallelism:
    """``extent`` iterations over the points of the first ``rows`` rows times ``blocks`` blocks of ``block`` values.

    ``grain`` is the least iterations worth a thread; 0 runs the kernel serially. Where sizes decide it at run time, it
    may come out as 0 too, and then means 1.
    """

    extent: Extent
    rows: int
    blocks: Extent
    block: int
    grain: Extent


def parallelism(nest: LoopNest, tile: Var | None, threshold: int) -> Parallelism:
    """Cut ``nest``; ``threshold`` is the work, in simple operations on one element, that pays for a thread."""
    outer: Sequence[Var] = nest.rows
    blocked: Var | None = None
    block = 1
    if tile is not None:
        outer, blocked, block = nest.rows[:-2], tile, _TILE
    elif nest.vector is not None and nest.vector in nest.rows:
        outer = nest.rows[:-1]
        length = nest.vector.extent
        if nest.columns:
            blocked, block = nest.vector, min(length, _REGISTER_BLOCK) if isinstance(length, int) else _REGISTER_BLOCK
        elif ix.hint_of(extent_product(outer)) < _ENOUGH_TASKS and ix.hint_of(length) > _BLOCK:
            blocked, block = nest.vector, _BLOCK
    blocks: Extent = 1 if blocked is None else ix.ceil_divide(blocked.extent, block)
    depth = 0
    while depth < len(outer) and ix.hint_of(ix.product((extent_product(outer[:depth]), blocks))) < _ENOUGH_TASKS:
        depth += 1
    if blocks != 1:
        depth = len(outer)  # blocks are counted inside all rows
    extent = ix.product((extent_product(outer[:depth]), blocks))
    points = extent_product((*nest.rows, *nest.columns))
    weight = max(1, len([p for p in nest.phases if p.inside])) * _weight(nest.phases)
    if isinstance(extent, int) and isinstance(points, int):
        work = points * weight // max(extent, 1)
        least = max(1, threshold // max(work, 1))
        return Parallelism(extent, depth, blocks, block, 0 if extent <= least else least)
    if points == 0:
        return Parallelism(extent, depth, blocks, block, 0)
    # Per iteration at least one point runs: how many is a division by sizes, done at each launch.
    grain = ix.extent(ix.as_index(ix.product((extent, max(1, threshold // weight)))) // points)
    return Parallelism(extent, depth, blocks, block, grain)


def _weight(phases: Sequence[Phase]) -> int:
    """How many plain operations one point costs, roughly: transcendental functions count for more."""
    roots = tuple(s.value for p in phases for s in p.inside) or tuple(s.value for p in phases for s in p.before)
    total = sum(12 if n.name in ops.MATH else 1 for n in ex.walk(roots) if isinstance(n, Op))
    return max(1, total // 8)
