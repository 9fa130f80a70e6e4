"""Gradients of resizes: every element of the input sums the elements of the output that read it.

Which ones these are, and with what weight, is a table for each dimension, made while compiling by the arithmetic of
eager's kernels. Dimensions are summed one after the other, the outermost first, so that most is read along memory. With
channels innermost, and few terms, one loop sums them all.

Tables need sizes that are known. Symbolic ones, and resizes that read an element very often, are left to the library.

Microseconds of one thread of a busy Zen 5, 8 x 64 x 56 x 56 to twice the size, or to 77 x 77:

| gradient | eager | here |
|---|---|---|
| bilinear | 16,475 | 5,247 |
| bilinear, channels last | 2,269 | 2,369 |
| bicubic | 89,621 | 5,599 |
| nearest, channels last | 968 | 410 |
| nearest to 77 x 77 | 2,859 | 1,695 |
| nearest, by gathers; left to the library | 2,787 | 4,967 |
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from ctypes import c_float
from dataclasses import dataclass
from functools import partial

import torch

from torchkiln.ir import index as ix
from torchkiln.ir.expr import Constant, Expr, masked, where
from torchkiln.ir.index import DataIndex, Extent, Index
from torchkiln.lowering.builder import Builder, Subscripts, TensorValue, compute_dtype
from torchkiln.lowering.registry import NotLowered, lowers

_LONGEST = 1 << 14  # elements of a dimension that a table is made for
_MOST_TERMS = 16  # terms of a sum that are written out

Reads = Iterator[tuple[int, float]]
"""What an element of the output reads: indices, and their weights."""
Rounded = Callable[[float], float]


@dataclass(frozen=True)
class _Resize:
    """One dimension: ``before`` and ``after`` the resize, the ``factor`` the user gave, and eager's precision."""

    before: int
    after: int
    factor: float | None
    rounded: Rounded
    aligned: bool = False

    @property
    def scale(self) -> float:
        """How far apart in the input neighbours of the output read."""
        if self.aligned:
            return self.rounded((self.before - 1) / (self.after - 1)) if self.after > 1 else 0.0
        if self.factor is not None and self.factor > 0:
            return self.rounded(1.0 / self.factor)
        return self.rounded(self.before / self.after)

    def source(self, position: int, *, cubic: bool = False) -> float:
        """Where in the input an element of the output lies."""
        if self.aligned:
            return self.rounded(self.scale * position)
        found = self.rounded(self.scale * (position + 0.5) - 0.5)  # rounded once: kernels fuse the two
        return found if cubic else max(found, 0.0)


def _in_float32(value: float) -> float:
    return float(c_float(value).value)


def _nearest(resize: _Resize, position: int, *, offset: float = 0.0) -> Reads:
    if offset == 0.0 and resize.after in (resize.before, 2 * resize.before):
        found = position * resize.before // resize.after
    else:
        scale = _Resize(resize.before, resize.after, resize.factor, _in_float32).scale
        found = math.floor(_in_float32(_in_float32(position + offset) * scale))
    yield min(found, resize.before - 1), 1.0


def _linear(resize: _Resize, position: int) -> Reads:
    if resize.before == resize.after:
        yield position, 1.0
        yield position, 0.0
        return
    place = resize.source(position)
    low = min(int(place), resize.before - 1)
    part = min(max(resize.rounded(place - low), 0.0), 1.0)
    yield low, resize.rounded(1.0 - part)
    yield min(low + 1, resize.before - 1), part


def _cubic(resize: _Resize, position: int) -> Reads:
    place = resize.source(position, cubic=True)
    low = min(math.floor(place), resize.before - 1)
    part = min(max(resize.rounded(place - low), 0.0), 1.0)
    for k, weight in enumerate(_cubic_weights(part)):
        yield min(max(low - 1 + k, 0), resize.before - 1), resize.rounded(weight)


def _cubic_weights(t: float) -> tuple[float, ...]:
    """Weights of four neighbours, by cubic convolution with the parameter -0.75."""
    a = -0.75

    def near(x: float) -> float:
        return ((a + 2) * x - (a + 3)) * x * x + 1

    def far(x: float) -> float:
        return ((a * x - 5 * a) * x + 8 * a) * x - 4 * a

    return far(t + 1), near(t), near(1 - t), far(2 - t)


