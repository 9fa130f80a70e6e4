"""Counts of what the compiler did in this process: graphs, kernels, extern calls, fallbacks, seconds per stage."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType


@dataclass(frozen=True)
class Fallback:
    """A graph that was not compiled as it should be, and why."""

    graph: str
    reason: str


@dataclass(frozen=True)
class PassRecord:
    """One run of a graph pass; ``before`` and ``after`` are the text of the graph."""

    number: int
    stage: str
    name: str
    seconds: float
    changed: bool
    skipped: bool = False
    before: str = ""
    after: str = ""


@dataclass(frozen=True)
class Stats:
    """A snapshot; later compilations do not change it.

    ``kernels`` counts distinct compiled kernels and ``launches`` how often one run of every compiled graph
    launches them. ``extern_calls`` counts, in the same way, calls of torch operators by name. ``fallbacks`` are graphs
    that run eagerly, ``per_size`` graphs that are compiled for each combination of sizes instead of once for all,
    ``slower`` graphs that run eagerly because that was measured to be faster (setting ``adaptive``).
    ``passes`` is filled while the setting ``record_passes`` is on. ``nodes`` are those of the functional graphs as they
    came from AOTAutograd. ``processor_seconds`` are those of ``seconds`` in which the compiling thread had a processor.
    """

    graphs: int = 0
    nodes: int = 0
    kernels: int = 0
    launches: int = 0
    extern_calls: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    fallbacks: tuple[Fallback, ...] = ()
    per_size: tuple[Fallback, ...] = ()
    slower: tuple[Fallback, ...] = ()
    seconds: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    processor_seconds: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    passes: tuple[PassRecord, ...] = ()

    def __str__(self) -> str:
        lines = [
            f"graphs compiled      {self.graphs}, of {self.nodes} nodes",
            f"kernels              {self.kernels} distinct, {self.launches} launches",
            f"extern calls         {sum(self.extern_calls.values())}",
        ]
        for name, count in sorted(self.extern_calls.items(), key=lambda item: (-item[1], item[0])):
            lines.append(f"  {name:<40} {count}")
        lines.append(f"graphs run eagerly   {len(self.fallbacks)}")
        lines += [f"  {fallback.graph}: {fallback.reason}" for fallback in self.fallbacks]
        if self.per_size:
            lines.append(f"compiled per size    {len(self.per_size)}")
            lines += [f"  {fallback.graph}: {fallback.reason}" for fallback in self.per_size]
        if self.slower:
            lines.append(f"eager was faster     {len(self.slower)}")
            lines += [f"  {graph.graph}: {graph.reason}" for graph in self.slower]
        lines.append(f"seconds compiling    {sum(self.seconds.values()):.3f}")
        lines += [f"  {stage:<40} {seconds:.3f}" for stage, seconds in self.seconds.items()]
        if self.passes:
            lines.append(f"passes recorded      {len(self.passes)}")
            lines += [f"  {p.number:>4} {p.stage}/{p.name:<32} {_outcome(p)}" for p in self.passes]
        return "\n".join(lines)


def _outcome(record: PassRecord) -> str:
    if record.skipped:
        return "skipped"
    return f"{record.seconds:.4f} s" + (", changed the graph" if record.changed else "")


@dataclass(frozen=True)
class _Taken:
    """An amount of time, by the clock on the wall and by that of this thread."""

    seconds: float
    processor_seconds: float

    def __add__(self, other: _Taken) -> _Taken:
        return _Taken(self.seconds + other.seconds, self.processor_seconds + other.processor_seconds)

    def __sub__(self, other: _Taken) -> _Taken:
        return _Taken(self.seconds - other.seconds, self.processor_seconds - other.processor_seconds)


_NOTHING = _Taken(0.0, 0.0)


def _now() -> _Taken:
    return _Taken(time.perf_counter(), time.thread_time())


class _Recorder:
    """The running counts, shared by every thread that compiles."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._clear()

    def _clear(self) -> None:
        self._graphs = 0
        self._nodes = 0
        self._kernels = 0
        self._launches = 0
        self._extern_calls: Counter[str] = Counter()
        self._fallbacks: list[Fallback] = []
        self._per_size: list[Fallback] = []
        self._slower: list[Fallback] = []
        self._seconds: dict[str, float] = {}
        self._processor_seconds: dict[str, float] = {}
        self._passes: list[PassRecord] = []

    def clear(self) -> None:
        with self._lock:
            self._clear()

    def graph(self, nodes: int, kernels: int, launches: int, extern_calls: Mapping[str, int]) -> None:
        with self._lock:
            self._graphs += 1
            self._nodes += nodes
            self._kernels += kernels
            self._launches += launches
            self._extern_calls.update(extern_calls)

    def fallback(self, fallback: Fallback) -> None:
        with self._lock:
            self._fallbacks.append(fallback)

    def per_size(self, fallback: Fallback) -> None:
        with self._lock:
            self._per_size.append(fallback)

    def slower(self, graph: Fallback) -> None:
        with self._lock:
            self._slower.append(graph)

    def graph_pass(self, record: PassRecord) -> None:
        with self._lock:
            self._passes.append(record)

    def seconds(self, stage: str, taken: _Taken) -> None:
        with self._lock:
            self._seconds[stage] = self._seconds.get(stage, 0.0) + taken.seconds
            self._processor_seconds[stage] = self._processor_seconds.get(stage, 0.0) + taken.processor_seconds

    def snapshot(self) -> Stats:
        with self._lock:
            return Stats(
                graphs=self._graphs,
                nodes=self._nodes,
                kernels=self._kernels,
                launches=self._launches,
                extern_calls=MappingProxyType(dict(self._extern_calls)),
                fallbacks=tuple(self._fallbacks),
                per_size=tuple(self._per_size),
                slower=tuple(self._slower),
                seconds=MappingProxyType(dict(self._seconds)),
                processor_seconds=MappingProxyType(dict(self._processor_seconds)),
                passes=tuple(self._passes),
            )


_recorder = _Recorder()
_inner_seconds = threading.local()


def stats() -> Stats:
    """What happened in this process so far, or since :func:`reset_stats`."""
    return _recorder.snapshot()


def reset_stats() -> None:
    """Start counting from zero."""
    _recorder.clear()


def record_graph(*, nodes: int, kernels: int, launches: int, extern_calls: Mapping[str, int]) -> None:
    """Count one compiled graph."""
    _recorder.graph(nodes, kernels, launches, extern_calls)


def record_fallback(graph: str, reason: str) -> None:
    """Count one graph that will run eagerly."""
    _recorder.fallback(Fallback(graph, reason))


def record_per_size(graph: str, reason: str) -> None:
    """Count one graph with symbolic sizes that will be compiled for each combination of them."""
    _recorder.per_size(Fallback(graph, reason))


def record_slower(graph: str, reason: str) -> None:
    """Count one graph that was compiled and will run eagerly, since that was measured to be faster."""
    _recorder.slower(Fallback(graph, reason))


def record_pass(record: PassRecord) -> None:
    """Keep what one graph pass did."""
    _recorder.graph_pass(record)


@contextmanager
def stage_seconds(stage: str) -> Iterator[None]:
    """Add the time spent in the block to ``stage``, less what stages nested inside it took themselves.

    AOTAutograd calls back into the later stages; subtracting them makes the seconds of all stages add up.
    """
    outer: _Taken = getattr(_inner_seconds, "value", _NOTHING)
    _inner_seconds.value = _NOTHING
    start = _now()
    try:
        yield
    finally:
        whole = _now() - start
        _recorder.seconds(stage, whole - _inner_seconds.value)
        _inner_seconds.value = outer + whole
