"""Patterns as expressions: what a value of a graph must look like.

An expression stands for one value. Using the same object in two places means that both must be the same value; two
objects that look alike may match different ones. Plain Python values inside an expression (numbers, None, dtypes,
lists) stand for themselves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from operator import methodcaller
from typing import Any

import torch
import torch.fx

from torchkiln.graph.fake import SYMBOLIC, expression
from torchkiln.patterns.arguments import ArgumentForm, argument_form

Target = Callable[..., Any] | str


class Expression:
    """One value of the graph; compared by identity."""

    __slots__ = ()

    def parts(self) -> tuple[Any, ...]:
        """The expressions and plain values this one is made of."""
        return ()


@dataclass(eq=False, repr=False, slots=True)
class Capture(Expression):
    """Any value, a node or a constant, kept under ``name``; the same name is the same value everywhere.

    An ``exclusive`` one must be a node that only the match reads. A ``rank`` says that it is a node, and is the number
    of dimensions to look for when a match may see through changes of layout.
    """

    name: str
    _: KW_ONLY
    exclusive: bool = False
    rank: int | None = None

    def __repr__(self) -> str:
        return f"${self.name}"


class Ignored(Expression):
    """Any value, not kept."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "?"


IGNORED = Ignored()


@dataclass(eq=False, repr=False, slots=True)
class Dimension(Expression):
    """The argument ``dim`` of a call: this one where the first argument is of ``rank``, and any where it is not.

    Counted from either end, so that ``-1`` of four dimensions is ``3``.
    """

    dim: int
    rank: int

    def __post_init__(self) -> None:
        self.dim %= self.rank

    def fits(self, dim: Any, rank: int | None) -> bool:
        """Whether this stands for dimension ``dim`` of a tensor of ``rank``."""
        return rank != self.rank or not isinstance(dim, int) or dim % rank == self.dim

    def __repr__(self) -> str:
        return f"@{self.dim}:{self.rank}"


class Call(Expression):
    """A call of ``target`` (an operator overload, a function, or the name of a method) or of one of several targets.

    Arguments are compared by the name they have in the operator's schema, however they are written, and those left
    out must have their defaults. ``users`` is the exact number of nodes that read the result, if it matters. A
    ``shared`` call inside a :class:`ListOf` is one node for all elements.
    """

    __slots__ = ("_arranged", "_last", "args", "kwargs", "shared", "targets", "users")

    def __init__(
        self,
        target: Target | Sequence[Target],
        *args: Any,
        users: int | None = None,
        shared: bool = False,
        **kwargs: Any,
    ) -> None:
        self.targets: tuple[Target, ...] = tuple(target) if isinstance(target, (list, tuple)) else (target,)  # type: ignore[assignment]
        self.args = args
        self.kwargs = kwargs
        self.users = users
        self.shared = shared
        self._arranged: dict[Any, Arranged | None] = {}
        self._last: tuple[Any, Arranged | None] = (None, None)

    def parts(self) -> tuple[Any, ...]:
        return (*self.args, *self.kwargs.values())

    def arranged(self, target: Any) -> Arranged | None:
        """The arguments as ``target`` takes them; None when that takes no such arguments."""
        if target is not self._last[0]:  # nearly always the same: hashing an operator costs more than all the rest
            if target not in self._arranged:
                form = argument_form(target)
                arguments = form.arrange(self.args, self.kwargs)
                self._arranged[target] = None if arguments is None else Arranged(form, arguments)
            self._last = (target, self._arranged[target])
        return self._last[1]

    def __repr__(self) -> str:
        names = [target_name(target) for target in self.targets]
        shown = [_shown(value) for value in self.args] + [f"{k}={_shown(v)}" for k, v in self.kwargs.items()]
        return f"{names[0] if len(names) == 1 else '{' + '|'.join(names) + '}'}({', '.join(shown)})"


class Arranged:
    """The arguments of a call in the order of the schema of its target, and by what is to be done with them."""

    __slots__ = ("arguments", "calls", "commutes", "constants", "dimensions", "form", "goals")

    def __init__(self, form: ArgumentForm, arguments: tuple[Any, ...]) -> None:
        self.form = form
        self.arguments = arguments
        self.commutes = form.commutes and all(map(same_constant, arguments[2:], form.defaults[2:]))
        """Whether the first two may be exchanged."""
        fixed = list(enumerate(arguments))[2 if self.commutes else 0 :]
        inner = [(k, v) for k, v in fixed if isinstance(v, (Expression, list, tuple))]
        self.constants = tuple((k, v) for k, v in fixed if not isinstance(v, (Expression, list, tuple)))
        self.dimensions = tuple((k, v) for k, v in inner if isinstance(v, Dimension))
        self.calls = tuple((k, v) for k, v in inner if isinstance(v, Call))
        self.goals = tuple((k, v) for k, v in inner if not isinstance(v, (Ignored, Dimension)))
        """The places left to match once constants and dimensions are compared; without the two that commute."""