@dataclass(frozen=True)
class _Terms:
    """What the elements of one dimension of the input sum: ``count`` neighbours in the output from a first one on.

    Element ``i`` begins at ``step * i + start`` where there is a step, else at ``first[i]``. Term ``k`` of it counts
    where ``present[k][i]``, with ``weights[k][i]``. At borders one element of the output may read it several times. Of
    such weights, ``others`` has those not above zero, where there are both: infinite gradients give NaN, as in eager.
    """

    count: int
    step: int | None
    start: int
    first: tuple[int, ...]
    present: tuple[tuple[bool, ...], ...]
    weights: tuple[tuple[float, ...], ...]
    others: tuple[tuple[float | None, ...], ...]

    @property
    def plain(self) -> bool:
        """Whether nothing is weighted."""
        return all(weight in (0.0, 1.0) for row in self.weights for weight in row) and self.present == tuple(
            tuple(weight == 1.0 for weight in row) for row in self.weights
        )


def _terms(resize: _Resize, reads: Callable[[_Resize, int], Reads]) -> _Terms:
    if max(resize.before, resize.after) > _LONGEST:
        raise NotLowered("the gradient of a resize of more elements than a table is made for")
    readers: list[dict[int, list[float]]] = [{} for _ in range(resize.before)]
    for position in range(resize.after):
        for index, weight in reads(resize, position):
            readers[index].setdefault(position, []).append(weight)
    step, start, first, count = _windows(resize, readers)
    if count > _MOST_TERMS:
        raise NotLowered("the gradient of a resize that reads an element very often")
    begins = [step * i + start for i in range(resize.before)] if step is not None else first
    rows = [[begin + k in found for begin, found in zip(begins, readers, strict=True)] for k in range(count)]
    pairs = [
        [_weights(found.get(begin + k, []), resize.rounded) for begin, found in zip(begins, readers, strict=True)]
        for k in range(count)
    ]
    present = tuple(map(tuple, rows))
    weights = tuple(tuple(weight for weight, _ in row) for row in pairs)
    others = tuple(tuple(other for _, other in row) for row in pairs)
    return _Terms(count, step, start, tuple(first), present, weights, others)


def _weights(found: Sequence[float], rounded: Rounded) -> tuple[float, float | None]:
    """The sum of weights; where some are above zero and some are not, the sums of both."""
    above = rounded(sum(weight for weight in found if weight > 0))
    rest = [weight for weight in found if not weight > 0]
    if not rest or len(rest) == len(found):
        return (above if not rest else rounded(sum(rest))), None
    return above, rounded(sum(rest))


def _windows(resize: _Resize, readers: Sequence[dict[int, list[float]]]) -> tuple[int | None, int, list[int], int]:
    """Step and start where windows move evenly, where each begins, and how long they are."""
    ends = [(min(found), max(found)) if found else None for found in readers]
    count = max((end[1] - end[0] + 1 for end in ends if end), default=1)
    first = [min(end[0] if end else 0, resize.after - count) for end in ends]
    step = resize.after // resize.before
    if step >= 1 and resize.after % resize.before == 0:
        start = min((end[0] - step * i for i, end in enumerate(ends) if end), default=0)
        even = max((end[1] - step * i - start + 1 for i, end in enumerate(ends) if end), default=1)
        if even <= count + 1:
            return step, start, first, even
    return None, 0, first, count


class _Sum:
    """The sum over the windows of one dimension."""

    def __init__(self, builder: Builder, terms: _Terms, dtype: torch.dtype, extent: int) -> None:
        self.terms, self.firsts = terms, extent - terms.count + 1
        self._first = None if terms.step is not None else builder.table(torch.tensor(terms.first))
        always = [all(row) for row in terms.present]
        self._present = None if all(always) else builder.table(torch.tensor(terms.present))
        self._always = always
        self._weights = None if terms.plain else builder.table(torch.tensor(terms.weights, dtype=dtype))
        self._double = [any(weight is not None for weight in row) for row in terms.others]
        if any(self._double):
            self._is_double = builder.table(torch.tensor([[w is not None for w in row] for row in terms.others]))
            self._others = builder.table(torch.tensor([[w or 0.0 for w in row] for row in terms.others], dtype=dtype))

    def of(self, i: Index, element: Callable[[Index], Expr]) -> Expr:
        """The sum at ``i`` of ``element`` at places along the dimension."""
        total: Expr | None = None
        for k in range(self.terms.count):
            value = self._term(i, k, element)
            total = Constant(0.0, value.dtype) + value if total is None else total + value
        assert total is not None
        return total

    def _term(self, i: Index, k: int, element: Callable[[Index], Expr]) -> Expr:
        row = ix.constant(k)
        if self._first is not None:
            value = element(ix.of(DataIndex(self._first.at([i]), self.firsts, False, False)) + k)
        else:
            assert self.terms.step is not None
            value = element(i * self.terms.step + (self.terms.start + k))
        read = value
        if self._weights is not None:
            value = self._weights.at([row, i]) * read
        if self._double[k]:
            value = value + where(self._is_double.at([row, i]), self._others.at([row, i]) * read, 0.0)
        if self._always[k]:
            return value
        assert self._present is not None
        present = self._present.at([row, i])
        if self._first is not None:
            return where(present, value, 0.0)
        return masked(present, value)


