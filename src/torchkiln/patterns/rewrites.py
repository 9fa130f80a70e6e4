"""Rewrites: a pattern, what goes in its place, and when; and sets of them that one pass applies."""

from __future__ import annotations

import hashlib
import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx

from torchkiln.errors import PatternError, first_line
from torchkiln.graph.fake import metadata_key, same_metadata
from torchkiln.graph.fingerprints import function_digest
from torchkiln.graph.strides import keep_output_strides, returned_values
from torchkiln.patterns.expressions import Call, Outputs, capture_names
from torchkiln.patterns.from_graph import distinct_results, pattern_of, results_of
from torchkiln.patterns.match import Match, fake_value
from torchkiln.patterns.matching import Found, GraphIndex, Mismatch, Pattern, Through, outer_layouts
from torchkiln.patterns.tracing import NeedsGuard, Traced, Tracer, without_new_guards

Check = Callable[[Match], bool]

# Ways to read one place of a graph that are looked at closely before it is left.
_MOST_WAYS = 16
Function = Callable[..., Any]


class Rewrite:
    """One rewrite as a set applies it: :meth:`attempt` at a candidate either changes the graph or says why not."""

    def __init__(self, name: str, *, when: Check | None = None, priority: int = 0) -> None:
        self.name = name
        self.when = when
        self.priority = priority

    def pattern(self) -> Pattern:
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
            for found in itertools.islice(self.pattern().matches(index, node, mismatch=mismatch), _MOST_WAYS):
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
        if mismatch is not None:
            reason = match.declined or f"the check {getattr(self.when, '__name__', self.when)} said no"
            _note(mismatch, match, reason, final=True)
        if match.declined_for_good:
            raise _Declined
        return None


class _Declined(Exception):
    """A place that is not to be replaced, however it is read."""


class DirectRewrite(Rewrite):
    """A pattern written as an expression, and a handler that edits the graph: ``handler(match, **captures)``."""

    def __init__(
        self,
        name: str,
        expression: Call | Outputs,
        handler: Function,
        *,
        when: Check | None = None,
        priority: int = 0,
        through: Through | None = None,
    ) -> None:
        super().__init__(name, when=when, priority=priority)
        self._pattern = Pattern(expression, through=through)
        self.handler = handler

    def pattern(self) -> Pattern:
        return self._pattern

    def apply(self, match: Match) -> None:
        self.handler(match, **match.captures)

    def sources(self) -> Iterator[str]:
        yield from super().sources()
        yield repr(self._pattern)
        yield function_digest(self.handler)


