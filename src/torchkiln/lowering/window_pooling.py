"""Pooling over windows that may overlap: averages with their gradient, and the largest elements with their places.

Every element of a window is written out, so windows are small; those of symbolic sizes are left to the library too.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from torchkiln.graph.dtypes import FLOATS
from torchkiln.ir import index as ix
from torchkiln.ir.expr import Constant, Expr, cast, index_value, masked, op, where
from torchkiln.ir.index import Extent, Index
from torchkiln.lowering.builder import Builder, Subscripts, TensorValue, compute_dtype, dimension_variables, indices
from torchkiln.lowering.extern_calls import is_used
from torchkiln.lowering.registry import NotLowered, lowers

_MOST_TAPS = 27  # elements of a window: one of 3 x 3 x 3
_MOST_PHASES = 4
_TRUE = Constant(True, torch.bool)


@dataclass(frozen=True)
class _Windows:
    """The windows along one dimension: ``count`` of them over ``size`` elements, each with ``taps`` of these.

    Window ``o`` begins at ``o * step - padding``, and its taps lie ``dilation`` apart.
    """

    size: int
    count: int
    taps: int
    step: int
    padding: int
    dilation: int

    def place(self, window: Index, tap: int) -> Index:
        """Where a tap of a window lies, which may be padding."""
        return window * self.step + (tap * self.dilation - self.padding)

    def holds(self, place: Index) -> Expr:
        return (index_value(place) >= 0) & (index_value(place) < self.size)

    def first_tap(self, window: Index) -> Expr:
        """The number of the first tap that is no padding."""
        before = [tap for tap in range(self.taps) if tap * self.dilation < self.padding]
        found: Expr = Constant(len(before), torch.int32)
        for tap in reversed(before):
            found = where(index_value(self.place(window, tap)) >= 0, Constant(tap, torch.int32), found)
        return found

    def readers(self, place: Index) -> Iterator[tuple[Index, Expr]]:
        """The windows that may have an element, the first one first, and whether each is there and has it.

        The taps lie side by side.
        """
        last, within = divmod(place + self.padding, self.step)
        for back in reversed(range(-(-self.taps // self.step))):
            window = last - back
            there = (index_value(window) >= 0) & (index_value(window) < self.count)
            yield window, there & (index_value(within) < self.taps - back * self.step)

    def counted(self, *, padding: bool) -> list[int]:
        """How many taps each window has, those of padding included or not; none lies beyond the padding."""
        starts = [window * self.step - self.padding for window in range(self.count)]
        first, end = (-self.padding, self.size + self.padding) if padding else (0, self.size)
        return [min(start + self.taps, end) - max(start, first) for start in starts]


def _windows(
    builder: Builder,
    x: TensorValue,
    pooled: Sequence[Extent],
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int] = (1,),
    *,
    rank: int,
) -> list[_Windows]:
    """Those along each of the last dimensions; raises where loops are not for them."""
    if builder.computes_on.is_gpu or x.dtype not in FLOATS:
        raise NotLowered("windows of integers, or on a card")
    taps = _of_each(kernel_size, rank)
    if math.prod(taps) > _MOST_TAPS:
        raise NotLowered(f"windows of more than {_MOST_TAPS} elements")
    given = taps, _of_each(stride, rank) if stride else taps, _of_each(padding, rank), _of_each(dilation, rank)
    found = []
    for size, count, *numbers in zip(x.shape[-rank:], pooled[-rank:], *given, strict=True):
        if not isinstance(size, int) or not isinstance(count, int):
            raise NotLowered("windows of symbolic sizes")
        found.append(_Windows(size, count, *numbers))
    if math.prod(w.size for w in found) >= 2**31:
        raise NotLowered("windows over images with more elements than 32 bits count")
    return found


def _of_each(given: Sequence[int], rank: int) -> tuple[int, ...]:
    """A number for each dimension; torch takes one for all of them too."""
    return tuple(given) * rank if len(given) == 1 else tuple(given)


def _taps(windows: Sequence[_Windows], i: Subscripts) -> Iterator[tuple[tuple[int, ...], Subscripts, Expr]]:
    """The taps of a window in the order of memory: the number along each dimension, the subscripts, and whether it is
    no padding."""
    rank = len(windows)
    for numbers in itertools.product(*(range(w.taps) for w in windows)):
        places = [w.place(o, tap) for w, o, tap in zip(windows, i[-rank:], numbers, strict=True)]
        inside = _all_of(w.holds(place) for w, place in zip(windows, places, strict=True))
        yield numbers, (*i[:-rank], *places), inside


def _all_of(conditions: Iterator[Expr]) -> Expr:
    result: Expr = _TRUE
    for condition in conditions:
        result = result & condition
    return result


# -- the largest ------------------------------------------------------------------------------------------------------


def _largest(
    rank: int,
    builder: Builder,
    x: TensorValue,
    kernel_size: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,),
    ceil_mode: bool = False,
) -> list[TensorValue | None]:
    """The first of the largest elements of each window, or its last NaN, and where it lies in the image.

    Microseconds of one thread of a Zen 4, 8 x 64 x 56 x 56 by windows of 3 x 3 with step 2, eager and here:

    | layout | float32 | with places | bfloat16 | with places |
    |---|---|---|---|---|
    | contiguous | 12,500, 590 | 12,490, 950 | 13,600, 620 | 13,700, 1,060 |
    | channels last | 690, 400 | 840, 910 | 700, 430 | |

    With channels last and places the library is left to it: of 5 x 5, 28 x 28 pixels, it takes 370 and loops 1,260.
    The gradient is the library's: it adds to one element for each window, where a loop would compare all places.
    """
    known = builder.results[0]
    shape = builder.sizes.extents(known.shape)
    windows = _windows(builder, x, shape, kernel_size, stride, padding, dilation, rank=rank)
    wants_places = is_used(builder.node, 1)
    if wants_places and builder.layout_for(shape)[-1] != 1:
        raise NotLowered("places of the largest elements where channels are innermost")
    inner = compute_dtype(x.dtype)
    lowest = Constant(-math.inf, inner)
    # How far apart neighbours of each dimension are in an image.
    steps = [math.prod(w.size for w in windows[k + 1 :]) for k in range(rank)]

    def value(i: Subscripts) -> Expr:
        largest: Expr = lowest
        for _, place, inside in _taps(windows, i):
            largest = op("first_maximum", largest, _tap(builder, x, place, inside, lowest))
        return largest

    def place(i: Subscripts) -> Expr:
        largest: Expr = lowest
        found: Expr = Constant(0, torch.int32)  # from where the window begins
        begin = ix.ZERO
        for w, o, step in zip(windows, i[-rank:], steps, strict=True):
            begin = begin + w.place(o, 0) * step
            found = found + w.first_tap(o) * (w.dilation * step)
        for numbers, at, inside in _taps(windows, i):
            tap = _tap(builder, x, at, inside, lowest)
            offset = sum(k * w.dilation * step for k, w, step in zip(numbers, windows, steps, strict=True))
            found = where((tap > largest) | op("isnan", tap), Constant(offset, torch.int32), found)
            largest = op("first_maximum", largest, tap)
        return index_value(begin) + cast(found, torch.int64)

    values = builder.pointwise(shape, x.dtype, value)
    return [values, builder.pointwise(shape, torch.int64, place) if wants_places else None]


def _tap(builder: Builder, x: TensorValue, place: Subscripts, inside: Expr, beyond: Expr) -> Expr:
    """An element of a window, and ``beyond`` for what is padding."""
    return where(inside, masked(inside, builder.load(x, place, beyond.dtype)), beyond)


# -- averages ---------------------------------------------------------------------------------------------------------


def _average(
    rank: int,
    builder: Builder,
    x: TensorValue,
    kernel_size: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> TensorValue:
    """Averages of windows, summed in eager's order.

    Microseconds of one thread of a Zen 4, 8 x 64 x 56 x 56 by windows of 3 x 3 with step 2, eager and here:

    | layout | float32 | the gradient | bfloat16 | the gradient |
    |---|---|---|---|---|
    | contiguous | 3,700, 490 | 3,820, 800 | 4,380, 350 | 7,890, 650 |
    | channels last | 400, 300 | 650, 390 | 380, 340 | 1,720, 430 |
    """
    shape = builder.result_shape
    windows = _windows(builder, x, shape, kernel_size, stride, padding, rank=rank)
    inner = compute_dtype(x.dtype)
    divisor = _divisor(builder, windows, inner, padding=count_include_pad, override=divisor_override)

    def element(i: Subscripts) -> Expr:
        total: Expr = Constant(0.0, inner)
        for _, place, inside in _taps(windows, i):
            # What is computed here is rounded as eager stores it: averages of integers that are quantized again are
            # often ties.
            total = total + op("rounded", masked(inside, builder.load(x, place, inner)))
        return total / divisor(i)

    return builder.pointwise(shape, x.dtype, element)


def _average_gradient(
    rank: int,
    builder: Builder,
    gradient: TensorValue,
    x: TensorValue,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    ceil_mode: bool,
    count_include_pad: bool,
    divisor_override: int | None,
) -> TensorValue:
    """Each element of the image sums what the windows that have it give, divided before, as eager does: no sum of
    large numbers overflows that does not there."""
    windows = _windows(builder, x, gradient.shape, kernel_size, stride, padding, rank=rank)
    inner = compute_dtype(gradient.dtype)
    divisor = _divisor(builder, windows, inner, padding=count_include_pad, override=divisor_override)
    strides = ix.strides_in_order(gradient.shape, builder.layout_for(x.shape))
    shares = builder.pointwise(gradient.shape, inner, lambda i: builder.load(gradient, i, inner) / divisor(i), strides)

    def element(i: Subscripts) -> Expr:
        total: Expr = Constant(0.0, inner)
        readers = (w.readers(place) for w, place in zip(windows, i[-rank:], strict=True))
        for chosen in itertools.product(*readers):
            inside = _all_of(there for _, there in chosen)
            total = total + masked(inside, shares.at((*i[:-rank], *(window for window, _ in chosen))))
        return total

    return _by_phase(builder, x.shape, gradient.dtype, windows, element)


def _divisor(
    builder: Builder, windows: Sequence[_Windows], dtype: torch.dtype, *, padding: bool, override: int | None
) -> Callable[[Subscripts], Expr]:
    """What the sum of a window is divided by."""
    if override is not None:
        return lambda _: Constant(float(override), dtype)
    counts = [w.counted(padding=padding) for w in windows]
    same = math.prod(numbers[0] for numbers in counts if len(set(numbers)) == 1)
    tables = [
        builder.table(torch.tensor(numbers, dtype=dtype)) if len(set(numbers)) > 1 else None for numbers in counts
    ]

    def divisor(i: Subscripts) -> Expr:
        result: Expr = Constant(float(same), dtype)
        for table, o in zip(tables, i[-len(windows) :], strict=True):
            if table is not None:
                result = table.at([o]) * result
        return result

    return divisor


def _by_phase(
    builder: Builder,
    shape: Sequence[Extent],
    dtype: torch.dtype,
    windows: Sequence[_Windows],
    element: Callable[[Subscripts], Expr],
) -> TensorValue:
    """A tensor whose elements read windows, in a loop for each place they may have between two beginnings of windows.

    Each of these reads the same taps everywhere. Along memory one short loop has all of them, whose iterations become
    the neighbours of a store (``schedule/interleave.py``).
    """
    last, rank, strides = windows[-1], len(windows), builder.layout_for(shape)
    overlap = any(w.taps > w.step > 1 for w in windows)
    if strides[-1] != 1 or not overlap or math.prod(w.step for w in windows) > _MOST_PHASES:
        return builder.pointwise(shape, dtype, element)
    buffer = builder.add_buffer("b", dtype, shape, strides)
    together = last.size % last.step == 0
    phases = [range(min(w.step, w.size)) for w in windows]
    for firsts in itertools.product(*phases[:-1], [0] if together else phases[-1]):
        counts = [len(range(first, w.size, w.step)) for first, w in zip(firsts, windows, strict=True)]
        dims = dimension_variables((*shape[:-rank], *counts, *([last.step] if together else [])))
        *at, within = indices(dims) if together else (*indices(dims), ix.ZERO)
        for k, (first, w) in enumerate(zip(firsts, windows, strict=True), len(shape) - rank):
            at[k] = at[k] * w.step + first
        at[-1] = at[-1] + within
        value = builder.convert(element(tuple(at)), dtype)
        builder.store(buffer, TensorValue(tuple(v.extent for v in dims), dtype, dims, value), dims, tuple(at))
    return builder.read(buffer)


for _rank in (2, 3):
    lowers(f"max_pool{_rank}d_with_indices")(partial(_largest, _rank))
    lowers(f"avg_pool{_rank}d")(partial(_average, _rank))
    lowers(f"avg_pool{_rank}d_backward")(partial(_average_gradient, _rank))
