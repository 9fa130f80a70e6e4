"""What the compiler did in this process: graphs, kernels, extern calls, fallbacks, seconds per stage."""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

# Graphs that are printed one by one; ``Stats`` has all of them.
_MOST_LINES = 20


@dataclass(frozen=True)
class Fallback:
    """A graph that was not compiled as it should be, and why."""

    graph: str
    reason: str

    def __str__(self) -> str:
        return f"{self.graph}: {self.reason}"


@dataclass(frozen=True)
class GraphRecord:
    """A graph that came to the compiler, and how it runs.

    ``kind`` is "inference", "forward" or "backward" for one that AOTAutograd made, or what a message calls it.
    ``operations`` are its calls, with those in the bodies of higher-order operators; inputs, constants and results are
    none. ``nodes`` are those of the functional graph, 0 for one that was never compiled. ``calls`` counts calls of
    torch operators in one run. A graph that is not ``compiled`` runs eagerly for the ``reason``, which is one line.
    Graphs of one captured graph have the same ``compilation`` number.
    """

    kind: str
    operations: int
    nodes: int = 0
    kernels: int = 0
    launches: int = 0
    calls: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    compiled: bool = True
    reason: str = ""
    compilation: int = 0

    @property
    def extern_calls(self) -> int:
        """Calls of torch operators in one run."""
        return sum(self.calls.values())

    def __str__(self) -> str:
        name = f"{self.kind:<16} {counted(self.operations, 'operation'):>16}"
        if not self.compiled:
            return f"{name}  eager: {self.reason}"
        kernels = f"{counted(self.kernels, 'kernel')}, {counted(self.launches, 'launch', 'launches')}"
        return f"{name}  compiled: {kernels}, {counted(self.extern_calls, 'extern call')}"


@dataclass(frozen=True)
class MatmulRecord:
    """A matmul or convolution of a compiled graph as it was lowered.

    ``call`` is the operator, ``node`` its name in the graph, ``sizes`` those of its result. ``packed`` is whether it is
    given its weight in the library's own layout, ``fused`` what the library does before it stores the result, and
    ``reason`` why it is not packed, or why no more is fused.
    """

    call: str
    node: str
    sizes: str
    packed: bool = False
    fused: tuple[str, ...] = ()
    reason: str = ""

    @property
    def form(self) -> str:
        """The call and what is fused into it."""
        return ", then ".join((f"{self.call}{', packed' if self.packed else ''}", *self.fused))

    def __str__(self) -> str:
        return f"{self.node} of {self.sizes}: {self.form}" + (f" ({self.reason})" if self.reason else "")


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

    def __str__(self) -> str:
        took = f"{self.seconds:.4f} s" + (", changed the graph" if self.changed else "")
        return f"{self.number:>4} {self.stage}/{self.name:<32} {'skipped' if self.skipped else took}"


@dataclass(frozen=True)
class CacheCounts:
    """What the cache was asked for. ``remote_hits`` are those of the ``hits`` that the folder did not have.

    ``refused`` are entries that were damaged or not signed as they must be, ``waits`` how often another process or
    thread compiled the same and was waited for.
    """

    hits: int = 0
    remote_hits: int = 0
    misses: int = 0
    puts: int = 0
    refused: int = 0
    waits: int = 0

    def __str__(self) -> str:
        counts = f"{counted(self.hits, 'hit')} ({self.remote_hits} remote), {counted(self.misses, 'miss', 'misses')}"
        return f"{counts}, {self.puts} stored, {self.refused} refused, {counted(self.waits, 'wait')}"