class TracedRewrite(Rewrite):
    """Two functions, one searched for and one put in its place, both traced by ``trace``.

    The pattern comes from the trace at the example inputs with integers ignored, since sizes are burned into a trace.
    Where it lies in a graph, the search function is traced again at the values found there, and must match exactly.
    An ``early_check`` reads the captures of a match and nothing else of it, so that it is asked before that trace too,
    which is by far the most expensive step (10 to 50 ms; a check 0.1 ms).
    Without ``any_rank``, values of the ranks of the example are looked for behind views, and others only where there
    are none of those: for 12 layers of attention that means 10 traces and not 18.
    """

    def __init__(
        self,
        name: str,
        search: Function,
        replace: Function,
        example_inputs: Callable[[], Sequence[Any]],
        trace: Tracer,
        *,
        when: Check | None = None,
        priority: int = 0,
        scalars: Mapping[str, float | int] | None = None,
        exclusive: Sequence[str] = (),
        through: Through | None = None,
        expression: Callable[[], Call | Outputs] | None = None,
        needs: Sequence[Any] = (),
        any_rank: bool = True,
        early_check: bool = False,
    ) -> None:
        super().__init__(name, when=when, priority=priority)
        self.early_check = early_check
        self.search = search
        self.replace = replace
        self.trace = trace
        self.names = argument_names(search)
        self.scalars = dict(scalars or {})
        self.exclusive = tuple(exclusive)
        self.through = through
        self.needs = needs
        self.any_rank = any_rank
        self._example_inputs = example_inputs
        self._expression = expression
        self._pattern: Pattern | None = None
        self._names_found: tuple[str, ...] | None = None
        if argument_names(replace) != self.names:
            raise PatternError(
                f"Rewrite {name!r}: search takes ({', '.join(self.names)}) and replace takes"
                f" ({', '.join(argument_names(replace))}); give both the same arguments."
            )

    def pattern(self) -> Pattern:
        if self._pattern is None:
            expression = self.traced_pattern() if self._expression is None else self._expression()
            self._pattern = Pattern(expression, through="layout", any_rank=self.any_rank)
        return self._pattern

    def may_match(self, index: GraphIndex) -> bool:
        return all(index.count((target,)) for target in self.needs)

    def traced_pattern(self) -> Call | Outputs:
        """The pattern from a trace at the example inputs."""
        values = dict(zip(self._tensor_names(), self._example_inputs(), strict=True))
        traced = self.trace(self.search, self.names, [{**self.scalars, **values}[name] for name in self.names])
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
        for root in outer_layouts(found.outputs[0]):
            if root.target not in exact.pattern.roots[0].targets:
                continue
            for place in itertools.islice(exact.pattern.matches(index, root, mismatch=closer), _MOST_WAYS):
                captures = {**{name: found.captures[name] for name in self.scalars}, **place.captures}
                if any(captures.get(n) is not v for n, v in found.captures.items() if isinstance(v, torch.fx.Node)):
                    continue
                other = exact.other_result(place.outputs)
                if other is not None:
                    _note(mismatch, found, other)
                    return None
                match = self._checked(self._match(Found(place.outputs, place.nodes, captures), index), mismatch)
                return match if match is None or self._is_replaceable(match, mismatch) else None
        if mismatch is not None:
            reason = closer[0].reason if closer else "the search function computes something else at these sizes"
            _note(mismatch, found, f"traced at the sizes found, {reason}")
        return None

    def apply(self, match: Match) -> None:
        values = [match.value(name) for name in self._all_names()]
        exact = match.index.traces["search", self, *map(metadata_key, values)]
        traced = self._replacement_for(match)
        inputs = [match.captures[name] for name in traced.arguments]
        match.replace_with_graph(traced.graph_module, inputs, chosen=exact.places)

    def _match(self, found: Found, index: GraphIndex) -> Match:
        return Match(found, index, trains=len(self._all_names()) > len(self.names))

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
            if mismatch is not None:
                reason = f"the replacement is not the same for all sizes: it depends on {error}"
                _note(mismatch, match, reason, final=True)
            return False
        return True

    def _replacement_for(self, match: Match) -> Traced:
        values = [match.value(name) for name in self._all_names()]
        key = ("replace", self, *map(metadata_key, values))
        if key not in match.index.traces:
            match.index.traces[key] = self._trace_at(self.replace, values)
        traced: Traced = match.index.traces[key]
        return traced

    def sources(self) -> Iterator[str]:
        yield from super().sources()
        yield function_digest(self.search)
        yield function_digest(self.replace)
        yield repr((self.scalars, self.exclusive, self.through, getattr(self.trace, "__name__", "")))

    def _tensor_names(self) -> list[str]:
        return [name for name in self.names if name not in self.scalars]

    def _asks_for_gradients(self) -> frozenset[str]:
        return frozenset(
            name
            for name, value in zip(self._tensor_names(), self._example_inputs(), strict=True)
            if isinstance(value, torch.Tensor) and value.requires_grad
        )

    def _all_names(self) -> tuple[str, ...]:
        """The arguments, and the gradients of the results where the rewrite is for training."""
        if self._names_found is None:
            tangents = [name for name in capture_names(self.pattern().top) if name not in self.names]
            self._names_found = (*self.names, *sorted(tangents))
        return self._names_found

    def _trace_at(self, function: Function, values: Sequence[Any]) -> Traced:
        """``function`` traced at values found in a graph, given in the order of :meth:`_all_names`."""
        grads = self._asks_for_gradients()
        given = [_with_grad(value, grad=name in grads) for name, value in zip(self.names, values, strict=False)]
        tangents = values[len(self.names) :]
        with without_new_guards(values):
            if tangents:
                return self.trace(function, self.names, given, tangents)
            return self.trace(function, self.names, given)

    def _exact_for(self, found: Found, index: GraphIndex) -> _Exact | str:
        """The search function at the arguments found; or why it has no pattern there."""
        try:
            values = [fake_value(found.captures[name]) for name in self._all_names()]
        except PatternError as error:
            return str(error)
        key = ("search", self, *map(metadata_key, values))
        if key not in index.traces:
            index.traces[key] = self._exact_at(values)
        exact: _Exact | str = index.traces[key]
        return exact

    def _exact_at(self, values: Sequence[Any]) -> _Exact | str:
        try:
            traced = self._trace_at(self.search, values)
            expression = pattern_of(traced, loose=False, exclusive=self.exclusive)
        except NeedsGuard as error:
            return f"the search function is not the same for all sizes: it depends on {error}"
        except Exception as error:  # a function of the user's, called with what it may not be made for
            return f"the search function does not run on what was found: {first_line(error)}"
        results, places = results_of(traced), distinct_results(traced)
        return _Exact(
            Pattern(expression, through=self.through), places, [fake_value(results[place]) for place in places]
        )


@dataclass(frozen=True)
class _Exact:
    """A search function traced at values of a graph: its pattern, and the results that are outputs of that."""

    pattern: Pattern
    places: tuple[int, ...]
    results: Sequence[Any]

    def other_result(self, outputs: Sequence[torch.fx.Node]) -> str | None:
        """Says which output has other sizes than the search function gives, as when views were seen through."""
        for node, result in zip(outputs, self.results, strict=True):
            there = fake_value(node)
            if isinstance(there, torch.Tensor) and isinstance(result, torch.Tensor):
                sizes, expected = list(there.shape), list(result.shape)
                if there.dtype != result.dtype or not same_metadata(sizes, expected):
                    return (
                        f"{node.name} is {there.dtype} of {sizes} where the search function gives"
                        f" {result.dtype} of {expected}"
                    )
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
            for node in rewrite.pattern().candidates(index):
                if node._erased:
                    continue
                match = rewrite.attempt(index, node)
                if match is None or any(index.made_by(inner) == rewrite.name for inner in match.nodes):
                    continue  # a replacement that has what it replaced in it is not replaced again
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
