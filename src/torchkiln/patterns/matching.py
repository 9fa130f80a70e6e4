"""Matching: is there a part of this graph that looks like this pattern?

A candidate for the first output is found from the rarest call of the pattern: the graph's nodes are indexed by target,
and from each node with the rarest one the path of users up to the output is followed. The candidate is then matched
top down. Choices (alternatives, arguments of commuting operators, which user of a value is the next output) are tried
in order, and taken back when what follows does not fit, so that a match is found wherever there is one.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import torch
import torch.fx

from torchkiln.graph.aliases import view_source
from torchkiln.graph.effects import has_effect, mutated_arguments, writes
from torchkiln.graph.fake import same_metadata
from torchkiln.patterns.arguments import argument_form
from torchkiln.patterns.expressions import (
    Call,
    Capture,
    Dimension,
    Expression,
    Ignored,
    ListOf,
    OneOf,
    Outputs,
    Repeated,
    capture_names,
    same_constant,
    subexpressions,
    target_name,
)

Through = Literal["no_ops", "views", "layout"]

# Seen through where they change nothing; what they do otherwise is in their result's sizes, strides and dtype.
_MAYBE_NO_OPS = frozenset(
    f"aten::{name}"
    for name in ("view", "reshape", "_unsafe_view", "slice", "expand", "clone", "alias", "detach", "permute")
)
# Keep the elements in their order and change the sizes alone.
_RESHAPES = frozenset(f"aten::{name}" for name in ("view", "reshape", "_unsafe_view", "squeeze", "unsqueeze"))
# What a product, a reshape or a cast to contiguous puts in to suit the strides of its input, and leaves out for others.
LAYOUT = frozenset(
    f"aten::{name}"
    for name in ("view", "reshape", "_unsafe_view", "expand", "clone", "alias", "squeeze", "unsqueeze", "contiguous")
)


class GraphIndex:
    """The nodes of a graph by target, and their arguments in the order of the schema.

    Kept right while a graph is rewritten: nodes that were erased are left out, and :meth:`add` tells of new ones.
    """

    def __init__(self, graph: torch.fx.Graph) -> None:
        self.graph = graph
        self._by_target: dict[Any, list[torch.fx.Node]] = {}
        self._arguments: dict[torch.fx.Node, tuple[Any, ...] | None] = {}
        self.author: str | None = None
        """The rewrite that makes the nodes added now."""
        self._authors: dict[torch.fx.Node, str] = {}
        self._sources: dict[tuple[torch.fx.Node, Through], torch.fx.Node | None] = {}
        self.traces: dict[object, Any] = {}
        """Traces at values found in this graph; they hold its fake tensors and go with it."""
        self.results: dict[Hashable, Hashable] = {}
        """What calls of operators gave, for ``settle_strides``."""
        for node in graph.nodes:
            self.add(node)

    def add(self, node: torch.fx.Node) -> None:
        if self.author is not None:
            self._authors[node] = self.author
        if node.op in ("call_function", "call_method"):
            self._by_target.setdefault(node.target, []).append(node)

    def made_by(self, node: torch.fx.Node) -> str | None:
        """The rewrite that put ``node`` into the graph since the index was made."""
        return self._authors.get(node)

    def nodes(self, targets: Iterable[Any]) -> list[torch.fx.Node]:
        return [node for target in targets for node in self._by_target.get(target, ()) if not node._erased]

    def count(self, targets: Iterable[Any]) -> int:
        return sum(len(self._by_target.get(target, ())) for target in targets)

    def writers(self) -> list[torch.fx.Node]:
        """The calls that write to memory of their arguments."""
        return self.nodes(target for target in self._by_target if _writes(target))

    def arguments(self, node: torch.fx.Node) -> tuple[Any, ...] | None:
        found = self._arguments.get(node, False)
        if found is False:
            found = self._arguments[node] = argument_form(node.target).arrange(node.args, node.kwargs)
        return found  # type: ignore[return-value]

    def forget(self, nodes: Iterable[torch.fx.Node]) -> None:
        """The arguments of these nodes have changed."""
        for node in nodes:
            self._arguments.pop(node, None)
        self.forget_values()

    def forget_values(self) -> None:
        """The sizes or strides of some nodes may have changed."""
        self._sources.clear()

    def seen_through(self, node: torch.fx.Node, through: Through) -> torch.fx.Node | None:
        """As the function of that name; every rewrite asks the same of the same nodes."""
        key = (node, through)
        found = self._sources.get(key, False)
        if found is False:
            found = self._sources[key] = seen_through(node, through)
        return found  # type: ignore[return-value]

    def chain(self, node: torch.fx.Node) -> Iterator[torch.fx.Node]:
        """``node``, what it is another layout of, what that is another layout of, and so on."""
        current: torch.fx.Node | None = node
        while current is not None:
            yield current
            current = self.seen_through(current, "layout")


@dataclass(frozen=True)
class Found:
    """Where a pattern lies: its outputs, all its nodes, and what it captured."""

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
    """Whether the pattern lies there and the rewrite itself said no: another way to read the place says less."""


@dataclass(frozen=True)
class _Path:
    """How to get from a part of an output to the output: the calls on the way up, by target."""

    part: Expression
    steps: tuple[Call, ...]


class Pattern:
    """An expression made ready for matching.

    ``through`` says what may lie between the nodes of the pattern: nothing, operators that change nothing
    (``no_ops``), also reshapes (``views``), or anything that changes the layout only (``layout``; expansions and copies
    too), which finds places that deserve a closer look. There, captures that ask for a rank may be of ``any_rank``.
    """

    def __init__(self, top: Call | Outputs, *, through: Through | None = None, any_rank: bool = True) -> None:
        self.top = top
        self.roots: tuple[Any, ...] = top.roots if isinstance(top, Outputs) else (top,)
        self.through = through
        self.any_rank = any_rank
        self.calls = tuple(item for item in subexpressions(top) if isinstance(item, Call))
        self._paths = tuple(_paths(root) for root in self.roots)
        optional = _inside_choices(top)
        self._required = tuple(call for call in self.calls if id(call) not in optional)

    def __repr__(self) -> str:
        return repr(self.top)

    def candidates(self, index: GraphIndex) -> list[torch.fx.Node]:
        """Nodes that may be the first output, in the order of the graph."""
        counts = [(index.count(call.targets), position) for position, call in enumerate(self._required)]
        if not counts or min(counts)[0] == 0:
            return []
        first = self.roots[0]
        by_part = {id(path.part): path for path in self._paths[0]}
        for _, position in sorted(counts):
            anchor = self._required[position]
            if anchor is first:
                break
            if id(anchor) not in by_part:  # a part of another output, or inside a list
                continue
            roots: dict[torch.fx.Node, None] = {}
            for node in index.nodes(anchor.targets):
                roots.update(dict.fromkeys(self._walk_up(index, by_part[id(anchor)].steps, node)))
            return sorted(roots)
        return sorted(index.nodes(first.targets))

    def match(self, index: GraphIndex, node: torch.fx.Node, *, mismatch: list[Mismatch] | None = None) -> Found | None:
        """The pattern with ``node`` as its first output, if it lies there."""
        return next(self.matches(index, node, mismatch=mismatch), None)

    def lies_in(self, index: GraphIndex) -> bool:
        """Whether the pattern is found anywhere, whoever else reads its nodes."""
        return any(self.lies_at(index, node) for node in self.candidates(index))

    def lies_at(self, index: GraphIndex, node: torch.fx.Node) -> bool:
        """Whether the pattern is found with ``node`` as its first output, whoever else reads its nodes."""
        search = _Search(self, index, None)
        return next(search.solutions(self._goals(node)), _NOTHING) is not _NOTHING

    def matches(
        self, index: GraphIndex, node: torch.fx.Node, *, mismatch: list[Mismatch] | None = None
    ) -> Iterator[Found]:
        """Every way the pattern lies with ``node`` as its first output.

        ``mismatch`` gets the furthest point reached on the way.
        """
        search = _Search(self, index, mismatch)
        for _ in search.solutions(self._goals(node)):
            found = search.result()
            if found is not None:
                yield found

    def _goals(self, node: torch.fx.Node) -> _Goals:
        goals: _Goals = None
        for position, root in reversed(list(enumerate(self.roots))):
            if position == 0:
                goals = ((root, node), goals)
            else:
                goals = ((_Elsewhere(root, self._paths[position]), None), goals)
        return goals

    def _walk_up(self, index: GraphIndex, steps: Sequence[Call], node: torch.fx.Node) -> Iterator[torch.fx.Node]:
        level: dict[torch.fx.Node, None] = {node: None}
        for step in steps:
            above: dict[torch.fx.Node, None] = {}
            pending = list(level)
            while pending:
                for user in pending.pop().users:
                    if user.target in step.targets:
                        above[user] = None
                    elif self.through is not None and index.seen_through(user, self.through) is not None:
                        pending.append(user)
            level = above
        yield from level


_NOTHING = object()
_Goals = tuple[tuple[Any, Any], Any] | None


class _Elsewhere(Expression):
    """An output still to be found, from parts of it that are matched already."""

    __slots__ = ("paths", "root")

    def __init__(self, root: Call | Repeated, paths: tuple[_Path, ...]) -> None:
        self.root = root
        self.paths = paths


class _Argument(Expression):
    """An expression with the argument it stands for; made only where a mismatch is to be explained."""

    __slots__ = ("expression", "name", "node")

    def __init__(self, expression: Any, node: torch.fx.Node, name: str) -> None:
        self.expression = expression
        self.node = node
        self.name = name


class _Search:
    """One attempt. Bindings made on the way are on a trail, and undone from there."""

    def __init__(self, pattern: Pattern, index: GraphIndex, mismatch: list[Mismatch] | None) -> None:
        self.pattern = pattern
        self.index = index
        self.bound: dict[int, torch.fx.Node] = {}  # by id of the expression; the pattern keeps expressions alive
        self.captures: dict[str, Any] = {}
        self.also: list[torch.fx.Node] = []  # seen through, or matched by an element of a list
        self.exclusive: list[torch.fx.Node] = []
        self.repeated: dict[int, list[torch.fx.Node]] = {}
        self._trail: list[tuple[dict[Any, Any], Any] | list[Any]] = []
        self._mismatch = mismatch
        self._where = "the value"  # the argument looked at, for the text of a mismatch

    def solutions(self, goals: _Goals) -> Iterator[None]:
        """Yields each time all goals are met together, with what that takes bound until the next one is asked for."""
        choices: list[tuple[_Goals, int, Iterator[Any]]] = []
        while True:
            if goals is None:
                yield
                if not choices:
                    return
                rest, mark, alternatives = choices.pop()
                self._undo(mark)
            else:
                (expression, value), rest = goals
                mark = len(self._trail)
                alternatives = self._alternatives(expression, value)
            subgoals = next(alternatives, None)
            while subgoals is None:
                self._undo(mark)
                if not choices:
                    return
                rest, mark, alternatives = choices.pop()
                self._undo(mark)
                subgoals = next(alternatives, None)
            choices.append((rest, mark, alternatives))
            goals = rest
            for goal in reversed(subgoals):
                goals = (goal, goals)

    def result(self) -> Found | None:
        """What was found, unless somebody else needs one of its nodes."""
        outputs = tuple(
            node
            for root in self.pattern.roots
            for node in (self.repeated[id(root)] if isinstance(root, Repeated) else (self.bound[id(root)],))
        )
        nodes = dict.fromkeys((*self.bound.values(), *self.also))
        for node in nodes:
            outside = next((user for user in node.users if user not in nodes), None)
            if outside is not None and node not in outputs and not _costs_nothing(node, nodes):
                self._fail(node, f"{node.name} is also read by {outside.name}, outside of the match")
                return None
        for node in self.exclusive:
            outside = next((user for user in node.users if user not in nodes), None)
            if outside is not None:
                self._fail(node, f"{node.name} must be read by the match alone and is also read by {outside.name}")
                return None
        reader = _reader_of_written(nodes)
        if reader is not None:
            self._fail(reader, f"{reader.name} reads memory that the match writes")
            return None
        writer = _writer_between(nodes, self.index.writers())
        if writer is not None:
            self._fail(writer, f"{writer.name} writes to memory of the match between its nodes")
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
        if isinstance(expression, _Elsewhere):
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
        source = self.index.seen_through(value, self.pattern.through) if self.pattern.through is not None else None
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
        else:  # what tells at once is compared before the search goes into any argument
            for place, dimension in form.dimensions:
                if not dimension.fits(given[place], _rank(given[0])):
                    return  # an explanation says more from the closer look
            for place, constant in form.constants:
                if not same_constant(constant, given[place]):
                    return
            for place, inner in form.calls:
                if not self._may_be(inner, given[place]):
                    return
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

    def _may_be(self, call: Call, value: Any) -> bool:
        """A first look at an argument, before the search goes into those before it."""
        if not isinstance(value, torch.fx.Node):
            return False
        through = self.pattern.through
        return value.target in call.targets or (
            through is not None and self.index.seen_through(value, through) is not None
        )

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
        if self.pattern.through != "layout" or capture.rank is None or not isinstance(value, torch.fx.Node):
            return [value]
        run: list[torch.fx.Node] = []
        later: list[torch.fx.Node] = []
        ended = False
        for node in self.index.chain(value):
            fits = getattr(node.meta.get("val"), "ndim", None) == capture.rank
            ended |= bool(run) and not fits
            if fits:
                (later if ended else run).append(node)
        fitting = [*reversed(run), *later]
        itself = not fitting or (self.pattern.any_rank and value not in fitting)
        return [*fitting, value] if itself else fitting

    def _list(self, expression: ListOf, value: Any) -> Iterator[tuple[Any, ...]]:
        if not isinstance(value, (list, tuple)) or len(value) < expression.at_least:
            expected = f"a list of at least {expression.at_least}"
            self._fail(None, f"{self._where} is {_shown(value)} where the pattern has {expected}")
            return
        for _ in self._each(expression.element, value):
            yield ()

    def _elsewhere(self, expression: _Elsewhere) -> Iterator[tuple[Any, ...]]:
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
            if next(self._each(call, [node]), _NOTHING) is not _NOTHING:
                matching.append(node)
            self._undo(mark)
        if len(matching) < root.at_least:
            return
        for _ in self._each(call, matching):
            self._bind(self.repeated, id(root), matching)
            yield ()

    def _reachable(self, call: Call, paths: Sequence[_Path]) -> list[torch.fx.Node]:
        """Nodes that may be ``call``, by way of the part of it that is matched and has the fewest users."""
        if id(call) in self.bound:
            return [self.bound[id(call)]]
        starts: list[tuple[int, int, int, torch.fx.Node, _Path]] = []
        for path in paths:
            node = self.bound.get(id(path.part))
            if node is None and isinstance(path.part, Capture):
                node = self.captures.get(path.part.name)
            if isinstance(node, torch.fx.Node):
                starts.append((len(node.users), len(path.steps), len(starts), node, path))
        if not starts:
            return self.index.nodes(call.targets)
        _, _, _, node, path = min(starts)
        return sorted(set(self.pattern._walk_up(self.index, path.steps, node)))

    def _each(self, element: Any, values: Sequence[Any]) -> Iterator[None]:
        """Yields each time every value matches ``element`` in a search of its own, with captures bound as lists.

        The searches share what was bound before and the calls that are ``shared``, so a value for which nothing fits
        has the one before it look for another way.
        """
        own = {id(item) for item in subexpressions(element) if isinstance(item, Call) and not item.shared}
        common = capture_names([item for item in subexpressions(element) if isinstance(item, Call) and item.shared])
        searches: list[tuple[_Search, Iterator[None]]] = []
        mark = len(self._trail)
        while True:
            while len(searches) < len(values):
                before = searches[-1][0] if searches else self
                inner = _Search(self.pattern, self.index, self._mismatch)
                inner.bound = {key: node for key, node in before.bound.items() if key not in own}
                inner.captures = {
                    **self.captures,
                    **{name: before.captures[name] for name in common if name in before.captures},
                }
                searches.append((inner, inner.solutions(((element, values[len(searches)]), None))))
                while searches and next(searches[-1][1], _NOTHING) is _NOTHING:
                    searches.pop()
                if not searches:
                    return
            self._gather(element, [inner for inner, _ in searches], own, common)
            yield
            self._undo(mark)
            while searches and next(searches[-1][1], _NOTHING) is _NOTHING:
                searches.pop()
            if not searches:
                return

    def _gather(self, element: Any, searches: Sequence[_Search], own: set[int], common: Sequence[str]) -> None:
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
            if self.pattern.through == "layout":
                return left in self.index.chain(right)
            return left is right or self._stripped(left) is self._stripped(right)
        if isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
            return len(left) == len(right) and all(map(self._same_value, left, right))
        return same_constant(left, right)

    def _stripped(self, node: torch.fx.Node) -> torch.fx.Node:
        if self.pattern.through is None:
            return node
        source = self.index.seen_through(node, "no_ops")
        while source is not None:
            node, source = source, self.index.seen_through(source, "no_ops")
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


def seen_through(node: torch.fx.Node, through: Through | None) -> torch.fx.Node | None:
    """The value ``node`` merely passes on, if it is one of the operators ``through`` names."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or not node.args:
        return None
    source = node.args[0]
    if not isinstance(source, torch.fx.Node):
        return None
    always, sometimes = _seen_through_as(target, through)
    if always:
        return source
    if not sometimes:
        return None
    before, after = source.meta.get("val"), node.meta.get("val")
    if not isinstance(before, torch.Tensor) or not isinstance(after, torch.Tensor):
        return None
    return source if same_metadata(before, after) else None


