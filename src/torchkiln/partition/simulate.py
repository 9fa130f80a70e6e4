"""How much memory forward and backward take at their peak, by the lifetimes of what they compute.

Counted are activations: what forward saves, and what either part holds in between. Inputs, parameters, results and
gradients that are handed out are the caller's. Operators on single elements that become part of the kernels that read
them take no memory. What is saved is held until backward ends, as torch's autograd does.
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
        self._free: set[torch.fx.Node] = set()
        self._outside: set[torch.fx.Node] = set()
        self._root = {node: info.aliases.root(node) for node in info.position}
        for node in info.position:
            value = node.meta.get("val")
            root = self._root[node]
            own = root is node and node not in info.alive_anyway and node not in handed_out
            if own and isinstance(value, torch.Tensor) and node.op == "call_function":
                self._bytes[node] = info.sizes.of(value)
            if kinds.is_free(node):
                self._free.add(node)
            elif kinds.is_fusible(node):
                self._in_kernel.add(node)
            elif kinds.runs_outside_kernels(node):
                self._outside.add(node)

    def run(self, schedule: Schedule) -> MemoryUse:
        saved_roots = {self._root[node] for node in schedule.saved}
        saved = sum(self._bytes.get(root, 0) for root in saved_roots)
        results = {self._root[value] for value in self._info.forward_results if isinstance(value, torch.fx.Node)}
        forward = self._peak(schedule.forward, saved_roots | results)
        given_out = {self._root[value] for value in self._info.backward_results if isinstance(value, torch.fx.Node)}
        backward = self._peak(schedule.backward, given_out)
        return MemoryUse(saved, forward, saved + backward)

    def _peak(self, order: Sequence[torch.fx.Node], kept: Collection[torch.fx.Node]) -> int:
        place = {node: k for k, node in enumerate(order)}
        level: dict[torch.fx.Node, int] = {}
        for node in order:
            before = max((level.get(source, 0) for source in node.all_input_nodes), default=0)
            level[node] = before if node in self._free or node in self._in_kernel else before + 1
        # When the reading of a node happens: for one without memory, when the last of its readers runs.
        runs: dict[torch.fx.Node, int] = {}
        farthest: dict[torch.fx.Node, int] = {}
        last: dict[torch.fx.Node, int] = {}
        needed: set[torch.fx.Node] = set(kept)
        for node in reversed(order):
            stored = node not in self._in_kernel or node in needed or farthest.get(node, 0) > level[node] + 1
            root = self._root[node]
            if node in self._free or not stored:
                runs[node] = last.get(node, place[node])
            else:
                runs[node] = place[node]
                if root is node:
                    needed.add(node)
            here, high = runs[node], level[node]
            if node in self._free:
                high = max(high, farthest.get(node, 0))
            for source in node.all_input_nodes:
                if last.get(source, -1) < here:
                    last[source] = here
                base = self._root[source]
                if base is not source and last.get(base, -1) < here:
                    last[base] = here
                if farthest.get(source, 0) < high:
                    farthest[source] = high
                if node in self._outside:
                    needed.add(base)
        change = [0] * (len(order) + 1)
        for node in order:
            size = self._bytes.get(node, 0)
            if not size or (node in self._in_kernel and node not in needed):
                continue
            change[place[node]] += size
            end = len(order) if node in kept else last.get(node, place[node]) + 1
            change[end] -= size
        return max(accumulate(change), default=0)
