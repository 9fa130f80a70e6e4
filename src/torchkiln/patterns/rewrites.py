"""Rewrites: a pattern, what goes in its place, and when; and sets of them that one pass applies."""

from __future__ import annotations

import hashlib
import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import cached_property, partial
from typing import Any, TypeVar

import torch
import torch.fx

from torchkiln.actions import take_rewrite
from torchkiln.errors import PatternError, first_line
from torchkiln.graph.fake import metadata_key
from torchkiln.graph.fingerprints import function_digest
from torchkiln.graph.source import source_line
from torchkiln.graph.strides import keep_output_strides, returned_values
from torchkiln.patterns.expressions import Call, Outputs, capture_names
from torchkiln.patterns.from_graph import distinct_results, pattern_of, results_of
from torchkiln.patterns.index import GraphIndex, Through, outer_layouts
from torchkiln.patterns.match import Match, described_where_different, fake_value
from torchkiln.patterns.matching import Pattern
from torchkiln.patterns.search import Found, Mismatch
from torchkiln.patterns.tracing import NeedsGuard, Traced, Tracer, without_new_guards

Check = Callable[[Match], bool]

# Ways to read one place of a graph that are looked at closely before it is left.
_MOST_WAYS = 16
Function = Callable[..., Any]
_T = TypeVar("_T")


@dataclass(eq=False, repr=False)
class Rewrite:
    """One rewrite as a set applies it: :meth:`attempt` at a candidate gives a match for :meth:`apply`, or says why not.

    ``when`` has the last word on a match. Rewrites of a lower ``priority`` come first.
    """

    name: str
    _: KW_ONLY
    when: Check | None = None
    priority: int = 0

    @cached_property
    def pattern(self) -> Pattern:
        """What to look for, made when it is first asked for."""
        raise NotImplementedError

    def has_pattern(self) -> bool:
        """Whether there is anything to look for."""
        return True

    def may_match(self, index: GraphIndex) -> bool:
        """A quick answer before the pattern is made: False where something it needs is not in the graph."""
        return True

    def apply(self, match: Match) -> None:
        """Put the replacement in place of ``match``."""
        raise NotImplementedError

    def verified(self, found: Found, index: GraphIndex, mismatch: list[Mismatch] | None) -> Match | None:
        """The match to apply, if the one found by structure still holds on a closer look."""
        return self._checked(Match(found, index), mismatch)

    def sources(self) -> Iterator[str]:
        """What the result of this rewrite depends on; equal texts mean the same rewrite."""
        yield self.name
        if self.when is not None:
            yield function_digest(self.when)

    def attempt(self, index: GraphIndex, node: torch.fx.Node, mismatch: list[Mismatch] | None = None) -> Match | None:
        """The match with ``node`` as first output, checked; ``mismatch`` gets the reason when there is none."""
        try:
            for found in itertools.islice(self.pattern.matches(index, node, mismatch=mismatch), _MOST_WAYS):
                match = self.verified(found, index, mismatch)
                if match is not None:
                    return match
        except _Declined:
            pass
        return None

    def _checked(self, match: Match, mismatch: list[Mismatch] | None) -> Match | None:
        """``match`` if the check agrees; raises _Declined where it says no to any way of reading this place."""
        if self.when is None or self.when(match):
            return match
        reason = match.declined or f"the check {getattr(self.when, '__name__', self.when)} said no"
        _note(mismatch, match, reason, final=True)
        if match.declined_for_good:
            raise _Declined
        return None


class _Declined(Exception):
    """A place that is not to be replaced, however it is read."""


@dataclass(eq=False, repr=False)
class DirectRewrite(Rewrite):
    """A pattern written as an expression, and a handler that edits the graph: ``handler(match, **captures)``."""

    expression: Call | Outputs
    handler: Function
    _: KW_ONLY
    through: Through | None = None

    @cached_property
    def pattern(self) -> Pattern:
        return Pattern(self.expression, through=self.through)

    def apply(self, match: Match) -> None:
        self.handler(match, **match.captures)

    def sources(self) -> Iterator[str]:
        yield from super().sources()
        yield repr(self.expression)
        yield function_digest(self.handler)


