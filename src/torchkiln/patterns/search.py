"""The search for matches of a pattern at one candidate, top down and with backtracking.

Choices (alternatives, arguments of commuting operators, which user of a value is the next output) are tried in order,
and taken back when what follows does not fit, so that a match is found wherever there is one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.fx

from torchkiln.patterns.expressions import (
    Arranged,
    Call,
    Capture,
    Dimension,
    Expression,
    Ignored,
    ListOf,
    OneOf,
    Repeated,
    capture_names,
    same_constant,
    subexpressions,
    target_name,
)
from torchkiln.patterns.index import GraphIndex, Through
from torchkiln.patterns.interference import interference


@dataclass(frozen=True)
class Found:
    """A match by structure: the outputs, all nodes, and what was captured."""

    outputs: tuple[torch.fx.Node, ...]
    nodes: tuple[torch.fx.Node, ...]
    captures: Mapping[str, Any]


@dataclass(frozen=True)
class Mismatch:
    """How far a candidate went and where it stopped."""

    matched: int
    node: torch.fx.Node | None
    reason: str
    final: bool = False
    """Whether the pattern matches and the rewrite itself said no: another way to read the place says less."""


@dataclass(frozen=True)
class Path:
    """How to get from a part of an output to the output: the calls on the path up, by target."""

    part: Expression
    steps: tuple[Call, ...]


def paths_up(root: Any) -> tuple[Path, ...]:
    """From every part of ``root`` that is reached through calls and plain lists alone, the shortest path up."""
    found: dict[int, Path] = {}

    def walk(item: Any, above: tuple[Call, ...]) -> None:
        if isinstance(item, (list, tuple)):
            for element in item:
                walk(element, above)
        elif isinstance(item, (Call, Capture)):
            known = found.get(id(item))
            if known is not None and len(known.steps) <= len(above):
                return
            found[id(item)] = Path(item, above)
            if isinstance(item, Call):
                walk(item.parts(), (item, *above))

    walk(root.element if isinstance(root, Repeated) else root, ())
    return tuple(path for path in found.values() if path.steps)


Goals = tuple[tuple[Any, Any], Any] | None
"""What is left to match: an expression and its value, and the goals after that."""


@dataclass(eq=False, slots=True)
class Elsewhere(Expression):
    """An output still to be found, from parts of it that are matched already."""

    root: Call | Repeated
    paths: tuple[Path, ...]


@dataclass(eq=False, slots=True)
class _Argument(Expression):
    """An expression with the argument it stands for; made only where a mismatch is to be explained."""

    expression: Any
    node: torch.fx.Node
    name: str


class Search:
    """One attempt. Bindings made on the way are on a trail, and undone from there."""

    def __init__(
        self, index: GraphIndex, through: Through | None, any_rank: bool, mismatch: list[Mismatch] | None
    ) -> None:
        self.index = index
        self.through = through
        self.any_rank = any_rank
        self.bound: dict[int, torch.fx.Node] = {}  # by id of the expression; the pattern keeps expressions alive
        self.captures: dict[str, Any] = {}
        self.also: list[torch.fx.Node] = []  # seen through, or matched by an element of a list
        self.exclusive: list[torch.fx.Node] = []
        self.repeated: dict[int, list[torch.fx.Node]] = {}
        self._trail: list[tuple[dict[Any, Any], Any] | list[Any]] = []
        self._mismatch = mismatch
        self._where = "the value"  # the argument looked at, for the text of a mismatch

    def solutions(self, goals: Goals) -> Iterator[bool]:
        """Yields True each time all goals are met together, with what that takes bound until the next is asked for."""
        choices: list[tuple[Goals, int, Iterator[Any]]] = []
        while True:
            if goals is None:
                yield True
            else:
                (expression, value), rest = goals
                choices.append((rest, len(self._trail), self._alternatives(expression, value)))
            while choices:
                rest, mark, alternatives = choices[-1]
                self._undo(mark)
                subgoals = next(alternatives, None)
                if subgoals is not None:
                    break
                choices.pop()
            else:
                return
            goals = rest
            for goal in reversed(subgoals):
                goals = (goal, goals)

    def result(self, roots: Sequence[Any]) -> Found | None:
        """What was found, unless a node outside stands against replacing it."""
        outputs = tuple(
            node
            for root in roots
            for node in (self.repeated[id(root)] if isinstance(root, Repeated) else (self.bound[id(root)],))
        )
        nodes = dict.fromkeys((*self.bound.values(), *self.also))
        for node, reason in interference(self.index, nodes, outputs, self.exclusive):
            self._fail(node, reason)
            return None
        return Found(outputs, tuple(sorted(nodes)), self.captures)

    # One generator a kind of expression: each item is a tuple of goals that together meet the expression.

    def _alternatives(self, expression: Any, value: Any) -> Iterator[tuple[Any, ...]]:
        if isinstance(expression, _Argument):
            self._where = f"argument {expression.name} of {expression.node.name}"
            expression = expression.expression
        if isinstance(expression, Call):
            return self._call(expression, value)
        if isinstance(expression, Capture):
            return self._capture(expression, value)
        if isinstance(expression, (Ignored, Dimension)):  # dimensions are compared with the call they belong to
            return iter(((),))
        if isinstance(expression, OneOf):
            return iter([((alternative, value),) for alternative in expression.alternatives])
        if isinstance(expression, ListOf):
            return self._list(expression, value)
        if isinstance(expression, Elsewhere):
            return self._elsewhere(expression)
        return self._plain(expression, value)

    def _plain(self, expected: Any, value: Any) -> Iterator[tuple[Any, ...]]:
        if isinstance(expected, (list, tuple)):
            if isinstance(value, (list, tuple)) and len(value) == len(expected):
                yield tuple(zip(expected, value, strict=True))
            else:
                self._fail(None, f"{self._where} is {_shown(value)} where the pattern has a list of {len(expected)}")
        elif same_constant(expected, value):
            yield ()
        else:
            self._fail(None, f"{self._where} is {_shown(value)} where the pattern has {expected!r}")

    def _call(self, call: Call, value: Any) -> Iterator[tuple[Any, ...]]:
        if not isinstance(value, torch.fx.Node):
            self._fail(None, f"{self._where} is {_shown(value)} where the pattern has {_names(call)}")
            return
        known = self.bound.get(id(call))
        if known is not None:
            if self._same_value(known, value):
                yield ()
            else:
                self._fail(value, f"{known.name} was expected a second time and {value.name} is there")
            return
        if value.target in call.targets and value.op in ("call_function", "call_method"):
            yield from self._call_of(call, value)
        source = self.index.seen_through(value, self.through)
        if source is not None:
            self._note(self.also, value)
            yield ((call, source),)
        elif value.target not in call.targets:
            self._fail(value, f"{value.name} is {_kind(value)} where the pattern has {_names(call)}")

    def _call_of(self, call: Call, node: torch.fx.Node) -> Iterator[tuple[Any, ...]]:
        form, given = call.arranged(node.target), self.index.arguments(node)
        if form is None or given is None or len(form.arguments) != len(given):
            self._fail(node, f"{node.name} has other arguments than the pattern")
            return
        if call.users is not None and len(node.users) != call.users:
            self._fail(node, f"{node.name} has {len(node.users)} users where the pattern asks for {call.users}")
            return
        expected = form.arguments
        if self._mismatch is not None:
            names = form.form.names or [str(place) for place in range(len(expected))]
            expected = tuple(_Argument(e, node, n) for e, n in zip(expected, names, strict=False))
            rest = tuple(zip(expected, given, strict=True))[2 if form.commutes else 0 :]
        elif self._differs_at_once(form, given):
            return
        else:
            rest = tuple([(wanted, given[place]) for place, wanted in form.goals])
        mark = len(self._trail)
        self._bind(self.bound, id(call), node)
        if not form.commutes:
            yield rest
            return
        yield ((expected[0], given[0]), (expected[1], given[1]), *rest)
        self._undo(mark)
        self._bind(self.bound, id(call), node)
        yield ((expected[0], given[1]), (expected[1], given[0]), *rest)

    def _differs_at_once(self, form: Arranged, given: Sequence[Any]) -> bool:
        """What tells at once, compared before the search goes into any argument.

        Not for an explanation, which says more from the closer look.
        """
        for place, dimension in form.dimensions:
            if not dimension.fits(given[place], _rank(given[0])):
                return True
        for place, constant in form.constants:
            if not same_constant(constant, given[place]):
                return True
        return not all(self._may_be(inner, given[place]) for place, inner in form.calls)

    def _may_be(self, call: Call, value: Any) -> bool:
        """A first look at an argument, before the search goes into those before it."""
        if not isinstance(value, torch.fx.Node):
            return False
        return value.target in call.targets or self.index.seen_through(value, self.through) is not None

    def _capture(self, capture: Capture, value: Any) -> Iterator[tuple[Any, ...]]:
        if capture.name in self.captures:
            known = self.captures[capture.name]
            if self._same_value(known, value):
                yield ()
            else:
                self._fail(None, f"{capture!r} is {_shown(known)} in one place and {_shown(value)} in another")
            return
        if capture.rank is not None and not isinstance(value, torch.fx.Node):
            self._fail(None, f"{self._where} is {_shown(value)} where the pattern has the tensor {capture!r}")
            return
        for candidate in self._values_for(capture, value):
            mark = len(self._trail)
            self._bind(self.captures, capture.name, candidate)
            if capture.exclusive and isinstance(candidate, torch.fx.Node):
                self._note(self.exclusive, candidate)
            yield ()
            self._undo(mark)

    def _values_for(self, capture: Capture, value: Any) -> list[Any]:
        """What ``capture`` may stand for where ``value`` is: that, or what it is another layout of.

        Of values with the rank asked for, the one before a copy comes first. The value itself comes last, where it may
        be of any rank or none has that: the closer look says whether the rewrite is right for that too.
        """
        if self.through != "layout" or capture.rank is None or not isinstance(value, torch.fx.Node):
            return [value]
        run: list[torch.fx.Node] = []
        later: list[torch.fx.Node] = []
        ended = False
        for node in self.index.chain(value, "layout"):
            fits = getattr(node.meta.get("val"), "ndim", None) == capture.rank
            ended |= bool(run) and not fits
            if fits:
                (later if ended else run).append(node)
        fitting = [*reversed(run), *later]
        itself = not fitting or (self.any_rank and value not in fitting)
        return [*fitting, value] if itself else fitting

    def _list(self, expression: ListOf, value: Any) -> Iterator[tuple[Any, ...]]:
        if not isinstance(value, (list, tuple)) or len(value) < expression.at_least:
            expected = f"a list of at least {expression.at_least}"
            self._fail(None, f"{self._where} is {_shown(value)} where the pattern has {expected}")
            return
        for _ in self._each(expression.element, value):
            yield ()

    def _elsewhere(self, expression: Elsewhere) -> Iterator[tuple[Any, ...]]:
        root = expression.root
        call = root.element if isinstance(root, Repeated) else root
        candidates = self._reachable(call, expression.paths)
        if isinstance(root, Call):
            for node in candidates:
                yield ((root, node),)
            return
        matching = []
        for node in candidates:
            mark = len(self._trail)
            if any(self._each(call, [node])):
                matching.append(node)
            self._undo(mark)
        if len(matching) < root.at_least:
            return
        for _ in self._each(call, matching):
            self._bind(self.repeated, id(root), matching)
            yield ()

    def _reachable(self, call: Call, paths: Sequence[Path]) -> list[torch.fx.Node]:
        """Nodes that may be ``call``, by way of the part of it that is matched and has the fewest users."""
        if id(call) in self.bound:
            return [self.bound[id(call)]]
        starts: list[tuple[int, int, int, torch.fx.Node, Path]] = []
        for path in paths:
            node = self.bound.get(id(path.part))
            if node is None and isinstance(path.part, Capture):
                node = self.captures.get(path.part.name)
            if isinstance(node, torch.fx.Node):
                starts.append((len(node.users), len(path.steps), len(starts), node, path))
        if not starts:
            return self.index.nodes(call.targets)
        _, _, _, node, path = min(starts)
        return sorted(set(self.index.walk_up(node, path.steps, self.through)))

    def _each(self, element: Any, values: Sequence[Any]) -> Iterator[bool]:
        """Yields True each time every value matches ``element`` in a search of its own, with captures bound as lists.

        The searches share what was bound before and the calls that are ``shared``, so a value for which nothing fits
        has the one before it look for another way.
        """
        calls = [item for item in subexpressions(element) if isinstance(item, Call)]
        own = {id(call) for call in calls if not call.shared}
        common = capture_names([call for call in calls if call.shared])
        searches: list[tuple[Search, Iterator[bool]]] = []
        mark = len(self._trail)
        while True:
            if len(searches) == len(values):
                self._gather(element, [inner for inner, _ in searches], own, common)
                yield True
                self._undo(mark)
            else:
                before = searches[-1][0] if searches else self
                inner = Search(self.index, self.through, self.any_rank, self._mismatch)
                inner.bound = {key: node for key, node in before.bound.items() if key not in own}
                shared = {name: before.captures[name] for name in common if name in before.captures}
                inner.captures = {**self.captures, **shared}
                searches.append((inner, inner.solutions(((element, values[len(searches)]), None))))
            while searches and not next(searches[-1][1], False):
                searches.pop()
            if not searches:
                return

    def _gather(self, element: Any, searches: Sequence[Search], own: set[int], common: Sequence[str]) -> None:
        """Take over what the searches for the elements of a list bound."""
        for name in [name for name in capture_names(element) if name not in self.captures]:
            found = [inner.captures[name] for inner in searches if name in inner.captures]
            if name not in common:
                self._bind(self.captures, name, found)
            elif found:
                self._bind(self.captures, name, found[0])
        for inner in searches:
            for key, node in inner.bound.items():
                if key in own:
                    self._note(self.also, node)
                elif key not in self.bound:
                    self._bind(self.bound, key, node)
            for node in inner.also:
                self._note(self.also, node)
            for node in inner.exclusive:
                self._note(self.exclusive, node)

    def _same_value(self, left: Any, right: Any) -> bool:
        if isinstance(left, torch.fx.Node) and isinstance(right, torch.fx.Node):
            if self.through == "layout":
                return left in self.index.chain(right, "layout")
            return left is right or self._stripped(left) is self._stripped(right)
        if isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
            return len(left) == len(right) and all(map(self._same_value, left, right))
        return same_constant(left, right)

    def _stripped(self, node: torch.fx.Node) -> torch.fx.Node:
        if self.through is not None:
            *_, node = self.index.chain(node, "no_ops")
        return node

    def _bind(self, table: dict[Any, Any], key: Any, value: Any) -> None:
        table[key] = value
        self._trail.append((table, key))

    def _note(self, notes: list[torch.fx.Node], node: torch.fx.Node) -> None:
        notes.append(node)
        self._trail.append(notes)

    def _undo(self, mark: int) -> None:
        while len(self._trail) > mark:
            entry = self._trail.pop()
            if isinstance(entry, tuple):
                del entry[0][entry[1]]
            else:
                entry.pop()

    def _fail(self, node: torch.fx.Node | None, reason: str) -> None:
        if self._mismatch is None:
            return
        if not self._mismatch or (not self._mismatch[0].final and self._mismatch[0].matched < len(self.bound)):
            self._mismatch[:] = [Mismatch(len(self.bound), node, reason)]


def _rank(value: Any) -> int | None:
    """The number of dimensions of a node that is a tensor."""
    return getattr(value.meta.get("val"), "ndim", None) if isinstance(value, torch.fx.Node) else None


def _names(call: Call) -> str:
    return " or ".join(map(target_name, call.targets))


def _kind(node: torch.fx.Node) -> str:
    return "an input" if node.op == "placeholder" else target_name(node.target)


def _shown(value: Any) -> str:
    return value.name if isinstance(value, torch.fx.Node) else repr(value)
