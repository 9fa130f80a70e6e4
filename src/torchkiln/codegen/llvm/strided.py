"""Vectors of elements that lie a constant stride apart: contiguous loads, from which shuffles pick the lanes, and
contiguous stores, for which they interleave several vectors.

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


def interleaved(f: InstructionList, element: str, size: int, parts: Sequence[str]) -> list[str]:
    """As many vectors as ``parts``, of ``size`` lanes as they, with lane 0 of each part first, then all lanes 1."""
    count = len(parts)
    if count == 1:
        return list(parts)
    if count % 2 == 0:  # fewer shuffles than one part after the other: 8 for four parts, not 12
        halves = zip(*(interleaved(f, element, size, parts[k::2]) for k in (0, 1)), strict=True)
        orders = [[first + k // 2 + size * (k % 2) for k in range(size)] for first in (0, size // 2)]
        return [shuffle(f, element, size, even, odd, order) for even, odd in halves for order in orders]
    results = []
    for first in range(0, count * size, size):
        places = [divmod(place, count) for place in range(first, first + size)]
        result = parts[0]
        order = [lane if part == 0 else -1 for lane, part in places]
        for number in range(1, count):
            order = [size + lane if part == number else old for (lane, part), old in zip(places, order, strict=True)]
            result = shuffle(f, element, size, result, parts[number], order)
            order = [k if part <= number else -1 for k, (_, part) in enumerate(places)]
        results.append(result)
    return results
