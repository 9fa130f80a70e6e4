"""Loads whose index is made of straight pieces along the lane, as one load of each piece.

Padding that reflects or repeats an edge computes the index it reads: ``2 - i``, then ``i - 2``, then ``112 - i``. That
which is circular divides by a size: ``(i + 54) % 56``. As a computed index every lane is gathered by itself. Each piece
is contiguous, reversed, picked out of contiguous loads, or one element, under a guard. Sizes may be symbolic.
(Reflection of 8 x 64 x 56 x 56 by 2 on each side, one thread of a Zen 5: 860 µs gathered, 180 in pieces, eager 190.
Circular padding by 3 on a Zen 4, gathered, in pieces and eager: 1,190, 370 and 750. With code for AVX2, 2 x 32 x 224 x
224: 4,040, 2,920 and 1,130, symbolic 9,070, 4,390 and 1,130; but reflected 2,440 and 8,800.)
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from torchkiln.ir import expr as ex
from torchkiln.ir import index as ix
from torchkiln.ir.expr import Constant, Expr, FlatLoad, IndexValue, Masked, Op
from torchkiln.ir.index import DataIndex, Index, Remainder, Size, Var
from torchkiln.schedule.kernel import LoopNest, Phase
from torchkiln.schedule.limits import Limits

# Loads of one vector that are still cheaper than gathering it.
_MOST_PIECES = 4
# How often a remainder starts over where that is not known.
_FAR = 1 << 32


@dataclass(frozen=True)
class _Piece:
    """``index`` where each of ``conditions`` is at least 0."""

    conditions: tuple[Index, ...]
    index: Index


def in_pieces(nest: LoopNest, limits: Limits, *, cheap_masks: bool) -> LoopNest:
    """The nest with guarded loads of the pieces in place of each such load, inside guards too.

    Without ``cheap_masks``, only of loads that would divide in each lane.
    """
    lane = nest.lane
    if lane is None:
        return nest
    memo: dict[Expr, Expr] = {}
    for node in ex.walk(tuple(s.value for s in nest.statements)):
        if isinstance(node, FlatLoad):
            taken_apart = _in_pieces(node, lane, limits, cheap_masks=cheap_masks)
            if taken_apart is not None:
                memo[node] = taken_apart
    if not memo:
        return nest

    def value(node: Expr) -> Expr:
        return ex.rewrite(node, lambda _: None, {}, memo)

    phases = tuple(
        Phase(tuple(s.mapped(_same, value) for s in p.before), tuple(s.mapped(_same, value) for s in p.inside))
        for p in nest.phases
    )
    return replace(nest, phases=phases)


def _same(index: Index) -> Index:
    return index


def _in_pieces(load: FlatLoad, lane: Var, limits: Limits, *, cheap_masks: bool) -> Expr | None:
    """``load`` as a choice of loads, or None where it stays as it is."""
    bent = {a for a in load.offset.atoms() if isinstance(a, DataIndex | Remainder) and lane in ix.atom_variables(a)}
    if len(bent) != 1:
        return None
    (atom,) = bent
    if not cheap_masks and isinstance(atom, DataIndex) and not isinstance(atom.value, IndexValue):
        return None
    pieces = _pieces_of_remainder(atom, lane) if isinstance(atom, Remainder) else _pieces_in_range(atom, lane)
    if pieces is None or not 1 <= len(pieces) <= _MOST_PIECES:
        return None
    offsets = [_replaced(load.offset, atom, piece.index) for piece in pieces]
    strides = [offset.coefficient(lane) for offset in offsets]
    if any(s not in (-1, 0, 1) and not limits.picks_lanes(s, load.dtype.itemsize) for s in strides):
        return None
    loads = [FlatLoad(load.memory, offset, load.dtype) for offset in offsets]
    result: Expr | None = None
    for piece, part in zip(reversed(pieces), reversed(loads), strict=True):
        condition = _condition(piece)
        guarded = part if condition is None else Masked(condition, part)
        result = guarded if result is None or condition is None else ex.where(condition, guarded, result)
    return result


def _pieces_in_range(atom: DataIndex, lane: Var) -> list[_Piece] | None:
    """The pieces of a computed index, each known to be in range; None where there are none."""
    pieces = _pieces(atom.value, lane)
    if pieces is None:
        return None
    last = ix.as_index(atom.extent) - 1
    found: list[_Piece] = []
    for piece in pieces:
        low, high = _bounds(piece.index, piece.conditions, lane)
        if atom.wraps and high < 0:
            piece = replace(piece, index=piece.index + atom.extent)
        elif low < 0 and (atom.checked or atom.wraps):
            return None
        if atom.checked and any(_bounds(i, piece.conditions, lane)[0] < 0 for i in (piece.index, last - piece.index)):
            return None
        found.append(piece)
    return found


def _pieces(value: Expr, lane: Var) -> list[_Piece] | None:
    """``value`` as indices with conditions that exclude each other, or None where it is not made of such."""
    if isinstance(value, IndexValue):
        return _pieces_of_index(value.index, lane)
    if isinstance(value, Constant) and value.dtype == torch.int64:
        return [_Piece((), ix.constant(int(value.value)))]
    if not isinstance(value, Op) or value.dtype != torch.int64 or value.name not in _BRANCHES:
        return None
    parts = [_pieces(operand, lane) for operand in value.args]
    if any(part is None for part in parts):
        return None
    found: list[_Piece] = []
    for first in parts[0] or ():
        for second in (parts[1] or ()) if len(parts) > 1 else (first,):
            known = (*first.conditions, *second.conditions)
            for condition, index in _BRANCHES[value.name](first.index, second.index):
                conditions = _together(known, () if condition is None else (condition,), lane)
                if conditions is not None:
                    found.append(_Piece(conditions, index))
    return found if len(found) <= 2 * _MOST_PIECES else None


def _pieces_of_index(index: Index, lane: Var) -> list[_Piece] | None:
    if index.coefficient(lane) is not None:
        return [_Piece((), index)]
    bent = {atom for atom in index.atoms() if not isinstance(atom, Var) and lane in ix.atom_variables(atom)}
    atom = bent.pop() if len(bent) == 1 else None
    if not isinstance(atom, Remainder):
        return None
    pieces = _pieces_of_remainder(atom, lane)
    return None if pieces is None else [replace(p, index=_replaced(index, atom, p.index)) for p in pieces]


def _pieces_of_remainder(atom: Remainder, lane: Var) -> list[_Piece] | None:
    """One for each time that a remainder starts over, as padding that is circular has it."""
    number, divisor = atom.numerator, ix.as_index(atom.divisor)
    if not isinstance(number.coefficient(lane), int):
        return None
    low, high = _bounds(number, (), lane)
    if isinstance(atom.divisor, int):
        least, most = low // atom.divisor, high // atom.divisor
    else:
        least = next((k for k in range(0, -_MOST_PIECES, -1) if _bounds(number - divisor * k, (), lane)[0] >= 0), -_FAR)
        most = next((k for k in range(_MOST_PIECES) if _bounds(divisor * (k + 1) - 1 - number, (), lane)[0] >= 0), _FAR)
    if most - least >= _MOST_PIECES:
        return None
    found = []
    for k in range(least, most + 1):
        rest = number - divisor * k
        conditions = _together((), (rest, divisor - 1 - rest), lane)
        if conditions is not None:
            found.append(_Piece(conditions, rest))
    return found


_Branch = tuple[Index | None, Index]  # a condition, at least 0 where it holds, and the result there


def _absolute(x: Index, _: Index) -> Iterator[_Branch]:
    yield x, x
    yield -x - 1, -x


def _least(x: Index, y: Index) -> Iterator[_Branch]:
    yield y - x, x
    yield x - y - 1, y


def _greatest(x: Index, y: Index) -> Iterator[_Branch]:
    yield x - y, x
    yield y - x - 1, y


_BRANCHES = {
    "add": lambda x, y: [(None, x + y)],
    "sub": lambda x, y: [(None, x - y)],
    "neg": lambda x, _: [(None, -x)],
    "abs": _absolute,
    "minimum": _least,
    "maximum": _greatest,
}


def _together(known: tuple[Index, ...], added: tuple[Index, ...], lane: Var) -> tuple[Index, ...] | None:
    """``known`` with further conditions, those aside that always hold then; None where they exclude each other."""
    known = tuple(dict.fromkeys(known))
    if _is_empty((*known, *added), lane):
        return None
    for condition in added:
        low, high = _bounds(condition, known, lane)
        if high < 0:
            return None
        if low < 0 and condition not in known:
            known = (*known, condition)
    return known


def _ends(conditions: tuple[Index, ...], lane: Var) -> tuple[list[Index], list[Index]]:
    """Numbers that ``lane`` is not below, and not above, where the conditions about it and sizes alone hold."""
    lows, highs = [ix.ZERO], [ix.as_index(lane.extent) - 1]
    for condition in conditions:
        slope = _slope(condition, lane)
        rest = condition - ix.of(lane) * slope
        if abs(slope) > 1 and rest.terms:
            continue
        # slope * lane + rest >= 0
        if slope > 0:
            lows.append(-(rest // slope))
        elif slope < 0:
            highs.append(rest // -slope)
    return lows, highs


def _is_empty(conditions: tuple[Index, ...], lane: Var) -> bool:
    lows, highs = _ends(conditions, lane)
    return any((high - low).bounds[1] < 0 for low in lows for high in highs)


def _slope(index: Index, lane: Var) -> int:
    """The factor of ``lane`` where there is nothing else but sizes and a number, otherwise 0."""
    slope = index.coefficient(lane)
    return slope if isinstance(slope, int) and all(a is lane or isinstance(a, Size) for a in index.atoms()) else 0


def _bounds(index: Index, conditions: tuple[Index, ...], lane: Var) -> tuple[int, int]:
    """Numbers that ``index`` is not below, and not above, where the conditions hold."""
    low, high = index.bounds
    slope = _slope(index, lane)
    if slope:
        rest = index - ix.of(lane) * slope
        lows, highs = _ends(conditions, lane)
        if slope < 0:
            lows, highs = highs, lows
        low = max(low, *((end * slope + rest).bounds[0] for end in lows))
        high = min(high, *((end * slope + rest).bounds[1] for end in highs))
    return low, high


def _condition(piece: _Piece) -> Expr | None:
    zero = Constant(0, torch.int64)
    tests = [ex.op("ge", IndexValue(condition, torch.int64), zero) for condition in piece.conditions]
    if not tests:
        return None
    result = tests[0]
    for test in tests[1:]:
        result = ex.op("logical_and", result, test)
    return result


def _replaced(offset: Index, atom: DataIndex | Remainder, index: Index) -> Index:
    """``offset`` with ``index`` for ``atom``."""
    result = ix.constant(offset.const)
    for monomial, coefficient in offset.terms.items():
        factors = (index if factor == atom else ix.of(factor) for factor in monomial)
        result = result + math.prod(factors, start=ix.constant(coefficient))
    return result
