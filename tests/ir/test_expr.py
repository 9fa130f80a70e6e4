"""Scalar expressions: interning, rewriting, and simplification that keeps NaN and signed zero."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchkiln.ir import expr as ex
from torchkiln.ir import index as ix
from torchkiln.ir.expr import Constant, Expr, IndexValue, Load, Masked, Op
from torchkiln.ir.index import DataIndex, Var

ROW, COLUMN = Var("i", 6), Var("j", 9)
X = Load("x", (ix.of(ROW), ix.of(COLUMN)), torch.float32)
Y = Load("y", (ix.of(COLUMN),), torch.float32)
AWKWARD = (0.0, -0.0, 1.0, -1.0, 2.5, float("inf"), float("-inf"), float("nan"), 1e-40)
PROPERTY = settings(max_examples=200, deadline=None, derandomize=True)

_COMPARE = {name: getattr(operator, name) for name in ("lt", "le", "gt", "ge", "eq", "ne")}
_ARITHMETIC: dict[str, Callable[[float, float], float]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
}


def evaluate(node: Expr, memory: dict[Expr, Any], point: dict[Var, int]) -> Any:
    """An expression in Python's arithmetic; loads come from ``memory``."""
    if isinstance(node, Constant):
        return node.value
    if node in memory:
        return memory[node]
    if isinstance(node, IndexValue):
        return node.index.const + sum(c * math.prod(point[a] for a in m) for m, c in node.index.terms.items())
    assert isinstance(node, Op)
    args = [evaluate(a, memory, point) for a in node.args]
    if node.name in _COMPARE:
        return _COMPARE[node.name](*args)
    if node.name in _ARITHMETIC:
        return _ARITHMETIC[node.name](*args)
    return {
        "where": lambda c, a, b: a if c else b,
        "logical_and": lambda a, b: a and b,
        "bitwise_and": lambda a, b: a and b,
        "cast": lambda a: a,
    }[node.name](*args)


def same(left: Any, right: Any) -> bool:
    """Equal, NaN to NaN, and zeros of one sign."""
    if isinstance(left, float) and math.isnan(left):
        return isinstance(right, float) and math.isnan(right)
    return bool(left == right and math.copysign(1, left) == math.copysign(1, right))


def test_equal_expressions_are_one_object() -> None:
    assert Op("add", (X, Y), torch.float32) is Op("add", (X, Y), torch.float32)
    assert Op("add", (X, Y), torch.float32) is not Op("add", (Y, X), torch.float32)
    assert Load("x", (ix.of(ROW), ix.of(COLUMN)), torch.float32) is X
    assert Load("x", (ix.of(COLUMN), ix.of(ROW)), torch.float32) is not X
    assert Masked(Constant(True, torch.bool), X) is Masked(Constant(True, torch.bool), X)
    assert IndexValue(ix.of(ROW) + 1, torch.int64) is IndexValue(ix.of(ROW) + 1, torch.int64)


def test_constants_differ_where_their_bits_do() -> None:
    assert Constant(0.0, torch.float32) is not Constant(-0.0, torch.float32)
    assert Constant(float("nan"), torch.float32) is Constant(float("nan"), torch.float32)
    assert Constant(1, torch.int64) is not Constant(1, torch.int32)
    assert Constant(True, torch.bool) is not Constant(1, torch.bool)


def test_an_expression_knows_its_variables() -> None:
    assert X.variables == {ROW, COLUMN}
    assert Op("add", (X, Y), torch.float32).variables == {ROW, COLUMN}
    assert Op("neg", (Y,), torch.float32).variables == {COLUMN}
    looked_up = Load("z", (ix.of(DataIndex(Load("p", (ix.of(ROW),), torch.int64), 5, True, True)),), torch.float32)
    assert looked_up.variables == {ROW}


def test_rewriting_replaces_variables_and_loads() -> None:
    value = Op("add", (X, Op("mul", (Y, Y), torch.float32)), torch.float32)
    moved = ex.rewrite(value, lambda _: None, {COLUMN: ix.of(ROW) + 1}, {})
    assert {str(load) for load in ex.loads(moved)} == {"x[i, i + 1]", "y[i + 1]"}
    fixed = ex.rewrite(value, lambda node: Constant(2.0, torch.float32) if node is Y else None, {}, {})
    assert str(fixed) == "add(x[i, j], mul(2.0, 2.0))"
    assert ex.rewrite(value, lambda _: None, {}, {}) is value


def test_rewriting_reaches_indices_read_from_memory() -> None:
    positions = Load("p", (ix.of(ROW),), torch.int64)
    value = Load("z", (ix.of(DataIndex(positions, 5, True, True)),), torch.float32)
    assert str(ex.rewrite(value, lambda _: None, {ROW: ix.of(COLUMN) * 2}, {})) == "z[[p[2*j]]]"
    nested = Load("z", (ix.of(DataIndex(positions, 5, True, True)) * 3 + ix.of(COLUMN),), torch.float32)
    replaced = ex.rewrite(nested, lambda n: Constant(4, torch.int64) if n is positions else None, {}, {})
    assert positions not in ex.walk((replaced,))


def test_a_mask_that_always_holds_disappears() -> None:
    below = ex.simplify("lt", (IndexValue(ix.of(ROW), torch.int64), Constant(3, torch.int64)), torch.bool)
    masked = Masked(below, X)
    assert ex.rewrite(masked, lambda _: None, {ROW: ix.of(Var("small", 3))}, {}) is not masked
    inside = ex.rewrite(masked, lambda _: None, {ROW: ix.of(Var("small", 3))}, {})
    assert isinstance(inside, Load)
    outside = ex.rewrite(masked, lambda _: None, {ROW: ix.of(Var("small", 3)) + 3}, {})
    assert outside is Constant(0, torch.float32)


