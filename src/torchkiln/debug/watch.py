"""Watching one captured graph being compiled: the graph after every pass, and its functional graphs with real inputs.

In place of its compiled code, each functional graph runs node by node: what one graph hands to the next is then right,
and nothing crashes, whatever the code does. The code is kept to be looked at.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx

from torchkiln.compiler import compile_fx, compile_fx_inner, functional_kind
from torchkiln.config import Settings
from torchkiln.graph.eager_run import OnCopies, copies_of
from torchkiln.graph.manager import PassResult
from torchkiln.graph.subgraphs import copy_graph_module
from torchkiln.partition import min_cut_rematerialization_partition
from torchkiln.recorder import Record, observe
from torchkiln.schedule.plan import Plan


@dataclass(frozen=True)
class Snapshot:
    """A graph as a pass left it; number 0 is the graph that a stage was given."""

    number: int
    path: str
    kind: str
    graph_module: torch.fx.GraphModule
    keep_numbers: bool


@dataclass
class FunctionalGraph:
    """One functional graph: its code, its plan, and the inputs of its first call."""

    kind: str
    graph_module: torch.fx.GraphModule
    code: Callable[[list[Any]], Any]
    plan: Plan | None
    inputs: list[Any] | None = None


@dataclass
class Watched:
    """What was seen of one compilation, in the order it happened."""

    snapshots: list[Snapshot] = field(default_factory=list)
    graphs: list[FunctionalGraph] = field(default_factory=list)
    plans: list[Plan] = field(default_factory=list)
    forward_results: int | None = None
    """How many results of forward its caller sees; those after them are saved for backward."""

    def of_kind(self, *kinds: str) -> list[Snapshot]:
        return [snapshot for snapshot in self.snapshots if snapshot.kind in kinds]

    def graph(self, kind: str) -> FunctionalGraph | None:
        """The last one of its kind: a graph is compiled again where a weight was refused."""
        return next((graph for graph in reversed(self.graphs) if graph.kind == kind), None)

    def last_of_stage(self, stage: str, kind: str) -> list[Snapshot]:
        """The snapshots of the last time that the passes of ``stage`` ran on such a graph."""
        found = [snapshot for snapshot in self.of_kind(kind) if snapshot.path.partition("/")[0] == stage]
        first = max((k for k, snapshot in enumerate(found) if snapshot.number == 0), default=0)
        return found[first:]


@contextmanager
def watching(watched: Watched) -> Iterator[None]:
    """What this thread compiles inside the block goes to ``watched``."""
    thread = threading.get_ident()

    def keep(record: Record) -> None:
        value = record.value
        if threading.get_ident() != thread:
            return
        if isinstance(value, PassResult):
            copy = copy_graph_module(value.graph_module)
            watched.snapshots.append(Snapshot(value.number, value.path, value.kind or "", copy, value.keep_numbers))
        elif isinstance(value, Plan):
            watched.plans.append(value)

    with observe(keep):
        yield


def compile_watched(
    gm: torch.fx.GraphModule, example_inputs: Sequence[Any], settings: Settings, watched: Watched
) -> Callable[..., Any]:
    """Compile a captured graph; the result runs its functional graphs node by node and notes their inputs."""

    def inner(
        graph: torch.fx.GraphModule,
        inputs: Sequence[Any],
        *,
        is_backward: bool = False,
        is_inference: bool = False,
        prepares_weights: bool = False,
        **facts: Any,
    ) -> Callable[[list[Any]], Any]:
        kind = functional_kind(is_backward=is_backward, is_inference=is_inference, prepares_weights=prepares_weights)
        facts |= {"is_backward": is_backward, "is_inference": is_inference, "prepares_weights": prepares_weights}
        kept = copy_graph_module(graph)
        code = compile_fx_inner(graph, inputs, **facts)
        plan = watched.plans[-1] if watched.plans else None
        functional = FunctionalGraph(kind, kept, code, plan)
        watched.graphs.append(functional)
        return _interpreting(functional)

    def split(joint: torch.fx.GraphModule, inputs: Any, *, num_fwd_outputs: int, **facts: Any) -> Any:
        watched.forward_results = num_fwd_outputs
        return min_cut_rematerialization_partition(joint, inputs, num_fwd_outputs=num_fwd_outputs, **facts)

    return compile_fx(
        gm, example_inputs, inner_compile=inner, split=split, settings=settings, prepares_weights=True
    )


def _interpreting(functional: FunctionalGraph) -> Callable[[list[Any]], Any]:
    def call(arguments: list[Any]) -> Any:
        given = list(arguments)
        arguments.clear()
        if functional.inputs is None:
            functional.inputs = copies_of(given)
        with torch.no_grad():
            return OnCopies(functional.graph_module).run(*given)

    call._boxed_call = True  # type: ignore[attr-defined]
    return call
