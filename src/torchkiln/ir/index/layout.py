"""Subscripts and places in memory: flattening, row-major strides, and the way back."""

from __future__ import annotations

from collections.abc import Sequence

from torchkiln.ir.index.algebra import ZERO, Index, hint_of, of, product
from torchkiln.ir.index.atoms import Extent, Var, bounds_of


def moves(size: Extent) -> bool:
    """Whether a subscript of a dimension of ``size`` can differ from 0, so that its stride matters."""
    return bounds_of(size)[1] > 1


def flatten(subscripts: Sequence[Index], strides: Sequence[Extent]) -> Index:
    """The offset of ``subscripts`` in memory laid out by ``strides``."""
    total = ZERO
    for subscript, stride in zip(subscripts, strides, strict=True):
        total = total + subscript * stride
    return total


def contiguous_strides(shape: Sequence[Extent]) -> tuple[Extent, ...]:
    """Row-major strides, in elements; dimensions of size 0 count as 1, as torch does."""
    strides: list[Extent] = [1] * len(shape)
    for k in range(len(shape) - 2, -1, -1):
        strides[k] = product((strides[k + 1], shape[k + 1] if shape[k + 1] != 0 else 1))
    return tuple(strides)


def strides_in_order(sizes: Sequence[Extent], strides: Sequence[Extent]) -> tuple[Extent, ...]:
    """Strides of memory without gaps in which dimensions lie in the order of ``strides``."""
    found: list[Extent] = [1] * len(sizes)
    expected: Extent = 1
    for k in sorted(range(len(sizes)), key=lambda k: (hint_of(strides[k]), -k)):
        found[k], expected = expected, product((expected, sizes[k]))
    return tuple(found)


def unflatten(offset: Index, shape: Sequence[Extent]) -> tuple[Index, ...]:
    """Row-major subscripts of a flat index into ``shape``."""
    subscripts = []
    for size, stride in zip(shape, contiguous_strides(shape), strict=True):
        subscripts.append(ZERO if size in (0, 1) else (offset // stride) % size)
    return tuple(subscripts)


def dense_inverse(offset: Index, variables: Sequence[Var]) -> dict[Var, tuple[Extent, Extent]] | None:
    """Invert an offset that visits ``[base, base + n)`` once over ``variables``.

    Returns for each variable ``(stride, extent)`` such that ``variable == (offset - base) // stride % extent``,
    or None where the offset is not such a bijection.
    """
    strides: list[tuple[Extent, Var]] = []
    rest = offset
    for var in variables:
        if not moves(var.extent):
            continue
        stride = offset.coefficient(var)
        # A stride that is a product of sizes is 0 only where one of them is, and then there is no point to visit.
        if stride is None or stride == 0 or bounds_of(stride)[0] < 0:
            return None
        strides.append((stride, var))
        rest = rest - of(var) * stride
    if rest.terms:
        return None
    strides.sort(key=lambda pair: hint_of(pair[0]))
    expected: Extent = 1
    for stride, var in strides:
        if stride != expected:
            return None
        expected = product((expected, var.extent))
    return {var: (stride, var.extent) for stride, var in strides}
