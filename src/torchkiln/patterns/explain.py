"""Why a rewrite did not fire: the places that come closest, and what was in the way."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.fx

from torchkiln.graph.manager import Pass, register_pass, unregister_pass
from torchkiln.graph.source import source_line
from torchkiln.graph.subgraphs import copy_graph_module
from torchkiln.patterns.api import RegisteredRewrite
from torchkiln.patterns.expressions import Call, Expression, subexpressions, target_name
from torchkiln.patterns.index import GraphIndex
from torchkiln.patterns.matching import Pattern
from torchkiln.patterns.rewrites import Rewrite
from torchkiln.patterns.search import Mismatch

_SHOWN = 3
_LONGEST = 60


@dataclass(frozen=True)
class Candidate:
    """A place in a graph where ``matched`` of ``total`` calls of the pattern lie; ``reason`` says what does not."""

    node: str
    matched: int
    total: int
    reason: str
    source: str | None = None

    @property
    def missing(self) -> int:
        return self.total - self.matched

    def __str__(self) -> str:
        extent = f"all {self.total}" if self.missing == 0 else f"{self.matched} of {self.total}"
        return f"at {self.node}, {extent} calls match, but {self.reason}"


@dataclass(frozen=True)
class Explanation:
    """What :func:`explain_match` found: the nodes where the rewrite fires, and the closest of the others."""

    rewrite: str
    fires_at: tuple[str, ...]
    candidates: tuple[Candidate, ...]

    def __str__(self) -> str:
        outcome = f"fires at {', '.join(self.fires_at)}" if self.fires_at else "does not fire"
        lines = [f"{self.rewrite} {outcome}"]
        for candidate in self.candidates:
            lines.append(f"  {candidate}")
            source = f"    {candidate.source}"
            if candidate.source and source not in lines:
                lines.append(source)
        if not self.fires_at and not self.candidates:
            lines.append("  the graph has none of the calls of its pattern")
        return "\n".join(lines)


def explain_match(rewrite: RegisteredRewrite | Rewrite, graph: Any, *args: Any, **kwargs: Any) -> Explanation:
    """Where ``rewrite`` fires in ``graph`` and, for the places that come closest, which node, argument or check failed.

    ``graph`` is a graph module of the rewrite's stage; or a function or module, which is compiled and called with
    ``args`` and ``kwargs`` to get there.
    """
    _reject_other_arguments(rewrite, graph)
    forms = rewrite.set.rewrites if isinstance(rewrite, RegisteredRewrite) else [rewrite]
    if isinstance(graph, torch.fx.GraphModule):
        graphs = [graph]
    elif isinstance(rewrite, RegisteredRewrite):
        with _captured_graphs(rewrite) as graphs:
            torch._dynamo.reset()
            torch.compile(graph, backend="kiln", options={"cache": False})(*args, **kwargs)  # passes must run
    else:
        raise TypeError(
            f"The rewrite {rewrite.name!r} belongs to a set and to no stage, so there is nothing to compile for it;"
            " pass the graph module that the set is applied to."
        )
    fires: list[str] = []
    near: dict[str, Candidate] = {}
    for graph_module in graphs:
        for form in forms:
            found, others = _look(form, graph_module) if form.has_pattern() else ([], [])
            fires += found
            for candidate in others:
                known = near.get(candidate.node, candidate)
                near[candidate.node] = candidate if candidate.missing < known.missing else known
    closest = sorted((c for c in near.values() if c.node not in fires), key=lambda c: c.missing)[:_SHOWN]
    if closest:  # beside a place that comes close, one with a call or two in common says nothing
        closest = [c for c in closest if 2 * c.matched >= c.total or c.missing == closest[0].missing]
    return Explanation(rewrite.name, tuple(dict.fromkeys(fires)), tuple(closest))


def _reject_other_arguments(rewrite: object, graph: object) -> None:
    if not isinstance(rewrite, (RegisteredRewrite, Rewrite)):
        raise TypeError(
            f"explain_match explains a rewrite, and {_shortened(rewrite)} is none; pass what @torchkiln.rewrite gave,"
            " or a rewrite of a set."
        )
    if not isinstance(graph, torch.fx.GraphModule) and not callable(graph):
        is_graph = isinstance(graph, torch.fx.Graph)
        instead = "graph.owning_module" if is_graph else "a function, a module or a graph module"
        raise TypeError(f"explain_match cannot look into {_shortened(graph)}; pass {instead}.")


def _shortened(value: object) -> str:
    text = repr(value)
    if len(text) > _LONGEST or "\n" in text:
        return f"an object of type {type(value).__name__}"
    return f"{text} ({type(value).__name__})"


def _look(rewrite: Rewrite, graph_module: torch.fx.GraphModule) -> tuple[list[str], list[Candidate]]:
    index = GraphIndex(graph_module.graph)
    pattern = rewrite.pattern
    total = len(pattern.calls)
    fires: list[str] = []
    others: list[Candidate] = []
    for node in index.nodes(pattern.roots[0].targets):
        mismatch: list[Mismatch] = []
        match = rewrite.attempt(index, node, mismatch)
        if match is not None:
            fires.append(match.outputs[0].name)
        elif mismatch:
            found = mismatch[0]
            others.append(Candidate(node.name, min(found.matched, total), total, found.reason, _short_source(node)))
    if not fires and all(candidate.missing for candidate in others):
        others += _parts(pattern, index, total)
    return fires, others


def _parts(pattern: Pattern, index: GraphIndex, total: int) -> list[Candidate]:
    """The largest parts of the pattern that lie in the graph although the whole does not."""
    users: dict[int, Call] = {}
    for call in pattern.calls:
        for part in _calls_read(call.parts()):
            users.setdefault(id(part), call)
    for call in sorted(pattern.calls, key=_size, reverse=True):
        if call in pattern.roots:
            continue
        alone, reader = Pattern(call, through=pattern.through), users[id(call)]
        found = [node for node in index.nodes(call.targets) if alone.occurs_at(index, node)]
        # Where the reader is there, the candidate for that says more.
        found = [node for node in found if not any(user.target in reader.targets for user in node.users)]
        if found:
            expected = " or ".join(map(target_name, reader.targets))
            reasons = {node: f"{expected} should read it, and {_readers(node)}" for node in found[:_SHOWN]}
            return [Candidate(n.name, _size(call), total, reason, _short_source(n)) for n, reason in reasons.items()]
    return []


def _readers(node: torch.fx.Node) -> str:
    kinds = {user: target_name(user.target) if user.op == "call_function" else user.op for user in node.users}
    names = [f"{user.name} ({kind})" for user, kind in kinds.items()]
    if not names:
        return "nothing does"
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{', '.join(names[:_SHOWN])}{more} {'does' if len(names) == 1 else 'do'}"


def _short_source(node: torch.fx.Node) -> str | None:
    """``model.py:12 in forward: y = self.linear(x)``, without the folders."""
    line = source_line(node)
    if line is None:
        return None
    place, colon, code = line.partition(": ")
    return f"{Path(place).name}{colon}{code}"


def _calls_read(parts: Sequence[Any]) -> Iterator[Call]:
    """The calls whose results a call with these arguments reads itself."""
    for part in parts:
        if isinstance(part, Call):
            yield part
        elif isinstance(part, (list, tuple, Expression)):
            yield from _calls_read(part.parts() if isinstance(part, Expression) else part)


def _size(call: Call) -> int:
    return sum(isinstance(part, Call) for part in subexpressions(call))


@contextmanager
def _captured_graphs(rewrite: RegisteredRewrite) -> Iterator[list[torch.fx.GraphModule]]:
    """The graphs that reach ``rewrite`` while compiling in this block, as they are before it."""
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph_module: torch.fx.GraphModule) -> bool:
        graphs.append(copy_graph_module(graph_module))
        return False

    name = f"explain {rewrite.name}"
    register_pass(rewrite.stage, rewrite.slot, Pass(name, keep), first=True)
    try:
        yield graphs
    finally:
        unregister_pass(rewrite.stage, rewrite.slot, name)
