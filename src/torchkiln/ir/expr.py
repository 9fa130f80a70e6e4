"""Scalar expressions: what one iteration of a loop computes.

Expressions are immutable and hash-consed: building the same expression twice gives the same object, so a value
that two consumers want is computed once without a search. Every node knows its dtype and the loop variables it
depends on.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from functools import lru_cache
from typing import Any, ClassVar
from weakref import WeakValueDictionary

import torch

from torchkiln.ir import index as ix
from torchkiln.ir.index import Index, Substitution, Var


class Expr:
    """Base of all expressions. ``variables`` are the loop variables it depends on; ``size`` its node count.

    ``operands`` are the expressions right below it, index values read from memory included.
    """

    __slots__ = ("__weakref__", "_loads_below", "dtype", "operands", "size", "variables")
    dtype: torch.dtype
    variables: frozenset[Var]
    size: int
    operands: tuple[Expr, ...]
    _loads_below: tuple[Load, ...]  # set when first asked for


class Constant(Expr):
    """A literal. ``value`` is a Python bool, int or float."""

    __slots__ = ("value",)
    _table: ClassVar[WeakValueDictionary[Any, Constant]] = WeakValueDictionary()
    value: bool | int | float

    def __new__(cls, value: bool | int | float, dtype: torch.dtype) -> Constant:
        key = (repr(value), dtype)  # repr tells -0.0 from 0.0 and makes NaN equal to itself
        found = cls._table.get(key)
        if found is None:
            found = object.__new__(cls)
            found.value = value
            found.dtype = dtype
            found.variables = frozenset()
            found.size = 1
            found.operands = ()
            cls._table[key] = found
        return found

    def __repr__(self) -> str:
        return f"{self.value!r}"


class Load(Expr):
    """The element of ``buffer`` at ``subscripts``."""

    __slots__ = ("buffer", "subscripts")
    _table: ClassVar[WeakValueDictionary[Any, Load]] = WeakValueDictionary()
    buffer: str
    subscripts: tuple[Index, ...]

    def __new__(cls, buffer: str, subscripts: tuple[Index, ...], dtype: torch.dtype) -> Load:
        key = (buffer, subscripts, dtype)
        found = cls._table.get(key)
        if found is None:
            found = object.__new__(cls)
            found.buffer = buffer
            found.subscripts = subscripts
            found.dtype = dtype
            found.variables = frozenset().union(*(s.variables() for s in subscripts)) if subscripts else frozenset()
            found.size = 1 + sum(
                atom.value.size for s in subscripts for atom in s.atoms() if isinstance(atom, ix.DataIndex)
            )
            found.operands = tuple(v for s in subscripts for v in index_operands(s))
            cls._table[key] = found
        return found

    def __repr__(self) -> str:
        return f"{self.buffer}[{', '.join(map(repr, self.subscripts))}]"


class IndexValue(Expr):
    """An index used as a value (iota, positions, masks by position)."""

    __slots__ = ("index",)
    _table: ClassVar[WeakValueDictionary[Any, IndexValue]] = WeakValueDictionary()
    index: Index

    def __new__(cls, index: Index, dtype: torch.dtype) -> IndexValue:
        key = (index, dtype)
        found = cls._table.get(key)
        if found is None:
            found = object.__new__(cls)
            found.index = index
            found.dtype = dtype
            found.variables = index.variables()
            found.size = 1
            found.operands = index_operands(index)
            cls._table[key] = found
        return found

    def __repr__(self) -> str:
        return f"index({self.index})"


class Op(Expr):
    """An operation of the fixed vocabulary in :mod:`torchkiln.ir.ops` on scalar operands."""

    __slots__ = ("args", "name")
    _table: ClassVar[WeakValueDictionary[Any, Op]] = WeakValueDictionary()
    name: str
    args: tuple[Expr, ...]

    def __new__(cls, name: str, args: tuple[Expr, ...], dtype: torch.dtype) -> Op:
        key = (name, args, dtype)
        found = cls._table.get(key)
        if found is None:
            found = object.__new__(cls)
            found.name = name
            found.args = args
            found.dtype = dtype
            found.variables = frozenset().union(*(a.variables for a in args)) if args else frozenset()
            found.size = 1 + sum(a.size for a in args)
            found.operands = args
            cls._table[key] = found
        return found

    def __repr__(self) -> str:
        suffix = f":{str(self.dtype).removeprefix('torch.')}" if self.name in ("cast", "narrow") else ""
        return f"{self.name}{suffix}({', '.join(map(repr, self.args))})"


class Masked(Expr):
    """``body`` where ``condition`` holds, else zero; ``body`` reads no memory where it does not hold."""

    __slots__ = ("body", "condition")
    _table: ClassVar[WeakValueDictionary[Any, Masked]] = WeakValueDictionary()
    condition: Expr
    body: Expr

    def __new__(cls, condition: Expr, body: Expr) -> Masked:
        key = (condition, body)
        found = cls._table.get(key)
        if found is None:
            found = object.__new__(cls)
            found.condition = condition
            found.body = body
            found.dtype = body.dtype
            found.variables = condition.variables | body.variables
            found.size = 1 + condition.size + body.size
            found.operands = (condition, body)
            cls._table[key] = found
        return found

    def __repr__(self) -> str:
        return f"masked({self.condition}, {self.body})"


class Reduced(Expr):
    """The result of reduction ``name`` of the kernel this expression belongs to, at the current row."""

    __slots__ = ("name",)
    _table: ClassVar[WeakValueDictionary[Any, Reduced]] = WeakValueDictionary()
    name: str

    def __new__(cls, name: str, rows: frozenset[Var], dtype: torch.dtype) -> Reduced:
        key = (name, rows, dtype)
        found = cls._table.get(key)
        if found is None:
            found = object.__new__(cls)
            found.name = name
            found.dtype = dtype
            found.variables = rows
            found.size = 1
            found.operands = ()
            cls._table[key] = found
        return found

    def __repr__(self) -> str:
        return f"{self.name}"


def rewrite(
    expr: Expr, leaf: Callable[[Expr], Expr | None], mapping: Substitution, memo: dict[Expr, Expr]
) -> Expr:
    """Rebuild ``expr``: ``leaf`` may replace a load or reduced value, ``mapping`` replaces loop variables and sizes.

    ``leaf`` sees each node *after* substitution of its subscripts and returns a replacement or None. ``memo``
    must belong to one (leaf, mapping) pair; it makes the work linear in distinct nodes. Expressions may be deeper
    than Python's stack.
    """
    for node in walk((expr,), memo):
        memo[node] = _rebuilt(node, leaf, mapping, memo)
    return memo[expr]


def _rebuilt(
    node: Expr, leaf: Callable[[Expr], Expr | None], mapping: Substitution, done: Mapping[Expr, Expr]
) -> Expr:
    """One node, its operands being rebuilt already."""
    again = done.__getitem__
    if isinstance(node, Op):
        args = tuple(again(a) for a in node.args)
        return node if args == node.args else simplify(node.name, args, node.dtype)
    if isinstance(node, Load):
        subscripts = tuple(ix.substitute(s, mapping, again) for s in node.subscripts)
        load = node if subscripts == node.subscripts else Load(node.buffer, subscripts, node.dtype)
        return leaf(load) or load
    if isinstance(node, IndexValue):
        index = ix.substitute(node.index, mapping, again)
        return node if index is node.index else IndexValue(index, node.dtype)
    if isinstance(node, Masked):
        condition, body = again(node.condition), again(node.body)
        if isinstance(condition, Constant):
            return body if condition.value else Constant(0, node.dtype)
        return Masked(condition, body)
    if isinstance(node, Reduced):
        return leaf(node) or node
    return node


def walk(roots: tuple[Expr, ...], known: Container[Expr] = ()) -> list[Expr]:
    """Every distinct node below ``roots`` (index values read from memory included), operands first.

    Nothing at or below a node of ``known`` is visited.
    """
    seen: set[Expr] = set()
    order: list[Expr] = []
    stack: list[tuple[Expr, bool]] = [(r, False) for r in reversed(roots)]
    while stack:
        node, expanded = stack.pop()
        if expanded:
            order.append(node)
            continue
        if node in seen or node in known:
            continue
        seen.add(node)
        if not node.operands:
            order.append(node)
            continue
        stack.append((node, True))
        stack.extend([(child, False) for child in reversed(node.operands)])
    return order


@lru_cache(maxsize=1 << 12)
def index_operands(index: Index) -> tuple[Expr, ...]:
    """Values read from memory that an index depends on."""
    found: list[Expr] = []
    for atom in index.atoms():
        if isinstance(atom, ix.DataIndex):
            found.append(atom.value)
        elif isinstance(atom, (ix.Quotient, ix.Remainder)):
            found.extend(index_operands(atom.numerator))
    return tuple(found)


def loads(value: Expr) -> tuple[Load, ...]:
    """Every distinct load at or below ``value``."""
    below = getattr(value, "_loads_below", None)
    if below is None:
        # Without the value itself, which would keep itself alive.
        below = value._loads_below = tuple(n for n in walk((value,)) if isinstance(n, Load) and n is not value)
    return (*below, value) if isinstance(value, Load) else below


_HALF = (torch.bfloat16, torch.float16)


def cast(value: Expr, dtype: torch.dtype, *, exact: bool = True) -> Expr:
    """``value`` converted to ``dtype``.

    Not ``exact`` marks the rounding of a half-precision result as one that may be skipped when the value is
    widened again right away; a conversion that the user wrote is exact.
    """
    if value.dtype == dtype:
        return value
    if isinstance(value, Constant):
        return _fold_cast(value, dtype)
    if dtype == torch.float32 and isinstance(value, Op) and value.name == "narrow":
        return value.args[0]
    narrows = not exact and dtype in _HALF and value.dtype == torch.float32
    return Op("narrow" if narrows else "cast", (value,), dtype)


def _fold_cast(value: Constant, dtype: torch.dtype) -> Expr:
    folded = torch.tensor(value.value, dtype=value.dtype).to(dtype).item()
    assert isinstance(folded, (bool, int, float))
    return Constant(folded, dtype)


def simplify(name: str, args: tuple[Expr, ...], dtype: torch.dtype) -> Expr:
    """An :class:`Op`, or something simpler that is equal for every input, NaN and signed zero included."""
    if name in ("cast", "narrow"):
        return cast(args[0], dtype, exact=name == "cast")
    if name == "where":
        condition, yes, no = args
        if isinstance(condition, Constant):
            return yes if condition.value else no
        if yes is no:
            return yes
    if name in ("lt", "le", "gt", "ge", "eq", "ne") and all(isinstance(a, IndexValue | Constant) for a in args):
        known = _compare_by_range(name, *args)
        if known is not None:
            return Constant(known, torch.bool)
    if name in ("logical_and", "bitwise_and") and dtype == torch.bool:
        for this, other in (args, args[::-1]):
            if isinstance(this, Constant):
                return other if this.value else this
    if name in ("logical_or", "bitwise_or") and dtype == torch.bool:
        for this, other in (args, args[::-1]):
            if isinstance(this, Constant):
                return this if this.value else other
    if name == "mul" and dtype.is_floating_point:
        for this, other in (args, args[::-1]):
            if isinstance(this, Constant) and this.value == 1:
                return other
    return Op(name, args, dtype)


def _compare_by_range(name: str, left: Expr, right: Expr) -> bool | None:
    """The truth of a comparison of positions that holds over the whole iteration space, if it does."""

    if isinstance(left, Constant) and isinstance(right, Constant):
        return None
    a, b = _as_position(left), _as_position(right)
    if a is None or b is None:
        return None
    if name in ("gt", "ge"):
        a, b, name = b, a, {"gt": "lt", "ge": "le"}[name]
    if name in ("lt", "le"):
        b = b + 1 if name == "le" else b
        return True if _below(a, b) else False if _below(b, a + 1) else None
    if _below(a, b) or _below(b, a):
        return name == "ne"
    return name == "eq" if a is b else None


def _below(left: Index, right: Index) -> bool:
    if left.bounds[1] < right.bounds[0]:
        return True
    return bool(ix.sizes_in(left) or ix.sizes_in(right)) and ix.known_below(left - right, 0)


def _as_position(side: Expr) -> Index | None:
    if isinstance(side, IndexValue):
        return side.index
    whole = isinstance(side, Constant) and not side.dtype.is_floating_point
    return ix.constant(int(side.value)) if whole and isinstance(side, Constant) else None
