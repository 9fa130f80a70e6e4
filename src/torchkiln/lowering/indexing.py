"""Concatenation, padding, slices that are stored, and indexing by tensors."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from torchkiln.ir import index as ix
from torchkiln.ir.expr import Constant, Expr, index_value, masked, where
from torchkiln.ir.index import DataIndex, Extent, Index
from torchkiln.lowering.builder import (
    Builder,
    Subscripts,
    TensorValue,
    dimension_variables,
    elements_share_memory,
    normalize_dim,
)
from torchkiln.lowering.pointwise import number
from torchkiln.lowering.promotion import promote
from torchkiln.lowering.refusals import LEAST, refuse
from torchkiln.lowering.registry import NotLowered, lowers
from torchkiln.lowering.views import broadcast_shapes, broadcast_to, index_along, reshape, slice_start


def _replaced(i: Subscripts, at: int, index: Index) -> Subscripts:
    """Subscripts with ``index`` along dimension ``at``."""
    return (*i[:at], index, *i[at + 1 :])


# Every element of a concatenation asks which piece it belongs to, one comparison per piece.
_MOST_PIECES = 32


def _merge_constants(pieces: Sequence[TensorValue], dim: int) -> list[TensorValue]:
    """Neighbours that are one constant all over become one piece (gradients of unbind are mostly zeros)."""
    merged: list[TensorValue] = []
    for piece in pieces:
        last = merged[-1] if merged else None
        if last is not None and isinstance(piece.value, Constant) and piece.value is last.value:
            along = ix.extent(ix.as_index(last.shape[dim]) + piece.shape[dim])
            shape = (*last.shape[:dim], along, *last.shape[dim + 1 :])
            merged[-1] = TensorValue(shape, last.dtype, dimension_variables(shape), last.value)
        else:
            merged.append(piece)
    return merged


@lowers("cat")
def lower_cat(builder: Builder, tensors: Sequence[TensorValue], dim: int = 0) -> TensorValue:
    dtype = promote(builder, tensors)
    pieces = [t for t in tensors if t.shape != (0,)]  # eager concatenates an empty vector with anything
    if not pieces:
        return builder.pointwise((0,), dtype, lambda i: number(0, dtype))
    at = normalize_dim(dim, len(pieces[0].shape))
    pieces = _merge_constants([p for p in pieces if p.shape[at] != 0] or pieces[:1], at)
    if len(pieces) > _MOST_PIECES:
        raise NotLowered("a concatenation of so many tensors that each element would be searched for")
    starts: list[Extent] = [0]
    for piece in pieces:
        starts.append(ix.extent(ix.as_index(starts[-1]) + piece.shape[at]))
    shape = (*pieces[0].shape[:at], starts[-1], *pieces[0].shape[at + 1 :])

    def element(i: Subscripts) -> Expr:
        result: Expr | None = None
        here = index_value(i[at])
        for piece, start, end in zip(pieces[::-1], starts[-2::-1], starts[:0:-1], strict=True):
            local = _replaced(i, at, i[at] - start)
            value = masked((here >= start) & (here < end), builder.load(piece, local, dtype))
            result = value if result is None else where(here < end, value, result)
        assert result is not None
        return result

    return builder.pointwise(shape, dtype, element)


@lowers("constant_pad_nd")
def lower_pad(builder: Builder, x: TensorValue, pad: Sequence[Extent], value: float = 0) -> TensorValue:
    rank = len(x.shape)
    before: list[Extent] = [0] * rank
    after: list[Extent] = [0] * rank
    for k in range(len(pad) // 2):
        before[rank - 1 - k], after[rank - 1 - k] = pad[2 * k], pad[2 * k + 1]
    shape = [ix.extent(ix.as_index(x.shape[k]) + before[k] + after[k]) for k in range(rank)]

    def element(i: Subscripts) -> Expr:
        inside: Expr = Constant(True, torch.bool)
        for k in range(rank):
            if ix.bounds_of(before[k])[1] > 0:
                inside = inside & (index_value(i[k]) >= before[k])
            if ix.bounds_of(after[k])[1] > 0:
                inside = inside & (index_value(i[k]) < ix.as_index(x.shape[k]) + before[k])
        body = masked(inside, x.at([at - first for at, first in zip(i, before, strict=True)]))
        return body if value == 0 else where(inside, body, number(value, x.dtype))

    return builder.pointwise(shape, x.dtype, element)


def _decline_overlap(builder: Builder) -> None:
    """Eager writes into a copy with the strides of its argument, where one write may show in several elements.

    It does not where a dimension is expanded: then the copy is contiguous.
    """
    source = builder.node.args[0]
    known = source.meta.get("val") if isinstance(source, torch.fx.Node) else None
    if known is None:
        return
    shape, strides = builder.sizes.extents(known.shape), builder.sizes.strides(known.stride())
    expanded = any(stride == 0 and size != 1 for size, stride in zip(shape, strides, strict=True))
    if not expanded and elements_share_memory(shape, strides):
        raise NotLowered("a write into a copy of which several elements lie at one place")


@lowers("slice_scatter")
def lower_slice_scatter(
    builder: Builder,
    x: TensorValue,
    source: TensorValue,
    dim: int = 0,
    start: Extent | None = None,
    end: Extent | None = None,
    step: int = 1,
) -> TensorValue:
    _decline_overlap(builder)
    at = normalize_dim(dim, len(x.shape))
    length = source.shape[at]
    first = slice_start(builder, x.shape[at], start, end, step, length)
    if length == 0:
        return builder.pointwise(x.shape, x.dtype, x.at)

    def element(i: Subscripts) -> Expr:
        shifted = i[at] - first
        here, beyond = index_value(i[at]), (ix.as_index(length) - 1) * step + 1 + first
        inside = (here >= first) & (here < beyond)
        if step > 1:
            # Adding a multiple of the step keeps the remainder and makes the operand non-negative.
            lifted = shifted + ix.as_index(ix.ceil_divide(first, step)) * step
            inside = inside & index_value(lifted % step).eq(0)
        local = _replaced(i, at, shifted // step)
        return where(inside, masked(inside, builder.load(source, local, x.dtype)), x.at(i))

    return builder.pointwise(x.shape, x.dtype, element)


@lowers("select_scatter")
def lower_select_scatter(builder: Builder, x: TensorValue, source: TensorValue, dim: int, index: Extent) -> TensorValue:
    _decline_overlap(builder)
    at = normalize_dim(dim, len(x.shape))
    chosen = index_along(builder, x.shape[at], index)

    def element(i: Subscripts) -> Expr:
        return where(index_value(i[at]).eq(chosen), builder.load(source, (*i[:at], *i[at + 1 :]), x.dtype), x.at(i))

    return builder.pointwise(x.shape, x.dtype, element)


@lowers("diagonal_scatter")
def lower_diagonal_scatter(
    builder: Builder, x: TensorValue, source: TensorValue, offset: int = 0, dim1: int = 0, dim2: int = 1
) -> TensorValue:
    _decline_overlap(builder)
    rank = len(x.shape)
    a, b = normalize_dim(dim1, rank), normalize_dim(dim2, rank)
    if 0 in source.shape:
        return builder.pointwise(x.shape, x.dtype, x.at)

    def element(i: Subscripts) -> Expr:
        here = index_value(i[b] - i[a]).eq(offset)
        local = (*(i[k] for k in range(rank) if k not in (a, b)), i[a] - max(-offset, 0))
        return where(here, masked(here, builder.load(source, local, x.dtype)), x.at(i))

    return builder.pointwise(x.shape, x.dtype, element)


@lowers("repeat")
def lower_repeat(builder: Builder, x: TensorValue, repeats: Sequence[Extent]) -> TensorValue:
    lead = len(repeats) - len(x.shape)
    shape = builder.result_shape
    if 0 in shape:
        return builder.pointwise(shape, x.dtype, lambda i: number(0, x.dtype))
    return builder.pointwise(
        shape, x.dtype, lambda i: x.at([ix.ZERO if size == 1 else i[lead + k] % size for k, size in enumerate(x.shape)])
    )


@lowers("roll")
def lower_roll(builder: Builder, x: TensorValue, shifts: Sequence[Extent], dims: Sequence[int] = ()) -> TensorValue:
    if not dims:
        if len(shifts) != 1:
            raise NotLowered("roll by several numbers along no dimension")  # an error in eager
        flat = lower_roll(builder, reshape(x, [x.numel]), shifts, [0])
        return builder.pointwise(x.shape, x.dtype, reshape(flat, x.shape).at)
    last = len(x.shape) - 1
    steps = [(normalize_dim(dim, len(x.shape)), shift) for dim, shift in zip(dims, shifts, strict=True)]
    amounts = [(at, _amount(x.shape[at], shift)) for at, shift in steps]
    if 0 in x.shape:
        return builder.pointwise(x.shape, x.dtype, x.at)

    def element(i: Subscripts, remaining: Sequence[tuple[int, Index]] = tuple(amounts)) -> Expr:
        if not remaining:
            return x.at(i)
        (at, amount), others = remaining[0], remaining[1:]
        size = x.shape[at]

        def moved(index: Index) -> Expr:
            return element(_replaced(i, at, index), others)

        if at != last:
            return moved((i[at] + size - amount) % size)
        # Along memory both pieces are read as vectors; a remainder in the index would be a gather.
        early, late = index_value(i[at]) < amount, index_value(i[at]) >= amount
        return where(early, masked(early, moved(i[at] + size - amount)), masked(late, moved(i[at] - amount)))

    return builder.pointwise(x.shape, x.dtype, element)


def _amount(size: Extent, shift: Extent) -> Index:
    """By how much a dimension is rolled forward, from 0 to below its size."""
    if isinstance(size, int) and isinstance(shift, int):
        return ix.as_index(shift % size if size else 0)
    least = ix.bounds_of(size)[0]
    if isinstance(shift, int) and -least < shift < least:
        return ix.as_index(shift) if shift >= 0 else ix.as_index(size) + shift
    raise NotLowered("roll by more than the size is known to be")


# -- indexing by tensors ------------------------------------------------------------------------------------------


def check_indices(builder: Builder, indices: TensorValue, extent: Extent, *, wraps: bool = False) -> None:
    """Raise at run time where eager would: all indices count, whether or not anything reads what they point at."""
    if ix.bounds_of(extent)[0] < 1:
        raise NotLowered("indexing a dimension that may be empty")  # there is no element to read in place of a bad one

    def value(i: Subscripts) -> Expr:
        return builder.convert(indices.at(i), torch.int64)

    def bad(i: Subscripts) -> Expr:
        return (value(i) < (-extent if wraps else 0)) | (value(i) >= extent)

    node = builder.node
    if _called(node) in _LOSSES_BY_CLASS:
        classes = f" There are {extent} classes." if isinstance(extent, int) else ""
        text = f"Target {{}} is out of bounds.{classes}"
        refuse(builder, indices.shape, bad, "IndexError", text, lambda i: where(bad(i), value(i), LEAST))
    else:
        error = "RuntimeError" if _called(node) in _RAISE_RUNTIME_ERROR else "IndexError"
        refuse(builder, indices.shape, bad, error, f"index out of range in {node.target}")


# Gather and scatter stand for other operators too, which raise their own errors.
_RAISE_RUNTIME_ERROR = frozenset({"aten::gather", "aten::scatter"})
_LOSSES_BY_CLASS = frozenset(
    {
        *("aten::nll_loss", "aten::nll_loss_nd", "aten::nll_loss_forward", "aten::nll_loss_backward"),
        *("aten::nll_loss2d", "aten::nll_loss2d_forward", "aten::nll_loss2d_backward"),
    }
)


def _called(node: torch.fx.Node) -> str:
    """The operator that the user's program called, before it was decomposed; by name, since nodes hold copies of it."""
    schema = getattr(node.meta.get("original_aten", node.target), "_schema", None)
    return "" if schema is None else str(schema.name)


