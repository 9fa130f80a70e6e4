"""The canonical form: sums, products, divisions, and what is known of an index whatever the sizes are."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from functools import lru_cache

from torchkiln.ir.hash_consing import hash_consed
from torchkiln.ir.index.atoms import (
    Atom,
    Bounded,
    DataIndex,
    Extent,
    Monomial,
    Quotient,
    Remainder,
    Size,
    Var,
    bounds_of,
)

# Indices are the same objects in equal layers of a network, and so are what is made of them. The last results of each
# operation are kept: a Llama of 12 layers in training asks for 87,000 sums, products and the like, of which 900 differ.
_REMEMBERED = 1 << 14


def _order(monomial: Monomial) -> tuple[str, ...]:
    return tuple(repr(atom) for atom in monomial)


@hash_consed(key=lambda terms, const: (frozenset(terms.items()), const))
class Index(Bounded):
    """An integer expression in canonical form. Build with :func:`constant`, :func:`of` and the operators."""

    terms: Mapping[Monomial, int]
    const: int

    def __post_init__(self) -> None:
        low = high = self.const
        for monomial, coefficient in self.terms.items():
            least, most = _monomial_bounds(monomial)
            if coefficient > 0:
                low += coefficient * least
                high += coefficient * most
            else:
                low += coefficient * most
                high += coefficient * least
        self.bounds = (low, high)

    def __repr__(self) -> str:
        parts = []
        for monomial, coefficient in sorted(self.terms.items(), key=lambda item: _order(item[0])):
            product = "*".join(repr(atom) for atom in monomial)
            parts.append(product if coefficient == 1 else f"{coefficient}*{product}")
        if self.const or not parts:
            parts.append(str(self.const))
        return " + ".join(parts)

    @lru_cache(maxsize=_REMEMBERED)  # noqa: B019
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

    def __rsub__(self, other: int) -> Index:
        return -self + other

    @lru_cache(maxsize=_REMEMBERED)  # noqa: B019
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

    @lru_cache(maxsize=_REMEMBERED)  # noqa: B019
    def __divmod__(self, divisor: Extent) -> tuple[Index, Index]:
        if isinstance(divisor, Index):
            return _divide(self, divisor) if divisor.terms else divmod(self, divisor.const)
        if divisor == 1:
            return self, ZERO
        if divisor <= 0:
            raise ValueError(f"index division needs a positive divisor, got {divisor}")
        quotient = Index({m: c // divisor for m, c in self.terms.items() if c % divisor == 0}, self.const // divisor)
        rest = {m: c for m, c in self.terms.items() if c % divisor}
        remainder = Index(rest, self.const % divisor)
        low, high = remainder.bounds
        if low // divisor == high // divisor:
            return quotient + low // divisor, remainder - (low // divisor) * divisor
        common = math.gcd(divisor, *rest.values())
        if common > 1:
            reduced = Index({m: c // common for m, c in rest.items()}, remainder.const // common)
            more, left = divmod(reduced, divisor // common)
            return quotient + more, left * common + remainder.const % common
        parts = _in_steps(remainder, divisor)
        if parts is not None:
            steps, within, size = parts
            more, left = divmod(steps, divisor // size)
            return quotient + more, left * size + within
        if _within(remainder, divisor):
            return quotient, remainder
        return quotient + _quotient(remainder, divisor), _remainder(remainder, divisor)

    def __floordiv__(self, divisor: Extent) -> Index:
        return divmod(self, divisor)[0]

    def __rfloordiv__(self, numerator: int) -> Index:
        return constant(numerator) // self

    def __mod__(self, divisor: Extent) -> Index:
        return divmod(self, divisor)[1]

    def __rmod__(self, numerator: int) -> Index:
        return constant(numerator) % self

    def coefficient(self, var: Var) -> Extent | None:
        """The stride along ``var`` where this is linear in it, or None where it is not."""
        stride: dict[Monomial, int] = {}
        known = 0
        for monomial, coefficient in self.terms.items():
            if not any(var in atom_variables(atom) for atom in monomial):
                continue
            others = tuple(atom for atom in monomial if atom is not var)
            if len(others) != len(monomial) - 1 or not all(_is_size(atom) for atom in others):
                return None
            if others:
                stride[others] = coefficient
            else:
                known = coefficient
        return Index(stride, known) if stride else known

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


def _in_steps(index: Index, divisor: int) -> tuple[Index, Index, int] | None:
    """``index`` as whole steps of a size that divides ``divisor``, and a rest within one step; the largest such size.

    ``(128*i + j) // 8192`` is ``i // 64`` where ``j`` is below 128.
    """
    for size in sorted({math.gcd(divisor, c) for c in index.terms.values()} - {1}, reverse=True):
        rest = Index({m: c for m, c in index.terms.items() if c % size}, index.const % size)
        low, high = rest.bounds
        if low >= 0 and high < size:
            steps = {m: c // size for m, c in index.terms.items() if c % size == 0}
            return Index(steps, index.const // size), rest, size
    return None


def _recombine(terms: dict[Monomial, int], const: int) -> Index:
    """Fold ``d*(e // d) + e % d`` back to ``e``: what flattening an unflattened index produces."""
    for monomial, coefficient in terms.items():
        remainders = [atom for atom in monomial if isinstance(atom, Remainder)]
        if len(remainders) != 1:
            continue
        atom = remainders[0]
        whole = atom.numerator // atom.divisor
        if not whole.terms:
            continue
        factor = Index({m: coefficient}, 0) if (m := tuple(a for a in monomial if a is not atom)) else coefficient
        scaled = whole * as_index(atom.divisor) * factor
        if all(terms.get(m) == c for m, c in scaled.terms.items()):
            rest = dict(terms)
            del rest[monomial]
            for m in scaled.terms:
                del rest[m]
            return Index(rest, const - scaled.const) + atom.numerator * factor
    return Index(terms, const)


# -- division by sizes -----------------------------------------------------------------------------------------------


def _divide(numerator: Index, divisor: Index) -> tuple[Index, Index]:
    """Quotient and remainder by a symbolic size, simplified as far as possible.

    Terms that hold the divisor are taken out one by one (long division by its leading term); what is left must be
    shown to lie in ``[0, divisor)``, or stays under a division.
    """
    lead = max(divisor.terms, key=lambda m: (len(m), _order(m)))
    whole, rest = ZERO, numerator
    for _ in range(len(numerator.terms) + 4):
        steps = (_monomial_quotient(m, c, lead, divisor.terms[lead]) for m, c in rest.terms.items())
        step = next((q for q in steps if q is not None), None)
        if step is None:
            break
        whole, rest = whole + step, rest - step * divisor
    if _within(rest, divisor):
        return whole, rest
    stepped = _in_steps_of_a_factor(rest, divisor)
    if stepped is not None:
        inner, over, factor, left = stepped
        more, within = divmod(inner, over)
        return whole + more, within * factor + left
    return whole + _quotient(rest, divisor), _remainder(rest, divisor)


def _in_steps_of_a_factor(numerator: Index, divisor: Index) -> tuple[Index, Extent, Index, Index] | None:
    """As :func:`_in_steps` for a size: the steps, the divisor in steps, the step, and the rest within one."""
    whole = _shared_factor(numerator, divisor)
    if whole is not None:
        return *whole, ZERO
    scale = math.gcd(*divisor.terms.values())
    atoms = [a for a in next(iter(divisor.terms)) if isinstance(a, Size) and all(a in m for m in divisor.terms)]
    for atom in (None, *atoms):
        stepping = {m: c for m, c in numerator.terms.items() if (atom in m if atom else scale > 1 and c % scale == 0)}
        shared = _shared_factor(Index(stepping, 0), divisor)
        if shared is None:
            continue
        inner, over, factor = shared
        rest = numerator - inner * factor
        if known_not_negative(rest) and known_below(rest, extent(factor)):
            return inner, over, factor, rest
    return None


def _monomial_quotient(monomial: Monomial, coefficient: int, lead: Monomial, scale: int) -> Index | None:
    """The index that times ``scale * lead`` gives the term, if there is one."""
    if coefficient % scale:
        return None
    left = list(monomial)
    for atom in lead:
        if atom not in left:
            return None
        left.remove(atom)
    return Index({tuple(left): coefficient // scale}, 0) if left else constant(coefficient // scale)


def _shared_factor(numerator: Index, divisor: Index) -> tuple[Index, Extent, Index] | None:
    """Both sides without a size (or number) that every term of both holds, and that factor."""
    if numerator.const or divisor.const or not numerator.terms:
        return None
    every = [*numerator.terms, *divisor.terms]
    atoms = [a for a in every[0] if isinstance(a, Size) and all(a in m for m in every)]
    scale = math.gcd(*numerator.terms.values(), *divisor.terms.values())
    if not atoms and scale == 1:
        return None
    factor = constant(scale) * (Index({(atoms[0],): 1}, 0) if atoms else 1)

    def without(index: Index) -> Index:
        parts = (_monomial_quotient(m, c, tuple(atoms[:1]), scale) for m, c in index.terms.items())
        return sum((part for part in parts if part is not None), ZERO)

    return without(numerator), extent(without(divisor)), factor


def single_atom(index: Index) -> Atom | None:
    """The atom that ``index`` is, if it is one."""
    if index.const or len(index.terms) != 1:
        return None
    ((monomial, coefficient),) = index.terms.items()
    return monomial[0] if coefficient == 1 and len(monomial) == 1 else None


def _quotient(numerator: Index, divisor: Extent) -> Index:
    """``numerator // divisor`` where nothing can be taken out of the numerator."""
    atom = single_atom(numerator)
    if isinstance(atom, Quotient):
        return atom.numerator // extent(as_index(atom.divisor) * divisor)
    if isinstance(atom, Remainder) and divides(divisor, atom.divisor):
        return (atom.numerator // divisor) % extent(as_index(atom.divisor) // divisor)
    return of(Quotient(numerator, divisor))


def _remainder(numerator: Index, divisor: Extent) -> Index:
    atom = single_atom(numerator)
    if isinstance(atom, Remainder) and divides(divisor, atom.divisor):
        return atom.numerator % divisor
    return of(Remainder(numerator, divisor))


# -- extents ----------------------------------------------------------------------------------------------------------


def extent(index: Index | int) -> Extent:
    """An index over sizes alone as an extent."""
    return index if isinstance(index, int) or index.terms else index.const


def product(sizes: Iterable[Extent]) -> Extent:
    return extent(math.prod(sizes))


def ceil_divide(size: Extent, divisor: Extent) -> Extent:
    return extent((as_index(size) + (as_index(divisor) - 1)) // divisor)


def divides(divisor: Extent, size: Extent) -> bool:
    """Whether ``size`` is known to be a multiple of ``divisor``."""
    return (as_index(size) % divisor) is ZERO


def hint_of(size: Extent) -> int:
    """A typical value of an extent: for choices of speed, never of meaning."""
    if isinstance(size, int):
        return size
    total = size.const
    for monomial, coefficient in size.terms.items():
        for atom in monomial:
            if isinstance(atom, Size):
                coefficient *= atom.hint
            elif isinstance(atom, Quotient):
                coefficient *= hint_of(atom.numerator) // max(hint_of(atom.divisor), 1)
            elif isinstance(atom, Remainder):
                coefficient *= hint_of(atom.numerator) % max(hint_of(atom.divisor), 1)
            else:
                raise ValueError(f"{size} is not a size")
        total += coefficient
    return total


def sizes_in(index: Extent) -> frozenset[Size]:
    """Every size an index depends on; not those below values read from memory."""
    if isinstance(index, int):
        return frozenset()
    found: set[Size] = set()
    for atom in index.atoms():
        if isinstance(atom, Size):
            found.add(atom)
        elif isinstance(atom, (Quotient, Remainder)):
            found |= sizes_in(atom.numerator) | sizes_in(atom.divisor)
        else:
            found |= sizes_in(atom.extent)
    return frozenset(found)


def _is_size(atom: Atom) -> bool:
    """Whether an atom is made of sizes alone: the same in every iteration."""
    if isinstance(atom, (Quotient, Remainder)):
        return all(_is_size(a) for a in atom.numerator.atoms())
    return isinstance(atom, Size)


def known_below(index: Index, limit: Extent) -> bool:
    """Whether ``index < limit`` holds at every point, whatever the sizes are."""
    if index.bounds[1] < bounds_of(limit)[0]:
        return True
    if isinstance(limit, int) and not sizes_in(index):
        return False
    most = _extreme(index, largest=True)
    return most is not None and (most - limit).bounds[1] < 0


def _within(index: Index, divisor: Extent) -> bool:
    """Whether dividing by ``divisor`` leaves the whole of ``index``: ``(i // n) % 4`` of 4 * n elements."""
    return known_not_negative(index) and known_below(index, divisor)


def known_not_negative(index: Index) -> bool:
    if index.bounds[0] >= 0:
        return True
    least = _extreme(index, largest=False)
    return least is not None and least.bounds[0] >= 0


def _extreme(index: Index, *, largest: bool) -> Index | None:
    """The index with every loop variable at the end of its range that makes it largest (or smallest)."""
    total = constant(index.const)
    for monomial, coefficient in index.terms.items():
        if any(atom.bounds[0] < 0 for atom in monomial):
            return None
        ends = [_atom_extreme(atom, largest=largest == (coefficient > 0)) for atom in monomial]
        known = [end for end in ends if end is not None]
        if len(known) != len(ends):
            return None
        total = total + math.prod(known, start=constant(coefficient))
    return total


def _atom_extreme(atom: Atom, *, largest: bool) -> Index | None:
    """The largest (or smallest) value of an atom that is not negative, over sizes."""
    if _is_size(atom):
        return of(atom)
    if not largest:
        return ZERO
    if isinstance(atom, (Var, DataIndex)):
        return as_index(atom.extent) - 1
    if isinstance(atom, Remainder):
        return as_index(atom.divisor) - 1
    assert isinstance(atom, Quotient)
    most = _extreme(atom.numerator, largest=True)
    return None if most is None else most // atom.divisor


def atom_variables(atom: Atom) -> frozenset[Var]:
    """Loop variables an atom depends on."""
    if isinstance(atom, Var):
        return frozenset((atom,))
    if isinstance(atom, Size):
        return frozenset()
    if isinstance(atom, DataIndex):
        return atom.value.variables
    return atom.numerator.variables()


@lru_cache(maxsize=_REMEMBERED)
def constant(value: int) -> Index:
    """The index that is always ``value``."""
    return Index({}, value)


@lru_cache(maxsize=_REMEMBERED)
def of(atom: Atom) -> Index:
    """An atom as an index. A variable of extent 1 is the constant 0."""
    low, high = atom.bounds
    if low == high and not isinstance(atom, DataIndex):
        return constant(low)
    return Index({(atom,): 1}, 0)


ZERO = constant(0)


def as_index(value: Index | Var | Size | int) -> Index:
    if isinstance(value, Index):
        return value
    return constant(value) if isinstance(value, int) else of(value)
