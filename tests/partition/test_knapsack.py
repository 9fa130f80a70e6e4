"""The three solvers: never over the capacity, and as good as trying everything where they promise that."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchkiln.partition.knapsack import SOLVERS

items = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 20)), max_size=9)
every_solver = pytest.mark.parametrize("name", sorted(SOLVERS))


def _best(values: list[float], weights: list[int], capacity: int) -> float:
    return max(
        sum(values[k] for k in chosen)
        for size in range(len(values) + 1)
        for chosen in combinations(range(len(values)), size)
        if sum(weights[k] for k in chosen) <= capacity
    )


@every_solver
@settings(max_examples=40, deadline=None)
@given(items, st.integers(0, 60))
def test_the_weight_stays_within_the_capacity(name: str, given_items: list[tuple[int, int]], capacity: int) -> None:
    values, weights = [v * 1e-6 for v, _ in given_items], [w for _, w in given_items]
    chosen = SOLVERS[name](values, weights, capacity)
    assert len(set(chosen)) == len(chosen)
    assert sum(weights[k] for k in chosen) <= capacity


@pytest.mark.parametrize("name", ["exact", "dynamic"])
@settings(max_examples=40, deadline=None)
@given(items, st.integers(0, 60))
def test_no_choice_is_worth_more(name: str, given_items: list[tuple[int, int]], capacity: int) -> None:
    values, weights = [v * 1e-6 for v, _ in given_items], [w for _, w in given_items]
    chosen = SOLVERS[name](values, weights, capacity)
    assert sum(values[k] for k in chosen) == pytest.approx(_best(values, weights, capacity))


def test_greed_takes_the_most_valuable_by_weight_first() -> None:
    assert SOLVERS["greedy"]([10.0, 9.0, 1.0], [10, 3, 1], 4) == [1, 2]


@every_solver
def test_nothing_fits_into_less_than_nothing(name: str) -> None:
    assert SOLVERS[name]([1.0], [1], -5) == []


def test_of_equal_items_those_taken_lie_apart() -> None:
    chosen = SOLVERS["exact"]([1.0] * 12, [4] * 12, 12)
    assert chosen == [2, 6, 10]
