"""Layer, group and batch normalization, forward and backward, in terms of reductions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from torchkiln.ir import index as ix
from torchkiln.ir.expr import Expr, literal, op
from torchkiln.ir.index import Extent, Index
from torchkiln.lowering.builder import Builder, Element, Subscripts, TensorValue, compute_dtype, view_of
from torchkiln.lowering.pointwise import share
from torchkiln.lowering.reduction import finish, moments_dtype, reader, reduce_dims, reduce_wide, variance
from torchkiln.lowering.registry import lowers
from torchkiln.lowering.views import broadcast_to, reshape

MaybeTensor = TensorValue | None
Gradients = tuple[MaybeTensor, MaybeTensor, MaybeTensor]


def _normalized(
    builder: Builder, x: TensorValue, average: MaybeTensor, inverse: TensorValue, weight: MaybeTensor, bias: MaybeTensor
) -> TensorValue:
    """``(x - average) * inverse * weight + bias``, all of which broadcast to the shape of ``x``."""
    steps = [("sub", average), ("mul", inverse), ("mul", weight), ("add", bias)]
    present = [(name, broadcast_to(value, x.shape)) for name, value in steps if value is not None]
    inner = compute_dtype(x.dtype)

    def element(i: Subscripts) -> Expr:
        y = builder.load(x, i, inner)
        for name, value in present:
            y = op(name, y, builder.load(value, i, inner))
        return y

    return builder.pointwise(x.shape, x.dtype, element)


def _inverse_deviation(builder: Builder, spread: TensorValue, eps: float, dtype: torch.dtype) -> TensorValue:
    return builder.pointwise(spread.shape, dtype, lambda i: op("rsqrt", builder.load(spread, i, dtype) + eps))


def _statistic(
    builder: Builder, value: TensorValue, position: int = 1, shape: Sequence[Extent] | None = None
) -> TensorValue:
    """A statistic that the operator returns: result ``position``, in the ``shape`` and dtype that eager saves it in."""
    saved = finish(builder, value, _statistics_dtype(builder, value.dtype, position))
    return saved if shape is None else reshape(saved, shape)


def _statistics_dtype(builder: Builder, default: torch.dtype, position: int) -> torch.dtype:
    """The dtype eager gives the saved statistics (it differs between mixed and uniform precision)."""
    results = builder.results
    if len(results) > position and isinstance(results[position], torch.Tensor):
        saved: torch.Tensor = results[position]
        return saved.dtype
    return default


# -- layer and group norm ---------------------------------------------------------------------------------------------


def _inner_dims(x: TensorValue, normalized_shape: Sequence[Extent]) -> tuple[int, ...]:
    return tuple(range(len(x.shape) - len(normalized_shape), len(x.shape)))


@lowers("native_layer_norm")
def lower_layer_norm(
    builder: Builder,
    x: TensorValue,
    normalized_shape: Sequence[Extent],
    weight: MaybeTensor,
    bias: MaybeTensor,
    eps: float,
) -> tuple[TensorValue, TensorValue, TensorValue]:
    inner = compute_dtype(x.dtype)
    spread, average = variance(builder, x, _inner_dims(x, normalized_shape), 0.0, inner)
    inverse = _inverse_deviation(builder, spread, eps, inner)
    result = _normalized(builder, x, average, inverse, weight, bias)
    return result, _statistic(builder, average), _statistic(builder, inverse)


@lowers("_fused_rms_norm")
def lower_rms_norm(
    builder: Builder, x: TensorValue, normalized_shape: Sequence[Extent], weight: MaybeTensor, eps: float | None
) -> tuple[TensorValue, TensorValue]:
    inner = compute_dtype(x.dtype)
    read = reader(builder, x, inner)
    total = reduce_dims(
        builder, x, _inner_dims(x, normalized_shape), "sum", lambda i: read(i) * read(i), keepdim=True
    )
    size = ix.product(normalized_shape)
    count = max(size, 1) if isinstance(size, int) else size
    mean = builder.pointwise(total.shape, inner, lambda i: total.at(i) / count)
    inverse = _inverse_deviation(builder, mean, torch.finfo(x.dtype).eps if eps is None else eps, inner)
    return _normalized(builder, x, None, inverse, weight, None), _statistic(builder, inverse)


@lowers("native_layer_norm_backward")
def lower_layer_norm_backward(
    builder: Builder,
    grad: TensorValue,
    x: TensorValue,
    normalized_shape: Sequence[Extent],
    average: TensorValue,
    inverse: TensorValue,
    weight: MaybeTensor,
    bias: MaybeTensor,
    output_mask: Sequence[bool],
) -> Gradients:
    inner = compute_dtype(x.dtype)
    inner_dims = _inner_dims(x, normalized_shape)
    g, x_at, mean_at, inverse_at = (
        reader(builder, broadcast_to(value, x.shape), inner) for value in (grad, x, average, inverse)
    )

    def normalized(i: Subscripts) -> Expr:
        return (x_at(i) - mean_at(i)) * inverse_at(i)

    def scaled(i: Subscripts) -> Expr:
        return g(i) if weight is None else g(i) * builder.load(weight, i[inner_dims[0] :], inner)

    input_grad = weight_grad = bias_grad = None
    if output_mask[0]:
        first = reduce_wide(builder, x, inner_dims, "sum", scaled)
        second = reduce_wide(builder, x, inner_dims, "sum", lambda i: scaled(i) * normalized(i))
        part = share(ix.product(normalized_shape), inner)

        def element(i: Subscripts) -> Expr:
            correction = first.at(i) + normalized(i) * second.at(i)
            return (scaled(i) - correction * part) * inverse_at(i)

        input_grad = builder.pointwise(x.shape, x.dtype, element)
    outer_dims = tuple(range(inner_dims[0]))
    if output_mask[1] and weight is not None:
        total = reduce_dims(builder, x, outer_dims, "sum", lambda i: g(i) * normalized(i), keepdim=False)
        weight_grad = finish(builder, total, weight.dtype)
    if output_mask[2] and bias is not None:
        bias_grad = finish(builder, reduce_dims(builder, x, outer_dims, "sum", g, keepdim=False), bias.dtype)
    return input_grad, weight_grad, bias_grad


@lowers("native_group_norm")
def lower_group_norm(
    builder: Builder,
    x: TensorValue,
    weight: MaybeTensor,
    bias: MaybeTensor,
    batch: Extent,
    channels: int,
    spatial: Extent,
    groups: int,
    eps: float,
) -> tuple[TensorValue, TensorValue, TensorValue]:
    inner = compute_dtype(x.dtype)
    size = channels // groups
    spread, average = variance(builder, reshape(x, [batch, groups, size, spatial]), (2, 3), 0.0, inner)
    inverse = _inverse_deviation(builder, spread, eps, inner)
    mean_at, inverse_at = (
        view_of(value, x.shape, lambda i: (i[0], i[1] // size, ix.ZERO, ix.ZERO)) for value in (average, inverse)
    )
    scale, shift = _channel_views(x, weight, bias)
    result = _normalized(builder, x, mean_at, inverse_at, scale, shift)
    shape = (batch, groups)
    return result, _statistic(builder, average, shape=shape), _statistic(builder, inverse, shape=shape)


# -- batch norm -------------------------------------------------------------------------------------------------------


def _channel_view(x: TensorValue, rank: int) -> TensorValue:
    """A per-channel vector shaped to broadcast against (N, C, ...)."""
    return reshape(x, [1, x.shape[0], *([1] * (rank - 2))])


def _channel_views(x: TensorValue, *values: MaybeTensor) -> Iterator[MaybeTensor]:
    return (None if value is None else _channel_view(value, len(x.shape)) for value in values)


def _batch_dims(x: TensorValue) -> tuple[int, ...]:
    return (0, *range(2, len(x.shape)))


@lowers("_native_batch_norm_legit_functional")
def lower_batch_norm_functional(
    builder: Builder,
    x: TensorValue,
    weight: MaybeTensor,
    bias: MaybeTensor,
    running_mean: TensorValue,
    running_var: TensorValue,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[TensorValue, ...]:
    if not training:
        results = lower_batch_norm_inference(builder, x, weight, bias, running_mean, running_var, momentum, eps)
        return *results, _statistic(builder, running_mean, 3), _statistic(builder, running_var, 4)
    output, average, inverse, spread = _batch_norm_training(builder, x, weight, bias, eps)
    channels = (x.shape[1],)
    new_mean = _moving(builder, running_mean, reshape(average, channels), momentum, None, 3)
    count = ix.product(x.shape[k] for k in _batch_dims(x))
    new_var = _moving(builder, running_var, reshape(spread, channels), momentum, count, 4)
    saved = (_statistic(builder, value, shape=channels) for value in (average, inverse))
    return output, *saved, new_mean, new_var


def _moving(
    builder: Builder, running: TensorValue, batch: TensorValue, momentum: float, count: Extent | None, position: int
) -> TensorValue:
    """A running statistic after this batch: result ``position`` of the operator.

    A variance over ``count`` values is made unbiased.
    """
    inner = compute_dtype(running.dtype)

    def element(i: Subscripts) -> Expr:
        old, new = builder.load(running, i, inner), builder.load(batch, i, inner)
        if isinstance(count, Index):
            new = new * (literal(count, inner) / literal(count - 1, inner) * momentum)
        else:
            scale = 1.0 if count is None else count / (count - 1) if count > 1 else float("nan")
            new = new * (scale * momentum)
        return new + old * (1 - momentum)

    return builder.pointwise(running.shape, _statistics_dtype(builder, running.dtype, position), element)


def _batch_norm_training(
    builder: Builder, x: TensorValue, weight: MaybeTensor, bias: MaybeTensor, eps: float
) -> tuple[TensorValue, TensorValue, TensorValue, TensorValue]:
    inner = compute_dtype(x.dtype)
    # The error of a mean far from zero shows in every element: around 1000, 32 x 64 x 28 x 28 values are off by 3e-5
    # so, which is half of the mean's last place, by 1.4e-4 where it is summed in float32, in eager by 5.5e-5.
    spread, average = variance(builder, x, _batch_dims(x), 0.0, inner, moments_dtype(builder, x.dtype))
    inverse = _inverse_deviation(builder, spread, eps, inner)
    scale, shift = _channel_views(x, weight, bias)
    return _normalized(builder, x, average, inverse, scale, shift), average, inverse, spread


@lowers("_native_batch_norm_legit.no_stats")
def lower_batch_norm_no_stats(
    builder: Builder,
    x: TensorValue,
    weight: MaybeTensor,
    bias: MaybeTensor,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[TensorValue, ...]:
    output, *statistics, _ = _batch_norm_training(builder, x, weight, bias, eps)
    return output, *(_statistic(builder, value, shape=(x.shape[1],)) for value in statistics)


@lowers("_native_batch_norm_legit_no_training")
def lower_batch_norm_inference(
    builder: Builder,
    x: TensorValue,
    weight: MaybeTensor,
    bias: MaybeTensor,
    running_mean: TensorValue,
    running_var: TensorValue,
    momentum: float,
    eps: float,
) -> tuple[TensorValue, TensorValue, TensorValue]:
    inner = compute_dtype(running_var.dtype)
    inverse = _inverse_deviation(builder, running_var, eps, inner)
    views = [_channel_view(value, len(x.shape)) for value in (running_mean, inverse)]
    scale, shift = _channel_views(x, weight, bias)
    output = _normalized(builder, x, views[0], views[1], scale, shift)
    if isinstance(saved := builder.results[1], torch.Tensor) and tuple(saved.shape) != (0,):
        # A card's operator returns what it used.
        used = [_statistic(builder, value, shape=(x.shape[1],)) for value in (running_mean, inverse)]
        return output, used[0], used[1]
    empty = builder.pointwise((0,), _statistics_dtype(builder, x.dtype, 1), lambda _: literal(0, inner))
    return output, empty, empty


@lowers("native_batch_norm_backward")
def lower_batch_norm_backward(
    builder: Builder,
    grad: TensorValue,
    x: TensorValue,
    weight: MaybeTensor,
    running_mean: MaybeTensor,
    running_var: MaybeTensor,
    saved_mean: MaybeTensor,
    saved_inverse: MaybeTensor,
    train: bool,
    eps: float,
    output_mask: Sequence[bool],
) -> Gradients:
    inner = compute_dtype(x.dtype)
    average, inverse = saved_mean, saved_inverse
    if not train:
        assert running_var is not None
        average, inverse = running_mean, _inverse_deviation(builder, finish(builder, running_var, inner), eps, inner)
    assert average is not None
    assert inverse is not None
    mean = broadcast_to(_channel_view(average, len(x.shape)), x.shape)
    g, x_at, mean_at, inverse_at = (reader(builder, value, inner) for value in (grad, x, mean, inverse))

    def centered(i: Subscripts) -> Expr:
        return x_at(i) - mean_at(i)

    dims = _batch_dims(x)
    grad_total = reduce_dims(builder, x, dims, "sum", g, keepdim=False)
    centered_total = reduce_dims(builder, x, dims, "sum", lambda i: g(i) * centered(i), keepdim=False)
    input_grad = weight_grad = bias_grad = None
    if output_mask[0]:
        scale = inverse_at if weight is None else lambda i: inverse_at(i) * builder.load(weight, i, inner)
        totals = (grad_total, centered_total) if train else None
        input_grad = _batch_norm_input_gradient(builder, x, g, centered, scale, inverse_at, totals)
    dtype = x.dtype if weight is None else weight.dtype
    if output_mask[1]:
        total = builder.pointwise((x.shape[1],), inner, lambda i: centered_total.at(i) * inverse_at(i))
        weight_grad = finish(builder, total, dtype)
    if output_mask[2]:
        bias_grad = finish(builder, grad_total, dtype)
    return input_grad, weight_grad, bias_grad


def _batch_norm_input_gradient(
    builder: Builder,
    x: TensorValue,
    g: Element,
    centered: Element,
    scale: Element,
    inverse: Element,
    totals: tuple[TensorValue, TensorValue] | None,
) -> TensorValue:
    """The gradient of ``x``. Where its own statistics were used, ``totals`` of ``g`` and of ``g * centered`` count."""
    inner = compute_dtype(x.dtype)
    wide_scale = _channel_values(builder, x, inner, scale)
    if totals is None:
        return builder.pointwise(x.shape, x.dtype, lambda i: g(i) * wide_scale.at(i))
    grad_total, centered_total = totals
    part = share(ix.product(x.shape[k] for k in _batch_dims(x)), inner)
    slope = _channel_values(builder, x, inner, lambda i: centered_total.at(i) * part * (inverse(i) * inverse(i)))
    shift = _channel_values(builder, x, inner, lambda i: grad_total.at(i) * part)
    return builder.pointwise(
        x.shape, x.dtype, lambda i: (g(i) - centered(i) * slope.at(i) - shift.at(i)) * wide_scale.at(i)
    )


def _channel_values(builder: Builder, x: TensorValue, dtype: torch.dtype, element: Element) -> TensorValue:
    """A vector with an ``element`` for each channel of ``x``, expanded to its shape."""
    return broadcast_to(_channel_view(builder.pointwise((x.shape[1],), dtype, element), len(x.shape)), x.shape)
