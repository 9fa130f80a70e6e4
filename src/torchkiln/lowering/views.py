"""Views and reshapes: index changes that move no data."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from torchkiln.ir import index as ix
from torchkiln.ir.expr import Load, index_value, op, where
from torchkiln.ir.index import Extent, Index
from torchkiln.ir.program import Refusal
from torchkiln.lowering.builder import (
    Builder,
    Subscripts,
    TensorValue,
    as_strided,
    elements_share_memory,
    indices,
    is_dense,
    normalize_dim,
    normalize_dims,
    view_of,
)
from torchkiln.lowering.registry import NotLowered, lowers


def broadcast_shapes(shapes: Sequence[tuple[Extent, ...]]) -> tuple[Extent, ...]:
    """The common shape. Of two sizes that are not 1 and not known to be equal, torch has seen to it that they are."""
    rank = max(map(len, shapes), default=0)
    result: list[Extent] = []
    for place in range(rank):
        sizes = [shape[len(shape) - rank + place] for shape in shapes if len(shape) - rank + place >= 0]
        wide = [size for size in sizes if size != 1]
        known = {size for size in wide if isinstance(size, int)}
        if len(known) > 1:
            raise ValueError(f"shapes {list(map(list, shapes))} do not broadcast together")
        result.append(known.pop() if known else wide[0] if wide else 1)
    return tuple(result)


def broadcast_to(x: TensorValue, shape: Sequence[Extent]) -> TensorValue:
    """``x`` expanded to ``shape`` by the usual rules."""
    if tuple(shape) == x.shape:
        return x
    lead = len(shape) - len(x.shape)

    def subscripts(i: Subscripts) -> list[Index]:
        return [ix.ZERO if size == 1 else i[lead + k] for k, size in enumerate(x.shape)]

    return view_of(x, shape, subscripts)


@lowers("expand")
def lower_expand(builder: Builder, x: TensorValue, size: Sequence[Extent], *, implicit: bool = False) -> TensorValue:
    return broadcast_to(x, builder.result_shape)


def reshape(x: TensorValue, shape: Sequence[Extent]) -> TensorValue:
    """Row-major reinterpretation of the elements."""
    if tuple(shape) == x.shape:
        return x
    if 0 in shape:
        return view_of(x, shape, lambda i: [ix.ZERO] * len(x.shape))
    strides = ix.contiguous_strides(shape)
    return view_of(x, shape, lambda i: ix.unflatten(ix.flatten(i, strides), x.shape))


@lowers("view", "_unsafe_view", "_reshape_alias", "reshape")
def lower_view(builder: Builder, x: TensorValue, *_: object) -> TensorValue:
    return reshape(x, builder.result_shape)


@lowers("permute")
def lower_permute(builder: Builder, x: TensorValue, dims: Sequence[int]) -> TensorValue:
    order = [normalize_dim(d, len(x.shape)) for d in dims]
    shape = [x.shape[d] for d in order]
    return view_of(x, shape, lambda i: [i[order.index(k)] for k in range(len(order))])


@lowers("transpose")
def lower_transpose(builder: Builder, x: TensorValue, a: int, b: int) -> TensorValue:
    order = list(range(len(x.shape)))
    if order:
        a, b = normalize_dim(a, len(order)), normalize_dim(b, len(order))
        order[a], order[b] = order[b], order[a]
    return lower_permute(builder, x, order)


@lowers("t")
def lower_t(builder: Builder, x: TensorValue) -> TensorValue:
    return lower_permute(builder, x, list(range(len(x.shape)))[::-1])


@lowers("squeeze")
def lower_squeeze(builder: Builder, x: TensorValue, dim: Sequence[int] | int | None = None) -> TensorValue:
    dims = range(len(x.shape)) if dim is None else normalize_dims(dim, len(x.shape)) if dim != [] else ()
    keep = [k for k in range(len(x.shape)) if k not in dims or x.shape[k] != 1]
    return view_of(
        x,
        [x.shape[k] for k in keep],
        lambda i: [i[keep.index(k)] if k in keep else ix.ZERO for k in range(len(x.shape))],
    )


@lowers("unsqueeze")
def lower_unsqueeze(builder: Builder, x: TensorValue, dim: int) -> TensorValue:
    at = normalize_dim(dim, len(x.shape) + 1)
    return view_of(x, (*x.shape[:at], 1, *x.shape[at:]), lambda i: (*i[:at], *i[at + 1 :]))


@lowers("select")
def lower_select(builder: Builder, x: TensorValue, dim: int, index: Extent) -> TensorValue:
    at = normalize_dim(dim, len(x.shape))
    chosen = index_along(builder, x.shape[at], index)
    _bind_offset(builder, at, chosen)
    return view_of(x, (*x.shape[:at], *x.shape[at + 1 :]), lambda i: (*i[:at], ix.as_index(chosen), *i[at:]))


def index_along(builder: Builder, size: Extent, index: Extent) -> Extent:
    """An index along a dimension that, where it is negative, counts from the end.

    One that depends on data is checked when it becomes known, before anything reads there.
    """
    low, high = ix.bounds_of(index)
    counted = ix.extent(ix.as_index(size) + index)
    guarded = not builder.sizes.from_data(index, size)
    if low >= 0 and (guarded or ix.known_below(ix.as_index(index), size)):
        return index
    if high < 0 and (guarded or ix.known_not_negative(ix.as_index(counted))):
        return counted
    given = index_value(index)
    found = where(given < 0, index_value(counted), given)
    refusal = Refusal("IndexError", f"an index out of range for a dimension of size {size}")
    chosen = where(found < size, found, -1)
    return ix.extent(builder.sizes.compute(chosen, 0, max(ix.bounds_of(size)[1] - 1, 0), 0, refusal))


def slice_along(x: TensorValue, dim: int, start: Extent, length: Extent, step: int = 1) -> TensorValue:
    """``length`` elements of ``x`` along ``dim``, from ``start``, ``step`` apart."""
    shape = (*x.shape[:dim], length, *x.shape[dim + 1 :])
    if shape == x.shape and start == 0 and step == 1:
        return x
    return view_of(x, shape, lambda i: (*i[:dim], i[dim] * step + start, *i[dim + 1 :]))


def slice_start(
    builder: Builder, size: Extent, start: Extent | None, end: Extent | None, step: int, length: Extent
) -> Extent:
    """The start of a slice after clamping as Python does.

    ``length`` is the one torch worked out: its guards tell which bounds lie inside of the dimension, and the length
    says all that matters about the end. A length that torch leaves open is worked out when the graph runs.
    """
    if isinstance(size, int) and all(part is None or isinstance(part, int) for part in (start, end)):
        return slice(start, end, step).indices(size)[0]
    first: Extent = 0 if start is None else start
    last = size if end is None or (isinstance(end, int) and end >= _END) else end
    open_length = builder.sizes.decide(length)
    if open_length is None:
        return _guarded_start(builder, size, first, last, step, length)
    first = clamped(builder, size, first)
    reach = ix.as_index(clamped(builder, size, last)) - first
    builder.compute_size(op("maximum", index_value((reach + (step - 1)) // step), index_value(0)), open_length)
    return first


def clamped(builder: Builder, size: Extent, bound: Extent) -> Extent:
    """A bound of a slice as Python reads it: from the end where it is negative, and never outside."""
    low = ix.bounds_of(bound)[0]
    if low >= 0 and ix.known_below(ix.as_index(bound), ix.extent(ix.as_index(size) + 1)):
        return bound
    given = index_value(bound)
    if low < 0:
        given = where(given < 0, index_value(ix.as_index(bound) + size), given)
    inside = op("minimum", op("maximum", given, index_value(0)), index_value(size))
    return ix.extent(builder.sizes.compute(inside, 0, ix.bounds_of(size)[1], 0))


def _guarded_start(builder: Builder, size: Extent, start: Extent, last: Extent, step: int, length: Extent) -> Extent:
    """Where a slice of ``length`` elements starts; anywhere, if there are none."""
    if length == size and step == 1:
        return 0
    first = _unclamped_start(size, start, last, step, length)
    if first is None:
        first = clamped(builder, size, start)
    reach = ix.as_index(first) + (ix.as_index(length) - 1) * step
    if not builder.sizes.from_data(first, length, size) or ix.known_below(reach, size):
        return first
    # Where the data decides, what torch took for granted may not hold.
    fits = (index_value(reach) < size) | (index_value(length) <= 0)
    refusal = Refusal("RuntimeError", f"a slice of {length} elements that reaches beyond the end of {size}")
    chosen = where(fits, index_value(first), -1)
    return ix.extent(builder.sizes.compute(chosen, 0, max(ix.bounds_of(first)[1], 0), 0, refusal))


def _unclamped_start(size: Extent, start: Extent, last: Extent, step: int, length: Extent) -> Extent | None:
    """The start where it is known while compiling."""
    low, high = ix.bounds_of(start)
    if low >= 0:
        return start  # beyond the end there are no elements
    counted = ix.extent(ix.as_index(size) + start)
    if high < 0 and ix.known_not_negative(ix.as_index(counted)):
        return counted
    # The way to read the start under which no bound is clamped is the right one, if torch came to that length.
    known = (first for first in (start, counted) if ix.extent(ix.as_index(last) - first) == length)
    return next(known, None) if step == 1 else None


_END = 2**62


def _bind_offset(builder: Builder, dim: int, first: Extent) -> None:
    """Where torch has a symbol for the place a view starts at in its storage, say what it is."""
    node = builder.node
    if not node.meta.get("unbacked_bindings") or not isinstance(node.meta["val"], torch.Tensor):
        return
    base = node.all_input_nodes[0].meta["val"]
    size = builder.sizes.decide(builder.sizes.extent(node.meta["val"].storage_offset()))
    if size is not None:
        stride = builder.sizes.extent(base.stride(dim), of_stride=True)
        start = ix.as_index(first) * stride + builder.sizes.extent(base.storage_offset())
        builder.compute_size(index_value(start), size)


@lowers("slice")
def lower_slice(
    builder: Builder,
    x: TensorValue,
    dim: int = 0,
    start: Extent | None = None,
    end: Extent | None = None,
    step: int = 1,
) -> TensorValue:
    at = normalize_dim(dim, len(x.shape))
    length = builder.result_shape[at]
    first = slice_start(builder, x.shape[at], start, end, step, length)
    _bind_offset(builder, at, first)
    return slice_along(x, at, first, length, step)


@lowers("split")
def lower_split(builder: Builder, x: TensorValue, size: Extent, dim: int = 0) -> list[TensorValue]:
    lengths = [builder.sizes.extent(piece.shape[dim]) for piece in builder.results]
    return lower_split_with_sizes(builder, x, lengths, dim)


@lowers("split_with_sizes")
def lower_split_with_sizes(
    builder: Builder, x: TensorValue, sizes: Sequence[Extent], dim: int = 0
) -> list[TensorValue]:
    at = normalize_dim(dim, len(x.shape))
    pieces: list[TensorValue] = []
    start: Extent = 0
    for size in sizes:
        pieces.append(slice_along(x, at, start, size))
        start = ix.extent(ix.as_index(start) + size)
    return pieces


@lowers("unbind")
def lower_unbind(builder: Builder, x: TensorValue, dim: int = 0) -> list[TensorValue]:
    at = normalize_dim(dim, len(x.shape))
    return [lower_select(builder, x, at, k) for k in range(len(builder.results))]


@lowers("diagonal")
def lower_diagonal(builder: Builder, x: TensorValue, offset: int = 0, dim1: int = 0, dim2: int = 1) -> TensorValue:
    rank = len(x.shape)
    a, b = normalize_dim(dim1, rank), normalize_dim(dim2, rank)
    row, column = max(-offset, 0), max(offset, 0)
    rest = [k for k in range(rank) if k not in (a, b)]

    def subscripts(i: Subscripts) -> list[Index]:
        along = i[-1]
        return [along + row if k == a else along + column if k == b else i[rest.index(k)] for k in range(rank)]

    return view_of(x, builder.result_shape, subscripts)


@lowers("unfold")
def lower_unfold(builder: Builder, x: TensorValue, dim: int, size: int, step: int) -> TensorValue:
    at = normalize_dim(dim, len(x.shape))
    return view_of(
        x, builder.result_shape, lambda i: (*i[:at], i[at] * step + i[-1], *i[at + 1 : -1]) if x.shape else ()
    )


@lowers("flip")
def lower_flip(builder: Builder, x: TensorValue, dims: Sequence[int]) -> TensorValue:
    flipped = set(normalize_dims(dims, len(x.shape))) if dims else set()

    def element(i: Subscripts) -> list[Index]:
        return [ix.as_index(x.shape[k]) - 1 - i[k] if k in flipped else i[k] for k in range(len(x.shape))]

    back = view_of(x, x.shape, element)
    if isinstance(x.value, Load) and isinstance(back.value, Load) and _is_whole(back) and not _is_whole(x):
        return back  # what was computed from its end on, as it lies in memory
    return builder.pointwise(x.shape, x.dtype, back.at)


def _is_whole(x: TensorValue) -> bool:
    """Whether ``x`` is a buffer as it lies in memory."""
    return isinstance(x.value, Load) and x.value.subscripts == indices(x.dims)


@lowers("as_strided_scatter")
def lower_as_strided_scatter(
    builder: Builder,
    x: TensorValue,
    source: TensorValue,
    size: Sequence[Extent],
    stride: Sequence[Extent],
    storage_offset: Extent | None = None,
) -> TensorValue:
    """A copy of ``x``, in the layout eager gives it, with ``source`` stored at places counted in its memory."""
    known, result, sizes = builder.node.all_input_nodes[0].meta["val"], builder.node.meta["val"], builder.sizes
    strides = sizes.strides(result.stride())
    if elements_share_memory(x.shape, strides):
        strides = ix.contiguous_strides(x.shape)  # as eager's copy has then, whatever the fake tensor says
    if not is_dense(x.shape, strides):
        raise NotLowered("memory with gaps, which a copy of ours does not have")
    view = builder.materialize(x, strides)
    offset: Extent = 0
    if storage_offset is not None:
        # Eager copies the storage as it is, from its start, unless elements share memory in it.
        kept = sizes.strides(known.stride()) == strides
        start = sizes.extent(known.storage_offset()) if kept else 0
        offset = ix.extent(ix.as_index(storage_offset) - start)
    place = as_strided(builder, view, tuple(size), tuple(stride), offset)
    if place is None or not isinstance(place.value, Load) or elements_share_memory(tuple(size), tuple(stride)):
        raise NotLowered("places outside of the memory that is copied, or the same place for several elements")
    buffer = builder.buffers[view.buffer]
    builder.store(buffer, broadcast_to(source, place.shape), place.dims, place.value.subscripts)
    return builder.read(buffer)


@lowers("alias", "detach", "lift_fresh")
def lower_alias(builder: Builder, x: TensorValue) -> TensorValue:
    return x
