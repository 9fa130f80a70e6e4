"""The recorder of one compilation: what each stage made, how long it took, and how the graphs run.

It is made when a compilation starts and is passed down. What is counted goes to the totals of the process
(:func:`torchkiln.stats`). The values that stages make go to those who :func:`listen`; without a listener nothing is
kept, and nothing is made for it.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torchkiln.stats import TOTALS, Fallback, GraphRecord, MatmulRecord, PassRecord, counted

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Record:
    """A value that a stage made. Graphs are edited by the stages after: a listener that keeps one copies it."""

    compilation: int
    stage: str
    value: Any


@dataclass(frozen=True)
class StageTime:
    """Seconds that a stage took, less those of stages nested inside it."""

    stage: str
    seconds: float


_listeners: tuple[Callable[[Record], None], ...] = ()
_observers: tuple[Callable[[Record], None], ...] = ()
_listeners_lock = threading.Lock()
_ids = itertools.count(1)
# What nested stages of this thread took, for the stage around them to leave out.
_inner = threading.local()


@contextmanager
def listen(listener: Callable[[Record], None]) -> Iterator[None]:
    """Call ``listener`` with every value that a stage makes, in whichever thread compiles."""
    global _listeners
    with _listeners_lock:
        _listeners = (*_listeners, listener)
    try:
        yield
    finally:
        with _listeners_lock:
            _listeners = tuple(other for other in _listeners if other is not listener)


@contextmanager
def observe(observer: Callable[[Record], None]) -> Iterator[None]:
    """Call ``observer`` with everything on the way, too: each action before it is taken, and what each pass left."""
    global _observers
    with _listeners_lock:
        _observers = (*_observers, observer)
    try:
        yield
    finally:
        with _listeners_lock:
            _observers = tuple(other for other in _observers if other is not observer)


def start_observing(observer: Callable[[Record], None]) -> None:
    """Call ``observer`` as :func:`observe` does, for as long as the process lives."""
    global _observers
    with _listeners_lock:
        _observers = (*_observers, observer)


def number_from_one() -> None:
    """Number compilations from 1 again, as in a new process: for a fork that stands for one."""
    global _ids
    _ids = itertools.count(1)


def is_listened_to() -> bool:
    """Whether anybody gets what stages make."""
    return bool(_listeners or _observers)


def is_observed() -> bool:
    """Whether anybody gets what happens on the way."""
    return bool(_observers)


def announce(what: str, value: Any) -> None:
    """Hand to the observers what happens where no recorder is known; they are told in the thread that compiles."""
    for observer in _observers:
        observer(Record(0, what, value))


class Recorder:
    """Everything recorded under one ``id``: the graphs that come of one captured graph."""

    def __init__(self) -> None:
        self.id = next(_ids)

    def record(self, stage: str, value: Any) -> None:
        """Hand what ``stage`` made to the listeners."""
        for listener in (*_listeners, *_observers):
            listener(Record(self.id, stage, value))

    def tell(self, what: str, value: Any) -> None:
        """Hand what happens on the way to the observers."""
        for observer in _observers:
            observer(Record(self.id, what, value))

    def ran_pass(self, record: PassRecord) -> None:
        """Keep what one graph pass did."""
        TOTALS.add(passes=record)

    def compiled(
        self, kind: str, *, nodes: int, operations: int, kernels: int, launches: int, extern_calls: Mapping[str, int]
    ) -> None:
        """Count one compiled graph."""
        graph = GraphRecord(kind, operations, nodes, kernels, launches, extern_calls, compilation=self.id)
        TOTALS.add(by_graph=graph)
        counts = operations, kernels, launches, graph.extern_calls
        _log.info("%s graph of %d operations compiled: %d kernels, %d launches, %d extern calls", kind, *counts)

    def multiplied(self, records: Iterable[MatmulRecord]) -> None:
        """Keep what the matmuls and convolutions of one graph became."""
        for record in records:
            TOTALS.add(matmuls=record)
            _log.debug("%s", record)

    def fell_back(self, graph: str, reason: str, *, operations: int) -> None:
        """Count one graph that will run eagerly."""
        record = GraphRecord(graph.removesuffix(" graph"), operations, compiled=False, reason=reason)
        self.tell("fallback", record)
        TOTALS.add(fallbacks=Fallback(graph, reason), by_graph=record)
        _log.info("the %s runs eagerly: %s", graph, reason)

    def broke(self, operations: int, reason: str) -> None:
        """Count one captured graph that Dynamo breaks, at an operator that cannot be traced."""
        graph = f"captured graph of {counted(operations, 'operation')}"
        TOTALS.add(breaks=Fallback(graph, reason))
        _log.info("Dynamo breaks a %s: %s", graph, reason)

    def compiles_per_size(self, graph: str, reason: str) -> None:
        """Count one graph with symbolic sizes that will be compiled for each combination of them."""
        TOTALS.add(per_size=Fallback(graph, reason))
        _log.info("%s graph compiled for each combination of sizes: %s", graph, reason)

    def runs_without_cuda_graph(self, graph: str, reason: str) -> None:
        """Count one graph of which calls are not replayed from CUDA graphs, though settings ask for them."""
        TOTALS.add(without_cuda_graph=Fallback(graph, reason))
        _log.warning("a graph for %s runs without CUDA graphs: %s", graph, reason)

    def is_slower(self, graph: str, reason: str) -> None:
        """Count this compilation as one that will run eagerly, since that was measured to be faster."""
        TOTALS.slower(Fallback(graph, reason), self.id)


@contextmanager
def timed_stage(stage: str) -> Iterator[None]:
    """Add the time spent in the block to ``stage``, less what stages nested inside it took themselves.

    AOTAutograd calls back into the later stages; subtracting them makes the seconds of all stages add up.
    """
    outer = getattr(_inner, "taken", (0.0, 0.0))
    _inner.taken = (0.0, 0.0)
    start = time.perf_counter(), time.thread_time()
    try:
        yield
    finally:
        whole = time.perf_counter() - start[0], time.thread_time() - start[1]
        own = whole[0] - _inner.taken[0], whole[1] - _inner.taken[1]
        TOTALS.seconds(stage, *own)
        _inner.taken = outer[0] + whole[0], outer[1] + whole[1]
        if _observers:
            announce("seconds", StageTime(stage, own[0]))
        _log.debug("%s: %.3f s", stage, own[0])