@lru_cache(maxsize=4096)
def _seen_through_as(target: torch._ops.OpOverload, through: Through | None) -> tuple[bool, bool]:
    """Whether a target is always seen through, and whether it is where it changes nothing."""
    name = target._schema.name
    return name in (LAYOUT if through == "layout" else _RESHAPES if through == "views" else ()), name in _MAYBE_NO_OPS


def outer_layouts(node: torch.fx.Node) -> Iterator[torch.fx.Node]:
    """``node`` and everything that is another layout of it, nearest first."""
    pending = [node]
    for current in pending:
        yield current
        pending += (user for user in current.users if seen_through(user, "layout") is current)


def _costs_nothing(node: torch.fx.Node, nodes: Mapping[torch.fx.Node, None]) -> bool:
    """Whether it does no harm to keep a node of a match for others: a tensor made from numbers alone, or a view.

    A view of what the match computes is not one of these, as that would be computed a second time.
    """
    root = memory_root(node)
    return root not in nodes or (not root.all_input_nodes and not has_effect(root))


def _reader_of_written(nodes: Mapping[torch.fx.Node, None]) -> torch.fx.Node | None:
    """A node outside a match that reads, through the tensor itself or a view of it, memory that the match writes to."""
    pending = [memory_root(written) for node in nodes for written in mutated_arguments(node)]
    for value in pending:
        for user in value.users:
            if view_source(user) is value:
                pending.append(user)
            elif user not in nodes:
                return user
    return None


