"""The operator table: what each ATen operator is, how we run it, what it costs, and which strides its kernel takes.

It adds to what torch's schemas and tags say. Lowering binds its functions to the names declared here.

A kernel that reads memory as if it were contiguous gives wrong numbers for other strides, without an error (gradients
of weight norm, of group norm, of fractional pooling). So an operator that is not in the table is called with eager's
strides. The others give the same values for permuted strides: ``tests/graph/test_operators.py`` calls them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from functools import cache, lru_cache, partial
from types import MappingProxyType
from typing import Any

import torch
import torch.fx

from torchkiln.graph.effects import draws_random_numbers, is_ordered_effect, is_torchs_own, writes
from torchkiln.graph.fake import is_channels_last, is_row_major, tensors_of
from torchkiln.graph.one_hot import SCATTERS, is_one_hot
from torchkiln.graph.seeded import SEEDED

OpOverload = torch._ops.OpOverload


class Kind(Enum):
    """What an operator does, whoever runs it."""

    POINTWISE = "an element from the elements at its place"
    MOVEMENT = "elements of arguments at other places, copies, or one number everywhere"
    VIEW = "the memory of an argument in another form"
    UNINITIALIZED = "memory that nobody has written to"
    RANDOM = "random numbers"
    REDUCTION = "an element from many of an argument: sums, scans, norms"
    SORT = "elements by rank"
    SCATTER = "a tensor with some elements replaced or added to"
    MATMUL = "a contraction: matmul, convolution, attention; time grows faster than the data"
    EFFECT = "more than a result: writes to an argument, checks, communicates"
    LIBRARY = "a kernel of torch's or of a user's, of which no more is known"


class Strides(Enum):
    """Which strides of its arguments an operator takes."""

    ANY = "any"
    IMAGES = "all images row by row, or all with their channels last"
    EAGER = "those eager gives it"


# Loops of ours, which may be fused. ``name`` stands for the overload ``default``, ``name.a,b`` for two others.
# Operators come and go between torch's versions; those that are not there are left out.
_LOOPS = {
    Kind.POINTWISE: """
        neg abs sign floor ceil trunc round frac exp exp2 expm1 log log2 log10 log1p sin cos tan asin acos atan sinh
        cosh tanh asinh acosh atanh erf erfc erfinv lgamma digamma sigmoid sqrt rsqrt reciprocal
        add.Tensor,Scalar sub.Tensor,Scalar rsub.Tensor,Scalar mul.Tensor,Scalar
        div.Tensor,Scalar,Tensor_mode,Scalar_mode floor_divide.default,Scalar fmod.Tensor,Scalar
        remainder.Tensor,Scalar,Scalar_Tensor pow.Tensor_Scalar,Tensor_Tensor,Scalar
        xlogy.Tensor,Scalar_Self,Scalar_Other maximum minimum fmax fmin atan2 copysign.Tensor hypot
        bitwise_and.Tensor,Scalar bitwise_or.Tensor,Scalar bitwise_xor.Tensor,Scalar bitwise_not
        eq.Tensor,Scalar ne.Tensor,Scalar lt.Tensor,Scalar le.Tensor,Scalar gt.Tensor,Scalar ge.Tensor,Scalar
        logical_and logical_or logical_xor logical_not isnan isinf signbit
        where.self,ScalarSelf,ScalarOther,Scalar masked_fill.Scalar,Tensor
        clamp.default,Tensor clamp_min.default,Tensor clamp_max.default,Tensor
        relu leaky_relu gelu gelu_backward silu silu_backward sigmoid_backward tanh_backward hardtanh_backward
        elu_backward hardswish_backward logit logit_backward addcmul addcdiv lerp.Scalar,Tensor native_dropout_backward
        prims::convert_element_type _to_copy
    """,
    Kind.MOVEMENT: """
        copy clone lift_fresh_copy alias_copy full full_like zeros ones zeros_like ones_like new_zeros new_ones new_full
        scalar_tensor fill.Scalar,Tensor arange.default,start,start_step prims::iota tril triu cat constant_pad_nd
        slice_scatter select_scatter diagonal_scatter repeat flip roll embedding index_select gather index.Tensor
        _unsafe_index.Tensor take
    """,
    Kind.VIEW: """
        expand view _unsafe_view _reshape_alias reshape permute transpose.int t squeeze.default,dim,dims unsqueeze
        select.int slice.Tensor split.Tensor split_with_sizes unbind.int diagonal unfold alias detach lift_fresh
    """,
    Kind.UNINITIALIZED: "empty.memory_format empty_like empty_strided new_empty new_empty_strided",
    Kind.REDUCTION: """
        sum.default,dim_IntList mean.default,dim var.default,dim,correction var_mean.default,dim,correction
        std.default,dim,correction std_mean.default,dim,correction amax amin
        max.default,dim min.default,dim argmax argmin any.default,dim,dims all.default,dim,dims prod.default,dim_int
        _softmax _softmax_backward_data _log_softmax _log_softmax_backward_data
        native_layer_norm native_layer_norm_backward _fused_rms_norm native_group_norm
        _native_batch_norm_legit.no_stats _native_batch_norm_legit_functional _native_batch_norm_legit_no_training
        native_batch_norm_backward
    """,
    Kind.SCATTER: "scatter.value,src as_strided_scatter",
    Kind.LIBRARY: """
        upsample_nearest1d_backward upsample_nearest2d_backward upsample_nearest3d_backward
        _upsample_nearest_exact1d_backward _upsample_nearest_exact2d_backward _upsample_nearest_exact3d_backward
        upsample_linear1d_backward upsample_bilinear2d_backward upsample_trilinear3d_backward
        upsample_bicubic2d_backward
        _adaptive_avg_pool2d _adaptive_avg_pool2d_backward _adaptive_avg_pool3d _adaptive_avg_pool3d_backward
    """,
}

# Calls of native code, or loops that read each element several times, for some arguments, and calls of torch for
# others; overloads as above. What they read is best in memory: an activation before a pool is part of a convolution.
_NATIVE_CALLS = {
    Kind.SORT: "sort.default,stable",
    Kind.REDUCTION: "cumsum cumprod",
    Kind.MATMUL: "mm bmm addmm baddbmm _scaled_dot_product_flash_attention_for_cpu_backward",
    Kind.LIBRARY: """
        avg_pool2d avg_pool2d_backward avg_pool3d avg_pool3d_backward max_pool2d_with_indices max_pool3d_with_indices
    """,
}

# Calls of torch, all overloads. Their kernels take any strides, as do those of all above. Pointwise operators are here
# where torch does not tag them as such: a layout that stops at one of them costs copies, as at the gradient of relu6 in
# MobileNetV2.
_LIBRARY = {
    Kind.POINTWISE: """
        hardsigmoid hardsigmoid_backward hardswish hardshrink_backward softshrink_backward leaky_relu_backward
        log_sigmoid_forward log_sigmoid_backward mish mish_backward softplus softplus_backward
        _prelu_kernel _prelu_kernel_backward complex polar
        quantized_decomposed::quantize_per_tensor quantized_decomposed::dequantize_per_tensor
        quantized_decomposed::quantize_per_channel quantized_decomposed::dequantize_per_channel
    """,
    Kind.MOVEMENT: """
        stack split_with_sizes_copy unsafe_split rot90 diag_embed masked_select nonzero _unsafe_masked_index
        reflection_pad1d reflection_pad2d reflection_pad3d replication_pad1d replication_pad2d replication_pad3d
        im2col pixel_shuffle pixel_unshuffle channel_shuffle diagonal_copy expand_copy narrow_copy permute_copy
        squeeze_copy transpose_copy unbind_copy unfold_copy unsqueeze_copy view_copy
        upsample_nearest1d upsample_nearest2d upsample_nearest3d
        _upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d
    """,
    Kind.REDUCTION: """
        nansum aminmax logsumexp linalg_vector_norm count_nonzero logcumsumexp cummax cummin
        trace _safe_softmax native_batch_norm batch_norm_backward _batch_norm_with_update
        _batch_norm_with_update_functional
    """,
    Kind.SORT: "topk kthvalue median nanmedian mode",
    Kind.SCATTER: """
        index_put index_add index_copy index_fill index_reduce scatter_add scatter_reduce masked_scatter put
        _unsafe_index_put _unsafe_masked_index_put_accumulate embedding_dense_backward col2im
        select_backward slice_backward diagonal_backward unfold_backward
    """,
    Kind.MATMUL: """
        addbmm mv addmv addr dot vdot linear matmul convolution convolution_backward mkldnn::_convolution_pointwise
        mkldnn::_convolution_transpose_pointwise mkldnn::_linear_pointwise mkl::_mkl_linear
    """,
    Kind.LIBRARY: """
        max_pool2d_with_indices_backward adaptive_max_pool2d adaptive_max_pool2d_backward adaptive_max_pool3d
        upsample_linear1d upsample_bilinear2d upsample_trilinear3d upsample_bicubic2d
        _upsample_bilinear2d_aa _upsample_bilinear2d_aa_backward
        grid_sampler_2d grid_sampler_2d_backward grid_sampler_3d grid_sampler_3d_backward
        reflection_pad1d_backward reflection_pad2d_backward reflection_pad3d_backward
        replication_pad1d_backward replication_pad2d_backward replication_pad3d_backward
        nll_loss_forward nll_loss_backward nll_loss2d_forward mse_loss smooth_l1_loss huber_loss
        mse_loss_backward smooth_l1_loss_backward huber_loss_backward soft_margin_loss soft_margin_loss_backward
        binary_cross_entropy binary_cross_entropy_backward binary_cross_entropy_with_logits glu glu_backward
        sym_size sym_numel _local_scalar_dense mkldnn::_reorder_convolution_weight
        mkldnn::_reorder_convolution_transpose_weight mkldnn::_reorder_linear_weight mkl::_mkl_reorder_linear_weight
    """,
}

# All overloads of operators, named above or not, whose kernels do not take any strides.
_STRICT = {
    (Kind.REDUCTION, Strides.IMAGES): "native_group_norm native_group_norm_backward",
    (Kind.REDUCTION, Strides.EAGER): "norm",
    (Kind.SCATTER, Strides.EAGER): "as_strided_scatter",
    (Kind.LIBRARY, Strides.EAGER): "max_pool3d_with_indices",
    (Kind.MATMUL, Strides.EAGER): """
        _scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention_for_cpu_backward
        _scaled_dot_product_attention_math _scaled_dot_product_fused_attention_overrideable
        _scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_backward
        _scaled_dot_product_efficient_attention _scaled_dot_product_efficient_attention_backward
        _scaled_dot_product_cudnn_attention _scaled_dot_product_cudnn_attention_backward
        mkldnn_rnn_layer lstm _convolution _int_mm _scaled_mm _grouped_mm cdist _cdist_forward
    """,
}
# Views whose result depends on where elements lie, and not only on which there are.
_VIEWS_OF_MEMORY = frozenset({"as_strided", "_reshape_alias", "view_as_complex", "view.dtype"})

CONVERT = torch.ops.prims.convert_element_type.default
CASTS = frozenset({torch.ops.aten._to_copy.default, CONVERT})
"""Operators that give their argument another dtype."""

# -- lookup -----------------------------------------------------------------------------------------------------------


def overloads(name: str) -> list[OpOverload]:
    """The overloads that ``name`` stands for: ``add`` for all, ``add.Tensor,Scalar`` for two.

    Names without a namespace are of ``aten`` or ``prims``. What the installed torch does not have is left out.
    """
    base, _, chosen = name.partition(".")
    namespace, _, short = base.rpartition("::")
    spaces = (namespace,) if namespace else ("aten", "prims")
    packet = next(filter(None, (getattr(getattr(torch.ops, space), short, None) for space in spaces)), None)
    if packet is None:
        return []
    present = packet.overloads()
    return [getattr(packet, n) for n in (chosen.split(",") if chosen else present) if n in present]


def named_operators(names: str) -> list[OpOverload]:
    """The operators of a list as those above: ``add.Tensor,Scalar`` for two overloads, ``mm`` for the default."""
    return [found for name in names.split() for found in overloads(name if "." in name else f"{name}.default")]


WHOLE_VIEWS = frozenset(named_operators("alias detach permute squeeze.default,dim,dims t transpose.int unsqueeze view"))
"""Views that begin where their argument begins and show all its elements, in another shape or order."""

COMMUTATIVE = frozenset(
    named_operators("""
        add.Tensor mul.Tensor maximum minimum eq.Tensor ne.Tensor bitwise_and.Tensor bitwise_or.Tensor
        bitwise_xor.Tensor logical_and logical_or logical_xor
    """)
)
"""Operators of two tensors that may be exchanged; those of ``add`` where its ``alpha`` is 1."""


def _declared(table: Mapping[Kind, str]) -> dict[OpOverload, Kind]:
    return {overload: kind for kind, names in table.items() for overload in named_operators(names)}


@cache
def loops() -> Mapping[OpOverload, Kind]:
    """The operators that become loops of ours, with what each is."""
    return MappingProxyType({**_declared(_LOOPS), **dict.fromkeys(SEEDED, Kind.RANDOM)})


@cache
def lowered() -> Mapping[OpOverload, Kind]:
    """The operators that lowering has a function for: loops, and calls of native code."""
    return MappingProxyType({**loops(), **_declared(_NATIVE_CALLS)})


@cache
def _by_name() -> Mapping[str, tuple[Kind, Strides]]:
    """Kind and strides of all overloads of an operator, by the name in its schema."""
    found: dict[str, tuple[Kind, Strides]] = {}
    for kind, names in (*_LOOPS.items(), *_NATIVE_CALLS.items(), *_LIBRARY.items()):
        found.update(dict.fromkeys(_schema_names(names), (kind, Strides.ANY)))
    for facts, names in _STRICT.items():
        found.update(dict.fromkeys(_schema_names(names), facts))
    return MappingProxyType(found)


def _schema_names(names: str) -> Iterator[str]:
    for name in names.split():
        base = name.partition(".")[0]
        yield base if "::" in base else f"aten::{base}"


@lru_cache(maxsize=4096)
def kind_of(target: object) -> Kind:
    """What ``target``, of a functional graph, is."""
    if not isinstance(target, OpOverload):
        return Kind.LIBRARY
    if target in lowered():
        return lowered()[target]
    if torch.Tag.pointwise in target.tags and not writes(target):  # max of two tensors is no reduction
        return Kind.POINTWISE
    if target.is_view:
        return Kind.VIEW
    listed = _by_name().get(target._schema.name)
    if listed is not None:
        return listed[0]
    if writes(target) or not target._schema.returns or (not is_torchs_own(target) and is_ordered_effect(target)):
        return Kind.EFFECT
    return Kind.RANDOM if draws_random_numbers(target) else Kind.LIBRARY


@lru_cache(maxsize=4096)
def is_declared(target: OpOverload) -> bool:
    """Whether more is known of ``target`` than its schema: it, or what it writes in place of, is in the table, or torch
    says by a tag what it is.
    """
    pointwise_or_view = torch.Tag.pointwise in target.tags or target.is_view
    return target in lowered() or pointwise_or_view or target._schema.name.rstrip("_") in _by_name()


def becomes_loop(node: torch.fx.Node) -> bool:
    """Whether ``node`` becomes a loop of ours, which reads what other loops compute without memory in between.

    Calls that lowering declines for their dtypes or sizes count as loops too.
    """
    return node.target in loops() and (node.target not in SCATTERS or is_one_hot(node))


def is_fusible(target: object) -> bool:
    """Whether ``target`` becomes part of the loops that read it, and costs little to recompute there."""
    return target in _fusible()


@cache
def _fusible() -> frozenset[OpOverload]:
    kinds = (Kind.POINTWISE, Kind.MOVEMENT, Kind.RANDOM)
    return frozenset(target for target, kind in loops().items() if kind in kinds)


# -- cost -------------------------------------------------------------------------------------------------------------

Shape = Sequence[int]


def _matmul(arguments: Sequence[Any], result: Shape, *, left: int = 0) -> int:
    contracted: int = arguments[left][-1]
    return 2 * math.prod(result) * contracted


def _convolution(arguments: Sequence[Any], result: Shape) -> int:
    """Each element of the smaller side meets the weights of one channel."""
    x, weight, transposed = arguments[0], arguments[1], arguments[6]
    return _convolved(x if transposed else result, weight)


def _convolved(ends: Shape, weight: Shape) -> int:
    return 2 * math.prod(ends) * math.prod(weight[1:])


def _packed_convolution(arguments: Sequence[Any], result: Shape, *, weight: int = 1, transposed: bool = False) -> int:
    return _convolved(arguments[0] if transposed else result, arguments[weight])


def _convolution_backward(arguments: Sequence[Any], _result: Shape) -> int:
    gradient, x, weight, _, _, _, _, transposed, _, _, wanted = arguments
    return _convolved(x if transposed else gradient, weight) * sum(map(bool, wanted[:2]))


def _attention(arguments: Sequence[Any], _result: Shape, *, query: int = 0, matmuls: int = 2) -> int:
    rows: Shape = arguments[query]
    keys: int = arguments[query + 1][-2]
    return matmuls * 2 * math.prod(rows) * keys


def _recurrent(x: Shape, weights: Sequence[Shape]) -> int:
    """Every step of every sequence meets every weight."""
    return 2 * math.prod(x[:-1]) * sum(math.prod(shape) for shape in weights if len(shape) == 2)


_OF_CARDS = ("flash", "efficient", "cudnn")  # kinds of attention

# By the name of the operator. torch.utils.flop_counter lacks attention on the CPU and recurrent layers, and leaves out
# groups in the backward of a convolution.
_FLOPS: dict[str, Callable[[Sequence[Any], Shape], int]] = {
    **dict.fromkeys(("mm", "bmm", "mv", "dot", "vdot", "linear", "matmul", "_int_mm", "_scaled_mm"), _matmul),
    **dict.fromkeys(("_grouped_mm", "cdist", "_cdist_forward"), _matmul),
    **dict.fromkeys(("addmm", "baddbmm", "addmv"), partial(_matmul, left=1)),
    "addbmm": lambda arguments, result: _matmul(arguments, (*result, arguments[1][0]), left=1),
    "addr": lambda _, result: 2 * math.prod(result),
    "convolution": _convolution,
    "_convolution": _convolution,
    "convolution_backward": _convolution_backward,
    "_convolution_pointwise.default": _packed_convolution,
    "_convolution_pointwise.binary": partial(_packed_convolution, weight=2),
    "_convolution_pointwise_.binary": lambda arguments, result: _convolved(result, arguments[2]),
    "_convolution_transpose_pointwise": partial(_packed_convolution, transposed=True),
    **dict.fromkeys(("_linear_pointwise", "_mkl_linear"), _matmul),
    "_scaled_dot_product_flash_attention_for_cpu": _attention,
    "_scaled_dot_product_attention_math": _attention,
    "_scaled_dot_product_fused_attention_overrideable": _attention,
    "_scaled_dot_product_flash_attention_for_cpu_backward": partial(_attention, query=1, matmuls=5),
    **{f"_scaled_dot_product_{kind}_attention": _attention for kind in _OF_CARDS},
    **{
        f"_scaled_dot_product_{kind}_attention_backward": partial(_attention, query=1, matmuls=5) for kind in _OF_CARDS
    },
    "mkldnn_rnn_layer": lambda arguments, _: _recurrent(arguments[0], arguments[1:3]),
    "lstm.input": lambda arguments, _: _recurrent(arguments[0], arguments[2]),
    "lstm.data": lambda arguments, _: _recurrent(arguments[0], arguments[3]),
}


def flops(target: object, arguments: Sequence[Any], result: Shape) -> int:
    """Multiplications and additions of a matmul, a convolution or attention; 0 for anything else.

    ``arguments`` are in the order of the schema, with shapes in place of tensors; ``result`` is the shape of the first
    result.
    """
    if not isinstance(target, OpOverload):
        return 0
    formula = _FLOPS.get(target._opname) or _FLOPS.get(f"{target._opname}.{target._overloadname}")
    return formula(arguments, result) if formula is not None else 0


# -- strides ----------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=4096)
def strides_taken(target: object) -> Strides:
    """Which strides of its arguments ``target``, of a functional graph, takes; what is no operator has no kernel."""
    if isinstance(target, torch._ops.HigherOrderOperator):
        return Strides.EAGER
    if not isinstance(target, OpOverload):
        return Strides.ANY
    if not is_torchs_own(target) and target.namespace not in ("prims", "quantized_decomposed"):
        return Strides.ANY if torch.Tag.flexible_layout in target.tags else Strides.EAGER
    if draws_random_numbers(target):
        return Strides.EAGER  # random numbers are drawn in the order of memory
    if target.is_view or target is torch.ops.aten._unsafe_view.default:
        base = target._opname if target._overloadname == "default" else f"{target._opname}.{target._overloadname}"
        return Strides.EAGER if base in _VIEWS_OF_MEMORY else Strides.ANY
    name = target._schema.name
    listed = _by_name().get(name.removesuffix("_") if target._schema.is_mutable else name)
    if listed is not None:
        return listed[1]
    return Strides.ANY if torch.Tag.pointwise in target.tags else Strides.EAGER


def listed_operators() -> dict[str, Strides]:
    """The operators this table names, with the strides each takes."""
    return {name: strides for name, (_, strides) in _by_name().items()}


def takes(target: object, arguments: Any) -> bool:
    """Whether ``target`` takes ``arguments``, in which fake tensors stand for tensors, as they are laid out."""
    taken = strides_taken(target)
    if taken is Strides.IMAGES:
        images = [value for value in tensors_of(arguments) if value.dim() > 2]
        return all(map(is_row_major, images)) or all(map(is_channels_last, images))
    return taken is Strides.ANY
