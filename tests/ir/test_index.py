"""The index algebra against Python integers: every simplification must keep the value at every point."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Union

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchkiln.ir import index as ix
from torchkiln.ir.index import Index, Var

VARIABLES = tuple(Var(name, extent) for name, extent in (("i", 7), ("j", 32), ("k", 1), ("l", 3), ("m", 12)))
PROPERTY = settings(max_examples=120, deadline=None, derandomize=True)


# A tree of operations, evaluated both by the algebra and by Python.


@dataclass(frozen=True)
class Leaf:
    value: Union[Var, int]


@dataclass(frozen=True)
class Binary:
    operator: str
    left: Tree
    right: Tree


@dataclass(frozen=True)
class Divided:
    operator: str
    left: Tree
    divisor: int


Tree = Union[Leaf, Binary, Divided]


def build(tree: Tree) -> Index:
    """The tree in the algebra's normal form."""
    if isinstance(tree, Leaf):
        return ix.as_index(tree.value)
    if isinstance(tree, Divided):
        left = build(tree.left)
        return left // tree.divisor if tree.operator == "//" else left % tree.divisor
    left, right = build(tree.left), build(tree.right)
    return {"+": lambda: left + right, "-": lambda: left - right, "*": lambda: left * right}[tree.operator]()


def evaluate(tree: Tree, point: Mapping[Var, int]) -> int:
    """The tree by Python's own arithmetic."""
    if isinstance(tree, Leaf):
        return point[tree.value] if isinstance(tree.value, Var) else tree.value
    if isinstance(tree, Divided):
        left = evaluate(tree.left, point)
        return left // tree.divisor if tree.operator == "//" else left % tree.divisor
    left, right = evaluate(tree.left, point), evaluate(tree.right, point)
    return {"+": left + right, "-": left - right, "*": left * right}[tree.operator]


def value_of(index: Index, point: Mapping[Var, int]) -> int:
    """An index at a point, read off its normal form."""
    total = index.const
    for monomial, coefficient in index.terms.items():
        for atom in monomial:
            if isinstance(atom, Var):
                coefficient *= point[atom]
            elif isinstance(atom, ix.Quotient):
                coefficient *= value_of(atom.numerator, point) // atom.divisor
            else:
                assert isinstance(atom, ix.Remainder)
                coefficient *= value_of(atom.numerator, point) % atom.divisor
        total += coefficient
    return total


divisors = st.sampled_from((1, 2, 3, 4, 6, 7, 8, 12, 16, 21, 32, 33, 96))
leaves = st.one_of(st.sampled_from(VARIABLES), st.integers(-40, 40)).map(Leaf)
scales = st.sampled_from((-7, -3, -2, -1, 0, 1, 2, 3, 4, 7, 8, 12, 32, 64)).map(Leaf)
trees: st.SearchStrategy[Tree] = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.builds(Binary, st.sampled_from(("+", "-")), inner, inner),
        st.builds(Binary, st.just("*"), inner, scales),
        st.builds(Divided, st.sampled_from(("//", "%")), inner, divisors),
        st.builds(Binary, st.just("*"), inner, inner),
    ),
    max_leaves=7,
)
points = st.fixed_dictionaries({v: st.integers(0, v.extent - 1) for v in VARIABLES})


@PROPERTY
@given(trees, st.lists(points, min_size=4, max_size=8))
def test_the_normal_form_has_the_value_of_the_expression(tree: Tree, places: list[dict[Var, int]]) -> None:
    index = build(tree)
    for point in places:
        assert value_of(index, point) == evaluate(tree, point), f"{index} at {point}"


@PROPERTY
@given(trees, st.lists(points, min_size=4, max_size=8))
def test_bounds_contain_every_value(tree: Tree, places: list[dict[Var, int]]) -> None:
    low, high = build(tree).bounds
    for point in places:
        assert low <= evaluate(tree, point) <= high


@PROPERTY
@given(trees)
def test_equal_expressions_are_one_object(tree: Tree) -> None:
    first, again = build(tree), build(tree)
    assert first is again
    assert first - first is ix.ZERO
    assert first + 0 is first
    assert first * 1 is first
    assert (first + 5) - 5 is first
    assert first * -1 * -1 is first


@PROPERTY
@given(trees, trees)
def test_sums_and_products_do_not_depend_on_the_order(left: Tree, right: Tree) -> None:
    a, b = build(left), build(right)
    assert a + b is b + a
    if len(a.terms) * len(b.terms) <= 6:
        assert a * b is b * a


@PROPERTY
@given(trees, st.dictionaries(st.sampled_from(VARIABLES), trees, max_size=3), points)
def test_substitution_is_evaluation_at_another_point(
    tree: Tree, replaced: dict[Var, Tree], point: dict[Var, int]
) -> None:
    mapping = {v: build(t) for v, t in replaced.items()}
    inner = {v: evaluate(replaced[v], point) if v in replaced else point[v] for v in VARIABLES}
    # Simplification may use that a variable stays within its range: so must what replaces it.
    if all(0 <= evaluate(t, p) < v.extent for v, t in replaced.items() for p in (point,)) and all(
        mapping[v].bounds[0] >= 0 and mapping[v].bounds[1] < v.extent for v in replaced
    ):
        assert value_of(ix.substitute(build(tree), mapping), point) == evaluate(tree, inner)


