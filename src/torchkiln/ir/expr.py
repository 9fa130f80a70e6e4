"""Scalar expressions: what one iteration of a loop computes.

Expressions are immutable and hash-consed: building the same expression twice gives the same object, so a value
that two consumers want is computed once without a search. Every node knows its dtype and the loop variables it
depends on.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Union
from typing import cast as typed

import torch

from torchkiln.graph.dtypes import HALF
from torchkiln.ir import index as ix
from torchkiln.ir.hash_consing import hash_consed
from torchkiln.ir.index import Extent, Index, Substitution, Var
from torchkiln.ir.ops import COMPARISONS, OPS

Scalar = Union["Expr", bool, int, float, Index]
"""What an operator of Python takes beside an expression: numbers become constants of its dtype."""


def _operator(name: str, *, reflected: bool = False) -> Callable[[Expr, Scalar], Expr]:
    """A binary operation of two values of one dtype, of which the first is ``self`` unless ``reflected``."""

    def apply(self: Expr, other: Scalar) -> Expr:
        operand = literal(other, self.dtype)
        return op(name, operand, self) if reflected else op(name, self, operand)

    return apply


class Expr:
    """Base of all expressions. ``variables`` are the loop variables it depends on; ``size`` its node count.

    ``operands`` are the expressions right below it, index values read from memory included. Operators of Python build
    expressions; ``==`` alone is identity, and ``eq`` the comparison.
    """

    __slots__ = ("__weakref__", "_reads_below", "dtype", "operands", "size", "variables")
    dtype: torch.dtype
    variables: frozenset[Var]
    size: int
    operands: tuple[Expr, ...]
    _reads_below: tuple[Expr, ...]  # set when first asked for

    def _depend_on(self, operands: tuple[Expr, ...], variables: frozenset[Var]) -> None:
        self.operands, self.variables = operands, variables
        self.size = 1 + sum(operand.size for operand in operands)

    __add__, __radd__ = _operator("add"), _operator("add", reflected=True)
    __sub__, __rsub__ = _operator("sub"), _operator("sub", reflected=True)
    __mul__, __rmul__ = _operator("mul"), _operator("mul", reflected=True)
    __truediv__, __rtruediv__ = _operator("div"), _operator("div", reflected=True)
    __lt__, __le__, __gt__, __ge__ = map(_operator, ("lt", "le", "gt", "ge"))
    eq, ne = _operator("eq"), _operator("ne")
    __and__, __or__, __xor__ = map(_operator, ("logical_and", "logical_or", "logical_xor"))

    def __neg__(self) -> Expr:
        return op("neg", self)

    def __invert__(self) -> Expr:
        return op("logical_not", self)


# By its text, which tells -0.0 from 0.0 and makes NaN equal to itself.
@hash_consed(key=lambda value, dtype: (repr(value), dtype))
class Constant(Expr):
    """A literal. ``value`` is a Python bool, int or float."""

    value: bool | int | float
    dtype: torch.dtype

    def __post_init__(self) -> None:
        self._depend_on((), frozenset())

    def __repr__(self) -> str:
        return f"{self.value!r}"


@hash_consed()
class Load(Expr):
    """The element of a program's ``buffer`` at ``subscripts``."""

    buffer: str
    subscripts: tuple[Index, ...]
    dtype: torch.dtype

    def __post_init__(self) -> None:
        operands = tuple(value for s in self.subscripts for value in index_operands(s))
        self._depend_on(operands, frozenset().union(*(s.variables() for s in self.subscripts)))

    def __repr__(self) -> str:
        return f"{self.buffer}[{', '.join(map(repr, self.subscripts))}]"


@dataclass(frozen=True)
class Parameter:
    """The memory that a kernel's pointer parameter ``number`` points to."""

    number: int

    def __str__(self) -> str:
        return f"%{self.number}"


@dataclass(frozen=True)
class ScratchRow:
    """Row ``number`` of the values that a kernel keeps from one phase to the next."""

    number: int

    def __str__(self) -> str:
        return f"scratch{self.number}"


@dataclass(frozen=True)
class TileBuffer:
    """Where operand ``number`` of those that a kernel accesses in tiles lies along the lanes."""

    number: int

    def __str__(self) -> str:
        return f"tile{self.number}"


KernelMemory = Parameter | ScratchRow | TileBuffer


@hash_consed()
class FlatLoad(Expr):
    """Within a kernel, the element of ``memory`` at ``offset``."""

    memory: KernelMemory
    offset: Index
    dtype: torch.dtype

    def __post_init__(self) -> None:
        self._depend_on(index_operands(self.offset), self.offset.variables())

    def __repr__(self) -> str:
        return f"{self.memory}[{self.offset!r}]"


@hash_consed()
class IndexValue(Expr):
    """An index used as a value: iota, comparisons of subscripts."""

    index: Index
    dtype: torch.dtype

    def __post_init__(self) -> None:
        self._depend_on(index_operands(self.index), self.index.variables())

    def __repr__(self) -> str:
        return f"index({self.index})"


