"""The index algebra with sizes known only at run time: every simplification must hold whatever the sizes are."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchkiln.ir import index as ix
from torchkiln.ir.index import Index, Quotient, Remainder, Size, Var

N, M = Size("n", 1, 1000, 8), Size("m", 1, 1000, 16)
SIZES = (N, M)
PROPERTY = settings(max_examples=300, deadline=None, derandomize=True)


def value(index: Index | int, point: dict[object, int]) -> int:
    """What an index comes to at a point, by Python's own arithmetic on its normal form."""
    if isinstance(index, int):
        return index
    total = index.const
    for monomial, coefficient in index.terms.items():
        for atom in monomial:
            if isinstance(atom, Quotient):
                coefficient *= value(atom.numerator, point) // value(atom.divisor, point)
            elif isinstance(atom, Remainder):
                coefficient *= value(atom.numerator, point) % value(atom.divisor, point)
            else:
                coefficient *= point[atom]
        total += coefficient
    return total


@st.composite
def extents(draw: st.DrawFn) -> ix.Extent:
    """A size as views make them: a number, a symbol, a multiple, a product, a sum."""
    n, m = ix.of(N), ix.of(M)
    made: list[ix.Extent] = [3, 8, n, m, n * 4, n * m, n + 1, n + m, m * 2 + 3, n * m * 2, (n + 3) // 4]
    return draw(st.sampled_from(made))


@st.composite
def programs(draw: st.DrawFn) -> tuple[tuple[Var, ...], list[tuple[str, object]]]:
    variables = tuple(Var(name, draw(extents())) for name in "ijk")
    steps = draw(
        st.lists(
            st.one_of(
                st.tuples(st.just("+"), st.sampled_from([*variables, 1, 5])),
                st.tuples(st.just("*"), extents()),
                st.tuples(st.just("//"), extents()),
                st.tuples(st.just("%"), extents()),
            ),
            min_size=1,
            max_size=7,
        )
    )
    return variables, steps


@given(programs(), st.integers(0, 2**32))
@PROPERTY
def test_arithmetic_with_sizes_keeps_its_value(
    program: tuple[tuple[Var, ...], list[tuple[str, object]]], seed: int
) -> None:
    variables, steps = program
    chance = random.Random(seed)
    for _ in range(12):
        point: dict[object, int] = {size: chance.choice((1, 2, 3, 5, 7, 16, 33)) for size in SIZES}
        for var in variables:
            point[var] = chance.randrange(value(var.extent, point))
        index, number = ix.of(variables[0]), point[variables[0]] if variables[0].extent != 1 else 0
        for operator, operand in steps:
            other = ix.as_index(operand)  # type: ignore[arg-type]
            known = value(other, point)
            if operator == "+":
                index, number = index + other, number + known
            elif operator == "*":
                index, number = index * other, number * known
            elif operator == "//":
                index, number = index // ix.extent(other), number // known
            else:
                index, number = index % ix.extent(other), number % known
        assert value(index, point) == number
        low, high = index.bounds
        assert low <= number <= high


def test_flattening_and_unflattening_a_symbolic_shape_gives_the_subscripts_back() -> None:
    for shape in [(ix.of(N), ix.of(M)), (ix.of(N), 4, ix.of(M)), (3, ix.of(N) + 1, 5), (ix.of(N) * ix.of(M), 7)]:
        dims = [Var(f"d{k}", size) for k, size in enumerate(shape)]
        here = tuple(ix.of(d) for d in dims)
        flat = ix.flatten(here, ix.contiguous_strides(shape))
        assert ix.unflatten(flat, shape) == here


def test_unflattening_rows_of_a_symbolic_length_needs_no_remainder_by_their_number() -> None:
    n = ix.of(N)
    place = ix.of(Var("i", n * 4))
    row, column = ix.unflatten(place, (4, n))
    assert (row, column) == (place // n, place % n)
    assert row // 4 == ix.as_index(0)
    assert ix.flatten((row, column), (n, 1)) == place


def test_merging_and_splitting_a_symbolic_dimension_cancels() -> None:
    flat = ix.of(Var("f", ix.product((ix.of(N), ix.of(M)))))
    rows, columns = ix.unflatten(flat, (ix.of(N), ix.of(M)))
    assert ix.flatten((rows, columns), (ix.of(M), 1)) is flat


@pytest.mark.parametrize(
    ("index", "limit", "expected"),
    [
        (ix.of(Var("i", ix.of(N))), ix.of(N), True),
        (ix.of(Var("i", ix.of(N))) + 1, ix.of(N), False),
        (ix.of(Var("i", ix.of(N))) * ix.of(M) + ix.of(Var("j", ix.of(M))), ix.product((ix.of(N), ix.of(M))), True),
        (ix.of(Var("i", ix.of(N))), ix.of(M), False),
        (ix.of(Var("i", ix.of(N))) * 2 + 1, ix.product((ix.of(N), 2)), True),
    ],
)
def test_what_is_known_to_be_below_a_size(index: Index, limit: ix.Extent, expected: bool) -> None:
    assert ix.known_below(index, limit) is expected


def test_the_stride_along_a_variable_may_be_a_size() -> None:
    i, j = Var("i", ix.of(N)), Var("j", ix.of(M))
    offset = ix.of(i) * ix.of(M) * 3 + ix.of(j) + 5
    assert offset.coefficient(i) is ix.of(M) * 3
    assert offset.coefficient(j) == 1
    assert (ix.of(i) * ix.of(j)).coefficient(i) is None


def test_a_dense_symbolic_offset_is_inverted() -> None:
    i, j = Var("i", ix.of(N)), Var("j", ix.of(M))
    assert ix.dense_inverse(ix.of(i) * ix.of(M) + ix.of(j), (i, j)) == {i: (ix.of(M), ix.of(N)), j: (1, ix.of(M))}
    assert ix.dense_inverse(ix.of(i) * ix.of(N) + ix.of(j), (i, j)) is None


def test_a_hint_is_the_value_at_typical_sizes() -> None:
    assert ix.hint_of((ix.of(N) * ix.of(M) + 3) // 4) == (8 * 16 + 3) // 4