@dataclass(eq=False, repr=False)
class TracedRewrite(Rewrite):
    """Two functions, one searched for and one put in its place, both traced by ``trace``.

    The pattern comes from the trace at the example inputs with integers ignored, since sizes are burned into a trace;
    or from ``expression``. Where it matches, the search function is traced again at the values found there, and
    must match exactly. ``scalars`` are the arguments that are numbers, with their value in the example.
    """

    search: Function
    replace: Function
    example_inputs: Callable[[], Sequence[Any]]
    trace: Tracer
    _: KW_ONLY
    scalars: Mapping[str, float | int] = field(default_factory=dict)
    exclusive: Sequence[str] = ()
    through: Through | None = None
    expression: Callable[[], Call | Outputs] | None = None
    needs: Sequence[Any] = ()
    """Operators that a graph without a match may lack, found without making the pattern."""
    any_rank: bool = True
    """Otherwise, values of the ranks of the example are looked for behind views, and others only where there are none
    of those: for 12 layers of attention that means 10 traces and not 18."""
    early_check: bool = False
    """Whether ``when`` reads the captures of a match and nothing else of it. It is then asked before the trace at the
    values found too, which is by far the most expensive step (10 to 50 ms; a check 0.1 ms)."""
    forward: TracedRewrite | None = None
    """For a rewrite with gradients: the one without. Unless that matches somewhere, this one is not even traced."""

    def __post_init__(self) -> None:
        self.names = argument_names(self.search)
        given = argument_names(self.replace)
        if given != self.names:
            raise PatternError(
                f"Rewrite {self.name!r}: search takes ({', '.join(self.names)}) and replace takes"
                f" ({', '.join(given)}); give both the same arguments."
            )

    @cached_property
    def pattern(self) -> Pattern:
        expression = self.traced_pattern() if self.expression is None else self.expression()
        return Pattern(expression, through="layout", any_rank=self.any_rank)

    def has_pattern(self) -> bool:
        try:
            return self.pattern is not None
        except (PatternError, RuntimeError):
            if self.forward is None:
                raise
            return False  # the function has no gradients with respect to these arguments

    def may_match(self, index: GraphIndex) -> bool:
        if self.forward is None:
            return all(index.count((target,)) for target in self.needs)
        key = ("occurs", self.forward)
        if key not in index.traces:
            index.traces[key] = self.forward.pattern.occurs_in(index)
        return index.traces[key] and self.has_pattern()

    def traced_pattern(self) -> Call | Outputs:
        """The pattern from a trace at the example inputs."""
        values = {**self.scalars, **self._examples()}
        traced = self.trace(self.search, self.names, [values[name] for name in self.names])
        expression = pattern_of(traced, loose=True, scalars=self.scalars, exclusive=self.exclusive)
        unused = [name for name in self.names if name not in capture_names(expression)]
        if unused:
            raise PatternError(
                f"Rewrite {self.name!r}: the trace of search does not use argument {unused[0]!r}; leave it out, or give"
                " a number that appears in the trace as a constant of its own in scalar_workaround."
            )
        return expression

    def verified(self, found: Found, index: GraphIndex, mismatch: list[Mismatch] | None) -> Match | None:
        # An explanation says first what the search function itself has against a place.
        if self.early_check and mismatch is None and not self._may_pass_check(found, index):
            return None
        exact = self._exact_for(found, index)
        if isinstance(exact, str):
            _note(mismatch, found, exact)
            return None
        closer: list[Mismatch] = []
        place = self._exact_place(exact, found, index, closer)
        if place is None:
            reason = closer[0].reason if closer else "the search function computes something else at these sizes"
            _note(mismatch, found, f"traced at the sizes found, {reason}")
            return None
        other = exact.other_result(place.outputs)
        if other is not None:
            _note(mismatch, found, other)
            return None
        match = self._checked(self._match(place, index), mismatch)
        return match if match is None or self._is_replaceable(match, mismatch) else None

    def _exact_place(self, exact: _Exact, found: Found, index: GraphIndex, closer: list[Mismatch]) -> Found | None:
        """The match of the exact pattern with the captures of ``found``; ``closer`` gets the reason for none."""
        nodes = {name: value for name, value in found.captures.items() if isinstance(value, torch.fx.Node)}
        for root in outer_layouts(found.outputs[0]):
            if root.target not in exact.pattern.roots[0].targets:
                continue
            for place in itertools.islice(exact.pattern.matches(index, root, mismatch=closer), _MOST_WAYS):
                captures = {**{name: found.captures[name] for name in self.scalars}, **place.captures}
                if all(captures.get(name) is node for name, node in nodes.items()):
                    return Found(place.outputs, place.nodes, captures)
        return None

    def apply(self, match: Match) -> None:
        exact = self._exact_for(match, match.index)
        assert isinstance(exact, _Exact)
        traced = self._replacement_for(match)
        inputs = [match.captures[name] for name in traced.arguments]
        match.replace_with_graph(traced.graph_module, inputs, chosen=exact.places)

    def _match(self, found: Found, index: GraphIndex) -> Match:
        return Match(found, index, trains=len(self._all_names) > len(self.names))

    def _may_pass_check(self, found: Found, index: GraphIndex) -> bool:
        """Whether the check agrees to the captures; where not, another way to read the place may still be right."""
        try:
            return self.when is None or self.when(self._match(found, index))
        except PatternError:  # a node without a fake value, of which the closer look tells
            return True

    def _is_replaceable(self, match: Match, mismatch: list[Mismatch] | None) -> bool:
        """Whether the replacement is one for all sizes that the compiled program is for."""
        try:
            self._replacement_for(match)
        except NeedsGuard as error:
            reason = f"the replacement is not the same for all sizes: it depends on {error}"
            _note(mismatch, match, reason, final=True)
            return False
        return True

    def _replacement_for(self, match: Match) -> Traced:
        values = [match.value(name) for name in self._all_names]
        return self._once(match.index, "replace", values, partial(self._trace_at, self.replace))

    def _exact_for(self, found: Found | Match, index: GraphIndex) -> _Exact | str:
        """The search function at the arguments found; or why it has no pattern there."""
        try:
            values = [fake_value(found.captures[name]) for name in self._all_names]
        except PatternError as error:
            return str(error)
        return self._once(index, "search", values, self._exact_at)

    def _once(self, index: GraphIndex, kind: str, values: Sequence[Any], make: Callable[[Sequence[Any]], _T]) -> _T:
        """What ``make`` gives for ``values``, shared by all places of a graph with equal metadata."""
        key = (kind, self, *map(metadata_key, values))
        if key not in index.traces:
            index.traces[key] = make(values)
        made: _T = index.traces[key]
        return made

    def sources(self) -> Iterator[str]:
        yield from super().sources()
        yield function_digest(self.search)
        yield function_digest(self.replace)
        yield repr((dict(self.scalars), tuple(self.exclusive), self.through, getattr(self.trace, "__name__", "")))

    def _examples(self) -> dict[str, Any]:
        """The example inputs by the names of the arguments that are tensors."""
        names = [name for name in self.names if name not in self.scalars]
        return dict(zip(names, self.example_inputs(), strict=True))

    @cached_property
    def _all_names(self) -> tuple[str, ...]:
        """The arguments, and the gradients of the results where the rewrite is for training."""
        tangents = [name for name in capture_names(self.pattern.top) if name not in self.names]
        return (*self.names, *sorted(tangents))

    def _trace_at(self, function: Function, values: Sequence[Any]) -> Traced:
        """``function`` traced at values found in a graph, given in the order of :attr:`_all_names`."""
        examples = self._examples().items()
        grads = {name for name, value in examples if isinstance(value, torch.Tensor) and value.requires_grad}
        given = [_with_grad(value, grad=name in grads) for name, value in zip(self.names, values, strict=False)]
        tangents = values[len(self.names) :]
        with without_new_guards(values):
            return self.trace(function, self.names, given, *([tangents] if tangents else []))

    def _exact_at(self, values: Sequence[Any]) -> _Exact | str:
        try:
            traced = self._trace_at(self.search, values)
            expression = pattern_of(traced, loose=False, exclusive=self.exclusive)
        except NeedsGuard as error:
            return f"the search function is not the same for all sizes: it depends on {error}"
        except Exception as error:  # a function of the user's, called with what it may not be made for
            return f"the search function does not run on what was found: {first_line(error)}"
        results, places = results_of(traced), distinct_results(traced)
        values = [fake_value(results[place]) for place in places]
        return _Exact(Pattern(expression, through=self.through), places, values)