@dataclass(eq=False, repr=False, slots=True)
class _Several(Expression):
    element: Any
    _: KW_ONLY
    at_least: int = 1

    def parts(self) -> tuple[Any, ...]:
        return (self.element,)


class ListOf(_Several):
    """A list of at least ``at_least`` values, each of which matches ``element`` on its own.

    What ``element`` captures is a list, one value for each. What a ``shared`` call captures is one value for all. A
    name captured on both sides of the list stands for the value outside, where that is matched first.
    """

    __slots__ = ()

    def __repr__(self) -> str:
        return f"[{_shown(self.element)}, ...]"


class Repeated(_Several):
    """All the values that match the call ``element`` given what is matched already, such as every piece of one split.

    Stands beside the other outputs of :class:`Outputs`; what ``element`` captures is a list, one value for each.
    """

    __slots__ = ()

    def __repr__(self) -> str:
        return f"every {_shown(self.element)}"


class OneOf(Expression):
    """A value that matches any of ``alternatives``; the first that leads to a match of the whole counts."""

    __slots__ = ("alternatives",)

    def __init__(self, *alternatives: Any) -> None:
        self.alternatives = alternatives

    def parts(self) -> tuple[Any, ...]:
        return self.alternatives

    def __repr__(self) -> str:
        return "(" + " | ".join(map(_shown, self.alternatives)) + ")"


class Outputs(Expression):
    """Several values at once: the results of a pattern with more than one. Only at the top."""

    __slots__ = ("roots",)

    def __init__(self, *roots: Call | Repeated) -> None:
        if not roots or not isinstance(roots[0], Call):
            raise ValueError("the first output of a pattern is a call")
        self.roots = roots

    def parts(self) -> tuple[Any, ...]:
        return self.roots

    def __repr__(self) -> str:
        return "outputs(" + ", ".join(map(repr, self.roots)) + ")"


def same_constant(expected: Any, value: Any) -> bool:
    """Whether two constants are equal as arguments: numbers by value, symbolic sizes as expressions."""
    if isinstance(value, torch.fx.Node):
        value = value.meta.get("val")
        if not isinstance(value, SYMBOLIC):
            return False
    if isinstance(expected, SYMBOLIC) or isinstance(value, SYMBOLIC):
        return bool(expression(expected) == expression(value))
    if isinstance(expected, bool) or isinstance(value, bool):
        return expected is value
    if isinstance(expected, (int, float)) and isinstance(value, (int, float)):
        return expected == value or (math.isnan(expected) and math.isnan(value))
    if isinstance(expected, (list, tuple)) and isinstance(value, (list, tuple)):
        return len(expected) == len(value) and all(map(same_constant, expected, value))
    return type(expected) is type(value) and bool(expected == value)


def subexpressions(
    top: Any, parts: Callable[[Expression], tuple[Any, ...]] = methodcaller("parts")
) -> Iterator[Expression]:
    """Every expression in ``top``, each once, outer ones first; ``parts`` says which parts of one to go into."""
    seen: set[int] = set()
    pending = [top]
    while pending:
        item = pending.pop()
        if isinstance(item, (list, tuple)):
            pending.extend(reversed(item))
        elif isinstance(item, Expression) and id(item) not in seen:
            seen.add(id(item))
            yield item
            pending.extend(reversed(parts(item)))


def capture_names(top: Any) -> tuple[str, ...]:
    """The names ``top`` captures, in the order they appear."""
    return tuple(dict.fromkeys(item.name for item in subexpressions(top) if isinstance(item, Capture)))


def target_name(target: Any) -> str:
    """How a target is written in the text of a pattern: ``aten.mm.default``, ``torch.relu``, ``.view``."""
    if isinstance(target, str):
        return f".{target}"
    if hasattr(target, "_schema"):
        return str(target)
    module = getattr(target, "__module__", "") or ""
    return f"{module}.{getattr(target, '__name__', target)}".removeprefix("builtins.")


def _shown(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_shown, value)) + "]"
    return repr(value)
