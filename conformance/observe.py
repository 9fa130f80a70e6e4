"""What compiling used: lowerings that gave generated code, operators that were called instead, kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torchkiln
from torchkiln.lowering import LOWERINGS

_active: list[Observed] = []
_wrapped: dict[Any, Callable[..., Any]] = {}


@dataclass
class Observed:
    """Grows while :func:`observe` is on."""

    lowerings: set[str] = field(default_factory=set)
    externs: dict[str, int] = field(default_factory=dict)
    kernels: int = 0
    graphs: int = 0


@contextmanager
def observe(into: Observed) -> Iterator[None]:
    """Record into ``into`` what compilations inside the block use."""
    _wrap_lowerings()
    before = torchkiln.stats()
    _active.append(into)
    try:
        yield
    finally:
        _active.remove(into)
        after = torchkiln.stats()
        into.kernels += after.kernels - before.kernels
        into.graphs += after.graphs - before.graphs
        for name, count in after.extern_calls.items():
            made = count - before.extern_calls.get(name, 0)
            if made:
                into.externs[name] = into.externs.get(name, 0) + made


def _wrap_lowerings() -> None:
    """Make every registered lowering report when it succeeds (a declined one raises)."""
    for target, function in list(LOWERINGS.items()):
        if _wrapped.get(target) is not function:
            _wrapped[target] = _reporting(str(target), function)
            LOWERINGS[target] = _wrapped[target]


def _reporting(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def lower(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        for observed in _active:
            observed.lowerings.add(name)
        return result

    return lower