def lower_gradient(
    reads: Callable[[_Resize, int], Reads],
    builder: Builder,
    grad: TensorValue,
    output_size: Sequence[Extent],
    input_size: Sequence[Extent],
    *options: float | None,
    aligns: bool = False,
) -> TensorValue:
    shape = builder.result_shape
    if not all(isinstance(size, int) for size in (*grad.shape, *shape)) or 0 in shape or 0 in grad.shape:
        raise NotLowered("the gradient of a resize of symbolic sizes, or of none")
    aligned, factors = (bool(options[0]), options[1:]) if aligns else (False, options)
    spatial = len(shape) - 2
    given = (*factors, *[None] * spatial)[:spatial]
    computed = compute_dtype(grad.dtype)
    rounded: Rounded = float if computed == torch.float64 else _in_float32
    sums = []
    for k in range(spatial):
        before, after = shape[2 + k], grad.shape[2 + k]
        assert isinstance(before, int)
        assert isinstance(after, int)
        terms = _terms(_Resize(before, after, given[k], rounded, aligned), reads)
        sums.append(_Sum(builder, terms, computed, after))
    (result,) = builder.results
    strides = builder.sizes.strides(result.stride())
    at_once = strides[1] == 1 and math.prod(s.terms.count for s in sums) <= _MOST_TERMS
    if at_once:
        return builder.pointwise(shape, grad.dtype, lambda i: _nested(builder, grad, sums, i, computed))
    last = sums[-1].terms
    if last.plain and last.step is not None and last.step > 1 and strides[-1] == 1:
        raise NotLowered("sums of neighbours along memory, which the library takes faster than gathers do")
    value = grad
    for k, one in enumerate(sums):
        dtype = grad.dtype if k == spatial - 1 else computed
        sizes = (*shape[: 3 + k], *grad.shape[3 + k :])
        value = builder.pointwise(
            sizes, dtype, partial(_along, builder, value, one, 2 + k, computed), ix.strides_in_order(sizes, strides)
        )
    return value


def _along(builder: Builder, x: TensorValue, one: _Sum, at: int, dtype: torch.dtype, i: Subscripts) -> Expr:
    return one.of(i[at], lambda place: builder.load(x, (*i[:at], place, *i[at + 1 :]), dtype))


def _nested(builder: Builder, x: TensorValue, sums: Sequence[_Sum], i: Subscripts, dtype: torch.dtype) -> Expr:
    """The sums of all dimensions, each of which sums those of the ones after it."""

    def inner(k: int, places: Subscripts) -> Expr:
        if k == len(sums):
            return builder.load(x, places, dtype)
        return sums[k].of(i[2 + k], lambda place: inner(k + 1, (*places, place)))

    return inner(0, i[:2])


lowers("upsample_nearest1d_backward", "upsample_nearest2d_backward", "upsample_nearest3d_backward")(
    partial(lower_gradient, _nearest)
)
lowers(
    "_upsample_nearest_exact1d_backward", "_upsample_nearest_exact2d_backward", "_upsample_nearest_exact3d_backward"
)(partial(lower_gradient, partial(_nearest, offset=0.5)))
lowers("upsample_linear1d_backward", "upsample_bilinear2d_backward", "upsample_trilinear3d_backward")(
    partial(lower_gradient, _linear, aligns=True)
)


@lowers("upsample_bicubic2d_backward")
def lower_bicubic_gradient(
    builder: Builder,
    grad: TensorValue,
    output_size: Sequence[Extent],
    input_size: Sequence[Extent],
    *options: float | None,
) -> TensorValue:
    same = tuple(grad.shape) == tuple(builder.result_shape)  # which eager copies, whatever the factors are
    return lower_gradient(_copied if same else _cubic, builder, grad, output_size, input_size, *options, aligns=True)


def _copied(_resize: _Resize, position: int) -> Reads:
    yield position, 1.0
