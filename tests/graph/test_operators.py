"""The operator table: kinds, FLOPs, and strides, for which eager's kernels give the same values where it says so."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch
import torch.fx
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from conformance.cases import Case, database
from conformance.forced_layouts import orders
from conformance.strides import call_with_other_strides, laid_out, stress, values_agree
from torchkiln.graph import operators as table
from torchkiln.graph.operators import (
    Kind,
    Strides,
    becomes_loop,
    flops,
    kind_of,
    listed_operators,
    loops,
    strides_taken,
    takes,
)
from torchkiln.native.onednn import packed_dtypes

aten = torch.ops.aten

# Together they reach nearly all that is listed.
CASES = """
_batch_norm_with_update _unsafe_masked_index _upsample_bilinear2d_aa addbmm addmv addr alias_copy all amin aminmax any
argmax argmin complex count_nonzero cummax cummin diagonal_copy expand_copy fft.fftshift fill floor_divide
grid_sampler_2d grid_sampler_3d index_add index_copy index_fill index_put index_reduce/mean kthvalue linalg.diagonal
linalg.eigh linalg.matrix_rank/hermitian linalg.vander logcumsumexp logdet logsumexp lu_unpack masked_fill
masked_scatter masked_select max/reduction_with_dim median min/reduction_no_dim mode msort nanmean nanmedian
narrow_copy native_dropout_backward nn.functional.adaptive_avg_pool1d nn.functional.adaptive_avg_pool3d
nn.functional.adaptive_max_pool1d nn.functional.adaptive_max_pool3d nn.functional.avg_pool2d nn.functional.avg_pool3d
nn.functional.batch_norm nn.functional.binary_cross_entropy nn.functional.binary_cross_entropy_with_logits
nn.functional.channel_shuffle nn.functional.conv2d nn.functional.conv_transpose1d nn.functional.cross_entropy
nn.functional.elu nn.functional.embedding nn.functional.gelu nn.functional.glu nn.functional.hardshrink
nn.functional.hardsigmoid nn.functional.hardswish nn.functional.hardtanh nn.functional.huber_loss
nn.functional.interpolate/bicubic nn.functional.interpolate/linear nn.functional.interpolate/nearest
nn.functional.interpolate/nearest-exact nn.functional.interpolate/trilinear nn.functional.layer_norm
nn.functional.leaky_relu nn.functional.logsigmoid nn.functional.max_pool1d nn.functional.mish nn.functional.mse_loss
nn.functional.multi_head_attention_forward nn.functional.pad/circular nn.functional.pad/reflect
nn.functional.pad/replicate nn.functional.pixel_unshuffle nn.functional.prelu nn.functional.smooth_l1_loss
nn.functional.soft_margin_loss nn.functional.softplus nn.functional.softshrink nn.functional.unfold
nn.functional.upsample_bilinear nonzero norm/fro permute_copy polar prod put rot90 rsub scatter_reduce/amin select
select_scatter slice_scatter split_with_sizes_copy squeeze_copy stack std/unbiased std_mean/unbiased stft take topk
torch.ops.aten._safe_softmax.default trace transpose_copy unbind_copy unfold_copy unsafe_split unsqueeze_copy
var/unbiased var_mean/unbiased view_copy where
"""
# Their results hold whatever was in memory, or are sizes.
NOT_VALUES = {"empty_like", "new_empty", "new_empty_strided", "sym_size", "sym_numel"}


def _more_calls() -> Iterator[tuple[Any, tuple[Any, ...]]]:
    """Operators that graphs have and the database does not call by themselves."""
    image, channels = torch.randn(2, 6, 5, 4), torch.rand(6) + 0.5
    statistics = (channels.clone(), channels.clone())
    yield aten._native_batch_norm_legit_no_training.default, (image, channels, channels, *statistics, 0.1, 1e-5)
    yield aten._native_batch_norm_legit_functional.default, (image, channels, channels, *statistics, True, 0.1, 1e-5)
    yield aten._native_batch_norm_legit.no_stats, (image, channels, channels, True, 0.1, 1e-5)
    yield aten._batch_norm_with_update_functional.default, (image, channels, channels, *statistics, 0.1, 1e-5)
    yield aten.linear.default, (torch.randn(3, 4, 5), torch.randn(6, 5), torch.randn(6))
    yield aten.matmul.default, (torch.randn(3, 4, 5), torch.randn(3, 5, 6))
    index = [None, torch.tensor([3, 0, 2])]
    yield aten._unsafe_index.Tensor, (image, index)
    yield aten._unsafe_index_put.default, (image, index, torch.randn(2, 3, 5, 4))
    yield aten.copy.default, (torch.empty(2, 6, 5, 4), image)
    yield aten.full_like.default, (image, 2.5)
    yield aten.new_full.default, (image, [2, 3], 2.5)
    yield aten.all.default, (image > -1,)
    yield aten.any.default, (image > 1,)
    yield aten.mse_loss.default, (image, torch.randn(2, 6, 5, 4))
    yield aten.fill.Scalar, (image, 2.5)
    yield aten.repeat.default, (image, [1, 2, 1, 2])
    yield aten.lift_fresh_copy.default, (image,)
    for target in (aten.alias_copy, aten.hardsigmoid, aten.mish, aten.softplus):
        yield target.default, (image,)
    yield aten.log_sigmoid_backward.default, (torch.randn(2, 6, 5, 4), image, aten.log_sigmoid_forward(image)[1])
    yield aten.softplus_backward.default, (torch.randn(2, 6, 5, 4), image, 1.0, 20.0)
    yield aten.mish_backward.default, (torch.randn(2, 6, 5, 4), image)
    yield aten.hardsigmoid_backward.default, (torch.randn(2, 6, 5, 4), image)
    yield aten.elu_backward.default, (torch.randn(2, 6, 5, 4), 1.0, 1.0, 1.0, False, image)
    if hasattr(aten, "_fused_rms_norm"):
        yield aten._fused_rms_norm.default, (image, [4], torch.randn(4), 1e-5)
    classes = torch.randint(0, 6, (2, 5, 4))
    yield aten.cumsum.default, (image, 1)
    yield aten.leaky_relu.default, (image, 0.1)
    yield aten.nll_loss2d_forward.default, (image, classes, channels, 1, -100)


def test_listed_operators_give_the_same_values_for_any_strides() -> None:
    listed = {name for name, taken in listed_operators().items() if taken is Strides.ANY and _rests_on_the_table(name)}
    names = [name for name in CASES.split() if name in database()]
    seen = stress(frozenset(listed), each=4, chosen=[Case(name, "float32") for name in names])
    for target, args in _more_calls():
        call_with_other_strides(target, (args, {}), seen)
    values = {f"aten::{name}" for name in NOT_VALUES}
    assert {name: found for name, found in seen.differences.items() if name not in values} == {}
    numbers = {"aten::dot", "aten::vdot", "aten::_local_scalar_dense", "aten::_batch_norm_with_update"}
    assert listed - values - seen.agreed.keys() <= numbers


def _rests_on_the_table(name: str) -> bool:
    """Whether torch's schemas and tags do not say it: the operator reads tensors, and is no view and not pointwise."""
    packet = getattr(aten, name.removeprefix("aten::"), None)
    found = [getattr(packet, overload) for overload in packet.overloads()] if packet is not None else []
    return any(
        _has_tensors(op._schema.arguments) and kind_of(op) is not Kind.VIEW and torch.Tag.pointwise not in op.tags
        for op in found
        if not op._schema.is_mutable and _has_tensors(op._schema.returns)
    )