@hash_consed()
class Op(Expr):
    """An operation of the fixed vocabulary in :mod:`torchkiln.ir.ops` on scalar operands."""

    name: str
    args: tuple[Expr, ...]
    dtype: torch.dtype

    def __post_init__(self) -> None:
        self._depend_on(self.args, frozenset().union(*(a.variables for a in self.args)))

    def __repr__(self) -> str:
        suffix = f":{str(self.dtype).removeprefix('torch.')}" if self.name in ("cast", "narrow") else ""
        return f"{self.name}{suffix}({', '.join(map(repr, self.args))})"


@hash_consed()
class Masked(Expr):
    """``body`` where ``condition`` holds, else zero; ``body`` reads no memory where it does not hold."""

    condition: Expr
    body: Expr

    def __post_init__(self) -> None:
        self.dtype = self.body.dtype
        self._depend_on((self.condition, self.body), self.condition.variables | self.body.variables)

    def __repr__(self) -> str:
        return f"masked({self.condition}, {self.body})"


@hash_consed()
class Reduced(Expr):
    """The result of reduction ``name`` of the kernel this expression belongs to, at the current row."""

    name: str
    variables: frozenset[Var]
    dtype: torch.dtype

    def __post_init__(self) -> None:
        self._depend_on((), self.variables)

    def __repr__(self) -> str:
        return f"{self.name}"


@hash_consed()
class Interleaved(Expr):
    """Within a kernel, several values at one point, of which a store makes neighbouring elements."""

    parts: tuple[Expr, ...]

    def __post_init__(self) -> None:
        self.dtype = self.parts[0].dtype
        self._depend_on(self.parts, frozenset().union(*(part.variables for part in self.parts)))

    def __repr__(self) -> str:
        return f"interleaved({', '.join(map(repr, self.parts))})"


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
    rebuilt = done.__getitem__
    if isinstance(node, Op):
        args = tuple(rebuilt(a) for a in node.args)
        return node if args == node.args else simplify(node.name, args, node.dtype)
    if isinstance(node, Load):
        subscripts = tuple(ix.substitute(s, mapping, rebuilt) for s in node.subscripts)
        load = node if subscripts == node.subscripts else Load(node.buffer, subscripts, node.dtype)
        return leaf(load) or load
    if isinstance(node, FlatLoad):
        offset = ix.substitute(node.offset, mapping, rebuilt)
        return node if offset is node.offset else FlatLoad(node.memory, offset, node.dtype)
    if isinstance(node, IndexValue):
        index = ix.substitute(node.index, mapping, rebuilt)
        return node if index is node.index else IndexValue(index, node.dtype)
    if isinstance(node, Masked):
        return masked(rebuilt(node.condition), rebuilt(node.body))
    if isinstance(node, Reduced):
        return leaf(node) or node
    if isinstance(node, Interleaved):
        return Interleaved(tuple(rebuilt(part) for part in node.parts))
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
    """Every distinct load at or below a value of a program."""
    return typed("tuple[Load, ...]", _reads(value))


def reads_memory(value: Expr) -> bool:
    """Whether there is a load at or below ``value``."""
    return bool(_reads(value))


def _reads(value: Expr) -> tuple[Expr, ...]:
    below = getattr(value, "_reads_below", None)
    if below is None:
        found = (node for node in walk((value,)) if isinstance(node, (Load, FlatLoad)))
        # Without the value itself, which would keep itself alive.
        below = value._reads_below = tuple(node for node in found if node is not value)
    return (*below, value) if isinstance(value, (Load, FlatLoad)) else below


def cast(value: Expr, dtype: torch.dtype, *, exact: bool = True) -> Expr:
    """``value`` converted to ``dtype``.

    Not ``exact`` marks the rounding of a half-precision result as one that may be skipped when the value is
    widened again right away; a conversion that the user wrote is exact.
    """
    if value.dtype == dtype:
        return value
    if isinstance(value, Constant):
        return literal(torch.tensor(value.value, dtype=value.dtype, device="cpu").to(dtype).item(), dtype)
    if dtype == torch.float32 and isinstance(value, Op) and value.name == "narrow":
        return value.args[0]
    narrows = not exact and dtype in HALF and value.dtype == torch.float32
    return Op("narrow" if narrows else "cast", (value,), dtype)


def index_value(index: Extent) -> Expr:
    """An index, or an extent, as a value of 64 bits."""
    return IndexValue(ix.as_index(index), torch.int64)


def literal(value: Scalar, dtype: torch.dtype) -> Expr:
    """A number, known while compiling or not, as a value of ``dtype``."""
    if isinstance(value, Expr):
        return cast(value, dtype)
    if isinstance(value, Index):
        return cast(index_value(value), dtype) if value.terms else literal(value.const, dtype)
    if dtype == torch.bool:
        return Constant(bool(value), dtype)
    return Constant(float(value) if dtype.is_floating_point else int(value), dtype)


def op(name: str, *args: Expr) -> Expr:
    """An operation whose operands decide the dtype of its result."""
    return simplify(name, args, OPS[name].result([arg.dtype for arg in args]))