def _writer_between(nodes: Mapping[torch.fx.Node, None], writers: Sequence[torch.fx.Node]) -> torch.fx.Node | None:
    """A node between those of a match, and not one of them, that writes to memory which one of them reads."""
    if not writers:  # in most graphs: they are functional
        return None
    first, last = min(nodes), max(nodes)
    between = [node for node in writers if first < node < last and node not in nodes]
    if not between:
        return None
    memory = {memory_root(value) for inner in nodes for value in (inner, *inner.all_input_nodes)}
    return next((w for w in sorted(between) if any(memory_root(v) in memory for v in mutated_arguments(w))), None)


@lru_cache(maxsize=4096)
def _writes(target: Any) -> bool:
    return isinstance(target, torch._ops.OpOverload) and writes(target)


def memory_root(node: torch.fx.Node) -> torch.fx.Node:
    """The node whose memory ``node`` shows."""
    source = view_source(node)
    while source is not None:
        node, source = source, view_source(source)
    return node


def _paths(root: Any) -> tuple[_Path, ...]:
    """From every part of ``root`` that is reached through calls and plain lists alone, the way up."""
    found: dict[int, _Path] = {}

    def walk(item: Any, above: tuple[Call, ...]) -> None:
        if isinstance(item, (list, tuple)):
            for element in item:
                walk(element, above)
        elif isinstance(item, (Call, Capture)):
            known = found.get(id(item))
            if known is not None and len(known.steps) <= len(above):
                return
            found[id(item)] = _Path(item, above)
            if isinstance(item, Call):
                for part in item.parts():
                    walk(part, (item, *above))

    walk(root.element if isinstance(root, Repeated) else root, ())
    return tuple(path for path in found.values() if path.steps)


def _inside_choices(top: Expression) -> set[int]:
    """Expressions that a match may do without: those only in alternatives, or in lists that may be empty."""
    outside: set[int] = set()
    pending: list[Any] = [top]
    while pending:
        item = pending.pop()
        if isinstance(item, (list, tuple)):
            pending.extend(item)
        elif isinstance(item, Expression) and id(item) not in outside:
            outside.add(id(item))
            empty = isinstance(item, (ListOf, Repeated)) and item.at_least == 0
            if not isinstance(item, OneOf) and not empty:
                pending.extend(item.parts())
    return {id(item) for item in subexpressions(top)} - outside


def _rank(value: Any) -> int | None:
    """The number of dimensions of a node that is a tensor."""
    return getattr(value.meta.get("val"), "ndim", None) if isinstance(value, torch.fx.Node) else None


def _names(call: Call) -> str:
    return " or ".join(map(target_name, call.targets))


def _kind(node: torch.fx.Node) -> str:
    return "an input" if node.op == "placeholder" else target_name(node.target)


def _shown(value: Any) -> str:
    return value.name if isinstance(value, torch.fx.Node) else repr(value)
