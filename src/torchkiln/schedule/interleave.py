"""Results that several values share in turns: stacks along the last dimension, repeated elements, scattered slices.

Such a store has a stride along every loop but a short one, whose iterations would waste the lanes. They are computed
together instead, each in the lanes of a longer loop, and interleaved in registers: the store is contiguous.
(768 x 1024 float32, one thread of a Zen 5, µs before and after: each element twice 223 and 105, of a transposed matrix
3290 and 212; two stacked 294 and 176, transposed 4020 and 405, three 862 and 277; rotary embeddings 243 and 98.)
"""

from __future__ import annotations

from torchkiln.ir import expr as ex
from torchkiln.ir import index as ix
from torchkiln.ir.expr import Interleaved
from torchkiln.ir.index import Var
from torchkiln.schedule.kernel import LoopNest, Phase, Statement, Store
from torchkiln.schedule.lanes import price_of_point
from torchkiln.schedule.limits import Limits
from torchkiln.schedule.loops import arrange, change_variables
from torchkiln.schedule.tiles import choose_tile


def interleave(nest: LoopNest, limits: Limits) -> LoopNest:
    """``nest``, or one that computes all iterations of a short loop at once where its accesses are cheaper."""
    pair = _pair(nest, limits)
    if pair is None:
        return nest
    short, lane = pair
    assert isinstance(short.extent, int)
    if len(ex.walk(tuple(s.value for s in nest.statements))) * short.extent > limits.kernel_nodes:
        return nest
    rows = tuple(v for v in nest.rows if v is not short)
    each = [change_variables(nest, {short: ix.constant(k)}, rows, (), lane) for k in range(short.extent)]
    (phase,) = each[0].phases
    inside: list[Statement] = []
    for number, store in enumerate(phase.inside):
        assert isinstance(store, Store)
        values = tuple(other.phases[0].inside[number].value for other in each)
        inside.append(Store(store.memory, store.offset, Interleaved(values)))
    together = arrange(LoopNest(rows, (), lane, (Phase((), tuple(inside)),), nest.parameters, (), nest.sizes), limits)
    before, after = (price_of_point(n, limits, tiled=choose_tile(n, limits) is not None) for n in (nest, together))
    return together if after < before * short.extent else nest


def _pair(nest: LoopNest, limits: Limits) -> tuple[Var, Var] | None:
    """A short loop along which every store is contiguous, and one whose steps are as long as it."""
    stores = [s for s in nest.statements if isinstance(s, Store)]
    if nest.columns or len(nest.phases) != 1 or nest.phases[0].before or not stores:
        return None
    for short in nest.rows:
        length = short.extent
        if not isinstance(length, int) or not 2 <= length <= limits.most_interleaved:
            continue
        if any(store.offset.coefficient(short) != 1 for store in stores):
            continue
        for lane in nest.rows:
            if lane is not short and all(store.offset.coefficient(lane) == length for store in stores):
                return short, lane
    return None