@PROPERTY
@given(trees, points)
def test_an_expression_moves_along_a_variable_by_its_coefficient(tree: Tree, point: dict[Var, int]) -> None:
    index = build(tree)
    for variable in VARIABLES:
        stride = index.coefficient(variable)
        if stride is None or point[variable] + 1 >= variable.extent:
            continue
        assert value_of(index, {**point, variable: point[variable] + 1}) == value_of(index, point) + stride
        if stride:
            assert variable in index.variables()


@PROPERTY
@given(trees)
def test_printed_indices_are_python_expressions_of_the_same_value(tree: Tree) -> None:
    index = build(tree)
    for point in itertools.islice(({v: (n * 5 + 1) % v.extent for v in VARIABLES} for n in itertools.count()), 4):
        assert eval(str(index), {v.name: n for v, n in point.items()}) == value_of(index, point)


shapes = st.lists(st.integers(1, 9), min_size=1, max_size=4).map(tuple)


@PROPERTY
@given(shapes)
def test_flattening_undoes_unflattening(shape: tuple[int, ...]) -> None:
    count = 1
    for size in shape:
        count *= size
    flat = ix.of(Var("f", count))
    assert ix.flatten(ix.unflatten(flat, shape), ix.contiguous_strides(shape)) is flat


@PROPERTY
@given(shapes)
def test_unflattening_undoes_flattening(shape: tuple[int, ...]) -> None:
    subscripts = tuple(ix.of(Var(f"s{k}", size)) for k, size in enumerate(shape))
    assert ix.unflatten(ix.flatten(subscripts, ix.contiguous_strides(shape)), shape) == subscripts


@PROPERTY
@given(shapes, st.randoms(use_true_random=False), st.integers(-3, 50))
def test_a_dense_offset_inverts_to_its_variables(shape: tuple[int, ...], random: object, base: int) -> None:
    variables = [Var(f"d{k}", size) for k, size in enumerate(shape)]
    order = list(range(len(shape)))
    random.shuffle(order)  # type: ignore[attr-defined]
    offset, stride = ix.constant(base), 1
    for k in order:
        offset += ix.of(variables[k]) * stride
        stride *= shape[k]
    inverse = ix.dense_inverse(offset, variables)
    assert inverse is not None
    for point in itertools.islice(itertools.product(*(range(s) for s in shape)), 50):
        position = value_of(offset, dict(zip(variables, point, strict=True))) - base
        for variable, place in zip(variables, point, strict=True):
            step, extent = inverse.get(variable, (1, 1))
            assert position // step % extent == place


@pytest.mark.parametrize(
    "offset",
    [
        ix.of(Var("a", 4)) * 3 + ix.of(Var("b", 2)),  # gaps
        ix.of(Var("a", 4)) + ix.of(Var("b", 2)),  # overlap
        ix.of(Var("a", 4)) * -2 + ix.of(Var("b", 2)),  # backwards
        ix.of(Var("a", 4)) * 2,  # b does not move it
        ix.of(Var("a", 4)) // 2 * 2 + ix.of(Var("b", 2)),  # not linear
        ix.of(Var("a", 4)) * 2 + ix.of(Var("b", 2)) + ix.of(Var("c", 3)),  # something else moves it
    ],
    ids=str,
)
def test_other_offsets_do_not_invert(offset: Index) -> None:
    assert ix.dense_inverse(offset, [Var("a", 4), Var("b", 2)]) is None


def test_division_uses_ranges() -> None:
    i, j = ix.of(Var("i", 7)), ix.of(Var("j", 32))
    assert (i * 32 + j) // 32 is i
    assert (i * 32 + j) % 32 is j
    assert (i * 64 + j + 33) // 64 is not i
    assert (i * 64 + j + 32) // 64 is i
    assert (i * 64 + j * 2 + 1) // 64 is i
    assert (i * 6 + 3) // 3 is i * 2 + 1
    assert (i - 7) // 7 is ix.constant(-1)
    assert ((i * 32 + j) // 8) // 4 is i
    assert ((i * 32 + j) % 32) // 8 is (j // 8)


def test_printing_is_readable() -> None:
    i, j = ix.of(Var("i", 7)), ix.of(Var("j", 32))
    assert str(i * 32 + j + 1) == "32*i + j + 1"
    assert str((i + j) // 3) == "((i + j) // 3)"
    assert str(j // 3 + 1) == "(j // 3) + 1"
    assert str(ix.ZERO) == "0"


@pytest.mark.parametrize("divisor", [0, -3])
def test_division_by_what_is_not_positive_is_refused(divisor: int) -> None:
    i = ix.of(Var("i", 7))
    with pytest.raises(ValueError, match="positive"):
        i // divisor
    with pytest.raises(ValueError, match="positive"):
        i % divisor


def test_steps_within_a_divisor_are_taken_apart() -> None:
    """What flattening a matrix seen as rows of rows gives: a view, not a copy."""
    i, j = Var("i", 512), Var("j", 128)
    row = (ix.of(i) * 128 + ix.of(j)) // 8192
    assert row is ix.of(i) // 64
    assert (ix.of(i) * 128 + ix.of(j)) % 8192 is (ix.of(i) % 64) * 128 + ix.of(j)
    assert row * 8192 + (ix.of(i) % 64) * 128 + ix.of(j) is ix.of(i) * 128 + ix.of(j)
    assert (ix.of(i) * 128 + ix.of(j) * 2) // 8192 is not row  # the rest reaches over a step
