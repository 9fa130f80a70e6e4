"""Loop nests in shape: split where an index divides, merge what runs together, order by stride, name canonically."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torchkiln.ir import expr as ex
from torchkiln.ir import index as ix
from torchkiln.ir.expr import Expr, FlatLoad, IndexValue, Reduced
from torchkiln.ir.index import Extent, Index, Size, Substitution, Var
from torchkiln.schedule.kernel import Accumulate, LoopNest, Phase, Store
from torchkiln.schedule.limits import Limits

# Tiles beside which a rest, done row by row, is small.
_TILES_PER_REST = 8


def arrange(nest: LoopNest, limits: Limits) -> LoopNest:
    """The nest with simple indices, few loops, and the lane variable last in its list."""
    nest = _drop_single(nest)
    nest = _split_divided(nest)
    nest = _order(nest, limits.far_stride)
    nest = _merge(nest)
    return _canonical(nest)


def indices_of_values(nest: LoopNest) -> list[Index]:
    """The nest's indices but for those of loads below stores: offsets, those for argmax, indices used as values."""
    found = [s.offset if isinstance(s, Store) else s.index for s in nest.statements]
    for node in ex.walk(tuple(s.value for s in nest.statements)):
        if isinstance(node, FlatLoad):
            found.append(node.offset)
        elif isinstance(node, IndexValue):
            found.append(node.index)
    return found


def indices(nest: LoopNest) -> list[Index]:
    """Every index of the nest. Values read from memory used as an index sit below stores too."""
    below = [value for s in nest.statements if isinstance(s, Store) for value in ex.index_operands(s.offset)]
    loads = [node.offset for value in below for node in ex.walk((value,)) if isinstance(node, FlatLoad)]
    return indices_of_values(nest) + loads


def change_variables(
    nest: LoopNest, mapping: Substitution, rows: Sequence[Var], columns: Sequence[Var], lane: Var | None
) -> LoopNest:
    """Substitute loop variables everywhere; ``rows`` and ``columns`` are the new lists."""
    memo: dict[Expr, Expr] = {}
    row_set = frozenset(rows)

    def leaf(node: Expr) -> Expr | None:
        return Reduced(node.name, row_set, node.dtype) if isinstance(node, Reduced) else None

    def value(node: Expr) -> Expr:
        return ex.rewrite(node, leaf, mapping, memo)

    def index(i: Index) -> Index:
        return ix.substitute(i, mapping, value)

    phases = tuple(
        Phase(tuple(s.mapped(index, value) for s in p.before), tuple(s.mapped(index, value) for s in p.inside))
        for p in nest.phases
    )
    return replace(nest, rows=tuple(rows), columns=tuple(columns), lane=lane, phases=phases)


def _drop_single(nest: LoopNest) -> LoopNest:
    """Loops of one iteration disappear (their variable is already the constant 0 in every index)."""
    rows = tuple(v for v in nest.rows if v.extent != 1)
    columns = tuple(v for v in nest.columns if v.extent != 1)
    return change_variables(nest, {}, rows, columns, nest.lane)


def _divisors(nest: LoopNest) -> dict[Var, set[Extent]]:
    """For each variable, the divisors of plain divisions and remainders of it."""
    found: dict[Var, set[Extent]] = {}
    pending = indices(nest)
    while pending:
        for atom in pending.pop().atoms():
            if isinstance(atom, (ix.Quotient, ix.Remainder)):
                pending.append(atom.numerator)
                divided = ix.single_atom(atom.numerator)
                if isinstance(divided, Var):
                    found.setdefault(divided, set()).add(atom.divisor)
    return found


