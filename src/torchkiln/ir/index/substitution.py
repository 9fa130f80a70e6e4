"""Putting indices in the place of variables and sizes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from torchkiln.ir.index.algebra import Index, constant, extent, of
from torchkiln.ir.index.atoms import Atom, DataIndex, Extent, Quotient, Remainder, Size, Var

if TYPE_CHECKING:
    from torchkiln.ir.expr import Expr

Substitution = Mapping[Any, Index]  # what stands in for a Var or a Size


def substitute(index: Index, mapping: Substitution, rewrite_value: Callable[[Expr], Expr] | None = None) -> Index:
    """Replace variables and sizes; ``rewrite_value`` does the same inside values read from memory."""
    if not index.terms:
        return index
    result = constant(index.const)
    for monomial, coefficient in index.terms.items():
        atoms = (_substitute_atom(atom, mapping, rewrite_value) for atom in monomial)
        result = result + math.prod(atoms, start=constant(coefficient))
    return result


def _substitute_atom(atom: Atom, mapping: Substitution, rewrite_value: Callable[[Expr], Expr] | None) -> Index:
    if isinstance(atom, (Var, Size)):
        return mapping.get(atom) or of(atom)
    if isinstance(atom, Quotient):
        return substitute(atom.numerator, mapping, rewrite_value) // substitute_extent(atom.divisor, mapping)
    if isinstance(atom, Remainder):
        return substitute(atom.numerator, mapping, rewrite_value) % substitute_extent(atom.divisor, mapping)
    value = rewrite_value(atom.value) if rewrite_value is not None else atom.value
    return of(DataIndex(value, substitute_extent(atom.extent, mapping), atom.checked, atom.wraps))


def substitute_extent(size: Extent, mapping: Substitution) -> Extent:
    """Replace sizes in an extent."""
    return size if isinstance(size, int) else extent(substitute(size, mapping))
