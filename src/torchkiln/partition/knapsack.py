"""Which of many items to take when their weights are limited: one question, three ways to answer it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from math import gcd

import numpy as np

Solver = Callable[[Sequence[float], Sequence[int], int], list[int]]
"""``solve(values, weights, capacity)``: the places of the items to take, in order."""

# Weights are rounded up to this many parts of the capacity where a table over all capacities is made.
_STEPS = 4096
# The solver proves that there is no better choice; where that takes longer, its best one so far is taken.
_SECONDS = 2.0
# Values are told apart by parts of the largest.
_VALUES = 10_000
# What weighs less than this part of the capacity takes what the others leave.
_LIGHT = 1e-4


def solve_exactly(values: Sequence[float], weights: Sequence[int], capacity: int) -> list[int]:
    """By a mixed-integer program, or by a table where one over all capacities is small.

    Equal items, as the layers of a model have, are one variable that counts them.
    """
    if not values or capacity < 0:
        return []
    most = max(values)
    equal: dict[tuple[int, int], list[int]] = defaultdict(list)
    light = []
    for place, (value, weight) in enumerate(zip(values, weights, strict=True)):
        if weight < _LIGHT * capacity:
            light.append(place)
        else:
            equal[round(_VALUES * value / most) if most else 0, weight].append(place)
    if not equal:
        return solve_greedily(values, weights, capacity)
    counts = _counts({item: len(places) for item, places in equal.items()}, capacity)
    if counts is None:
        return solve_greedily(values, weights, capacity)
    chosen = [place for places, count in zip(equal.values(), counts, strict=True) for place in _spread(places, count)]
    # Within the solver's tolerance, the sum may be a little over.
    chosen.sort(key=lambda place: (-values[place], place))
    return sorted(_within([*chosen, *light], weights, capacity))


def _counts(items: Mapping[tuple[int, int], int], capacity: int) -> list[int] | None:
    """How many to take of each item, a pair of value and weight that is there so many times; None without an answer."""
    unit = gcd(*(weight for _, weight in items)) or 1
    room = capacity // unit
    if room <= _STEPS:
        # scipy's solver writes to the screen now and then, so it is left to what needs it.
        every = [item for item, count in items.items() for _ in range(count)]
        taken = solve_by_table([value for value, _ in every], [weight // unit for _, weight in every], room)
        return [sum(every[k] == item for k in taken) for item in items]
    # Loading it takes 0.6 s and 30 MiB, and few budgets come here.
    from scipy.optimize import Bounds, LinearConstraint, milp

    result = milp(
        np.array([-value for value, _ in items], dtype=float),
        constraints=LinearConstraint(np.array([[weight // unit for _, weight in items]], dtype=float), ub=room),
        integrality=np.ones(len(items)),
        bounds=Bounds(0, np.array(list(items.values()), dtype=float)),
        options={"time_limit": _SECONDS},
    )
    return None if result.x is None else np.rint(result.x).astype(int).tolist()


def solve_by_table(values: Sequence[float], weights: Sequence[int], capacity: int) -> list[int]:
    """By dynamic programming over capacities, in steps of a small part of the whole."""
    if capacity < 0:
        return []
    unit = max(1, -(-capacity // _STEPS))
    room = capacity // unit
    best = np.zeros(room + 1)
    taken = np.zeros((len(values), room + 1), dtype=bool)
    for place, (value, weight) in enumerate(zip(values, weights, strict=True)):
        steps = -(-weight // unit)
        if steps > room:
            continue
        other = best[: room + 1 - steps] + value
        better = other > best[steps:]
        taken[place, steps:] = better
        best[steps:] = np.where(better, other, best[steps:])
    chosen = []
    for place in reversed(range(len(values))):
        if taken[place, room]:
            chosen.append(place)
            room -= -(-weights[place] // unit)
    return sorted(chosen)


def solve_greedily(values: Sequence[float], weights: Sequence[int], capacity: int) -> list[int]:
    """The most valuable by weight first, as long as they fit."""
    order = sorted(range(len(values)), key=lambda place: (-values[place] / max(1, weights[place]), place))
    return sorted(_within(order, weights, capacity))


def _within(order: Sequence[int], weights: Sequence[int], capacity: int) -> list[int]:
    taken = []
    for place in order:
        if weights[place] <= capacity:
            capacity -= weights[place]
            taken.append(place)
    return taken


def _spread(places: Sequence[int], count: int) -> list[int]:
    """``count`` of ``places``, evenly: what lies between two saved values is recomputed at once."""
    return [places[(2 * k + 1) * len(places) // (2 * count)] for k in range(count)]


SOLVERS: Mapping[str, Solver] = {"exact": solve_exactly, "dynamic": solve_by_table, "greedy": solve_greedily}
"""By the setting ``budget_solver``."""