def _split_divided(nest: LoopNest) -> LoopNest:
    """``v // d`` and ``v % d`` become two loop variables where ``d`` divides the extent."""
    for round_number in range(4):
        divisors = _divisors(nest)
        splits: dict[Var, tuple[Var, Var]] = {}
        for var, found in divisors.items():
            usable = [d for d in found if d not in (1, var.extent) and ix.divides(d, var.extent)]
            if usable:
                d = min(usable, key=lambda divisor: (ix.hint_of(divisor), repr(divisor)))
                stem = f"{var.name}_{round_number}"
                outer = ix.extent(ix.as_index(var.extent) // d)
                splits[var] = (Var(f"{stem}o", outer), Var(f"{stem}i", d))
        if not splits:
            return nest
        mapping = {v: ix.of(o) * i.extent + ix.of(i) for v, (o, i) in splits.items()}
        rows = [w for v in nest.rows for w in splits.get(v, (v,))]
        columns = [w for v in nest.columns for w in splits.get(v, (v,))]
        lane = splits[nest.lane][1] if nest.lane in splits else nest.lane
        nest = change_variables(nest, mapping, rows, columns, lane)
    return nest


def _order(nest: LoopNest, far: int) -> LoopNest:
    """Larger strides outside; the lane variable innermost in its list.

    Stores count twice: a store that jumps fetches its line from afar and gives it back unfinished, where loads from
    several places are streams of their own. (Moving heads, one thread of a Zen 5, reads in order and writes in order:
    to the front, 2 x 512 x 16 x 64, 124 and 95 µs, bfloat16 83 and 51; to the back 198 and 110, 93 and 60; 8 x 12 x
    128 x 64 68 and 78; windows of 7 x 7 out of 8 x 56 x 56 x 96 528 and 422.) Indices that are values, as guards have
    them, touch no memory.
    """
    every = _places(nest)

    def weight(var: Var) -> int:
        return sum(min(abs(ix.hint_of(index.coefficient(var) or 0)), far) for index in every)

    def arranged(variables: Sequence[Var]) -> tuple[Var, ...]:
        others = [v for v in variables if v is not nest.lane]
        # A stable sort keeps the program's order among equals.
        others.sort(key=weight, reverse=True)
        return (*others, nest.lane) if nest.lane in variables else tuple(others)  # type: ignore[arg-type]

    return replace(nest, rows=arranged(nest.rows), columns=arranged(nest.columns))


def _places(nest: LoopNest) -> list[Index]:
    """What a point touches: offsets of loads and, twice, of stores; and the place of the point in a reduction."""
    stores = [s.offset for s in nest.statements if isinstance(s, Store)]
    values = [s.value for s in nest.statements] + [value for offset in stores for value in ex.index_operands(offset)]
    loads = [node.offset for node in ex.walk(tuple(values)) if isinstance(node, FlatLoad)]
    return stores + stores + loads + [s.index for s in nest.statements if isinstance(s, Accumulate)]


def _merge(nest: LoopNest) -> LoopNest:
    """Neighbouring loops whose every index moves as one become one loop."""
    while (pair := _mergeable(nest)) is not None:
        outer, inner = pair
        merged = Var(f"{outer.name}{inner.name}", ix.product((outer.extent, inner.extent)))
        rows, columns = (
            [merged if v is inner else v for v in variables if v is not outer]
            for variables in (nest.rows, nest.columns)
        )
        # outer*extent + inner == merged in every index, so inner stands for the whole and outer for nothing.
        mapping = {outer: ix.ZERO, inner: ix.of(merged)}
        nest = change_variables(nest, mapping, rows, columns, merged if nest.lane is inner else nest.lane)
    return nest


def _mergeable(nest: LoopNest) -> tuple[Var, Var] | None:
    every = indices(nest)
    for outer, inner in (*itertools.pairwise(nest.rows), *itertools.pairwise(nest.columns)):
        if all(moves_as_one(index, outer, inner) for index in every):
            return outer, inner
    return None


def moves_as_one(index: Index, outer: Var, inner: Var) -> bool:
    """Whether ``index`` walks through ``outer`` and ``inner`` as through one loop."""
    a, b = index.coefficient(outer), index.coefficient(inner)
    return a is not None and b is not None and a == ix.product((b, inner.extent))


def _canonical(nest: LoopNest) -> LoopNest:
    """Names by position, so that equal nests are equal objects."""
    rows = {v: Var(f"i{k}", v.extent) for k, v in enumerate(nest.rows)}
    return _renamed(nest, rows | {v: Var(f"r{k}", v.extent) for k, v in enumerate(nest.columns)}, {})


def _renamed(nest: LoopNest, names: Mapping[Var, Var], sizes: Mapping[Size, Index]) -> LoopNest:
    rows, columns = ([names[v] for v in variables] for variables in (nest.rows, nest.columns))
    mapping: dict[Any, Index] = {**sizes, **{old: ix.of(new) for old, new in names.items()}}
    return change_variables(nest, mapping, rows, columns, None if nest.lane is None else names[nest.lane])


def name_sizes(nest: LoopNest) -> tuple[LoopNest, tuple[Size, ...]]:
    """The nest with sizes named by the order they come in, and the sizes those names stand for."""
    variables = (*nest.rows, *nest.columns)
    order: dict[Size, None] = {}
    for extent in (*(v.extent for v in variables), *indices(nest)):
        order.update(dict.fromkeys(sorted(ix.sizes_in(extent), key=repr)))
    if not order:
        return nest, ()
    named = {size: Size(f"n{k}", *size.bounds, size.hint) for k, size in enumerate(order)}
    sizes: dict[Any, Index] = {size: ix.of(name) for size, name in named.items()}
    nest = _renamed(nest, {v: Var(v.name, ix.substitute_extent(v.extent, sizes)) for v in variables}, sizes)
    return replace(nest, sizes=tuple(named.values())), tuple(order)


def fill_tiles(nest: LoopNest, tile: Var, side: int) -> LoopNest | None:
    """The nest with a few iterations of another row in its lanes: tiles of ``side`` then leave no rest, or a small one.

    None where the lanes are less than one tile even so.

    An image of 56 x 56 has rows of three tiles and a half, two of which are seven. (Sum of two channels-last images
    into a contiguous one, 4 x 64 x 56 x 56, one thread: 0.26 ms before, 0.16 after.) Rows of 14 are less than a tile,
    and 14 of them twelve and a rest.
    """
    lane = nest.lane
    assert lane is not None
    length = ix.hint_of(lane.extent)
    unchanged = nest if length >= side else None
    if not isinstance(lane.extent, int) or length % side == 0:
        return unchanged
    every = indices(nest)
    for row in nest.rows:
        if row in (tile, lane) or not isinstance(row.extent, int):
            continue
        taken = _iterations_to_fill(row.extent, length, side)
        if taken > 1 and taken * length >= side and all(moves_as_one(index, row, lane) for index in every):
            outer, filled = Var(f"{row.name}o", row.extent // taken), Var(f"{row.name}{lane.name}", taken * lane.extent)
            # row * extent + lane == taken * extent * outer + filled in every index.
            around = ix.ZERO if taken == row.extent else ix.of(outer) * taken
            rows = [{row: outer, lane: filled}.get(v, v) for v in nest.rows if v is not row or taken != row.extent]
            return change_variables(nest, {row: around, lane: ix.of(filled)}, rows, nest.columns, filled)
    return unchanged


def _iterations_to_fill(count: int, length: int, side: int) -> int:
    """How many of ``count`` rows to take: the fewest without a rest, or with many tiles to it; others stay parallel."""
    enough = side // math.gcd(length, side)
    if count % enough == 0:
        return enough
    most = _TILES_PER_REST * side
    divisors = (d for d in range(1, min(count, most) + 1) if count % d == 0)
    return next((d for d in divisors if d * length >= most), count if count <= most else 1)


def move_last(nest: LoopNest, tile: Var) -> tuple[LoopNest, int]:
    """The nest with ``tile``, if it is a row, as the last one but for the lane, and its place among the variables.

    Names are canonical again.
    """
    ends = [v for v in nest.rows if v in (tile, nest.lane)]
    ends.sort(key=lambda v: v is nest.lane)
    nest = replace(nest, rows=(*(v for v in nest.rows if v not in ends), *ends))
    return _canonical(nest), (*nest.rows, *nest.columns).index(tile)
