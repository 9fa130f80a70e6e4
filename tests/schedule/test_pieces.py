"""Computed indices of straight pieces: each piece is one load, and values are those of eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.lowering.against_eager import DTYPES, check, specimen
from tests.schedule.test_fusion import plan_of
from torchkiln.ir import expr as ex
from torchkiln.ir import index as ix
from torchkiln.ir.expr import Constant, Expr, FlatLoad, IndexValue
from torchkiln.ir.index import DataIndex, Size, Var
from torchkiln.schedule.pieces import _bounds, _pieces, _pieces_in_range
from torchkiln.schedule.plan import Launch

Function = Callable[..., Any]
_unsafe_index = torch.ops.aten._unsafe_index.Tensor
LANE = Var("i0", 23)


def _numbers() -> st.SearchStrategy[Expr]:
    constants = st.integers(-30, 30).map(lambda c: Constant(c, torch.int64))
    lanes = st.tuples(st.integers(-2, 2), st.integers(-9, 9)).map(
        lambda pair: IndexValue(ix.of(LANE) * pair[0] + pair[1], torch.int64)
    )
    remainders = st.tuples(st.integers(-2, 2), st.integers(-40, 40), st.integers(1, 30)).map(
        lambda triple: IndexValue((ix.of(LANE) * triple[0] + triple[1]) % triple[2], torch.int64)
    )
    return st.recursive(
        constants | lanes | remainders,
        lambda inner: st.one_of(
            st.builds(ex.op, st.sampled_from(["add", "sub", "minimum", "maximum"]), inner, inner),
            st.builds(ex.op, st.sampled_from(["abs", "neg"]), inner),
        ),
        max_leaves=5,
    )


def _value(node: Any, at: int) -> int:
    """What ``node`` is where the lane variable is ``at``, by the meaning of its operations."""
    if isinstance(node, Constant):
        return int(node.value)
    if isinstance(node, IndexValue):
        found = ix.substitute(node.index, {LANE: ix.constant(at)})
        assert not found.terms
        return found.const
    operands = [_value(a, at) for a in node.args]
    meaning: dict[str, Function] = {
        "add": lambda x, y: x + y,
        "sub": lambda x, y: x - y,
        "mul": lambda x, y: x * y,
        "minimum": min,
        "maximum": max,
        "abs": abs,
        "neg": lambda x: -x,
    }
    return int(meaning[node.name](*operands))


@settings(max_examples=300)
@given(_numbers())
def test_exactly_one_piece_holds_anywhere_and_has_the_value(number: Expr) -> None:
    pieces = _pieces(number, LANE)
    if pieces is None:
        return
    for at in range(23):
        holding = [p for p in pieces if all(_value(IndexValue(c, torch.int64), at) >= 0 for c in p.conditions)]
        assert len(holding) == 1
        wanted = _value(number, at)
        assert _value(IndexValue(holding[0].index, torch.int64), at) == wanted
        low, high = _bounds(holding[0].index, holding[0].conditions, LANE)
        assert low <= wanted <= high


N = Size("n", 5, 1 << 40, 8)
LONG = Var("i0", ix.as_index(N) + 6)


def _of_a_size(mode: str) -> Expr:
    """The index that padding by 3 on each side of N elements reads."""
    here, last = IndexValue(ix.of(LONG) - 3, torch.int64), IndexValue(ix.of(N) - 1, torch.int64)
    if mode == "circular":
        return ex.op("remainder", here, ex.index_value(ix.of(N)))
    if mode == "replicate":
        return ex.op("minimum", ex.op("maximum", here, Constant(0, torch.int64)), last)
    return ex.op("sub", last, ex.op("abs", ex.op("sub", last, ex.op("abs", here))))


@pytest.mark.parametrize("mode", ["reflect", "replicate", "circular"])
def test_pieces_of_a_symbolic_size_hold_whatever_it_is(mode: str) -> None:
    atom = DataIndex(_of_a_size(mode), ix.of(N), True, True)
    pieces = _pieces_in_range(atom, LONG)
    assert pieces is not None
    assert len(pieces) == 3
    for size in (5, 6, 17):
        read = []
        for at in range(size + 6):
            there = {LONG: ix.constant(at), N: ix.constant(size)}
            conditions = [[ix.substitute(c, there).const >= 0 for c in p.conditions] for p in pieces]
            (piece,) = [p for p, holds in zip(pieces, conditions, strict=True) if all(holds)]
            read.append(ix.substitute(piece.index, there).const)
        expected = F.pad(torch.arange(float(size))[None, None], (3, 3), mode=mode).long().flatten().tolist()
        assert read == expected


def test_what_may_be_out_of_range_is_no_piece() -> None:
    """Of five elements at least, padding by 6 may read further than there are."""
    further = DataIndex(IndexValue(ix.of(LONG) - 3, torch.int64), ix.of(N), True, False)
    assert _pieces_in_range(further, LONG) is None
    negative = DataIndex(IndexValue(ix.of(LONG) - 3, torch.int64), ix.of(N), False, True)
    assert _pieces_in_range(negative, LONG) is None


def _padded(mode: str) -> Function:
    if mode != "circular":
        return lambda x: F.pad(x, (2, 3, 1, 2), mode=mode)

    def circular(x: torch.Tensor) -> torch.Tensor:
        rows, columns = x.shape[-2:]
        x = _unsafe_index(x, [None, None, torch.arange(-1, rows + 2) % rows])
        return _unsafe_index(x, [None, None, None, torch.arange(-2, columns + 3) % columns])

    return circular


@pytest.mark.parametrize("apart", [1, 3])
@pytest.mark.parametrize("mode", ["reflect", "replicate", "circular"])
def test_padding_reads_no_computed_index_along_the_lanes(mode: str, apart: int) -> None:
    plan = plan_of(lambda x: (_padded(mode)(x),), torch.zeros(2, 3, 40, 40 * apart)[..., ::apart], vector_bits=512)
    (kernel,) = [step.kernel for step in plan.steps if isinstance(step, Launch)]
    lane = kernel.nest.lane
    assert lane is not None
    for node in ex.walk(tuple(s.value for s in kernel.nest.statements)):
        if isinstance(node, FlatLoad):
            assert node.offset.coefficient(lane) in (-apart, 0, apart)
            assert not any(isinstance(a, DataIndex) and lane in a.value.variables for a in node.offset.atoms())


@settings(deadline=None, max_examples=25)
@given(st.sampled_from(DTYPES), st.integers(4, 140), st.integers(4, 9), st.data())
def test_padding_of_any_width_has_the_values_of_eager(
    dtype: torch.dtype, width: int, height: int, data: st.DataObject
) -> None:
    left, right = (data.draw(st.integers(0, min(width - 1, 70))) for _ in range(2))
    functions: dict[str, Function] = {
        "reflect": lambda x: F.pad(x, (left, right, 1, 2), mode="reflect"),
        "replicate": lambda x: F.pad(x, (left, right, 1, 2), mode="replicate"),
        "circular": lambda x: F.pad(x, (left, right, 1, 2), mode="circular"),
        "clamped": lambda x: x[..., (torch.arange(width + 9) - 4).clamp(0, width - 1)],
        "modulo": lambda x: x[..., torch.arange(-5, width + 7) % width],
        "rolled rows": lambda x: x.mT.roll(3, -2),
        "repeated": lambda x: x.repeat(1, 1, 1, 2)[..., : width + 3],
        "from the end": lambda x: x[..., torch.arange(width + 1) * -1 + (width - 1)],
    }
    bits, apart = data.draw(st.sampled_from([256, 512])), data.draw(st.sampled_from([1, 2, 3]))
    check(functions, [specimen(dtype, (1, 2, height, width * apart))[..., ::apart]], exact=True, vector_bits=bits)