def _has_tensors(values: Any) -> bool:
    return any("Tensor" in str(value.type) for value in values)


@pytest.mark.parametrize("target", [aten.dot.default, aten.vdot.default])
def test_products_of_vectors_take_gaps(target: Any) -> None:
    a, b = torch.randn(2, 7, 3).unbind(0)
    torch.testing.assert_close(target(a[:, 1], b[:, 1]), target(a[:, 1].clone(), b[:, 1].clone()))


def test_operators_on_single_elements_take_any_strides() -> None:
    names = ("add", "atan2", "clamp", "erf", "lerp", "mul", "pow", "sigmoid", "where")
    seen = stress(each=3, chosen=[Case(name, "float32") for name in names])
    pointwise = {name for name in {*seen.agreed, *seen.differences} if _is_pointwise(name)}
    assert len(pointwise) > 5
    assert pointwise.isdisjoint(seen.differences)


def _is_pointwise(name: str) -> bool:
    packet = getattr(aten, name.removeprefix("aten::"))
    return any(torch.Tag.pointwise in getattr(packet, overload).tags for overload in packet.overloads())


def _channels_last(value: Tensor) -> Tensor:
    return laid_out(value, (0, *range(2, value.dim()), 1))


@pytest.mark.parametrize("shape", [(2, 8, 5, 6), (2, 8, 3, 4, 5), (2, 8, 1, 6)])
def test_group_norm_takes_images_that_all_have_one_layout(shape: tuple[int, ...]) -> None:
    x, gradient, weight = torch.randn(shape), torch.randn(shape), torch.randn(8)
    sizes = (2, 8, x[0, 0].numel(), 4)
    _, mean, rstd = expected = aten.native_group_norm(x, weight, weight, *sizes, 1e-5)
    assert values_agree(aten.native_group_norm(_channels_last(x), weight, weight, *sizes, 1e-5), expected)
    target = aten.native_group_norm_backward.default
    right = target(gradient, x, mean, rstd, weight, *sizes, [True] * 3)
    for change_gradient, change_image in product((False, True), repeat=2):
        images = (
            _channels_last(gradient) if change_gradient else gradient,
            _channels_last(x) if change_image else x,
        )
        arguments = (*images, mean, rstd, weight, *sizes, [True] * 3)
        taken = takes(target, (arguments, {}))
        assert taken == (change_gradient == change_image)
        assert not taken or values_agree(target(*arguments), right)


