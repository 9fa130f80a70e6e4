"""What indices are made of: variables, sizes, divisions that stay, values read from memory. Each knows its range."""

from __future__ import annotations

from typing import TYPE_CHECKING, Union

from torchkiln.ir.hash_consing import hash_consed

if TYPE_CHECKING:
    from torchkiln.ir.expr import Expr
    from torchkiln.ir.index.algebra import Index

Monomial = tuple["Atom", ...]
Extent = Union[int, "Index"]


def bounds_of(size: Extent) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else size.bounds


@hash_consed()
class Size:
    """A whole number in ``bounds`` known when the graph runs. ``hint`` is a typical value, for choices of speed."""

    __slots__ = ("__weakref__", "bounds", "hint", "name")
    name: str
    bounds: tuple[int, int]
    hint: int

    def __init__(self, name: str, low: int, high: int, hint: int) -> None:
        self.name = name
        self.bounds = (low, high)
        self.hint = hint

    def __repr__(self) -> str:
        return self.name


@hash_consed()
class Var:
    """A loop variable: an integer in ``[0, extent)``."""

    __slots__ = ("__weakref__", "extent", "name")
    name: str
    extent: Extent

    def __init__(self, name: str, extent: Extent) -> None:
        self.name = name
        self.extent = extent

    def __repr__(self) -> str:
        return self.name

    @property
    def bounds(self) -> tuple[int, int]:
        return 0, max(bounds_of(self.extent)[1] - 1, 0)


@hash_consed()
class Quotient:
    """``numerator // divisor`` with a positive divisor, kept only when it does not simplify."""

    __slots__ = ("__weakref__", "bounds", "divisor", "numerator")
    numerator: Index
    divisor: Extent
    bounds: tuple[int, int]

    def __init__(self, numerator: Index, divisor: Extent) -> None:
        self.numerator = numerator
        self.divisor = divisor
        low, high = numerator.bounds
        least, most = (max(end, 1) for end in bounds_of(divisor))
        self.bounds = (low // (least if low < 0 else most), high // (most if high < 0 else least))

    def __repr__(self) -> str:
        return f"({_operand(self.numerator)} // {_operand(self.divisor)})"


@hash_consed()
class Remainder:
    """``numerator % divisor`` (sign of the divisor, which is positive), kept only when it does not simplify."""

    __slots__ = ("__weakref__", "bounds", "divisor", "numerator")
    numerator: Index
    divisor: Extent
    bounds: tuple[int, int]

    def __init__(self, numerator: Index, divisor: Extent) -> None:
        self.numerator = numerator
        self.divisor = divisor
        self.bounds = (0, max(bounds_of(divisor)[1] - 1, 0))

    def __repr__(self) -> str:
        return f"({_operand(self.numerator)} % {_operand(self.divisor)})"


@hash_consed()
class DataIndex:
    """An index read from memory, in ``[0, extent)``.

    ``checked`` says that the value must be verified at run time; an unchecked one is known to be in range.
    ``wraps`` says that a negative value counts from the end.
    """

    __slots__ = ("__weakref__", "checked", "extent", "value", "wraps")
    value: Expr
    extent: Extent
    checked: bool
    wraps: bool

    def __init__(self, value: Expr, extent: Extent, checked: bool, wraps: bool) -> None:
        self.value = value
        self.extent = extent
        self.checked = checked
        self.wraps = wraps

    def __repr__(self) -> str:
        return f"[{self.value}]"

    @property
    def bounds(self) -> tuple[int, int]:
        return 0, max(bounds_of(self.extent)[1] - 1, 0)


Atom = Union[Var, Size, Quotient, Remainder, DataIndex]


def _operand(index: Extent) -> str:
    """An index as text next to an operator that binds more strongly than a sum."""
    if isinstance(index, int) or not index.terms:
        return f"{index}"
    ((monomial, coefficient), *more) = [*index.terms.items(), ((), index.const)]
    plain = not index.const and len(more) == 1 and coefficient == 1 and len(monomial) == 1
    return f"{index}" if plain else f"({index})"
