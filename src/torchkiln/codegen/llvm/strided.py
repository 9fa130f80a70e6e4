"""Vectors of elements that lie a constant stride apart: contiguous loads, and shuffles that pick the lanes.

Lane ``k`` is at element ``k * stride`` from lane 0. Nothing is read outside the elements between the first and the last
active lane: there the memory of a tensor may end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torchkiln.codegen.llvm.instructions import InstructionList, join_lanes, shuffle

LoadPiece = Callable[[int, int], str]
"""Given an element and a number of elements, the vector that begins there."""


def places_of_lanes(lanes: int, active: int, stride: int) -> list[int]:
    """Where the lanes lie, counted from the lowest of the active ones; the others stand where the last of those is."""
    last = active - 1
    first = 0 if stride > 0 else last * -stride
    return [first + min(lane, last) * stride for lane in range(lanes)]


def load_places(f: InstructionList, element: str, places: Sequence[int], register: int, load: LoadPiece) -> str:
    """The vector of the elements at ``places``, from 0 to the largest, by loads of at most ``register`` elements.

    Each register of the result is made of those that hold its elements, one two-operand shuffle for each after the
    first. The last load is shifted back so that it ends with the last element.
    """
    span = max(places) + 1
    size = min(register, len(places), 1 << (span.bit_length() - 1))
    starts = [*range(0, span - size, size), span - size]
    loaded: dict[int, str] = {}
    results = []
    for first in range(0, len(places), size):
        wanted = [(min(place // size, len(starts) - 1), place) for place in places[first : first + size]]
        sources = sorted({source for source, _ in wanted})
        for source in sources:
            if source not in loaded:
                loaded[source] = load(starts[source], size)
        order = [place - starts[sources[0]] if source == sources[0] else -1 for source, place in wanted]
        result, others = loaded[sources[0]], sources[1:]
        if not others and order != list(range(size)):
            result = shuffle(f, element, size, result, "poison", order)
        for source in others:
            added = [size + place - starts[source] if home == source else -1 for home, place in wanted]
            order = [new if new >= 0 else old for old, new in zip(order, added, strict=True)]
            result = shuffle(f, element, size, result, loaded[source], order)
            order = [lane if old >= 0 else -1 for lane, old in enumerate(order)]
        results.append(result)
    return join_lanes(f, element, size, results)
