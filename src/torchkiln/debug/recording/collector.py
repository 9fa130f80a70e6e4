"""The observer behind a recording: takes what the stages of every compilation hand out and puts it in order."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import torch.fx

import torchkiln
from torchkiln.cache.explain import explain as differences
from torchkiln.codegen.llvm import Generated
from torchkiln.compiler import CapturedGraph, FunctionalGraph
from torchkiln.debug.recording.code import Measured, kernels_of, library_calls_of, memory_of
from torchkiln.debug.recording.graphs import Replacements, arguments_of, graph_text, lines_of, nodes_of, traced_from
from torchkiln.debug.recording.model import (
    About,
    Argument,
    CacheLookup,
    Compilation,
    Fusion,
    Line,
    Node,
    Pass,
    Recording,
    Stage,
)
from torchkiln.frontend.function_entry import Lookup
from torchkiln.graph.manager import PassResult
from torchkiln.ir.program import Program
from torchkiln.lowering.calls import KeptCall
from torchkiln.recorder import Record, StageTime
from torchkiln.runtime.executable import CompiledGraph
from torchkiln.runtime.timing import StepTime
from torchkiln.schedule.decisions import FusionDecision
from torchkiln.schedule.group import FusedGroup
from torchkiln.schedule.plan import Plan
from torchkiln.stats import GraphRecord, PassRecord
from torchkiln.target import Target, capture_target


@dataclass
class _StageDraft:
    """A stage while it is recorded; its time may come after it."""

    name: str
    text: int
    nodes: tuple[Node, ...] = ()
    seconds: float = 0.0


@dataclass
class _Graph:
    """One functional graph while it is compiled, and after."""

    kind: str
    inputs: tuple[Argument, ...]
    stages: list[int]
    passes: list[int]
    seconds: float = 0.0
    fusions: list[Fusion] = field(default_factory=list)
    kept: dict[str, str] = field(default_factory=dict)
    lines: Mapping[str, tuple[Line, ...]] = field(default_factory=dict)
    groups: bool = False
    plan: Plan | None = None
    code: Generated | None = None
    executable: CompiledGraph | None = None
    fallback: str = ""
    made: Compilation | None = None


@dataclass
class _Capture:
    """One captured graph, and the functional graphs that come of it.

    Its texts, stages and passes are its own, so that what comes of one captured graph is made of that alone.
    """

    number: int
    texts: dict[str, int] = field(default_factory=dict)
    all_stages: list[_StageDraft] = field(default_factory=list)
    all_passes: list[Pass] = field(default_factory=list)
    stages: list[int] = field(default_factory=list)
    passes: list[int] = field(default_factory=list)
    traced: torch.fx.Graph | None = None
    open: _Graph | None = None
    graphs: list[_Graph] = field(default_factory=list)
    lookups: list[Lookup] = field(default_factory=list)
    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))


class Collector:
    """Collects while it is an observer; :meth:`recording` is what came together so far.

    ``captured`` is called with each captured graph and its number before it is compiled, ``finished`` with that number
    each time one of its graphs is. With ``keep_code``, compiled code is kept in memory, for the times it takes.
    """

    def __init__(
        self,
        *,
        captured: Callable[[int, CapturedGraph], None] | None = None,
        finished: Callable[[int], None] | None = None,
        keep_code: bool = True,
    ) -> None:
        self._captured, self._finished, self._keep_code = captured, finished, keep_code
        self._lock = threading.RLock()
        self._captures: dict[int, _Capture] = {}
        self._target: Target | None = None
        # Per thread: the captured graph that is compiled, the text of the graph that passes edit, times not yet shown.
        self._thread = threading.local()

    def __call__(self, record: Record) -> None:
        with self._lock:
            if record.compilation:
                self._thread.capture = self._captures.setdefault(record.compilation, _Capture(record.compilation))
            capture = getattr(self._thread, "capture", None)
            if isinstance(record.value, StageTime):
                self._take_time(record.value, capture)
            elif isinstance(record.value, Lookup):  # before the captured graph has a number
                self._thread.lookups = [record.value]
            elif capture is not None:
                self._take(record.stage, record.value, capture)

    # -- what comes in ----------------------------------------------------------------------------------------------

    def _take(self, what: str, value: Any, capture: _Capture) -> None:
        graph = capture.open
        if isinstance(value, CapturedGraph):
            capture.lookups += getattr(self._thread, "lookups", [])
            self._thread.lookups = []
            if self._captured is not None:
                self._captured(capture.number, value)
        elif isinstance(value, FunctionalGraph):
            self._begin_graph(value, capture)
        elif isinstance(value, PassResult):
            self._take_pass_result(value, capture)
        elif isinstance(value, PassRecord):
            self._take_pass_time(value, capture)
        elif isinstance(value, GraphRecord):
            self._fell_back(value, capture)
        elif isinstance(value, torch.fx.GraphModule):
            self._take_graph(what, value, capture)
        elif graph is not None:
            self._take_of_graph(what, value, graph, capture)

    def _take_of_graph(self, what: str, value: Any, graph: _Graph, capture: _Capture) -> None:
        if isinstance(value, Program):
            _add_stage(capture, graph.stages, "program", str(value), self._time_of("lowering"))
        elif isinstance(value, Plan):
            graph.plan = value
            _add_stage(capture, graph.stages, "plan", str(value), self._time_of("schedule"))
        elif isinstance(value, Generated):
            graph.code = value
            _add_stage(capture, graph.stages, "code", value.text, self._time_of("codegen"))
        elif isinstance(value, KeptCall):
            graph.kept.setdefault(value.node, value.reason)
        elif what == "fusions":
            # Loops of one node are one thing to the user.
            graph.fusions += [_fusion(decision) for decision in value if decision.first != decision.second]
        elif what == "groups" and not graph.groups:  # those of bodies come after
            graph.groups = True
            units = [f"{'group ' if isinstance(unit, FusedGroup) else ''}{unit}" for unit in value]
            _add_stage(capture, graph.stages, "fused groups", "\n".join(units))
        elif isinstance(value, CompiledGraph):
            graph.executable = value if self._keep_code else None
            self._end_graph(capture)

    def _begin_graph(self, value: FunctionalGraph, capture: _Capture) -> None:
        graph = _Graph(value.kind, arguments_of(value.graph_module.graph), list(capture.stages), list(capture.passes))
        capture.graphs.append(graph)
        capture.open = graph

    def _end_graph(self, capture: _Capture) -> None:
        capture.open = None
        if self._finished is not None:
            self._finished(capture.number)

    def _fell_back(self, record: GraphRecord, capture: _Capture) -> None:
        if capture.open is None:  # it failed on the way to functional graphs
            capture.open = _Graph("captured", (), list(capture.stages), list(capture.passes))
            capture.graphs.append(capture.open)
        capture.open.fallback = record.reason
        self._end_graph(capture)

    # -- graphs and passes ------------------------------------------------------------------------------------------

    def _take_pass_result(self, result: PassResult, capture: _Capture) -> None:
        text = graph_text(result.graph_module)
        self._thread.after = text
        if result.number == 0:
            self._thread.text = text
            self._begin_stage(result, capture, text)

    def _begin_stage(self, result: PassResult, capture: _Capture, text: str) -> None:
        """The graph as passes are given it; what they replace in it is watched."""
        graph_module, kind = result.graph_module, result.kind or ""
        self._thread.kind = kind
        if result.path == "post_grad" and capture.open is not None:
            stages = capture.open.stages
            known = _same_names(_last_nodes(capture, stages), graph_module)
            name, timed = f"{kind} graph", "partition"
            # The graph of inference is not handed out between its joint passes and these.
            known |= {name: origins for name, origins in self._replaced().items() if origins}
        elif kind == "captured":
            stages, known, name, timed = capture.stages, {}, "captured graph", ""
            capture.traced = graph_module.graph
        else:
            captured = capture.traced
            known = traced_from(graph_module.graph, captured) if captured is not None else {}
            stages, name, timed = capture.stages, f"{kind} graph as traced", ""
        _add_stage(capture, stages, name, text, self._time_of(timed), nodes_of(graph_module, known))
        self._thread.replacements = Replacements(graph_module)

    def _take_graph(self, what: str, graph_module: torch.fx.GraphModule, capture: _Capture) -> None:
        """A graph after its passes."""
        nodes = nodes_of(graph_module, self._replaced())
        graph = capture.open
        timed = {"captured graph": "pre-grad passes", "joint graph": "joint passes"}.get(what, "post-grad passes")
        stages = capture.stages if graph is None else graph.stages
        _add_stage(capture, stages, f"{what} after passes", graph_text(graph_module), self._time_of(timed), nodes)
        if what == "captured graph":
            capture.traced = graph_module.graph
        if graph is not None:
            graph.lines = {node.id: node.lines for node in nodes}

    def _replaced(self) -> dict[str, tuple[str, ...]]:
        """Where the nodes come from of the graph that passes of this thread have edited."""
        replacements: Replacements | None = getattr(self._thread, "replacements", None)
        self._thread.replacements = None
        return {} if replacements is None else replacements.finish()

    def _take_pass_time(self, record: PassRecord, capture: _Capture) -> None:
        before = getattr(self._thread, "text", "")
        after = self._thread.after if record.changed else before
        self._thread.text = after
        kind = getattr(self._thread, "kind", "")
        passes = capture.passes if capture.open is None else capture.open.passes
        passes.append(len(capture.all_passes))
        texts = _text(capture, before), _text(capture, after)
        capture.all_passes.append(
            Pass(record.number, record.stage, record.name, kind, record.seconds, record.changed, *texts)
        )

    # -- times ------------------------------------------------------------------------------------------------------

    def _waiting(self) -> dict[str, float]:
        """Times of stages whose result is still to come, in this thread."""
        if not hasattr(self._thread, "waiting"):
            self._thread.waiting = {}
        waiting: dict[str, float] = self._thread.waiting
        return waiting

    def _time_of(self, stage: str) -> float:
        """What ``stage`` took, once."""
        return self._waiting().pop(stage, 0.0)

    def _take_time(self, taken: StageTime, capture: _Capture | None) -> None:
        self._waiting()[taken.stage] = self._waiting().get(taken.stage, 0.0) + taken.seconds
        if capture is None:
            return
        capture.seconds[taken.stage] += taken.seconds
        if capture.open is not None:
            capture.open.seconds += taken.seconds
        if taken.stage == "AOTAutograd":  # comes after all that it calls
            for number in capture.stages:
                if capture.all_stages[number].name.endswith("as traced"):
                    capture.all_stages[number].seconds += taken.seconds
                    break

    # -- what comes out ---------------------------------------------------------------------------------------------

    def recording(self, name: str, *, captures: set[int] | None = None) -> Recording:
        """What was collected, of these captured graphs or of all; assembly is generated here."""
        with self._lock:
            target = self._target = self._target or capture_target(torchkiln.Settings())
            numbers = self._captures if captures is None else captures
            made = _Tables()
            for number in numbers:
                capture = self._captures[number]
                graphs = enumerate(capture.graphs)
                made.add(capture, [self._compilation(capture, graph, position, target) for position, graph in graphs])
            recording = made.recording(about(name, target))
        return replace(recording, sources=_sources(recording))

    def _compilation(self, capture: _Capture, graph: _Graph, position: int, target: Target) -> Compilation:
        """Made once, where there are no times that go on."""
        if graph.made is None or self._keep_code:
            graph.made = self._made(capture, graph, position, target)
            if not self._keep_code:
                graph.plan = graph.code = None
        return graph.made

    def _made(self, capture: _Capture, graph: _Graph, position: int, target: Target) -> Compilation:
        same = sum(other.kind == graph.kind for other in capture.graphs[:position])
        measured = _measured(graph)
        plan = graph.plan
        return Compilation(
            id=f"{capture.number}.{graph.kind}" + (f".{same + 1}" if same else ""),
            kind=graph.kind,
            capture=capture.number,
            inputs=graph.inputs,
            seconds=graph.seconds,
            stages=tuple(graph.stages),
            passes=tuple(graph.passes),
            fusions=tuple(dict.fromkeys(graph.fusions)),  # several loops of the same nodes
            kernels=() if plan is None else kernels_of(plan, graph.code, target.processor, graph.lines, measured),
            library_calls=() if plan is None else library_calls_of(plan, graph.kept, graph.lines, measured),
            memory=None if plan is None else memory_of(plan),
            cache=tuple(map(_cache_lookup, capture.lookups)),
            fallback=graph.fallback,
            measured_calls=measured.calls if measured is not None else 0,
        )


def _add_stage(
    capture: _Capture, stages: list[int], name: str, text: str, seconds: float = 0.0, nodes: tuple[Node, ...] = ()
) -> None:
    stages.append(len(capture.all_stages))
    capture.all_stages.append(_StageDraft(name, _text(capture, text), nodes, seconds))


def _text(capture: _Capture, text: str) -> int:
    """Its number among the texts; equal ones are stored once."""
    return capture.texts.setdefault(text, len(capture.texts))


def _last_nodes(capture: _Capture, stages: list[int]) -> tuple[Node, ...]:
    drafts = (capture.all_stages[number] for number in reversed(stages))
    return next((draft.nodes for draft in drafts if draft.nodes), ())


def _same_names(nodes: tuple[Node, ...], graph_module: torch.fx.GraphModule) -> dict[str, tuple[str, ...]]:
    """The ``nodes`` of the last graph that those of this one come from: a partition keeps names.

    What passes made for weights alone is taken out of the graph that they edited; it has the user's lines.
    """
    by_line: dict[tuple[Line, ...], list[str]] = {}
    for node in nodes:
        if node.lines and node.op == "call_function":
            by_line.setdefault(node.lines, []).append(node.id)
    before = {node.id for node in nodes}
    return {
        node.name: (node.name,) if node.name in before else tuple(by_line.get(lines_of(node), ()))
        for node in graph_module.graph.nodes
    }


class _Tables:
    """The tables of a recording, as far as they are filled."""

    def __init__(self) -> None:
        self._texts: dict[str, int] = {}
        self._stages: list[Stage] = []
        self._passes: list[Pass] = []
        self._compilations: list[Compilation] = []
        self._seconds: defaultdict[str, float] = defaultdict(float)

    def add(self, capture: _Capture, compilations: Sequence[Compilation]) -> None:
        """What one captured graph adds to them, its numbers made those of these tables."""
        texts = [self._texts.setdefault(text, len(self._texts)) for text in capture.texts]
        stages, passes = len(self._stages), len(self._passes)
        self._stages += [Stage(one.name, texts[one.text], one.seconds, one.nodes) for one in capture.all_stages]
        self._passes += [replace(one, before=texts[one.before], after=texts[one.after]) for one in capture.all_passes]
        self._compilations += [
            replace(
                one,
                stages=tuple(stages + number for number in one.stages),
                passes=tuple(passes + number for number in one.passes),
            )
            for one in compilations
        ]
        for stage, taken in capture.seconds.items():
            self._seconds[stage] += taken

    def recording(self, described: About) -> Recording:
        return Recording(
            about=described,
            texts=tuple(self._texts),
            stages=tuple(self._stages),
            passes=tuple(self._passes),
            compilations=tuple(self._compilations),
            seconds=dict(self._seconds),
        )


def about(name: str, target: Target) -> About:
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return About(name, now, torch.__version__, torchkiln.__version__, target.cpu, torch.get_num_threads())


def _cache_lookup(lookup: Lookup) -> CacheLookup:
    """Why a graph was not there: the fields in which the nearest stored key differs from its own."""
    what = "captured graph"
    if lookup.hit:
        return CacheLookup(what, True, "compiled all the same, to be recorded")
    if lookup.cache is None or lookup.key is None:
        return CacheLookup(what, False, lookup.reason)
    nearest = lookup.cache.nearest(lookup.key, before=time.time())
    if nearest is None:
        return CacheLookup(what, False, "nothing of this kind is stored")
    return CacheLookup(what, False, "\n".join(differences(nearest, lookup.key)))


def _fusion(decision: FusionDecision) -> Fusion:
    return Fusion(decision.kind, decision.first, decision.second, decision.fused, decision.reason)


def _times_of(graph: _Graph) -> list[StepTime]:
    """Those of the steps of its plan; what comes around them is before them."""
    times = graph.executable.times if graph.executable is not None else None
    if times is None or graph.plan is None:
        return []
    found = times.read()
    return found[len(found) - len(graph.plan.steps) :]


def _measured(graph: _Graph) -> Measured | None:
    """Of a graph that was compiled with the setting ``profile``. The first calls are slow, and others may be."""
    times = _times_of(graph)
    most = max((step.calls for step in times), default=0)
    if not most:
        return None
    return Measured(most, tuple(step.least_nanoseconds / 1e9 if step.calls else None for step in times))


def _sources(recording: Recording) -> dict[str, str]:
    files = {line.file for stage in recording.stages for node in stage.nodes for line in node.lines}
    found = {}
    for file in sorted(files):
        try:
            found[file] = Path(file).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            continue  # such as code typed at a prompt
    return found