# -- oneDNN -----------------------------------------------------------------------------------------------------------

mkldnn = torch.ops.mkldnn
packs = pytest.mark.skipif("float32" not in packed_dtypes(), reason="needs oneDNN")


def _images(value: Tensor) -> Iterator[Tensor]:
    """A tensor in all kinds of layouts: several orders of its dimensions, and gaps between elements."""
    yield value
    for order in orders(value.dim()):
        yield laid_out(value, order)
    wide = torch.randn(*value.shape[:-1], 2 * value.shape[-1])
    wide[..., ::2] = value
    yield wide[..., ::2]


@packs
@pytest.mark.parametrize("groups", [1, 2])
def test_convolutions_with_packed_weights_take_any_strides_and_return_channels_last(groups: int) -> None:
    image, other, bias = torch.randn(2, 6, 5, 4), torch.randn(2, 8, 5, 4), torch.randn(8)
    weight = torch.randn(8, 6 // groups, 3, 3)
    geometry = ([1, 1], [1, 1], [1, 1], groups)
    for stored in _images(weight):
        packed = mkldnn._reorder_convolution_weight(stored, *geometry, [2, 6, 5, 4])
        _convolutions_agree(image, other, (weight, packed, bias), geometry)


def _convolutions_agree(image: Tensor, other: Tensor, weights: tuple[Tensor, ...], geometry: tuple[Any, ...]) -> None:
    weight, packed, bias = weights
    groups = geometry[-1]
    plain = F.conv2d(image, weight, bias, 1, 1, 1, groups)
    last = _channels_last(plain).stride()
    for laid in _images(image):
        result = mkldnn._convolution_pointwise(laid, packed, bias, *geometry, "none", [], "")
        torch.testing.assert_close(result, plain)
        assert result.stride() == last
        for added in _images(other):
            result = mkldnn._convolution_pointwise.binary(
                laid, added, packed, bias, *geometry, "add", None, None, [], None
            )
            torch.testing.assert_close(result, plain + other)
            assert result.stride() == last
            written = added.clone()
            mkldnn._convolution_pointwise_.binary(written, laid, packed, bias, *geometry, "add", None, None, [], None)
            torch.testing.assert_close(written, plain + other)


@packs
@pytest.mark.parametrize("groups", [1, 2])
def test_transposed_convolutions_with_packed_weights_take_any_strides(groups: int) -> None:
    image, weight, bias = torch.randn(2, 6, 5, 4), torch.randn(6, 8 // groups, 3, 3), torch.randn(8)
    geometry = ([1, 1], [1, 1], [2, 2], [1, 1], groups)
    packed = mkldnn._reorder_convolution_transpose_weight(weight, *geometry, [2, 6, 5, 4])
    plain = F.conv_transpose2d(image, weight, bias, 2, 1, 1, groups)
    for laid in _images(image):
        result = mkldnn._convolution_transpose_pointwise(laid, packed, bias, *geometry, "none", [], "")
        torch.testing.assert_close(result, plain)
        assert result.stride() == _channels_last(plain).stride()


@packs
def test_linear_layers_with_packed_weights_take_any_strides() -> None:
    rows, other, weight, bias = torch.randn(5, 6), torch.randn(5, 7), torch.randn(7, 6), torch.randn(7)
    plain = F.linear(rows, weight, bias)
    for stored in _images(weight):
        packed = mkldnn._reorder_linear_weight(stored)
        for laid in _images(rows):
            result = mkldnn._linear_pointwise(laid, packed, bias, "none", [], "")
            torch.testing.assert_close(result, plain)
            assert result.is_contiguous()
            for added in _images(other):
                result = mkldnn._linear_pointwise.binary(laid, added, packed, bias, "add")
                torch.testing.assert_close(result, plain + other)
                assert result.is_contiguous()


# -- kinds ------------------------------------------------------------------------------------------------------------


def test_every_operator_is_declared_once() -> None:
    names = [
        name.partition(".")[0]
        for rows in (table._LOOPS, table._NATIVE_CALLS, table._LIBRARY)
        for text in rows.values()
        for name in text.split()
    ]
    assert sorted(names) == sorted(set(names))


@pytest.mark.parametrize(
    ("target", "kind"),
    [
        (aten.add.Tensor, Kind.POINTWISE),
        (aten.special_bessel_j0.default, Kind.POINTWISE),
        (aten.floor_divide.default, Kind.POINTWISE),
        (aten.max.other, Kind.POINTWISE),
        (aten.max.dim, Kind.REDUCTION),
        (aten.cumsum.default, Kind.REDUCTION),
        (aten.sort.stable, Kind.SORT),
        (aten.topk.default, Kind.SORT),
        (aten.cat.default, Kind.MOVEMENT),
        (aten.permute.default, Kind.VIEW),
        (aten._unsafe_view.default, Kind.VIEW),
        (aten.view_as_complex.default, Kind.VIEW),
        (aten.empty_like.default, Kind.UNINITIALIZED),
        (aten.bernoulli.p, Kind.RANDOM),
        (torch.ops.kiln.random.default, Kind.RANDOM),
        (aten.index_add.default, Kind.SCATTER),
        (aten.mm.default, Kind.MATMUL),
        (aten.mm.dtype, Kind.MATMUL),
        (aten._scaled_dot_product_flash_attention_for_cpu.default, Kind.MATMUL),
        (aten._scaled_dot_product_flash_attention.default, Kind.MATMUL),
        (aten._scaled_dot_product_efficient_attention_backward.default, Kind.MATMUL),
        (aten.add_.Tensor, Kind.EFFECT),
        (aten._assert_async.msg, Kind.EFFECT),
        (aten._fft_r2c.default, Kind.LIBRARY),
        (torch.ops.higher_order.cond, Kind.LIBRARY),
    ],
    ids=str,
)
def test_an_operator_has_the_kind_of_what_it_does(target: Any, kind: Kind) -> None:
    assert kind_of(target) is kind


def test_loops_take_what_they_read_from_other_loops_and_calls_from_memory() -> None:
    graph = torch.fx.Graph()
    x, index = graph.placeholder("x"), graph.placeholder("index")
    x.meta["val"], index.meta["val"] = torch.empty(3, 4), torch.empty(3, 1, dtype=torch.int64)
    one_hot = graph.call_function(aten.scatter.value, (x, 1, index, 1.0))
    several = graph.call_function(aten.scatter.value, (x, 0, index, 1.0))
    assert becomes_loop(one_hot)
    assert not becomes_loop(several)
    for target in (aten.sort.stable, aten.mm.default, aten.cumsum.default, torch.ops.higher_order.cond):
        assert not becomes_loop(graph.call_function(target, (x,))), target
    assert becomes_loop(graph.call_function(aten.sum.default, (x,)))


# -- cost -------------------------------------------------------------------------------------------------------------


def _counted(target: Any, *arguments: Any) -> tuple[int, int]:
    """Ours, and what torch's counter says, of one call."""
    shaped = [tuple(a.shape) if isinstance(a, Tensor) else a for a in arguments]
    with FlopCounterMode(display=False) as counter:
        result = target(*arguments)
    first = next(part for part in (result if isinstance(result, tuple) else (result,)) if part is not None)
    return flops(target, shaped, tuple(first.shape)), counter.get_total_flops()


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("groups", [1, 2])
def test_convolutions_cost_what_torchs_counter_says(groups: int, transposed: bool) -> None:
    x = torch.randn(2, 4, 9, 7)
    weight = torch.randn(4, 6 // groups, 3, 2) if transposed else torch.randn(6, 4 // groups, 3, 2)
    form = ([2, 1], [1, 0], [1, 1], transposed, [0, 0], groups)
    ours, torchs = _counted(aten.convolution.default, x, weight, None, *form)
    assert ours == torchs > 0
    gradient = torch.randn_like(aten.convolution(x, weight, None, *form))
    backward = _counted(aten.convolution_backward.default, gradient, x, weight, [0], *form, [True, True, False])
    assert backward[0] == 2 * ours  # torch's counter leaves out groups and transposition here
    assert groups > 1 or transposed or backward[0] == backward[1]


@pytest.mark.parametrize(
    ("target", "shapes"),
    [
        (aten.mm.default, ((3, 4), (4, 5))),
        (aten.bmm.default, ((2, 3, 4), (2, 4, 5))),
        (aten.addmm.default, ((5,), (3, 4), (4, 5))),
        (aten.baddbmm.default, ((2, 3, 5), (2, 3, 4), (2, 4, 5))),
    ],
    ids=str,
)
def test_matmuls_cost_what_torchs_counter_says(target: Any, shapes: tuple[tuple[int, ...], ...]) -> None:
    ours, torchs = _counted(target, *map(torch.randn, shapes))
    assert ours == torchs > 0


@pytest.mark.parametrize(
    ("target", "shapes", "result", "expected"),
    [
        (aten.mv.default, ((3, 4), (4,)), (3,), 2 * 3 * 4),
        (aten.dot.default, ((4,), (4,)), (), 2 * 4),
        (aten.addmv.default, ((3,), (3, 4), (4,)), (3,), 2 * 3 * 4),
        (aten.addr.default, ((3, 5), (3,), (5,)), (3, 5), 2 * 3 * 5),
        (aten.addbmm.default, ((3, 5), (2, 3, 4), (2, 4, 5)), (3, 5), 2 * 2 * 3 * 4 * 5),
        (aten.linear.default, ((2, 3, 4), (5, 4), None), (2, 3, 5), 2 * 6 * 4 * 5),
        (aten._scaled_dot_product_flash_attention_for_cpu.default, ((2, 3, 7, 4), (2, 3, 9, 4), (2, 3, 9, 4)),
         (2, 3, 7, 4), 2 * 2 * 6 * 7 * 9 * 4),
        (aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
         ((2, 3, 7, 4), (2, 3, 7, 4), (2, 3, 9, 4), (2, 3, 9, 4)), (2, 3, 7, 4), 5 * 2 * 6 * 7 * 9 * 4),
        (aten._scaled_dot_product_cudnn_attention.default,
         ((2, 3, 7, 4), (2, 3, 9, 4), (2, 3, 9, 4), None, True), (2, 3, 7, 4), 2 * 2 * 6 * 7 * 9 * 4),
        (aten._scaled_dot_product_efficient_attention_backward.default,
         ((2, 3, 7, 4), (2, 3, 7, 4), (2, 3, 9, 4), (2, 3, 9, 4), None), (2, 3, 7, 4), 5 * 2 * 6 * 7 * 9 * 4),
        (aten.lstm.input, ((5, 2, 3), [(1, 2, 4)] * 2, [(16, 3), (16, 4), (16,), (16,)]), (5, 2, 4), 2 * 10 * 16 * 7),
        (mkldnn._convolution_pointwise.default, ((2, 6, 5, 4), (8, 3, 3, 3), (8,)), (2, 8, 5, 4), 2 * 320 * 27),
        (mkldnn._convolution_pointwise.binary, ((2, 6, 5, 4), (2, 8, 5, 4), (8, 3, 3, 3)), (2, 8, 5, 4), 2 * 320 * 27),
        (mkldnn._convolution_pointwise_.binary, ((2, 8, 5, 4), (2, 6, 5, 4), (8, 3, 3, 3)), (2, 8, 5, 4), 2 * 320 * 27),
        (mkldnn._convolution_transpose_pointwise.default, ((2, 6, 5, 4), (6, 8, 3, 3), (8,)), (2, 8, 9, 7),
         2 * 240 * 72),
        (mkldnn._linear_pointwise.default, ((5, 6), (7, 6), (7,)), (5, 7), 2 * 35 * 6),
        (mkldnn._linear_pointwise.binary, ((5, 6), (5, 7), (7, 6), (7,)), (5, 7), 2 * 35 * 6),
        (torch.ops.mkl._mkl_linear.default, ((5, 6), (7, 6), (7, 6), (7,)), (5, 7), 2 * 35 * 6),
        (aten.add.Tensor, ((3, 4), (3, 4)), (3, 4), 0),
        (torch.ops.higher_order.cond, (), (), 0),
    ],
    ids=lambda value: str(value) if callable(value) else "",
)  # fmt: skip
def test_flops_are_those_of_the_definition(target: Any, shapes: Any, result: Any, expected: int) -> None:
    assert flops(target, shapes, result) == expected


def test_every_matmul_has_a_formula() -> None:
    names = {name.rpartition("::")[2] for name, (kind, _) in table._by_name().items() if kind is Kind.MATMUL}
    assert names == {name.partition(".")[0].removesuffix("_") for name in table._FLOPS}


# -- strides ----------------------------------------------------------------------------------------------------------


def test_layouts_are_followed_through_operators_that_are_loops_of_ours() -> None:
    """One that is not listed is right too, but the layout would stop there."""
    stopping = {
        target
        for target in loops()
        if target.namespace == "aten" and any("Tensor" in str(argument.type) for argument in target._schema.arguments)
        if strides_taken(target) is not Strides.ANY
    }
    of_memory = {aten._reshape_alias.default, aten.as_strided_scatter.default}
    assert stopping - of_memory == {aten.native_group_norm.default}


def test_what_reads_memory_as_it_lies_is_given_what_eager_gives_it() -> None:
    for target in (
        aten._weight_norm_interface_backward.default,
        aten.fractional_max_pool2d_backward.default,
        aten.adaptive_max_pool3d_backward.default,
        aten.nll_loss2d_backward.default,
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        aten.as_strided.default,
        aten.as_strided_scatter.default,
        aten.view.dtype,
        aten.bernoulli.p,
        torch.ops.higher_order.cond,
    ):
        assert strides_taken(target) is Strides.EAGER, target
    assert strides_taken(aten.permute.default) is Strides.ANY
    assert strides_taken(aten.index_put_.default) is Strides.ANY


def test_the_gradient_of_weight_norm_reads_its_gradient_as_contiguous() -> None:
    """The fact the table rests on: where it no longer holds, the operator may be listed."""
    v, g, gradient = torch.randn(16, 2, 3, 3), torch.randn(16, 1, 1, 1), torch.randn(16, 2, 3, 3)
    _, norms = aten._weight_norm_interface(v, g)
    target = aten._weight_norm_interface_backward.default
    right = target(gradient, v, g, norms, 0)
    assert not values_agree(target(laid_out(gradient, orders(4)[1]), v, g, norms, 0), right)


def test_operators_of_users_say_themselves_whether_they_take_any_strides() -> None:
    library = torch.library.Library("kiln_test_table", "DEF")
    try:
        library.define("exact(Tensor x) -> Tensor")
        library.define("ordered(Tensor x) -> Tensor", tags=(torch.Tag.needs_fixed_stride_order,))
        library.define("flexible(Tensor x) -> Tensor", tags=(torch.Tag.flexible_layout,))
        operators = torch.ops.kiln_test_table
        assert strides_taken(operators.exact.default) is Strides.EAGER
        assert strides_taken(operators.ordered.default) is Strides.EAGER
        assert strides_taken(operators.flexible.default) is Strides.ANY
    finally:
        library._destroy()
