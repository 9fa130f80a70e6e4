"""Plans that keep only what crosses a few narrow places of forward, and recompute each stretch between them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate

from torch.fx import Node

from torchkiln.partition.classify import NodeInfo

_COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)


def segment_plans(info: NodeInfo, forward: Sequence[Node], seconds: Mapping[Node, float]) -> Iterator[frozenset[Node]]:
    """Sets of values to save, for one to many stretches of about the same run time."""
    crossing = _widths(info, forward)
    elapsed = list(accumulate(seconds.get(node, 0.0) + 1e-12 for node in forward))
    if not elapsed:
        return
    seen: set[tuple[int, ...]] = set()
    for count in _COUNTS:
        if count > len(forward):
            return
        places = []
        for k in range(1, count):
            low, high = (bisect_left(elapsed, elapsed[-1] * (k + shift) / count) for shift in (-0.4, 0.4))
            window = range(max(0, low), min(len(forward) - 1, high) + 1)
            if window:
                places.append(min(window, key=lambda p: (crossing[p], p)))
        if tuple(places) not in seen:
            seen.add(tuple(places))
            yield _crossing(info, forward, places)


def _last_uses(info: NodeInfo, forward: Sequence[Node]) -> dict[Node, int]:
    last: dict[Node, int] = {}
    for place, node in enumerate(forward):
        for source in info.reads[node]:
            last[info.aliases.root(source)] = place
    return last


def _widths(info: NodeInfo, forward: Sequence[Node]) -> list[int]:
    """For every place in ``forward``, the bytes computed up to there that are read later."""
    last = _last_uses(info, forward)
    change = [0] * (len(forward) + 1)
    for place, node in enumerate(forward):
        if node in last and info.aliases.root(node) is node and node in info.savable:
            change[place] += info.nbytes[node]
            change[last[node]] -= info.nbytes[node]
    return list(accumulate(change))


def _crossing(info: NodeInfo, forward: Sequence[Node], places: Sequence[int]) -> frozenset[Node]:
    last = _last_uses(info, forward)
    found = set()
    for place, node in enumerate(forward):
        if node in info.savable and info.aliases.root(node) is node and node in last:
            nearest = bisect_left(places, place)
            if nearest < len(places) and places[nearest] < last[node]:
                found.add(node)
    return frozenset(found)