def data_index(builder: Builder, value: Expr, extent: Extent, *, checked: bool = True, wraps: bool = False) -> Index:
    """An index read from memory, to be checked as a whole by :func:`check_indices`; negative ones count from the end
    if it ``wraps``. ``checked`` says that it may still be out of range when it is used.
    """
    return ix.of(DataIndex(builder.convert(value, torch.int64), extent, checked, wraps))


@lowers("gather")
def lower_gather(
    builder: Builder, x: TensorValue, dim: int, indices: TensorValue, *, sparse_grad: bool = False
) -> TensorValue:
    if not x.shape or len(indices.shape) != len(x.shape):  # eager lets indices without elements have any rank
        raise NotLowered("gather of a 0-dim tensor, or by indices of another rank")
    at = normalize_dim(dim, len(x.shape))
    check_indices(builder, indices, x.shape[at])
    return builder.pointwise(
        indices.shape, x.dtype, lambda i: x.at(_replaced(i, at, data_index(builder, indices.at(i), x.shape[at])))
    )


@lowers("scatter")
def lower_scatter(
    builder: Builder, x: TensorValue, dim: int, indices: TensorValue, source: TensorValue | float
) -> TensorValue:
    """One index in each row, as the gradient of a loss by class has it: every element asks whether it is meant.

    More than one would be a search in each element; a library call that writes at the indices does less.
    """
    _decline_overlap(builder)
    if not x.shape or len(indices.shape) != len(x.shape):
        raise NotLowered("scatter into a 0-dim tensor, or by indices of another rank")
    at = normalize_dim(dim, len(x.shape))
    if indices.shape != (*x.shape[:at], 1, *x.shape[at + 1 :]):
        raise NotLowered("scatter to other than one index in each row")
    check_indices(builder, indices, x.shape[at])

    def element(i: Subscripts) -> Expr:
        row = _replaced(i, at, ix.ZERO)
        # As an index it is known to be small, and is compared in 32 bits.
        meant = index_value(data_index(builder, indices.at(row), x.shape[at]))
        new = builder.load(source, row, x.dtype) if isinstance(source, TensorValue) else number(source, x.dtype)
        return where(index_value(i[at]).eq(meant), new, x.at(i))

    return builder.pointwise(x.shape, x.dtype, element)


