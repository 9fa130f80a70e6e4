"""``torchkiln.shadow``: every stage's and pass's program, and the compiled code, run beside eager and float64."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.fx

from torchkiln import config
from torchkiln.compiler import compile_fx_inner
from torchkiln.config import Settings
from torchkiln.debug.accuracy import Divergence, Expected, Results, first_divergence
from torchkiln.debug.children import Answer, ask
from torchkiln.debug.determinism import self_difference
from torchkiln.debug.finding import Finding, ShadowReport
from torchkiln.debug.first_node import first_failing_prefix, node_changed_by_pass, node_laid_out_by_pass
from torchkiln.debug.runs import expected_of, expected_of_functional, interpreted, results_of, saved_values
from torchkiln.debug.watch import FunctionalGraph, Snapshot, Watched, compile_watched, watching
from torchkiln.errors import CompileError, first_line
from torchkiln.graph.source import source_line
from torchkiln.graph.strides import returned_nodes
from torchkiln.graph.subgraphs import copy_graph_module
from torchkiln.graph.tangents import is_tangent
from torchkiln.memory.capture import calling
from torchkiln.memory.unchanged import copied_inputs, state_kept
from torchkiln.schedule.plan import Launch, Plan, all_steps


def shadow(function: Callable[..., Any], /, *args: Any, dynamic: bool = False, **kwargs: Any) -> ShadowReport:
    """Find the first pass, node and line at which compiling ``function`` makes its results worse than eager's.

    The function is called once, as ``torch.compile(function, backend="kiln")`` would, on copies of the tensors given.
    For each captured graph, what every pass left and what every functional graph's code computes is run on the real
    inputs and compared: an error against float64 may not exceed eager's own by more than rounding. Gradients of inputs
    that ask for them are compared too, and so is what is written to inputs. A graph that differs from itself when eager
    runs it twice is not judged, and a note says so. Code runs in a child process, so that a crash is a finding.
    Parameters, buffers and random numbers stay as they are. Settings in force here hold, but for ``fallback``,
    ``adaptive`` and ``cache``.
    """
    settings = replace(config.resolve(), fallback=False, adaptive=False, cache=False, reproductions=os.devnull)
    reports: list[ShadowReport] = []

    def backend(gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        graph = _GraphShadow(gm, example_inputs, settings)
        pending = True

        def call(*inputs: Any) -> Any:
            nonlocal pending
            if pending:
                pending = False
                reports.append(graph.report(inputs))
            return graph.captured(*inputs)

        return call

    model = getattr(function, "_orig_mod", function)
    with state_kept(model):
        given, named = copied_inputs((tuple(args), dict(kwargs)))
        torch.compile(calling(model), backend=backend, dynamic=dynamic)(*given, **named)
    return ShadowReport(
        graphs=len(reports),
        checked=tuple(name for report in reports for name in report.checked),
        findings=tuple(finding for report in reports for finding in report.findings),
        without_reference=sum(report.without_reference for report in reports),
        notes=tuple(f"captured graph {k}: {note}" for k, report in enumerate(reports, 1) for note in report.notes),
    )


class _GraphShadow:
    """One captured graph, compiled and watched; :meth:`report` compares when real inputs are there."""

    def __init__(self, gm: torch.fx.GraphModule, example_inputs: Sequence[Any], settings: Settings) -> None:
        self.captured = copy_graph_module(gm)
        self._settings = settings
        self._watched = Watched()
        self._checked: list[str] = []
        self._gradients = True
        self._failure: CompileError | None = None
        self._program: Callable[..., Any] = self.captured
        with watching(self._watched):
            try:
                self._program = compile_watched(gm, example_inputs, settings, self._watched)
            except CompileError as error:
                self._failure = error

    def report(self, inputs: Sequence[Any]) -> ShadowReport:
        # A graph that was called without gradients may have operators that have none.
        self._gradients = torch.is_grad_enabled()
        expected = expected_of(interpreted(self.captured), inputs, gradients=self._gradients)
        missing = int(expected.reference is None)
        difference = self_difference(self.captured, inputs, expected, gradients=self._gradients)
        if difference is not None:
            failed = () if self._failure is None else (_of_failure(self._failure),)
            return ShadowReport(1, (), failed, missing, (f"{difference}; its results are not judged",))
        finding = next(self._findings(inputs, expected), None)
        return ShadowReport(1, tuple(self._checked), () if finding is None else (finding,), missing)

    def _findings(self, inputs: Sequence[Any], expected: Expected) -> Iterator[Finding]:
        """In the order of the flow; whoever asks for the first one leaves the rest undone."""
        watched = self._watched
        before = self.captured
        for snapshot in watched.of_kind("captured"):
            self._checked.append(f"{snapshot.path} on the captured graph")
            found = _divergence_of(snapshot, inputs, expected, gradients=self._gradients)
            if found is not None:
                yield _blamed_pass(snapshot, before, inputs, found)
            before = snapshot.graph_module
        whole = self._run_whole(inputs)
        if watched.of_kind("inference"):
            yield from self._inference_findings(inputs)
        else:
            yield from self._training_findings(inputs)
        if self._failure is not None:
            yield _of_failure(self._failure)
        if isinstance(whole, CompileError) or not all(snapshot.keep_numbers for snapshot in watched.snapshots):
            return  # with other random numbers there are other results
        self._checked.append("AOTAutograd")
        found = first_divergence(whole, expected)
        if found is not None:
            yield Finding("AOTAutograd or the call of its graphs", "captured", divergence=found)

    def _run_whole(self, inputs: Sequence[Any]) -> Results | CompileError:
        """Run the functional graphs one after the other, which compiles the backward and notes their inputs."""
        try:
            with watching(self._watched):
                return results_of(self._program, inputs, gradients=self._gradients)
        except CompileError as error:
            self._failure = error
            return {}
        except Exception as error:  # the graph that a stage left does not run; its snapshots say which
            return CompileError("run", error)

    def _inference_findings(self, inputs: Sequence[Any]) -> Iterator[Finding]:
        watched = self._watched
        graph, weights = watched.graph("inference"), watched.graph("weights")
        given = graph.inputs if graph is not None else None
        if given is None:  # compiling failed: AOTAutograd has the same inputs, in the same order
            given = list(inputs)
        joint = watched.last_of_stage("joint", "inference")
        yield from self._pass_findings(joint, given[: len(inputs)])
        if weights is not None and weights.inputs is not None and graph is not None:
            yield from self._hoisting_findings(joint[-1], given, len(inputs), weights, graph)
            yield from self._pass_findings(watched.last_of_stage("post_grad", "weights"), weights.inputs)
            yield from self._code_findings(weights, weights.inputs)
        yield from self._pass_findings(watched.last_of_stage("post_grad", "inference"), given)
        if graph is not None:
            yield from self._code_findings(graph, given)

    def _hoisting_findings(
        self, joint: Snapshot, given: Sequence[Any], count: int, weights: FunctionalGraph, rest: FunctionalGraph
    ) -> Iterator[Finding]:
        """The graph of weights and the rest, one after the other, against the graph that both were: ``count`` of what
        is ``given`` are its inputs."""
        self._checked.append("weights taken out of the inference graph")
        assert weights.inputs is not None
        expected = expected_of_functional(joint.graph_module, given[:count])
        outputs = {name: value for name, value in expected.eager.items() if name.startswith("output")}
        prepare, run = interpreted(weights.graph_module), interpreted(rest.graph_module)
        of_weights = weights.inputs

        def both(*inputs: Any) -> Any:
            return run(*inputs, *prepare(*of_weights))

        found = first_divergence(results_of(both, given[:count], gradients=False), replace(expected, eager=outputs))
        if found is not None:
            yield Finding("hoisting", "inference", divergence=found)

    def _training_findings(self, inputs: Sequence[Any]) -> Iterator[Finding]:
        watched = self._watched
        forward, backward = watched.graph("forward"), watched.graph("backward")
        joint = watched.of_kind("joint")
        if joint:
            given = _joint_inputs(joint[0].graph_module, inputs, forward, backward)
            if given is not None:
                yield from self._pass_findings(joint, given)
                if forward is not None and backward is not None:
                    yield from self._partition_findings(joint[-1], given, forward, backward)
        for graph in (forward, backward):
            if graph is not None and graph.inputs is not None:
                yield from self._pass_findings(watched.of_kind(graph.kind), graph.inputs)
                yield from self._code_findings(graph, graph.inputs)
        if forward is None:
            yield from self._pass_findings(watched.of_kind("forward"), list(inputs))

    def _pass_findings(self, snapshots: Sequence[Snapshot], inputs: Sequence[Any]) -> Iterator[Finding]:
        """Passes on one functional graph, each against what the first graph computes."""
        expected: Expected | None = None
        before: Snapshot | None = None
        for snapshot in snapshots:
            if before is None or expected is None or not snapshot.keep_numbers:
                try:
                    expected = self._expected_of(snapshot.kind, snapshot.graph_module, inputs)
                except Exception:  # it was given other inputs than are known here
                    return
            else:
                self._checked.append(f"{snapshot.path} on the {snapshot.kind} graph")
                found = _divergence_of(snapshot, inputs, expected, gradients=False)
                if found is not None:
                    yield _blamed_pass(snapshot, before.graph_module, inputs, found)
            before = snapshot

    def _expected_of(self, kind: str, graph_module: torch.fx.GraphModule, inputs: Sequence[Any]) -> Expected:
        """What a functional graph's passes and code are to give. What is saved may have any strides."""
        expected = expected_of_functional(graph_module, inputs)
        if kind != "forward":
            return expected
        saved = saved_values(graph_module, self._watched.forward_results)
        return replace(expected, strides=set(expected.strides) - saved)

    def _partition_findings(
        self, joint: Snapshot, inputs: Sequence[Any], forward: FunctionalGraph, backward: FunctionalGraph
    ) -> Iterator[Finding]:
        self._checked.append("partition of the joint graph")
        assert forward.inputs is not None
        if backward.inputs is None:
            return
        expected = expected_of_functional(joint.graph_module, inputs)
        outputs = {name: value for name, value in expected.eager.items() if name.startswith("output")}
        gradients = len(returned_nodes(backward.graph_module.graph))
        first = len(returned_nodes(joint.graph_module.graph)) - gradients
        split = interpreted(forward.graph_module), interpreted(backward.graph_module)

        def both(*_: Any) -> Any:
            results = split[0](*forward.inputs or ())
            return [*results[:first], *split[1](*backward.inputs or ())]

        found = first_divergence(results_of(both, (), gradients=False), replace(expected, eager=outputs))
        if found is not None:
            yield Finding("partition", "joint", divergence=found)

    def _code_findings(self, graph: FunctionalGraph, inputs: Sequence[Any]) -> Iterator[Finding]:
        """Compiled code of one functional graph against the graph, in child processes."""
        self._checked.append(f"code of the {graph.kind} graph")
        module = graph.graph_module
        answer = ask(lambda: _judged(graph.code, self._expected_of(graph.kind, module, inputs), inputs))
        finding = _finding_of(answer, graph.kind)
        if finding is None:
            return
        compiled = self._last_graph(graph.kind) or module
        of_strides = _is_of_strides(finding.divergence)
        node = first_failing_prefix(compiled, partial(self._prefix_fails, inputs=inputs, strides=of_strides))
        yield replace(
            finding,
            node=node.name if node is not None else None,
            source=source_line(node) if node is not None else None,
            kernel=_kernel_of(graph.plan, node),
        )

    def _last_graph(self, kind: str) -> torch.fx.GraphModule | None:
        snapshots = [s for s in self._watched.of_kind(kind) if s.path.startswith("post_grad")]
        return snapshots[-1].graph_module if snapshots else None

    def _prefix_fails(self, part: torch.fx.GraphModule, inputs: Sequence[Any], *, strides: bool) -> bool:
        """Whether the code of a part of a graph is wrong; strides between its nodes are free otherwise."""

        def judge() -> Any:
            settings = replace(self._settings, passes_limit=0)
            code = compile_fx_inner(copy_graph_module(part), list(inputs), is_inference=True, settings=settings)
            expected = expected_of_functional(part, inputs)
            return _judged(code, expected if strides else replace(expected, strides=()), inputs)

        return _finding_of(ask(judge), "") is not None


