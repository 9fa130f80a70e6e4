"""Integer index algebra: the normal form of every subscript and offset in loop IR.

An :class:`Index` is a constant plus a sum of ``coefficient * atom * atom ...`` terms. An atom is a loop
variable, a floor division or a remainder that could not be simplified away, or a value
read from memory. Equal expressions are the same object, so equality is identity and a set of indices is cheap.

Two facts carry the simplification: every atom knows its range, and division distributes over the terms that
the divisor divides. ``(32*i + j) // 32`` is ``i`` as soon as ``j`` is known to lie in ``[0, 32)``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, Union
from weakref import WeakValueDictionary

if TYPE_CHECKING:
    from torchkiln.ir.expr import Expr

Monomial = tuple["Atom", ...]


class Var:
    """A loop variable: an integer in ``[0, extent)``."""

    __slots__ = ("__weakref__", "extent", "name")
    _table: ClassVar[WeakValueDictionary[tuple[str, int], Var]] = WeakValueDictionary()
    name: str
    extent: int

    def __new__(cls, name: str, extent: int) -> Var:
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
        return 0, max(self.extent - 1, 0)


class Quotient:
    """``numerator // divisor`` with a positive constant divisor, kept only when it does not simplify."""

    __slots__ = ("__weakref__", "bounds", "divisor", "numerator")
    _table: ClassVar[WeakValueDictionary[tuple[Index, int], Quotient]] = WeakValueDictionary()
    numerator: Index
    divisor: int
    bounds: tuple[int, int]

    def __new__(cls, numerator: Index, divisor: int) -> Quotient:
        key = (numerator, divisor)
        found = cls._table.get(key)
        if found is None:
            found = object.__new__(cls)
            found.numerator = numerator
            found.divisor = divisor
            low, high = numerator.bounds
            found.bounds = (low // divisor, high // divisor)
            cls._table[key] = found
        return found

    def __repr__(self) -> str:
        return f"({_operand(self.numerator)} // {self.divisor})"


class Remainder:
    """``numerator % divisor`` (sign of the divisor, which is positive), kept only when it does not simplify."""

    __slots__ = ("__weakref__", "bounds", "divisor", "numerator")
    _table: ClassVar[WeakValueDictionary[tuple[Index, int], Remainder]] = WeakValueDictionary()
    numerator: Index
    divisor: int
    bounds: tuple[int, int]

    def __new__(cls, numerator: Index, divisor: int) -> Remainder:
        key = (numerator, divisor)
        found = cls._table.get(key)
        if found is None:
            found = object.__new__(cls)
            found.numerator = numerator
            found.divisor = divisor
            found.bounds = (0, divisor - 1)
            cls._table[key] = found
        return found

    def __repr__(self) -> str:
        return f"({_operand(self.numerator)} % {self.divisor})"


class DataIndex:
    """An index read from memory, in ``[0, extent)``.

    ``checked`` says that the value must be verified at run time; an unchecked one is known to be in range.
    ``wraps`` says that a negative value counts from the end.
    """

    __slots__ = ("__weakref__", "checked", "extent", "value", "wraps")
    _table: ClassVar[WeakValueDictionary[tuple[Expr, int, bool, bool], DataIndex]] = WeakValueDictionary()
    value: Expr
    extent: int
    checked: bool
    wraps: bool

    def __new__(cls, value: Expr, extent: int, checked: bool = True, wraps: bool = True) -> DataIndex:
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
        return 0, max(self.extent - 1, 0)


Atom = Union[Var, Quotient, Remainder, DataIndex]


def _operand(index: Index) -> str:
    """An index as text next to an operator that binds more strongly than a sum."""
    ((monomial, coefficient), *more) = [*index.terms.items(), ((), index.const)]
    plain = not index.const and len(more) == 1 and coefficient == 1 and len(monomial) == 1
    return f"{index}" if plain else f"({index})"


def _order(monomial: Monomial) -> tuple[str, ...]:
    return tuple(repr(atom) for atom in monomial)


class Index:
    """An integer expression in normal form. Build with :func:`constant`, :func:`of` and the operators."""

    __slots__ = ("__weakref__", "bounds", "const", "terms")
    _table: ClassVar[WeakValueDictionary[tuple[frozenset[tuple[Monomial, int]], int], Index]] = WeakValueDictionary()
    terms: dict[Monomial, int]
    const: int
    bounds: tuple[int, int]

    def __new__(cls, terms: Mapping[Monomial, int], const: int) -> Index:
        key = (frozenset(terms.items()), const)
        found = cls._table.get(key)
        if found is None:
            found = object.__new__(cls)
            found.terms = dict(terms)
            found.const = const
            low = high = const
            for monomial, coefficient in terms.items():
                least, most = _monomial_bounds(monomial)
                if coefficient > 0:
                    low += coefficient * least
                    high += coefficient * most
                else:
                    low += coefficient * most
                    high += coefficient * least
            found.bounds = (low, high)
            cls._table[key] = found
        return found

    def __repr__(self) -> str:
        parts = []
        for monomial, coefficient in sorted(self.terms.items(), key=lambda item: _order(item[0])):
            product = "*".join(repr(atom) for atom in monomial)
            parts.append(product if coefficient == 1 else f"{coefficient}*{product}")
        if self.const or not parts:
            parts.append(str(self.const))
        return " + ".join(parts)

    def __add__(self, other: Index | int) -> Index:
        if isinstance(other, int):
            return self if other == 0 else Index(self.terms, self.const + other)
        if not other.terms:
            return self if other.const == 0 else Index(self.terms, self.const + other.const)
        if not self.terms and self.const == 0:
            return other
        terms = dict(self.terms)
        for monomial, coefficient in other.terms.items():
            total = terms.get(monomial, 0) + coefficient
            if total:
                terms[monomial] = total
            else:
                del terms[monomial]
        return _recombine(terms, self.const + other.const)

    __radd__ = __add__

    def __neg__(self) -> Index:
        return self * -1

    def __sub__(self, other: Index | int) -> Index:
        return self + (-other)

    def __mul__(self, other: Index | int) -> Index:
        if isinstance(other, Index) and not other.terms:
            other = other.const
        if isinstance(other, int):
            if other == 1:
                return self
            if other == 0:
                return ZERO
            return Index({m: c * other for m, c in self.terms.items()}, self.const * other)
        if not self.terms:
            return other * self.const
        result = constant(self.const * other.const)
        for left, a in self.terms.items():
            for right, b in other.terms.items():
                result = result + Index({tuple(sorted(left + right, key=repr)): a * b}, 0)
        return result + Index(self.terms, 0) * other.const + Index(other.terms, 0) * self.const

    __rmul__ = __mul__

    def __floordiv__(self, divisor: int) -> Index:
        if divisor == 1:
            return self
        if divisor <= 0:
            raise ValueError(f"index division needs a positive constant divisor, got {divisor}")
        whole = {m: c // divisor for m, c in self.terms.items() if c % divisor == 0}
        rest = {m: c for m, c in self.terms.items() if c % divisor}
        quotient = Index(whole, self.const // divisor)
        remainder = Index(rest, self.const % divisor)
        low, high = remainder.bounds
        if low // divisor == high // divisor:
            return quotient + low // divisor
        common = math.gcd(divisor, *rest.values())
        if common > 1:
            remainder = Index({m: c // common for m, c in rest.items()}, remainder.const // common)
            return quotient + remainder // (divisor // common)
        if remainder.const == 0 and len(rest) == 1:
            ((monomial, coefficient),) = rest.items()
            if coefficient == 1 and len(monomial) == 1:
                atom = monomial[0]
                if isinstance(atom, Quotient):
                    return quotient + atom.numerator // (atom.divisor * divisor)
                if isinstance(atom, Remainder) and atom.divisor % divisor == 0:
                    return quotient + (atom.numerator // divisor) % (atom.divisor // divisor)
        return quotient + of(Quotient(remainder, divisor))

    def __mod__(self, divisor: int) -> Index:
        if divisor == 1:
            return ZERO
        if divisor <= 0:
            raise ValueError(f"index remainder needs a positive constant divisor, got {divisor}")
        remainder = Index({m: c for m, c in self.terms.items() if c % divisor}, self.const % divisor)
        low, high = remainder.bounds
        if low // divisor == high // divisor:
            return remainder - (low // divisor) * divisor
        common = math.gcd(divisor, *remainder.terms.values())
        if common > 1:
            reduced = Index({m: c // common for m, c in remainder.terms.items()}, remainder.const // common)
            return (reduced % (divisor // common)) * common + remainder.const % common
        if remainder.const == 0 and len(remainder.terms) == 1:
            ((monomial, coefficient),) = remainder.terms.items()
            atom = monomial[0]
            if coefficient == 1 and len(monomial) == 1 and isinstance(atom, Remainder) and atom.divisor % divisor == 0:
                return atom.numerator % divisor
        return of(Remainder(remainder, divisor))

    @property
    def is_constant(self) -> bool:
        return not self.terms

    def coefficient(self, var: Var) -> int | None:
        """The stride along ``var`` where this is linear in it, or None where it is not."""
        stride = 0
        for monomial, coefficient in self.terms.items():
            if monomial == (var,):
                stride = coefficient
            elif any(var in atom_variables(atom) for atom in monomial):
                return None
        return stride

    def variables(self) -> frozenset[Var]:
        """Every loop variable this depends on, also through divisions and values read from memory."""
        return frozenset().union(*(atom_variables(a) for m in self.terms for a in m)) if self.terms else frozenset()

    def atoms(self) -> Iterable[Atom]:
        for monomial in self.terms:
            yield from monomial


def _monomial_bounds(monomial: Monomial) -> tuple[int, int]:
    low, high = monomial[0].bounds
    for atom in monomial[1:]:
        a, b = atom.bounds
        corners = (low * a, low * b, high * a, high * b)
        low, high = min(corners), max(corners)
    return low, high


def _recombine(terms: dict[Monomial, int], const: int) -> Index:
    """Fold ``d*(e // d) + e % d`` back to ``e``: what flattening an unflattened index produces."""
    for monomial, coefficient in terms.items():
        if len(monomial) != 1 or not isinstance(monomial[0], Remainder):
            continue
        atom = monomial[0]
        whole = atom.numerator // atom.divisor
        if not whole.terms:
            continue
        scaled = coefficient * atom.divisor
        if all(terms.get(m) == c * scaled for m, c in whole.terms.items()):
            rest = dict(terms)
            del rest[monomial]
            for m in whole.terms:
                del rest[m]
            return Index(rest, const - whole.const * scaled) + atom.numerator * coefficient
    return Index(terms, const)


def atom_variables(atom: Atom) -> frozenset[Var]:
    """Loop variables an atom depends on."""
    if isinstance(atom, Var):
        return frozenset((atom,))
    if isinstance(atom, DataIndex):
        return atom.value.variables
    return atom.numerator.variables()


def constant(value: int) -> Index:
    """The index that is always ``value``."""
    return Index({}, value)


def of(atom: Atom) -> Index:
    """An atom as an index. A variable of extent 1 is the constant 0."""
    low, high = atom.bounds
    if low == high and not isinstance(atom, DataIndex):
        return constant(low)
    return Index({(atom,): 1}, 0)


ZERO = constant(0)


def as_index(value: Index | Var | int) -> Index:
    if isinstance(value, Index):
        return value
    return constant(value) if isinstance(value, int) else of(value)


def flatten(subscripts: Sequence[Index], strides: Sequence[int]) -> Index:
    """The offset of ``subscripts`` in memory laid out by ``strides``."""
    total = ZERO
    for subscript, stride in zip(subscripts, strides, strict=True):
        total = total + subscript * stride
    return total


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Row-major strides, in elements; dimensions of size 0 count as 1, as torch does."""
    strides = [1] * len(shape)
    for k in range(len(shape) - 2, -1, -1):
        strides[k] = strides[k + 1] * max(shape[k + 1], 1)
    return tuple(strides)


def unflatten(offset: Index, shape: Sequence[int]) -> tuple[Index, ...]:
    """Row-major subscripts of a flat position in ``shape``."""
    subscripts = []
    for size, stride in zip(shape, contiguous_strides(shape), strict=True):
        subscripts.append((offset // stride) % size if size > 1 else ZERO)
    return tuple(subscripts)


def substitute(
    index: Index, mapping: Mapping[Var, Index], rewrite_value: Callable[[Expr], Expr] | None = None
) -> Index:
    """Replace variables; ``rewrite_value`` does the same inside values read from memory."""
    result = constant(index.const)
    for monomial, coefficient in index.terms.items():
        product = constant(coefficient)
        for atom in monomial:
            product = product * _substitute_atom(atom, mapping, rewrite_value)
        result = result + product
    return result


def _substitute_atom(atom: Atom, mapping: Mapping[Var, Index], rewrite_value: Callable[[Expr], Expr] | None) -> Index:
    if isinstance(atom, Var):
        return mapping.get(atom) or of(atom)
    if isinstance(atom, Quotient):
        return substitute(atom.numerator, mapping, rewrite_value) // atom.divisor
    if isinstance(atom, Remainder):
        return substitute(atom.numerator, mapping, rewrite_value) % atom.divisor
    value = rewrite_value(atom.value) if rewrite_value is not None else atom.value
    return of(DataIndex(value, atom.extent, atom.checked, atom.wraps))


def dense_inverse(offset: Index, variables: Sequence[Var]) -> dict[Var, tuple[int, int]] | None:
    """Invert an offset that visits ``[base, base + n)`` once over ``variables``.

    Returns for each variable ``(stride, extent)`` such that ``variable == (offset - base) // stride % extent``,
    or None where the offset is not such a bijection.
    """
    strides: list[tuple[int, Var]] = []
    for var in variables:
        if var.extent == 1:
            continue
        stride = offset.coefficient(var)
        if stride is None or stride <= 0:
            return None
        strides.append((stride, var))
    if len(strides) != len(offset.terms):
        return None
    strides.sort(key=lambda pair: pair[0])
    expected = 1
    for stride, var in strides:
        if stride != expected:
            return None
        expected *= var.extent
    return {var: (stride, var.extent) for stride, var in strides}