def test_walking_visits_operands_first_and_once() -> None:
    square = Op("mul", (X, X), torch.float32)
    order = ex.walk((Op("add", (square, square), torch.float32), square))
    assert [type(n).__name__ for n in order] == ["Load", "Op", "Op"]
    assert order.index(X) < order.index(square)


def test_walking_a_deep_expression_needs_no_recursion() -> None:
    value: Expr = X
    for _ in range(20_000):
        value = Op("neg", (value,), torch.float32)
    assert len(ex.walk((value,))) == 20_001


numbers = st.sampled_from(AWKWARD)
constants = numbers.map(lambda v: Constant(v, torch.float32))
values = st.one_of(st.just(X), st.just(Y), constants)


@PROPERTY
@given(st.sampled_from(("add", "sub", "mul")), values, values, numbers, numbers)
def test_simplified_arithmetic_has_the_same_value(name: str, a: Expr, b: Expr, x: float, y: float) -> None:
    memory: dict[Expr, Any] = {X: x, Y: y}
    plain = _ARITHMETIC[name](evaluate(a, memory, {}), evaluate(b, memory, {}))
    assert same(evaluate(ex.simplify(name, (a, b), torch.float32), memory, {}), plain)


positions = st.one_of(
    st.builds(
        lambda a, b, c: ix.of(ROW) * a + ix.of(COLUMN) * b + c,
        st.integers(-3, 3),
        st.integers(-3, 3),
        st.integers(-9, 9),
    )
)
bounds = st.one_of(
    st.integers(-30, 30).map(lambda v: Constant(v, torch.int64)), positions.map(lambda p: IndexValue(p, torch.int64))
)


@PROPERTY
@given(st.sampled_from(sorted(_COMPARE)), positions, bounds, st.booleans(), st.integers(0, 5), st.integers(0, 8))
def test_a_comparison_of_positions_folds_only_where_it_holds_everywhere(
    name: str, index: ix.Index, bound: Expr, swapped: bool, i: int, j: int
) -> None:
    sides: tuple[Expr, Expr] = (IndexValue(index, torch.int64), bound)
    left, right = sides[::-1] if swapped else sides
    point = {ROW: i, COLUMN: j}
    wanted = _COMPARE[name](evaluate(left, {}, point), evaluate(right, {}, point))
    assert evaluate(ex.simplify(name, (left, right), torch.bool), {}, point) == wanted


@PROPERTY
@given(values, values, st.booleans(), numbers, numbers)
def test_a_choice_with_a_known_condition_folds(a: Expr, b: Expr, condition: bool, x: float, y: float) -> None:
    chosen = ex.simplify("where", (Constant(condition, torch.bool), a, b), torch.float32)
    assert chosen is (a if condition else b)
    assert ex.simplify("where", (Op("lt", (X, Y), torch.bool), a, a), torch.float32) is a


@pytest.mark.parametrize("name", ["logical_and", "bitwise_and", "logical_or", "bitwise_or"])
@pytest.mark.parametrize("known", [True, False])
def test_logic_with_a_known_side_folds(name: str, known: bool) -> None:
    open_side = Op("lt", (X, Y), torch.bool)
    side = Constant(known, torch.bool)
    decides = known is name.endswith("or")
    for args in ((side, open_side), (open_side, side)):
        assert ex.simplify(name, args, torch.bool) is (side if decides else open_side)


def test_logic_on_integers_does_not_fold() -> None:
    number, one = Load("n", (ix.of(ROW),), torch.int64), Constant(1, torch.int64)
    for name in ("bitwise_and", "bitwise_or"):
        assert ex.simplify(name, (number, one), torch.int64) is Op(name, (number, one), torch.int64)


@pytest.mark.parametrize(
    "source", [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.bool]
)
@pytest.mark.parametrize(
    "target", [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.bool]
)
def test_casts_of_constants_round_as_torch_does(source: torch.dtype, target: torch.dtype) -> None:
    if source.is_floating_point:
        given_values: tuple[Any, ...] = (0.1, -2.75, -0.0, 70000.5)
        if target.is_floating_point or target == torch.bool:
            given_values += (float("inf"), float("nan"), 1e-40)
    else:
        given_values = (True, False) if source == torch.bool else (0, 1, -3, 2**24 + 1)
    for value in given_values:
        exact = torch.tensor(value, dtype=source)
        folded = ex.cast(Constant(exact.item(), source), target)
        assert isinstance(folded, Constant)
        assert folded.dtype == target
        assert same(float(folded.value), float(exact.to(target).item()))


def test_widening_right_after_a_rounding_that_may_be_skipped_skips_it() -> None:
    wide = Op("add", (X, Y), torch.float32)
    for half in (torch.float16, torch.bfloat16):
        assert ex.cast(ex.cast(wide, half, exact=False), torch.float32) is wide
        kept = ex.cast(ex.cast(wide, half, exact=True), torch.float32)
        assert isinstance(kept, Op)
        assert kept.args[0].dtype == half
        # Only the way back to float32 may skip it: any other reader sees the rounded value.
        assert ex.cast(ex.cast(wide, half, exact=False), torch.float64) is not wide


def test_printing_is_readable() -> None:
    value = ex.simplify(
        "where", (Op("lt", (X, Y), torch.bool), ex.cast(X, torch.int64), Constant(1, torch.int64)), torch.int64
    )
    assert str(value) == "where(lt(x[i, j], y[j]), cast:int64(x[i, j]), 1)"