@dataclass(frozen=True)
class Stats:
    """A snapshot; later compilations do not change it.

    ``by_graph`` has every graph that came to the compiler, in order; what Dynamo did not capture is in none.
    ``fallbacks`` are graphs that run eagerly, ``slower`` those that do because that was measured to be faster (setting
    ``adaptive``), ``per_size`` those compiled for each combination of sizes instead of once for all.
    ``without_cuda_graph`` are those of ``mode="reduce-overhead"`` of which all or some calls are launched anew.
    ``breaks`` are captured graphs with an operator that cannot be traced: Dynamo leaves their frame to Python, and the
    functions called in it come to the compiler one by one. ``passes`` is filled while the setting ``record_passes`` is
    on.
    ``matmuls`` has every matmul and convolution compiled here, and not those of functions that a cache had.
    ``processor_seconds`` are those of ``seconds`` in which the compiling thread had a processor. ``cache`` counts
    lookups.
    """

    by_graph: tuple[GraphRecord, ...] = ()
    fallbacks: tuple[Fallback, ...] = ()
    per_size: tuple[Fallback, ...] = ()
    breaks: tuple[Fallback, ...] = ()
    slower: tuple[Fallback, ...] = ()
    without_cuda_graph: tuple[Fallback, ...] = ()
    passes: tuple[PassRecord, ...] = ()
    matmuls: tuple[MatmulRecord, ...] = ()
    seconds: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    processor_seconds: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    cache: CacheCounts = CacheCounts()

    @property
    def graphs(self) -> int:
        """Functional graphs that were compiled."""
        return sum(graph.nodes > 0 for graph in self.by_graph)

    @property
    def nodes(self) -> int:
        """The nodes of those graphs, as they came from AOTAutograd."""
        return sum(graph.nodes for graph in self.by_graph)

    @property
    def kernels(self) -> int:
        """Distinct kernels of every graph."""
        return sum(graph.kernels for graph in self.by_graph)

    @property
    def launches(self) -> int:
        """How often one run of every compiled graph launches a kernel."""
        return sum(graph.launches for graph in self.by_graph)

    @property
    def extern_calls(self) -> Mapping[str, int]:
        """Calls of torch operators in one run of every compiled graph, by name."""
        total: Counter[str] = Counter()
        for graph in self.by_graph:
            total.update(graph.calls)
        return total

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

    def _matmul_lines(self) -> list[str]:
        forms = Counter(record.form for record in self.matmuls)
        rows = (f"{form:<40} {count}" for form, count in forms.most_common())
        return _section("matmuls", len(self.matmuls), rows) if forms else []

    def __str__(self) -> str:
        calls = sorted(self.extern_calls.items(), key=lambda item: (-item[1], item[0]))
        lines = [
            self._share(),
            f"graphs compiled      {self.graphs}, of {self.nodes} nodes",
            f"kernels              {self.kernels} distinct, {self.launches} launches",
            *_section("extern calls", sum(self.extern_calls.values()), (f"{name:<40} {n}" for name, n in calls)),
            *self._matmul_lines(),
            *_section("graphs run eagerly", len(self.fallbacks), self.fallbacks),
        ]
        if self.breaks:
            lines += _section("broken by Dynamo", len(self.breaks), _first(self.breaks, "breaks"))
        if self.per_size:
            lines += _section("compiled per size", len(self.per_size), self.per_size)
        if self.slower:
            lines += _section("eager was faster", len(self.slower), self.slower)
        if self.without_cuda_graph:
            lines += _section("without CUDA graph", len(self.without_cuda_graph), self.without_cuda_graph)
        stages = (f"{stage:<40} {seconds:.3f}" for stage, seconds in self.seconds.items())
        lines += _section("seconds compiling", f"{sum(self.seconds.values()):.3f}", stages)
        if self.passes:
            lines += _section("passes recorded", len(self.passes), self.passes)
        if self.cache != CacheCounts():
            lines += _section("cache", self.cache, ())
        if self.by_graph:
            lines += _section("each graph", len(self.by_graph), _first(self.by_graph, "by_graph"))
        return "\n".join(lines)


def counted(number: int, what: str, several: str = "") -> str:
    return f"{number} {what if number == 1 else several or what + 's'}"


def _section(title: str, total: object, rows: Iterable[object]) -> list[str]:
    return [f"{title:<20} {total}", *(f"  {row}" for row in rows)]


def _first(graphs: Sequence[object], name: str) -> list[object]:
    more = len(graphs) - _MOST_LINES
    return [*graphs[:_MOST_LINES], *([f"and {more} more in stats().{name}"] if more > 0 else [])]


class Totals:
    """What was recorded in this process, by every thread that compiles."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.clear()

    def clear(self) -> None:
        with self._lock:
            self._lists: defaultdict[str, list[Any]] = defaultdict(list)
            self._seconds: defaultdict[str, float] = defaultdict(float)
            self._processor_seconds: defaultdict[str, float] = defaultdict(float)
            self._cache = CacheCounts()

    def add(self, **items: object) -> None:
        """Append each item to the field of :class:`Stats` of its name."""
        with self._lock:
            for name, item in items.items():
                self._lists[name].append(item)

    def slower(self, graph: Fallback, compilation: int) -> None:
        """The graphs of this compilation run eagerly from now on."""
        reason = f"measured to be faster ({graph.reason})"
        with self._lock:
            self._lists["slower"].append(graph)
            self._lists["by_graph"] = [
                replace(known, compiled=False, reason=reason)
                if known.compiled and known.compilation == compilation
                else known
                for known in self._lists["by_graph"]
            ]

    def seconds(self, stage: str, seconds: float, processor_seconds: float) -> None:
        with self._lock:
            self._seconds[stage] += seconds
            self._processor_seconds[stage] += processor_seconds

    def count_in_cache(self, *what: str) -> None:
        """Add one to each of these fields of :class:`CacheCounts`."""
        with self._lock:
            self._cache = replace(self._cache, **{name: getattr(self._cache, name) + 1 for name in what})

    def snapshot(self) -> Stats:
        with self._lock:
            return Stats(
                **{name: tuple(items) for name, items in self._lists.items()},
                seconds=MappingProxyType(dict(self._seconds)),
                processor_seconds=MappingProxyType(dict(self._processor_seconds)),
                cache=self._cache,
            )


TOTALS = Totals()


def stats() -> Stats:
    """What happened in this process so far, or since :func:`reset_stats`."""
    return TOTALS.snapshot()


def reset_stats() -> None:
    """Start counting from zero."""
    TOTALS.clear()