@lowers("index")
def lower_index(
    builder: Builder,
    x: TensorValue,
    indices: Sequence[TensorValue | None],
    *,
    checked: bool = True,
    wraps: bool = True,
) -> TensorValue:
    given = {k: tensor for k, tensor in enumerate(indices) if tensor is not None}
    if any(t.dtype in (torch.bool, torch.uint8) for t in given.values()) or not given:
        raise NotLowered("indexing by a mask has a size that depends on data")
    block = broadcast_shapes([t.shape for t in given.values()])
    first = min(given)
    adjacent = list(given) == list(range(first, max(given) + 1))
    rest = [k for k in range(len(x.shape)) if k not in given]
    # The dimensions of the index tensors take the place of those they index, or lead where these lie apart.
    leading = [k for k in rest if adjacent and k < first]
    trailing = rest[len(leading) :]
    if checked:
        for k, tensor in given.items():
            check_indices(builder, tensor, x.shape[k], wraps=wraps)
    wide = {k: broadcast_to(tensor, block) for k, tensor in given.items()}
    split = len(leading), len(leading) + len(block)

    def element(i: Subscripts) -> Expr:
        subscripts = dict(zip([*leading, *trailing], [*i[: split[0]], *i[split[1] :]], strict=True))
        for k, tensor in wide.items():
            value = tensor.at(i[split[0] : split[1]])
            subscripts[k] = data_index(builder, value, x.shape[k], checked=checked, wraps=wraps)
        return x.at([subscripts[k] for k in range(len(x.shape))])

    shape = [*(x.shape[k] for k in leading), *block, *(x.shape[k] for k in trailing)]
    return builder.pointwise(shape, x.dtype, element)


lowers("_unsafe_index")(partial(lower_index, checked=False))


@lowers("embedding")
def lower_embedding(
    builder: Builder, weight: TensorValue, indices: TensorValue, *_: object, **__: object
) -> TensorValue:
    return lower_index(builder, weight, [indices], wraps=False)


@lowers("index_select")
def lower_index_select(builder: Builder, x: TensorValue, dim: int, indices: TensorValue) -> TensorValue:
    if not x.shape or len(indices.shape) != 1:
        raise NotLowered("index_select of a 0-dim tensor")
    if indices.dtype not in (torch.int32, torch.int64):
        raise NotLowered("index_select by indices of another type, which eager refuses")
    return lower_index(builder, x, [*[None] * normalize_dim(dim, len(x.shape)), indices], wraps=False)


@lowers("take")
def lower_take(builder: Builder, x: TensorValue, indices: TensorValue) -> TensorValue:
    return lower_index(builder, reshape(x, [x.numel]), [indices])
