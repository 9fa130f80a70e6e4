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


def _below(extent: Extent) -> tuple[int, int]:
    return 0, max(bounds_of(extent)[1] - 1, 0)


class Bounded:
    """Base of atoms and indices: integers in ``bounds``."""

    __slots__ = ("bounds",)
    bounds: tuple[int, int]


@hash_consed()
class Size(Bounded):
    """An integer in ``bounds`` known when the graph runs. ``hint`` is a typical value, for choices of speed."""

    name: str
    low: int
    high: int
    hint: int

    def __post_init__(self) -> None:
        self.bounds = (self.low, self.high)

    def __repr__(self) -> str:
        return self.name


@hash_consed()
class Var(Bounded):
    """A loop variable: an integer in ``[0, extent)``."""

    name: str
    extent: Extent

    def __post_init__(self) -> None:
        self.bounds = _below(self.extent)

    def __repr__(self) -> str:
        return self.name


@hash_consed()
class Quotient(Bounded):
    """``numerator // divisor`` with a positive divisor, kept only when it does not simplify."""

    numerator: Index
    divisor: Extent

    def __post_init__(self) -> None:
        low, high = self.numerator.bounds
        least, most = (max(end, 1) for end in bounds_of(self.divisor))
        self.bounds = (low // (least if low < 0 else most), high // (most if high < 0 else least))

    def __repr__(self) -> str:
        return f"({_operand(self.numerator)} // {_operand(self.divisor)})"


@hash_consed()
class Remainder(Bounded):
    """``numerator % divisor`` (sign of the divisor, which is positive), kept only when it does not simplify."""

    numerator: Index
    divisor: Extent

    def __post_init__(self) -> None:
        self.bounds = _below(self.divisor)

    def __repr__(self) -> str:
        return f"({_operand(self.numerator)} % {_operand(self.divisor)})"


@hash_consed()
class DataIndex(Bounded):
    """An index read from memory, in ``[0, extent)``.

    ``checked`` says that the value must be verified at run time; an unchecked one is known to be in range.
    ``wraps`` says that a negative value counts from the end.
    """

    value: Expr
    extent: Extent
    checked: bool
    wraps: bool

    def __post_init__(self) -> None:
        self.bounds = _below(self.extent)

    def __repr__(self) -> str:
        return f"[{self.value}]"


Atom = Union[Var, Size, Quotient, Remainder, DataIndex]


def _operand(index: Extent) -> str:
    """An index as text next to an operator that binds more strongly than a sum."""
    if isinstance(index, int) or not index.terms:
        return f"{index}"
    ((monomial, coefficient), *more) = [*index.terms.items(), ((), index.const)]
    plain = not index.const and len(more) == 1 and coefficient == 1 and len(monomial) == 1
    return f"{index}" if plain else f"({index})"
