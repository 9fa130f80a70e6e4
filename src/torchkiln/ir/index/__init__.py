"""Integer index algebra: the canonical form of every subscript and offset in loop IR.

An :class:`Index` is a constant plus a sum of ``coefficient * atom * atom ...`` terms. An atom is a loop
variable, a size known at run time, a floor division or a remainder that could not be simplified away, or a value
read from memory. Equal expressions are the same object, so equality is identity and a set of indices is cheap.

Two facts carry the simplification: every atom knows its range, and division distributes over the terms that
the divisor divides. ``(32*i + j) // 32`` is ``i`` as soon as ``j`` is known to lie in ``[0, 32)``. The same holds for a
divisor that is a size: in ``(n*i + j) // n`` the range of ``j`` is ``[0, n)``, and ``n - 1 < n`` whatever ``n`` is.

An :data:`Extent` is how sizes, strides and divisors are written everywhere: an ``int`` where the number is known while
compiling, otherwise an :class:`Index` over sizes alone (never a constant one, so ``==`` on extents is exact).
"""

from __future__ import annotations

from torchkiln.ir.index.algebra import (
    ZERO,
    Index,
    as_index,
    atom_variables,
    ceil_divide,
    constant,
    divides,
    extent,
    hint_of,
    known_below,
    known_not_negative,
    of,
    product,
    single_atom,
    sizes_in,
)
from torchkiln.ir.index.atoms import Atom, DataIndex, Extent, Quotient, Remainder, Size, Var, bounds_of
from torchkiln.ir.index.layout import (
    contiguous_strides,
    dense_inverse,
    flatten,
    moves,
    strides_in_order,
    unflatten,
)
from torchkiln.ir.index.substitution import Substitution, substitute, substitute_extent

__all__ = [
    "ZERO",
    "Atom",
    "DataIndex",
    "Extent",
    "Index",
    "Quotient",
    "Remainder",
    "Size",
    "Substitution",
    "Var",
    "as_index",
    "atom_variables",
    "bounds_of",
    "ceil_divide",
    "constant",
    "contiguous_strides",
    "dense_inverse",
    "divides",
    "extent",
    "flatten",
    "hint_of",
    "known_below",
    "known_not_negative",
    "moves",
    "of",
    "product",
    "single_atom",
    "sizes_in",
    "strides_in_order",
    "substitute",
    "substitute_extent",
    "unflatten",
]
