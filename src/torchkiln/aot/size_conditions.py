"""Conditions that the sizes of one call must fulfil together, such as that one is no larger than another.

They are trees of plain data, compared by Python and, in a library, by C. Nothing of the compiler is imported here.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from functools import reduce
from typing import Any, Union

Tree = Union[int, tuple[Any, ...]]
"""An integer, ("symbol", its number), or the name of one of :data:`OPERATIONS` and the trees of its arguments."""

_OF_TWO: dict[str, Callable[[Any, Any], Any]] = {
    **{name: getattr(operator, name) for name in ("add", "mul", "floordiv", "mod")},
    **{name: getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")},
    "and": lambda left, right: bool(left and right),
    "or": lambda left, right: bool(left or right),
    "min": min, "max": max,
}
OPERATIONS = frozenset({*_OF_TWO, "not"})

_IN_C = {
    "add": "({} + {})", "mul": "({} * {})",
    "floordiv": "quotient({}, {}, &undefined)", "mod": "remainder_of({}, {}, &undefined)",
    "eq": "({} == {})", "ne": "({} != {})", "lt": "({} < {})", "le": "({} <= {})",
    "gt": "({} > {})", "ge": "({} >= {})", "and": "({} && {})", "or": "({} || {})",
    "min": "smaller({}, {})", "max": "larger({}, {})", "not": "!{}",
}


@dataclass(frozen=True)
class SizeCondition:
    """What must hold, as a tree over symbols by number, and as text with the names of sizes."""

    tree: Tree
    text: str

    def holds(self, values: Mapping[int, int]) -> bool:
        """Whether it does where symbols have these ``values``; a division by zero means that it does not."""
        try:
            return bool(_value(self.tree, values))
        except ZeroDivisionError:
            return False

    def symbols(self) -> frozenset[int]:
        return frozenset(_symbols(self.tree))

    def in_c(self) -> str:
        """An expression of the array ``symbols``, which sets ``undefined`` where it divides by zero."""
        return _in_c(self.tree)


def check_condition(condition: SizeCondition, symbols: Set[int]) -> None:
    """Raise TypeError or ValueError for what is no condition on these symbols."""
    if type(condition) is not SizeCondition or type(condition.text) is not str:
        raise TypeError("a condition on sizes is none")
    _check_tree(condition.tree, symbols)


def _check_tree(tree: Any, symbols: Set[int]) -> None:
    if type(tree) is int:
        return
    if type(tree) is not tuple or not tree:
        raise TypeError("a condition on sizes is no tree")
    name, *parts = tree
    if name == "symbol":
        if len(parts) != 1 or type(parts[0]) is not int or parts[0] not in symbols:
            raise ValueError("a condition is on a size that is none")
        return
    if name not in OPERATIONS or (len(parts) != 1 if name == "not" else len(parts) < 2):
        raise ValueError("a condition on sizes computes what no condition does")
    for part in parts:
        _check_tree(part, symbols)


def _value(tree: Tree, values: Mapping[int, int]) -> Any:
    if isinstance(tree, int):
        return tree
    name, *parts = tree
    if name == "symbol":
        return values[parts[0]]
    computed = [_value(part, values) for part in parts]
    return not computed[0] if name == "not" else reduce(_OF_TWO[name], computed)


def _symbols(tree: Tree) -> set[int]:
    if isinstance(tree, int):
        return set()
    name, *parts = tree
    return {parts[0]} if name == "symbol" else set().union(*map(_symbols, parts))


def _in_c(tree: Tree) -> str:
    if isinstance(tree, int):
        return f"INT64_C({tree})"
    name, *parts = tree
    if name == "symbol":
        return f"symbols[{parts[0]}]"
    texts = [_in_c(part) for part in parts]
    return _IN_C[name].format(*texts) if name == "not" else reduce(_IN_C[name].format, texts)