def _judged(code: Callable[[list[Any]], Any], expected: Expected, inputs: Sequence[Any]) -> Any:
    """How code of a functional graph diverges, as JSON."""
    found = first_divergence(results_of(lambda *given: code(list(given)), inputs, gradients=False), expected)
    return None if found is None else [found.what, found.kind, found.detail]


def _finding_of(answer: Answer, graph: str) -> Finding | None:
    if answer.ending == "answered":
        return None if answer.value is None else Finding("code", graph, divergence=Divergence(*answer.value))
    return Finding("code", graph, failure=f"it {answer.ending}: {answer.text}")


def _is_of_strides(found: Divergence | str | None) -> bool:
    return isinstance(found, Divergence) and found.kind == "other strides"


def _divergence_of(
    snapshot: Snapshot, inputs: Sequence[Any], expected: Expected, *, gradients: bool
) -> Divergence | str | None:
    try:
        results = results_of(interpreted(snapshot.graph_module), inputs, gradients=gradients)
    except Exception as error:
        return f"the graph no longer runs: {type(error).__name__}: {first_line(error)}"
    return first_divergence(results, expected)


def _blamed_pass(
    snapshot: Snapshot, before: torch.fx.GraphModule, inputs: Sequence[Any], found: Divergence | str
) -> Finding:
    search = node_laid_out_by_pass if _is_of_strides(found) else node_changed_by_pass
    node = search(before, snapshot.graph_module, inputs)
    return Finding(
        f"{snapshot.path.partition('/')[0]} passes",
        snapshot.kind,
        graph_pass=snapshot.path if snapshot.number else None,
        number=snapshot.number or None,
        node=node.name if node is not None else None,
        source=(source_line(node) or _line_nearby(node)) if node is not None else None,
        divergence=found if isinstance(found, Divergence) else None,
        failure=found if isinstance(found, str) else None,
    )


