"""Counts of what the compiler did in this process: graphs, kernels, extern calls, fallbacks, seconds per stage."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

# Graphs that are printed one by one; ``Stats.by_graph`` has all of them.
_MOST_LINES = 20


@dataclass(frozen=True)
class Fallback:
    """A graph that was not compiled as it should be, and why."""

    graph: str
    reason: str


@dataclass(frozen=True)
class GraphRecord:
    """A graph that came to the compiler, and how it runs.

    ``kind`` is "inference", "forward" or "backward" for one that AOTAutograd made, or what a message calls it.
    ``operations`` are its calls, with those in the bodies of higher-order operators; inputs, constants and results are
    none. ``extern_calls`` are calls of torch operators in one run. Where it is not ``compiled``, it runs eagerly for
    the ``reason``, which is one line. Graphs of one captured graph have the same ``compilation`` number.
    """

    kind: str
    operations: int
    kernels: int = 0
    launches: int = 0
    extern_calls: int = 0
    compiled: bool = True
    reason: str = ""
    compilation: int = 0

    def __str__(self) -> str:
        name = f"{self.kind:<16} {counted(self.operations, 'operation'):>16}"
        if not self.compiled:
            return f"{name}  eager: {self.reason}"
        kernels = f"{counted(self.kernels, 'kernel')}, {counted(self.launches, 'launch', 'launches')}"
        return f"{name}  compiled: {kernels}, {counted(self.extern_calls, 'extern call')}"


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
    that run eagerly. ``breaks`` are captured graphs with an operator that cannot be traced: Dynamo leaves their frame
    as it is, and the functions called in it come to the compiler one by one. ``per_size`` are graphs that are compiled
    for each combination of sizes instead of once for all,
    ``slower`` graphs that run eagerly because that was measured to be faster (setting ``adaptive``).
    ``passes`` is filled while the setting ``record_passes`` is on. ``nodes`` are those of the functional graphs as they
    came from AOTAutograd. ``processor_seconds`` are those of ``seconds`` in which the compiling thread had a processor.
    ``by_graph`` has every graph, compiled or not, in the order they came; what Dynamo did not capture is in none.
    """

    graphs: int = 0
    nodes: int = 0
    kernels: int = 0
    launches: int = 0
    extern_calls: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    fallbacks: tuple[Fallback, ...] = ()
    per_size: tuple[Fallback, ...] = ()
    breaks: tuple[Fallback, ...] = ()
    slower: tuple[Fallback, ...] = ()
    seconds: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    processor_seconds: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    passes: tuple[PassRecord, ...] = ()
    by_graph: tuple[GraphRecord, ...] = ()

    @property
    def operations(self) -> int:
        """Calls in all graphs that came to the compiler."""
        return sum(graph.operations for graph in self.by_graph)

    @property
    def compiled_operations(self) -> int:
        """Those of them in graphs that run compiled; some of these are calls of torch operators."""
        return sum(graph.operations for graph in self.by_graph if graph.compiled)

    @property
    def compiled_share(self) -> float | None:
        """The share of all operations that run compiled, from 0 to 1; None where no graph came to the compiler."""
        return self.compiled_operations / self.operations if self.operations else None

    def _share(self) -> str:
        share = self.compiled_share
        if share is None and self.breaks:
            return f"nothing runs compiled: Dynamo left {counted(len(self.breaks), 'captured graph')} to eager"
        if share is None:
            return "no operation has come to torchkiln so far"
        running = [graph for graph in self.by_graph if graph.compiled]
        # A pass may turn one operation into several calls.
        externs = sum(min(graph.extern_calls, graph.operations) for graph in running)
        eager = self.operations - self.compiled_operations
        # Rounded down: 100 % is all of them.
        return (
            f"{int(100 * share)} % of {counted(self.operations, 'operation')} run compiled,"
            f" {externs} of them as calls of torch operators; {eager} run eagerly"
        )

    def __str__(self) -> str:
        lines = [
            self._share(),
            f"graphs compiled      {self.graphs}, of {self.nodes} nodes",
            f"kernels              {self.kernels} distinct, {self.launches} launches",
            f"extern calls         {sum(self.extern_calls.values())}",
        ]
        for name, count in sorted(self.extern_calls.items(), key=lambda item: (-item[1], item[0])):
            lines.append(f"  {name:<40} {count}")
        lines.append(f"graphs run eagerly   {len(self.fallbacks)}")
        lines += [f"  {fallback.graph}: {fallback.reason}" for fallback in self.fallbacks]
        if self.breaks:
            lines.append(f"broken by Dynamo     {len(self.breaks)}")
            lines += [f"  {graph.graph}: {graph.reason}" for graph in self.breaks[:_MOST_LINES]]
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
        if self.by_graph:
            lines.append(f"each graph           {len(self.by_graph)}")
            lines += [f"  {graph}" for graph in self.by_graph[:_MOST_LINES]]
            if len(self.by_graph) > _MOST_LINES:
                lines.append(f"  and {len(self.by_graph) - _MOST_LINES} more in stats().by_graph")
        return "\n".join(lines)


