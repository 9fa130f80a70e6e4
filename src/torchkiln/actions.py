"""Numbered actions of one compilation, and limits on them: what bisection halves.

Graph passes, applications of rewrites, fusions and calls of operators are counted, each kind by itself, over all graphs
of a compilation. A action above the limit of its kind is counted and not taken, so those before it are the same with
every limit. Observers of the recorder are told of each action before it is taken: the last one told of names a crash.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from torchkiln.config import Settings
from torchkiln.recorder import Recorder, is_observed

ActionKind = Literal["compilation", "pass", "rewrite", "fusion", "call"]

# The setting that limits each kind. Without its action a compilation still gives the same results: passes and rewrites
# leave the graph as it was, loops stay apart, and operators are called through Python, as eager does.
LIMITS: Mapping[ActionKind, str] = MappingProxyType(
    {
        "compilation": "compilations_limit",
        "pass": "passes_limit",
        "rewrite": "rewrites_limit",
        "fusion": "fusions_limit",
        "call": "calls_limit",
    }
)


def has_limits(settings: Settings) -> bool:
    """Whether some action would not be taken; numbers depend on the graphs before, so nothing is cached then."""
    return any(getattr(settings, name) is not None for name in LIMITS.values())


@dataclass(frozen=True)
class Action:
    """One action: ``name`` says what is done to which nodes, ``source`` is the user's line where it is known."""

    kind: ActionKind
    number: int
    name: str
    source: str | None = None
    compilation: int = 0

    def __str__(self) -> str:
        line = f" ({self.source})" if self.source else ""
        return f"{self.kind} {self.number}, {self.name}{line}"


class Actions:
    """Counts the actions of one compilation, and says which of them settings allow."""

    def __init__(self, settings: Settings, recorder: Recorder) -> None:
        self._recorder = recorder
        self._limits = {kind: getattr(settings, name) for kind, name in LIMITS.items()}
        self._numbers = {kind: itertools.count(1) for kind in LIMITS}

    def take_compilation(self, name: str) -> bool:
        """Whether to compile the captured graph, whose number is that of the recorder in the process."""
        number, limit = self._recorder.id, self._limits["compilation"]
        if limit is not None and number > limit:
            return False
        self.tell("compilation", number, name)
        return True

    def number(self, kind: ActionKind) -> int:
        """The number of the next action of that kind."""
        return next(self._numbers[kind])

    def tell(self, kind: ActionKind, number: int, name: str, source: str | None = None) -> None:
        """Tell the observers of a action that is about to be taken."""
        self._recorder.tell("action", Action(kind, number, name, source, self._recorder.id))

    def watch(self, what: str, described: Callable[[], object]) -> None:
        """Hand what was decided to the observers; without one, nothing is described."""
        if is_observed():
            self._recorder.tell(what, described())

    def take(self, kind: ActionKind, described: Callable[[], tuple[str, str | None]]) -> bool:
        """Count a action; whether to take it. ``described`` gives its name and the user's line."""
        number, limit = next(self._numbers[kind]), self._limits[kind]
        if limit is not None and number > limit:
            return False
        if is_observed():
            self.tell(kind, number, *described())
        return True


# Passes are functions of a graph, many of them users'. So the actions of the pass that runs are known by context.
_of_running_pass: ContextVar[Actions | None] = ContextVar("torchkiln_actions", default=None)


@contextmanager
def in_pass(actions: Actions) -> Iterator[None]:
    """Rewrites applied inside the block are counted by ``actions``."""
    token = _of_running_pass.set(actions)
    try:
        yield
    finally:
        _of_running_pass.reset(token)


def take_rewrite(described: Callable[[], tuple[str, str | None]]) -> bool:
    """Count a place that a pass is about to rewrite, or to try to; whether it may."""
    actions = _of_running_pass.get()
    return actions is None or actions.take("rewrite", described)
