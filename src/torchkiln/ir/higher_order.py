"""Higher-order operators in a program: calls that choose among, or repeat, bodies of their own.

A body goes through the stages with the graph that holds it: it is a ``Program`` after lowering, a ``Plan`` after
scheduling and code after code generation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torchkiln.artifact.calls import Kind


@dataclass(frozen=True, eq=False)
class HigherOrder:
    """The target of an extern call whose flat arguments are, by ``kind``:

    - ``call``: the arguments of the one body;
    - ``cond``: the predicate, then the arguments of both bodies, the one for true first;
    - ``while_loop``: ``carried`` values, then what stays the same; the bodies are the condition and one iteration;
    - ``scan``: ``carried`` values, then ``scanned`` tensors that give one slice to each iteration, then the rest;
    - ``map``: a scan that carries nothing.

    ``effect`` says whether a body does more than compute its results.
    """

    kind: Kind
    bodies: tuple[Any, ...]
    carried: int = 0
    scanned: int = 0
    effect: bool = False

    def with_bodies(self, stage: Callable[[Any], Any]) -> HigherOrder:
        """The same operator with every body taken through the next stage."""
        return replace(self, bodies=tuple(stage(body) for body in self.bodies))

    def __str__(self) -> str:
        return f"higher_order.{self.kind}"


class OncePerBody:
    """A stage that does each body once, however many calls share it."""

    def __init__(self, stage: Callable[[Any], Any]) -> None:
        self._stage = stage
        self._done: dict[int, tuple[Any, Any]] = {}  # by identity; the body is kept so that it stays its own

    def __call__(self, body: Any) -> Any:
        found = self._done.get(id(body))
        if found is None:
            found = self._done[id(body)] = (body, self._stage(body))
        return found[1]
