"""A stable radix sort of rows of floating-point numbers.

An element becomes a key of 32 bits that orders as torch does: -0.0 and 0.0 are equal, and NaN is more than anything.
Keys are paired with their positions and sorted by 8 bits at a time, from the lowest; a byte that all keys share is
skipped. Short rows are sorted by insertion, stable because pairs differ by their positions.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

from torchkiln.codegen.llvm.functions import Function, Register, native

# Rows up to this length are sorted by insertion.
_SHORT = 32


@dataclass(frozen=True)
class _Format:
    """A format whose bits, ``shift`` to the left, are ordered as those of float32 are; ``infinity`` is so shifted."""

    name: str
    bits: int
    infinity: int

    @property
    def shift(self) -> int:
        return 32 - self.bits

    @property
    def digits(self) -> range:
        """Bytes of the key that differ between elements."""
        return range(self.shift // 8, 4)


_FORMATS = {
    torch.float32: _Format("float32", 32, 0x7F800000),
    torch.bfloat16: _Format("bfloat16", 16, 0x7F800000),
    torch.float16: _Format("float16", 16, 0x7C000000),
}


def row_sort(dtype: torch.dtype) -> str:
    """The name of ``void (i64 begin, i64 end, ptr context)``, which sorts these rows.

    The context: pointers to rows, values, positions and scratch memory of that size, the length of a row, and a mask, 0
    or -1 for the largest first.
    """
    return f"kiln_sort_rows_{_FORMATS[dtype].name}"


def _sort_rows(form: _Format, f: Function, begin: Register, end: Register, context: Register) -> None:
    element = f"i{form.bits}*"
    rows, values, positions, spare = (context.cast("ptr*")[k] for k in range(4))
    length, mask = context[4], context[5].convert("trunc", "i32")
    # How often each byte of the keys has which value.
    counts = f.alloca("i32", 256 * len(form.digits), align=64)
    histograms = [counts.at(256 * k) for k in range(len(form.digits))]
    is_long = length > _SHORT
    with f.loop(end, begin) as row:
        first = row * length
        elements, sorted_elements = rows.cast(element).at(first), values.cast(element).at(first)
        pairs = positions.cast("i64*").at(first)
        source, target = f.variable("i64*", pairs), f.variable("i64*", spare.cast("i64*").at(first))
        with f.if_(is_long):
            f.call("llvm.memset.p0.i64", counts, 0, 1024 * len(form.digits), 0)
        with f.loop(length) as i:
            key = _key(form, elements[i]) ^ mask
            pairs[i] = (key.convert("zext", "i64") << 32) | i
            for digit, histogram in zip(form.digits, histograms, strict=True):
                histogram[((key >> 8 * digit) & 255).convert("zext", "i64")] += 1
        with f.if_(~is_long):
            f.call(_insertion_sort, pairs, length)
        with f.if_(is_long):
            for digit, histogram in zip(form.digits, histograms, strict=True):
                moved = f.call(_radix_pass, source[0], target[0], length, histogram, 32 + 8 * digit)
                with f.if_(moved):
                    source[0], target[0] = target[0], source[0]
        with f.loop(length) as i:
            position = source[0][i] & 0xFFFFFFFF
            sorted_elements[i] = elements[position]
            pairs[i] = position


def _key(form: _Format, bits: Register) -> Register:
    """A number that orders, unsigned, as the element with these bits does."""
    f = bits.function
    if form.shift:
        bits = bits.convert("zext", "i32") << form.shift
    magnitude = bits & 0x7FFFFFFF
    bits = magnitude.eq(0).select(f.literal("i32", 0), bits)
    number = bits ^ (bits.binary("ashr", 31) | -(2**31))
    return magnitude.compare("ugt", form.infinity).select(f.literal("i32", -1), number)


@native("void insertion_sort(i64*, i64)", attributes="alwaysinline")
def _insertion_sort(f: Function, pairs: Register, length: Register) -> None:
    with f.loop(length, 1) as i:
        new, hole = pairs[i], f.variable("i64", i)
        with f.loop(None):
            with f.if_(hole[0].eq(0)):
                f.break_()
            neighbour = pairs[hole[0] - 1]
            with f.if_(neighbour.compare("ule", new)):
                f.break_()
            pairs[hole[0]] = neighbour
            hole[0] -= 1
        pairs[hole[0]] = new


@native("i1 radix_pass(i64*, i64*, i64, i32*, i64)")
def _radix_pass(
    f: Function, source: Register, target: Register, length: Register, histogram: Register, shift: Register
) -> None:
    """Sort by the byte ``shift`` bits from the right, and answer true; false where all pairs have the same there."""
    common = histogram[(source[0] >> shift) & 255]
    with f.if_(common.convert("zext", "i64").eq(length)):
        f.ret(0)
    free = f.variable("i32", 0)
    with f.loop(256, step=4) as i:
        for k in range(4):
            count = histogram[i + k]
            histogram[i + k] = free[0]
            free[0] += count
    with f.loop(length) as i:
        pair = source[i]
        place = histogram.at((pair >> shift) & 255)
        free_place = place[0]
        place[0] = free_place + 1
        target[free_place.convert("zext", "i64")] = pair
    f.ret(1)


EXPORTS = tuple(
    native(f"void {row_sort(dtype)}(i64, i64, i64*)", exported=True)(partial(_sort_rows, form))
    for dtype, form in _FORMATS.items()
)
