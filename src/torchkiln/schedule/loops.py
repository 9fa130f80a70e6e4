"""Loop nests in shape: split where an index divides, merge what runs together, order by stride, name canonically."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torchkiln.ir import expr as ex
from torchkiln.ir import index as ix
from torchkiln.ir.expr import Expr, IndexValue, Load, Masked, Reduced
from torchkiln.ir.index import Extent, Index, Size, Substitution, Var
from torchkiln.schedule.kernel import Accumulate, Phase, Scratch, Statement, Store


@dataclass(frozen=True)
class LoopNest:
    """Loops and statements before code generation; the vector variable is anywhere in its list until arranged."""

    rows: tuple[Var, ...]
    columns: tuple[Var, ...]
    vector: Var | None
    phases: tuple[Phase, ...]
    scratch: tuple[Scratch, ...]


def arrange(nest: LoopNest) -> LoopNest:
    """The nest with simple indices, few loops, and the vector variable last in its list."""
    nest = _drop_single(nest)
    nest = _split_divided(nest)
    nest = _order(nest)
    nest = _merge(nest)
    return _canonical(nest)


def statements(nest: LoopNest) -> list[Statement]:
    return [s for p in nest.phases for s in (*p.before, *p.inside)]


def indices(nest: LoopNest) -> list[Index]:
    """Every index of the nest: offsets, positions, and indices used as values."""
    found: list[Index] = []
    everything = statements(nest)
    for statement in everything:
        found.append(statement.offset if isinstance(statement, Store) else statement.position)
    for node in ex.walk(tuple(s.value for s in everything)):
        if isinstance(node, Load):
            found.extend(node.subscripts)
        elif isinstance(node, IndexValue):
            found.append(node.index)
    # Values read from memory used as an index sit below stores too.
    for statement in everything:
        if isinstance(statement, Store):
            for value in ex.index_operands(statement.offset):
                for node in ex.walk((value,)):
                    if isinstance(node, Load):
                        found.extend(node.subscripts)
    return found


def change_variables(
    nest: LoopNest, mapping: Substitution, rows: Sequence[Var], columns: Sequence[Var], vector: Var | None
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
        Phase(
            tuple(_map_store(s, index, value) for s in p.before),
            tuple(
                _map_store(s, index, value)
                if isinstance(s, Store)
                else Accumulate(s.name, s.reducer, value(s.value), index(s.position))
                for s in p.inside
            ),
        )
        for p in nest.phases
    )
    return LoopNest(tuple(rows), tuple(columns), vector, phases, nest.scratch)


def _map_store(store: Store, index: Callable[[Index], Index], value: Callable[[Expr], Expr]) -> Store:
    return Store(store.parameter, index(store.offset), value(store.value))


def _drop_single(nest: LoopNest) -> LoopNest:
    """Loops of one iteration disappear (their variable is already the constant 0 in every index)."""
    rows = tuple(v for v in nest.rows if v.extent != 1)
    columns = tuple(v for v in nest.columns if v.extent != 1)
    return change_variables(nest, {}, rows, columns, nest.vector)


def _divisors(nest: LoopNest) -> dict[Var, set[Extent]]:
    """For each variable, the divisors of plain divisions and remainders of it."""
    found: dict[Var, set[Extent]] = {}

    def visit(index: Index) -> None:
        for atom in index.atoms():
            if isinstance(atom, (ix.Quotient, ix.Remainder)):
                numerator = atom.numerator
                terms = list(numerator.terms.items())
                if len(terms) == 1 and numerator.const == 0 and terms[0][1] == 1 and len(terms[0][0]) == 1:
                    only = terms[0][0][0]
                    if isinstance(only, Var):
                        found.setdefault(only, set()).add(atom.divisor)
                visit(numerator)

    for index in indices(nest):
        visit(index)
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
        vector = splits[nest.vector][1] if nest.vector in splits else nest.vector
        nest = change_variables(nest, mapping, rows, columns, vector)
    return nest


# A jump of a page or more costs the same however far it goes.
_FAR = 1024


def _order(nest: LoopNest) -> LoopNest:
    """Larger strides outside; the vector variable innermost in its list.

    Loads count twice: a jump while reading stalls, a jump while writing waits in the store buffer. (Moving heads
    to the front, 8 x 128 x 12 x 64: 309 to 327 µs with the writes in order, 288 to 298 µs with the reads in order.)
    """
    stores = [s.offset for s in statements(nest) if isinstance(s, Store)]
    every = [(index, 2) for index in indices(nest)] + [(offset, -1) for offset in stores]

    def weight(var: Var) -> int:
        return sum(times * min(abs(ix.hint_of(index.coefficient(var) or 0)), _FAR) for index, times in every)

    def arranged(variables: Sequence[Var]) -> tuple[Var, ...]:
        others = [v for v in variables if v is not nest.vector]
        # A stable sort keeps the program's order among equals.
        others.sort(key=weight, reverse=True)
        return (*others, nest.vector) if nest.vector in variables else tuple(others)  # type: ignore[arg-type]

    return replace(nest, rows=arranged(nest.rows), columns=arranged(nest.columns))


def _merge(nest: LoopNest) -> LoopNest:
    """Neighbouring loops whose every index moves as one become one loop."""
    changed = True
    while changed:
        changed = False
        every = indices(nest)
        for which in ("rows", "columns"):
            variables: tuple[Var, ...] = getattr(nest, which)
            for outer, inner in itertools.pairwise(variables):
                if not all(_moves_as_one(i, outer, inner) for i in every):
                    continue
                merged = Var(f"{outer.name}{inner.name}", ix.product((outer.extent, inner.extent)))
                replacement = [merged if v is inner else v for v in variables if v is not outer]
                rows = replacement if which == "rows" else nest.rows
                columns = replacement if which == "columns" else nest.columns
                # outer*extent + inner == merged in every index, so inner stands for the whole and outer for nothing.
                mapping = {outer: ix.ZERO, inner: ix.of(merged)}
                vector = merged if nest.vector is inner else nest.vector
                nest = change_variables(nest, mapping, rows, columns, vector)
                changed = True
                break
            if changed:
                break
    return nest


def _moves_as_one(index: Index, outer: Var, inner: Var) -> bool:
    a, b = index.coefficient(outer), index.coefficient(inner)
    return a is not None and b is not None and a == ix.product((b, inner.extent))


def _canonical(nest: LoopNest) -> LoopNest:
    """Names by position, so that equal nests are equal objects."""
    rows = [Var(f"i{k}", v.extent) for k, v in enumerate(nest.rows)]
    columns = [Var(f"r{k}", v.extent) for k, v in enumerate(nest.columns)]
    mapping = {old: ix.of(new) for old, new in zip((*nest.rows, *nest.columns), (*rows, *columns), strict=True)}
    vector = None
    if nest.vector is not None:
        everything = dict(zip((*nest.rows, *nest.columns), (*rows, *columns), strict=True))
        vector = everything.get(nest.vector)
    return change_variables(nest, mapping, rows, columns, vector)


def name_sizes(nest: LoopNest) -> tuple[LoopNest, tuple[Size, ...]]:
    """The nest with sizes named by the order they come in, and the sizes those names stand for."""
    order: dict[Size, None] = {}

    def add(extent: Extent) -> None:
        order.update(dict.fromkeys(sorted(ix.sizes_in(extent), key=repr)))

    for var in (*nest.rows, *nest.columns):
        add(var.extent)
    for index in indices(nest):
        add(index)
    if not order:
        return nest, ()
    names: dict[Any, Index] = {size: ix.of(Size(f"n{k}", *size.bounds, size.hint)) for k, size in enumerate(order)}

    def renamed(variables: Sequence[Var]) -> dict[Var, Var]:
        return {v: Var(v.name, ix.substitute_extent(v.extent, names)) for v in variables}

    rows, columns = renamed(nest.rows), renamed(nest.columns)
    variables = rows | columns
    mapping = names | {old: ix.of(new) for old, new in variables.items()}
    vector = None if nest.vector is None else variables[nest.vector]
    return change_variables(nest, mapping, tuple(rows.values()), tuple(columns.values()), vector), tuple(order)


# Beyond this many operations a tile's code, repeated for each of its rows, grows too large to pay.
_MOST_TILE_NODES = 48


def choose_tile(nest: LoopNest) -> Var | None:
    """The row variable along which loads run in memory that the vector variable crosses, if there is one.

    Such loads are read in square tiles along memory and turned in registers; gathered one by one they would cost
    a cache line each.
    """
    vector = nest.vector
    if nest.columns or vector is None or vector not in nest.rows or ix.hint_of(vector.extent) < 16:
        return None
    nodes = ex.walk(tuple(s.value for s in statements(nest)))
    if len(nodes) > _MOST_TILE_NODES or any(isinstance(n, Masked) for n in nodes):
        return None
    votes: dict[Var, int] = {}
    for node in nodes:
        if not isinstance(node, Load) or node.subscripts[0].coefficient(vector) in (None, 0, 1):
            continue
        for var in nest.rows:
            if var is not vector and ix.hint_of(var.extent) >= 16 and node.subscripts[0].coefficient(var) == 1:
                votes[var] = votes.get(var, 0) + 1
    return max(votes, key=lambda v: votes[v]) if votes else None


def move_last(nest: LoopNest, tile: Var) -> LoopNest:
    """The nest with ``tile`` as the last row before the vector, names canonical again."""
    others = [v for v in nest.rows if v is not tile and v is not nest.vector]
    assert nest.vector is not None
    return _canonical(replace(nest, rows=(*others, tile, nest.vector)))
