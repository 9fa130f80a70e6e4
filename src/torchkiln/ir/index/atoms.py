"""What indices are made of: variables, sizes, divisions that stay, values read from memory. Each knows its range."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Union
from weakref import WeakValueDictionary

if TYPE_CHECKING:
    from torchkiln.ir.expr import Expr
    from torchkiln.ir.index.algebra import Index

Monomial = tuple["Atom", ...]
Extent = Union[int, "Index"]


def bounds_of(size: Extent) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else size.bounds


class Size:
    """A whole number in ``bounds`` known when the graph runs. ``hint`` is a typical value, for choices of speed."""

    __slots__ = ("__weakref__", "bounds", "hint", "name")
    _table: ClassVar[WeakValueDictionary[tuple[str, int, int, int], Size]] = WeakValueDictionary()
    name: str
    bounds: tuple[int, int]
    hint: int

    def __new__(cls, name: str, low: int, high: int, hint: int) -> Size:
        key = (name, low, high, hint)
        found = cls._table.get(key)
        if found is None:
            found = object.__new__(cls)
            found.name = name
            found.bounds = (low, high)
            found.hint = hint
            cls._table[key] = found
        return found

    def __repr__(self) -> str:
        return self.name


class Var:
    """A loop variable: an integer in ``[0, extent)``."""

    __slots__ = ("__weakref__", "extent", "name")
    _table: ClassVar[WeakValueDictionary[tuple[str, Extent], Var]] = WeakValueDictionary()
    name: str
    extent: Extent

    def __new__(cls, name: str, extent: Extent) -> Var:
        key = (name, extent)
        found = cls._table.get(key)
        if found is None:
            found = object.__new__(cls)
            found.name = name
            found.extent = extent
            cls._table[key] = found
        return found

    def __repr__(self) -> str:
        return self.name

    @property
    def bounds(self) -> tuple[int, int]:
        return 0, max(bounds_of(self.extent)[1] - 1, 0)


class Quotient:
    """``numerator // divisor`` with a positive divisor, kept only when it does not simplify."""

    __slots__ = ("__weakref__", "bounds", "divisor", "numerator")
    _table: ClassVar[WeakValueDictionary[tuple[Index, Extent], Quotient]] = WeakValueDictionary()
    numerator: Index
    divisor: Extent
    bounds: tuple[int, int]

    def __new__(cls, numerator: Index, divisor: Extent) -> Quotient:
        key = (numerator, divisor)
        found = cls._table.get(key)
        if found is None:
            found = object.__new__(cls)
            found.numerator = numerator
            found.divisor = divisor
            low, high = numerator.bounds
            least, most = (max(end, 1) for end in bounds_of(divisor))
            found.bounds = (low // (least if low < 0 else most), high // (most if high < 0 else least))
            cls._table[key] = found
        return found

    def __repr__(self) -> str:
        return f"({_operand(self.numerator)} // {_operand(self.divisor)})"


class Remainder:
    """``numerator % divisor`` (sign of the divisor, which is positive), kept only when it does not simplify."""

    __slots__ = ("__weakref__", "bounds", "divisor", "numerator")
    _table: ClassVar[WeakValueDictionary[tuple[Index, Extent], Remainder]] = WeakValueDictionary()
    numerator: Index
    divisor: Extent
    bounds: tuple[int, int]

    def __new__(cls, numerator: Index, divisor: Extent) -> Remainder:
        key = (numerator, divisor)
        found = cls._table.get(key)
        if found is None:
            found = object.__new__(cls)
            found.numerator = numerator
            found.divisor = divisor
            found.bounds = (0, max(bounds_of(divisor)[1] - 1, 0))
            cls._table[key] = found
        return found

    def __repr__(self) -> str:
        return f"({_operand(self.numerator)} % {_operand(self.divisor)})"


class DataIndex:
    """An index read from memory, in ``[0, extent)``.

    ``checked`` says that the value must be verified at run time; an unchecked one is known to be in range.
    ``wraps`` says that a negative value counts from the end.
    """

    __slots__ = ("__weakref__", "checked", "extent", "value", "wraps")
    _table: ClassVar[WeakValueDictionary[tuple[Expr, Extent, bool, bool], DataIndex]] = WeakValueDictionary()
    value: Expr
    extent: Extent
    checked: bool
    wraps: bool

    def __new__(cls, value: Expr, extent: Extent, checked: bool = True, wraps: bool = True) -> DataIndex:
        key = (value, extent, checked, wraps)
        found = cls._table.get(key)
        if found is None:
            found = object.__new__(cls)
            found.value = value
            found.extent = extent
            found.checked = checked
            found.wraps = wraps
            cls._table[key] = found
        return found

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
