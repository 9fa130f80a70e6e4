"""How much memory forward and backward take at their peak, by the lifetimes of what they compute.

Counted are activations: what forward saves, and what either part holds in between. Inputs, parameters, results and
gradients that are handed out are the caller's. Pointwise operators that become part of the kernels that read them take
no memory. What is saved is held until the last step of backward that reads it: then its memory is reused or freed.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import accumulate

from torch.fx import Node

from torchkiln.partition import kinds
from torchkiln.partition.classify import NodeInfo
from torchkiln.partition.extract import Schedule


@dataclass(frozen=True)
class MemoryUse:
    """In bytes. ``peak`` is the larger one of both peaks; both include what is saved at the time."""

    saved: int
    forward_peak: int
    backward_peak: int

    @property
    def peak(self) -> int:
        return max(self.forward_peak, self.backward_peak)


class Simulator:
    """Simulates schedules of one joint graph; what is the same for all of them is looked up once."""

    def __init__(self, info: NodeInfo) -> None:
        self._info = info
        self._bytes = info.activation_bytes
        self._reads = {**info.reads, **info.recompute_reads}
        self._root = {node: info.aliases.root(node) for node in info.position}
        running = [node for node in info.position if node not in info.free]
        self._in_kernel = set(filter(kinds.is_fusible, running))
        self._outside = {n for n in running if n not in self._in_kernel and kinds.runs_outside_kernels(n)}

    def _saved_roots(self, schedule: Schedule) -> frozenset[Node]:
        return frozenset(map(self._root.__getitem__, schedule.saved))

    def saved_bytes(self, schedule: Schedule) -> int:
        """What is held between forward and backward."""
        return sum(self._bytes.get(root, 0) for root in self._saved_roots(schedule))

    def run(self, schedule: Schedule) -> MemoryUse:
        saved = self._saved_roots(schedule)
        forward = self._peak(schedule.forward, saved | self._info.roots(self._info.forward_results))
        backward = self._peak(schedule.backward, self._info.handed_out, saved)
        return MemoryUse(self.saved_bytes(schedule), forward, backward)

    def _peak(self, order: Sequence[Node], kept: Collection[Node], given: Collection[Node] = ()) -> int:
        """What ``order`` holds at most: ``kept`` until it ends, ``given`` from the beginning."""
        last, in_memory = self._last_reads(order, kept)
        change = [0] * (len(order) + 1)
        for node in given:
            change[last.get(node, len(order) - 1) + 1] -= self._bytes.get(node, 0)
        for place, node in enumerate(order):
            size = self._bytes.get(node, 0)
            if size and (node not in self._in_kernel or node in in_memory):
                change[place] += size
                change[len(order) if node in kept else last.get(node, place) + 1] -= size
        return max(accumulate(change, initial=sum(self._bytes.get(node, 0) for node in given)))

    def _last_reads(self, order: Sequence[Node], kept: Collection[Node]) -> tuple[dict[Node, int], set[Node]]:
        """For each node, the place in ``order`` where its memory is read last; and which fusible nodes have memory.

        A fusible node has none unless it is in ``kept``, a library call reads it, or kernels far apart do. What has no
        memory reads its inputs when the last of its own readers runs.
        """
        reads, roots, inside, free, outside = self._reads, self._root, self._in_kernel, self._info.free, self._outside
        level = self._levels(order)
        last: dict[Node, int] = {}
        farthest: dict[Node, int] = {}  # the highest level of a reader
        in_memory = set(kept)
        for place in range(len(order) - 1, -1, -1):
            node = order[place]
            here, high = place, level[node]
            if node in free:
                here, high = last.get(node, here), max(high, farthest.get(node, 0))
            elif node in inside:
                if farthest.get(node, 0) > high + 1:
                    in_memory.add(node)
                elif node not in in_memory:
                    here = last.get(node, here)
            for source in reads[node]:
                base = roots[source]
                if last.get(source, -1) < here:
                    last[source] = here
                if base is not source and last.get(base, -1) < here:
                    last[base] = here
                if farthest.get(source, 0) < high:
                    farthest[source] = high
                if node in outside:
                    in_memory.add(base)
        return last, in_memory

    def _levels(self, order: Sequence[Node]) -> dict[Node, int]:
        """How many reductions and library calls, one after the other, come up to the result of each node."""
        level: dict[Node, int] = {}
        for node in order:
            before = max((level.get(source, 0) for source in self._reads[node]), default=0)
            level[node] = before + (node not in self._info.free and node not in self._in_kernel)
        return level