def where(condition: Expr, yes: Scalar, no: Scalar) -> Expr:
    """One of two values of one dtype, of which at least one is an expression."""
    like = yes if isinstance(yes, Expr) else no
    assert isinstance(like, Expr)
    return op("where", condition, literal(yes, like.dtype), literal(no, like.dtype))


def masked(condition: Expr, body: Expr) -> Expr:
    """A :class:`Masked`, or something simpler where the condition is known."""
    if isinstance(condition, Constant):
        return body if condition.value else Constant(0, body.dtype)
    return Masked(condition, body)


def simplify(name: str, args: tuple[Expr, ...], dtype: torch.dtype) -> Expr:
    """An :class:`Op`, or something simpler that is equal for every input, NaN and signed zero included."""
    rule = _RULES.get(name)
    simpler = None if rule is None else rule(args, dtype)
    return Op(name, args, dtype) if simpler is None else simpler


Rule = Callable[[tuple[Expr, ...], torch.dtype], Expr | None]
"""Something simpler than one operation on these operands, or None."""


def _where(args: tuple[Expr, ...], dtype: torch.dtype) -> Expr | None:
    condition, yes, no = args
    if isinstance(condition, Constant):
        return yes if condition.value else no
    return yes if yes is no else None


def _logic(absorbing: bool) -> Rule:
    """``and`` or ``or`` of bools: one constant decides alone, the other changes nothing."""

    def rule(args: tuple[Expr, ...], dtype: torch.dtype) -> Expr | None:
        if dtype == torch.bool:
            for this, other in (args, args[::-1]):
                if isinstance(this, Constant):
                    return this if bool(this.value) is absorbing else other
        return None

    return rule


def _mul(args: tuple[Expr, ...], dtype: torch.dtype) -> Expr | None:
    if dtype.is_floating_point:
        for this, other in (args, args[::-1]):
            if isinstance(this, Constant) and this.value == 1:
                return other
    return None


def _remainder(args: tuple[Expr, ...], dtype: torch.dtype) -> Expr | None:
    """Of an index by a size: an index too, of which more is known than of a value."""
    numerator, divisor = (_as_index(side) for side in args)
    if dtype != torch.int64 or numerator is None or divisor is None or not numerator.terms:
        return None
    if divisor.bounds[0] < 1 or divisor.variables() or any(isinstance(a, ix.DataIndex) for a in divisor.atoms()):
        return None
    return IndexValue(numerator % ix.extent(divisor), dtype)


def _by_range(holds: Callable[[Index, Index], bool | None]) -> Rule:
    """A comparison of indices with one outcome over the whole iteration space."""

    def rule(args: tuple[Expr, ...], dtype: torch.dtype) -> Expr | None:
        left, right = args
        if isinstance(left, Constant) and isinstance(right, Constant):
            return None
        a, b = _as_index(left), _as_index(right)
        known = None if a is None or b is None else holds(a, b)
        return None if known is None else Constant(known, torch.bool)

    return rule


def _less(a: Index, b: Index) -> bool | None:
    return True if _below(a, b) else False if _below(b, a + 1) else None


def _differ(a: Index, b: Index) -> bool | None:
    return True if _below(a, b) or _below(b, a) else False if a is b else None


def _equal(a: Index, b: Index) -> bool | None:
    differ = _differ(a, b)
    return None if differ is None else not differ


def _below(left: Index, right: Index) -> bool:
    if left.bounds[1] < right.bounds[0]:
        return True
    return bool(ix.sizes_in(left) or ix.sizes_in(right)) and ix.known_below(left - right, 0)


def _as_index(side: Expr) -> Index | None:
    if isinstance(side, IndexValue):
        return side.index
    if isinstance(side, Constant) and not side.dtype.is_floating_point:
        return ix.constant(int(side.value))
    return None


_RULES: dict[str, Rule] = {
    "cast": lambda args, dtype: cast(args[0], dtype),
    "narrow": lambda args, dtype: cast(args[0], dtype, exact=False),
    "where": _where,
    "lt": _by_range(_less),
    "le": _by_range(lambda a, b: _less(a, b + 1)),
    "gt": _by_range(lambda a, b: _less(b, a)),
    "ge": _by_range(lambda a, b: _less(b, a + 1)),
    "eq": _by_range(_equal),
    "ne": _by_range(_differ),
    "logical_and": _logic(absorbing=False),
    "bitwise_and": _logic(absorbing=False),
    "logical_or": _logic(absorbing=True),
    "bitwise_or": _logic(absorbing=True),
    "mul": _mul,
    "remainder": _remainder,
}


def compares_indices(node: Expr) -> bool:
    """Whether ``node`` compares loop indices with each other or with constants, and no values."""
    return (
        isinstance(node, Op)
        and node.name in COMPARISONS
        and all(isinstance(operand, IndexValue | Constant) for operand in node.args)
    )


def cost(value: Expr) -> int:
    """Estimated work of evaluating ``value`` once, every distinct node counted once."""
    total = 0
    for node in walk((value,)):
        if isinstance(node, Op):
            total += OPS[node.name].cost
        elif not isinstance(node, Constant | IndexValue):
            total += 1
    return total
