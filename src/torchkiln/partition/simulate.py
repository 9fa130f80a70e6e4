"""How much memory forward and backward take at their peak, by the lifetimes of what they compute.

Counted are activations: what forward saves, and what either part holds in between. Inputs, parameters, results and
gradients that are handed out are the caller's. Operators on single elements that become part of the kernels that read
them take no memory. What is saved is held until the last step of backward that reads it: then its memory is used for
other values, or freed.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch.fx

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
        handed_out = {info.aliases.root(value) for value in info.backward_results if isinstance(value, torch.fx.Node)}
        self._bytes: dict[torch.fx.Node, int] = {}
        self._in_kernel: set[torch.fx.Node] = set()
        self._free = info.free
        self._outside: set[torch.fx.Node] = set()
        self._reads = {**info.reads, **info.repeat_reads}
        self._root = {node: info.aliases.root(node) for node in info.position}
        for node in info.position:
            value = node.meta.get("val")
            root = self._root[node]
            own = root is node and node not in info.alive_anyway and node not in handed_out
            if own and isinstance(value, torch.Tensor) and node.op == "call_function":
                self._bytes[node] = info.sizes.of(value)
            if node in info.free:
                continue
            if kinds.is_fusible(node):
                self._in_kernel.add(node)
            elif kinds.runs_outside_kernels(node):
                self._outside.add(node)

    def saved_bytes(self, schedule: Schedule) -> int:
        """What is held between forward and backward."""
        return sum(self._bytes.get(root, 0) for root in {self._root[node] for node in schedule.saved})

    def run(self, schedule: Schedule) -> MemoryUse:
        saved_roots = {self._root[node] for node in schedule.saved}
        saved = self.saved_bytes(schedule)
        results = {self._root[value] for value in self._info.forward_results if isinstance(value, torch.fx.Node)}
        forward = self._peak(schedule.forward, saved_roots | results)
        given_out = {self._root[value] for value in self._info.backward_results if isinstance(value, torch.fx.Node)}
        backward = self._peak(schedule.backward, given_out, saved_roots)
        return MemoryUse(saved, forward, backward)

    def _peak(
        self,
        order: Sequence[torch.fx.Node],
        kept: Collection[torch.fx.Node],
        given: Collection[torch.fx.Node] = (),
    ) -> int:
        """What ``order`` holds at most: ``kept`` until it ends, ``given`` from the beginning."""
        reads, roots, inside, free, outside = self._reads, self._root, self._in_kernel, self._free, self._outside
        place = {node: k for k, node in enumerate(order)}
        level: dict[torch.fx.Node, int] = {}
        for node in order:
            before = 0
            for source in reads[node]:
                if level.get(source, 0) > before:
                    before = level[source]
            level[node] = before if node in free or node in inside else before + 1
        last: dict[torch.fx.Node, int] = {}
        farthest: dict[torch.fx.Node, int] = {}
        needed: set[torch.fx.Node] = set(kept)
        for node in reversed(order):
            # When its inputs are read: for a node without memory, when the last of its own readers runs.
            here, high = place[node], level[node]
            if node in free:
                here, high = last.get(node, here), max(high, farthest.get(node, 0))
            elif node in inside:
                if node in needed or farthest.get(node, 0) > high + 1:
                    needed.add(node)
                else:
                    here = last.get(node, here)
            for source in reads[node]:
                if last.get(source, -1) < here:
                    last[source] = here
                if farthest.get(source, 0) < high:
                    farthest[source] = high
                base = roots[source]
                if base is not source and last.get(base, -1) < here:
                    last[base] = here
                if node in outside:
                    needed.add(base)
        change = [0] * (len(order) + 1)
        at_start = 0
        for node in given:
            size = self._bytes.get(node, 0)
            at_start += size
            change[last.get(node, len(order) - 1) + 1] -= size
        for node in order:
            size = self._bytes.get(node, 0)
            if not size or (node in self._in_kernel and node not in needed):
                continue
            change[place[node]] += size
            end = len(order) if node in kept else last.get(node, place[node]) + 1
            change[end] -= size
        return max(accumulate(change, initial=at_start))