def _line_nearby(node: torch.fx.Node) -> str | None:
    """The user's line of what reads a node that has none of its own."""
    return next((line for user in node.users if (line := source_line(user)) is not None), None)


def _of_failure(error: CompileError) -> Finding:
    return Finding(
        error.stage, "", graph_pass=error.graph_pass, node=error.node, source=error.source, failure=error.reason()
    )


def _joint_inputs(
    joint: torch.fx.GraphModule,
    inputs: Sequence[Any],
    forward: FunctionalGraph | None,
    backward: FunctionalGraph | None,
) -> list[Any] | None:
    """Inputs of a joint graph: those of its forward, and the tangents that its backward was given.

    Tangents are ones where no backward ran.
    """
    given = list(inputs) if forward is None or forward.inputs is None else list(forward.inputs)
    tangents = [node for node in joint.graph.find_nodes(op="placeholder") if is_tangent(node)]
    if len(given) + len(tangents) != len(joint.graph.find_nodes(op="placeholder")):
        return None
    if backward is not None and backward.inputs is not None:
        seen = backward.graph_module.graph.find_nodes(op="placeholder")
        values = {node.name: value for node, value in zip(seen, backward.inputs, strict=True)}
        return [*given, *(values[node.name] if node.name in values else _ones(node) for node in tangents)]
    return [*given, *map(_ones, tangents)]


def _ones(node: torch.fx.Node) -> Any:
    like = node.meta["val"]
    return torch.ones([int(size) for size in like.shape], dtype=like.dtype)


def _kernel_of(plan: Plan | None, node: torch.fx.Node | None) -> str | None:
    """The step of a plan that computes ``node``."""
    if plan is None or node is None:
        return None
    kernels: dict[Any, str] = {}
    computed: dict[str, str] = {}
    for step in all_steps(plan):
        if isinstance(step, Launch):
            name = kernels.setdefault(step.kernel, f"kernel{len(kernels)}")
            text = f"{name}, which computes {', '.join(step.origin.nodes)}"
        else:
            text = f"a call of {getattr(step, 'target', step)}"
        for computed_node in getattr(getattr(step, "origin", None), "nodes", ()):
            computed.setdefault(computed_node, text)
    pending = [node]
    while pending:  # a value that is computed where it is read has no kernel of its own
        current = pending.pop(0)
        if current.name in computed:
            return computed[current.name]
        pending += [user for user in current.users if user.op != "output"]
    return None