def counted(number: int, what: str, several: str = "") -> str:
    return f"{number} {what if number == 1 else several or what + 's'}"


def _outcome(record: PassRecord) -> str:
    if record.skipped:
        return "skipped"
    return f"{record.seconds:.4f} s" + (", changed the graph" if record.changed else "")


class Totals:
    """The running counts of the process, shared by every thread that compiles."""

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
        self._breaks: list[Fallback] = []
        self._slower: list[Fallback] = []
        self._seconds: dict[str, float] = {}
        self._processor_seconds: dict[str, float] = {}
        self._passes: list[PassRecord] = []
        self._by_graph: list[GraphRecord] = []

    def clear(self) -> None:
        with self._lock:
            self._clear()

    def graph(self, graph: GraphRecord, nodes: int, extern_calls: Mapping[str, int]) -> None:
        with self._lock:
            self._graphs += 1
            self._nodes += nodes
            self._kernels += graph.kernels
            self._launches += graph.launches
            self._extern_calls.update(extern_calls)
            self._by_graph.append(graph)

    def fallback(self, fallback: Fallback, graph: GraphRecord) -> None:
        with self._lock:
            self._fallbacks.append(fallback)
            self._by_graph.append(graph)

    def graph_break(self, graph: Fallback) -> None:
        with self._lock:
            self._breaks.append(graph)

    def per_size(self, fallback: Fallback) -> None:
        with self._lock:
            self._per_size.append(fallback)

    def slower(self, graph: Fallback, compilation: int) -> None:
        with self._lock:
            self._slower.append(graph)
            self._by_graph = [
                replace(known, compiled=False, reason=f"measured to be faster ({graph.reason})")
                if known.compiled and known.compilation == compilation
                else known
                for known in self._by_graph
            ]

    def graph_pass(self, record: PassRecord) -> None:
        with self._lock:
            self._passes.append(record)

    def seconds(self, stage: str, seconds: float, processor_seconds: float) -> None:
        with self._lock:
            self._seconds[stage] = self._seconds.get(stage, 0.0) + seconds
            self._processor_seconds[stage] = self._processor_seconds.get(stage, 0.0) + processor_seconds

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
                breaks=tuple(self._breaks),
                slower=tuple(self._slower),
                seconds=MappingProxyType(dict(self._seconds)),
                processor_seconds=MappingProxyType(dict(self._processor_seconds)),
                passes=tuple(self._passes),
                by_graph=tuple(self._by_graph),
            )


TOTALS = Totals()


def stats() -> Stats:
    """What happened in this process so far, or since :func:`reset_stats`."""
    return TOTALS.snapshot()


def reset_stats() -> None:
    """Start counting from zero."""
    TOTALS.clear()