@dataclass(frozen=True)
class _Exact:
    """A search function traced at values of a graph: its pattern, and the results that are outputs of that."""

    pattern: Pattern
    places: tuple[int, ...]
    results: Sequence[Any]

    def other_result(self, outputs: Sequence[torch.fx.Node]) -> str | None:
        """Says which output has other sizes than the search function gives, as when views were seen through."""
        for node, result in zip(outputs, self.results, strict=True):
            differing = described_where_different(fake_value(node), result)
            if differing is not None:
                return f"{node.name} is {differing[0]} where the search function gives {differing[1]}"
        return None


@dataclass
class RewriteSet:
    """Rewrites that one pass applies, by priority and then in the order they were added."""

    name: str
    rewrites: list[Rewrite] = field(default_factory=list)

    def add(self, rewrite: Rewrite) -> None:
        self.rewrites.append(rewrite)
        self.rewrites.sort(key=lambda item: item.priority)  # stable

    def apply(self, graph_module: torch.fx.GraphModule) -> bool:
        """Apply every rewrite wherever it matches; returns whether any did."""
        index = GraphIndex(graph_module.graph)
        promised = returned_values(graph_module.graph)
        changed = False
        for rewrite in self.rewrites:
            if not rewrite.may_match(index):
                continue
            for node in rewrite.pattern.candidates(index):
                if node._erased:
                    continue
                match = rewrite.attempt(index, node)
                if match is None or any(index.made_by(inner) == rewrite.name for inner in match.nodes):
                    continue  # a replacement that has what it replaced in it is not replaced again
                if not take_rewrite(partial(_described, rewrite, node)):
                    continue
                index.author = rewrite.name
                rewrite.apply(match)
                index.forget_values()
                changed = True
        if changed:
            keep_output_strides(graph_module.graph, promised)
        return changed

    def fingerprint(self) -> str:
        """Changes when a rewrite of the set does, or their order."""
        digest = hashlib.sha256(self.name.encode())
        for rewrite in self.rewrites:
            for text in rewrite.sources():
                digest.update(text.encode() + b"\0")
        return digest.hexdigest()


def _described(rewrite: Rewrite, node: torch.fx.Node) -> tuple[str, str | None]:
    return f"{rewrite.name} at {node.name}", source_line(node)


def argument_names(function: Function) -> tuple[str, ...]:
    """The names of a function's positional arguments."""
    return tuple(inspect.signature(function).parameters)


def _with_grad(value: Any, *, grad: bool) -> Any:
    """A fake tensor that asks for gradients as the example did; tracing makes a leaf like it."""
    if not isinstance(value, torch.Tensor) or value.requires_grad == grad:
        return value
    fresh = value.detach()
    return fresh.requires_grad_(grad) if value.is_floating_point() or value.is_complex() else fresh


def _note(mismatch: list[Mismatch] | None, found: Found | Match, reason: str, *, final: bool = False) -> None:
    if mismatch is not None and not (mismatch and mismatch[0].final):
        mismatch[:] = [Mismatch(len(found.nodes), found.outputs[0], reason, final)]
