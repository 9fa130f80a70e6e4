"""Patterns made ready for matching: candidates in a graph, and the matches at each.

A candidate for the first output is found from the rarest call of the pattern: from each node with the target of that
call, the path of users up to the output is followed. The candidate is then matched top down (:mod:`.search`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch.fx

from torchkiln.patterns.expressions import Call, Expression, ListOf, OneOf, Outputs, Repeated, subexpressions
from torchkiln.patterns.index import GraphIndex, Through
from torchkiln.patterns.search import Elsewhere, Found, Goals, Mismatch, Search, paths_up


class Pattern:
    """An expression made ready for matching.

    ``through`` says what may lie between the nodes of the pattern: nothing, operators that change nothing
    (``no_ops``), also reshapes (``views``), or anything that changes the layout only (``layout``; expansions and copies
    too), which finds places that deserve a closer look. There, captures that ask for a rank may be of ``any_rank``.
    """

    def __init__(self, top: Call | Outputs, *, through: Through | None = None, any_rank: bool = True) -> None:
        self.top = top
        self.roots: tuple[Any, ...] = top.roots if isinstance(top, Outputs) else (top,)
        self.through = through
        self.any_rank = any_rank
        self.calls = tuple(item for item in subexpressions(top) if isinstance(item, Call))
        self._paths = tuple(paths_up(root) for root in self.roots)
        needed = {id(item) for item in subexpressions(top, _needed_parts)}
        self._required = tuple(call for call in self.calls if id(call) in needed)

    def __repr__(self) -> str:
        return repr(self.top)

    def candidates(self, index: GraphIndex) -> list[torch.fx.Node]:
        """Nodes that may be the first output, in the order of the graph."""
        counts = [(index.count(call.targets), position) for position, call in enumerate(self._required)]
        if not counts or min(counts)[0] == 0:
            return []
        first = self.roots[0]
        by_part = {id(path.part): path for path in self._paths[0]}
        for _, position in sorted(counts):
            anchor = self._required[position]
            if anchor is first:
                break
            if id(anchor) in by_part:  # and not a part of another output, or inside a list
                steps = by_part[id(anchor)].steps
                starts = index.nodes(anchor.targets)
                return sorted({root for node in starts for root in index.walk_up(node, steps, self.through)})
        return sorted(index.nodes(first.targets))

    def match(self, index: GraphIndex, node: torch.fx.Node, *, mismatch: list[Mismatch] | None = None) -> Found | None:
        """The first match with ``node`` as the first output."""
        return next(self.matches(index, node, mismatch=mismatch), None)

    def occurs_in(self, index: GraphIndex) -> bool:
        """Whether the pattern matches anywhere, whoever else reads its nodes."""
        return any(self.occurs_at(index, node) for node in self.candidates(index))

    def occurs_at(self, index: GraphIndex, node: torch.fx.Node) -> bool:
        """Whether the pattern matches with ``node`` as its first output, whoever else reads its nodes."""
        return any(Search(index, self.through, self.any_rank, None).solutions(self._goals(node)))

    def matches(
        self, index: GraphIndex, node: torch.fx.Node, *, mismatch: list[Mismatch] | None = None
    ) -> Iterator[Found]:
        """Every match with ``node`` as the first output.

        ``mismatch`` gets the furthest point reached on the way.
        """
        search = Search(index, self.through, self.any_rank, mismatch)
        for _ in search.solutions(self._goals(node)):
            found = search.result(self.roots)
            if found is not None:
                yield found

    def _goals(self, node: torch.fx.Node) -> Goals:
        goals: Goals = None
        for root, paths in reversed(list(zip(self.roots[1:], self._paths[1:], strict=True))):
            goals = ((Elsewhere(root, paths), None), goals)
        return (self.roots[0], node), goals


def _needed_parts(expression: Expression) -> tuple[Any, ...]:
    """The parts that a match cannot do without: not alternatives, nor elements of lists that may be empty."""
    empty = isinstance(expression, (ListOf, Repeated)) and expression.at_least == 0
    return () if empty or isinstance(expression, OneOf) else expression.parts()
