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
    spans = _spans(info, forward)
    change = [0] * (len(forward) + 1)
    for node, place, last in spans:
        change[place] += info.nbytes[node]
        change[last] -= info.nbytes[node]
    widths = list(accumulate(change))  # for every place, the bytes computed up to there that are read later
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
                places.append(min(window, key=lambda p: (widths[p], p)))
        if tuple(places) not in seen:
            seen.add(tuple(places))
            yield frozenset(node for node, first, last in spans if any(first <= place < last for place in places))


def _spans(info: NodeInfo, forward: Sequence[Node]) -> list[tuple[Node, int, int]]:
    """Savable values with memory of their own, the places in ``forward`` where they are computed and read last."""
    root = info.aliases.root
    last = {root(source): place for place, node in enumerate(forward) for source in info.reads[node]}
    own = ((node, place) for place, node in enumerate(forward) if root(node) is node and node in info.savable)
    return [(node, place, last[node]) for node, place in own if node in last]
