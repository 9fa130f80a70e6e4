"""What is known about operators, beyond what torch's schemas and tags say: which strides their library kernels take.

A kernel that reads memory as if it were contiguous gives wrong numbers for other strides, without an error: gradients
of weight norm, of group norm and of fractional pooling do. So an operator that is not listed here is called with the
strides eager calls it with. What is listed was seen to give the same values for permuted strides of each argument and
of all of them, and tests/graph/test_operators.py sees it again for whatever torch is installed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import Enum
from functools import lru_cache
from typing import Any

import torch

from torchkiln.graph.effects import is_torchs_own
from torchkiln.graph.fake import is_channels_last, is_row_major


class Strides(Enum):
    """Which strides of its arguments an operator takes."""

    ANY = "any"
    IMAGES = "all images row by row, or all with their channels last"
    EAGER = "those eager gives it"


# Names in ATen, for all overloads. Of operators on single elements, those are listed that torch does not mark as such
# (Tag.pointwise): a layout that stops at one of them costs copies, as at the gradient of relu6 in MobileNetV2.
_ANY_STRIDES = """
    convolution convolution_backward
    mm bmm addmm baddbmm addbmm mv addmv addr dot vdot linear matmul
    native_batch_norm native_batch_norm_backward batch_norm_backward _native_batch_norm_legit
    _native_batch_norm_legit_functional _native_batch_norm_legit_no_training
    _batch_norm_with_update _batch_norm_with_update_functional
    native_layer_norm native_layer_norm_backward _fused_rms_norm
    _softmax _softmax_backward_data _log_softmax _log_softmax_backward_data _safe_softmax
    avg_pool2d avg_pool2d_backward avg_pool3d avg_pool3d_backward max_pool2d_with_indices
    max_pool2d_with_indices_backward adaptive_max_pool2d adaptive_max_pool2d_backward adaptive_max_pool3d
    _adaptive_avg_pool2d _adaptive_avg_pool2d_backward _adaptive_avg_pool3d _adaptive_avg_pool3d_backward
    upsample_nearest1d upsample_nearest1d_backward upsample_nearest2d upsample_nearest2d_backward upsample_nearest3d
    upsample_nearest3d_backward _upsample_nearest_exact1d _upsample_nearest_exact1d_backward
    _upsample_nearest_exact2d _upsample_nearest_exact2d_backward _upsample_nearest_exact3d
    _upsample_nearest_exact3d_backward upsample_linear1d upsample_linear1d_backward upsample_bilinear2d
    upsample_bilinear2d_backward upsample_trilinear3d upsample_trilinear3d_backward upsample_bicubic2d
    upsample_bicubic2d_backward _upsample_bilinear2d_aa _upsample_bilinear2d_aa_backward
    grid_sampler_2d grid_sampler_2d_backward grid_sampler_3d grid_sampler_3d_backward
    constant_pad_nd reflection_pad1d reflection_pad1d_backward reflection_pad2d reflection_pad2d_backward
    reflection_pad3d reflection_pad3d_backward replication_pad1d replication_pad1d_backward replication_pad2d
    replication_pad2d_backward replication_pad3d replication_pad3d_backward
    im2col col2im pixel_shuffle pixel_unshuffle channel_shuffle
    sum mean nansum prod amax amin aminmax max min argmax argmin any all var var_mean std std_mean logsumexp
    linalg_vector_norm count_nonzero cumsum cumprod logcumsumexp cummax cummin
    sort topk kthvalue median nanmedian mode
    cat stack split_with_sizes_copy unsafe_split flip roll rot90 tril triu trace diag_embed
    clone copy _to_copy zeros_like ones_like full_like empty_like new_zeros new_ones new_full new_empty
    new_empty_strided
    index index_put index_select index_add index_copy index_fill index_reduce gather scatter scatter_add
    scatter_reduce masked_select masked_scatter take put embedding embedding_dense_backward nonzero
    _unsafe_index _unsafe_index_put _unsafe_masked_index _unsafe_masked_index_put_accumulate
    select_scatter slice_scatter diagonal_scatter select_backward slice_backward diagonal_backward unfold_backward
    nll_loss_forward nll_loss_backward nll_loss2d_forward mse_loss smooth_l1_loss huber_loss
    mse_loss_backward smooth_l1_loss_backward huber_loss_backward soft_margin_loss soft_margin_loss_backward
    binary_cross_entropy binary_cross_entropy_backward binary_cross_entropy_with_logits
    glu glu_backward leaky_relu gelu_backward elu_backward hardtanh_backward hardsigmoid hardsigmoid_backward hardswish
    hardswish_backward hardshrink_backward softshrink_backward leaky_relu_backward log_sigmoid_forward
    log_sigmoid_backward mish mish_backward softplus softplus_backward _prelu_kernel _prelu_kernel_backward
    native_dropout_backward masked_fill where floor_divide rsub fill repeat complex polar
    alias_copy diagonal_copy expand_copy lift_fresh_copy narrow_copy permute_copy squeeze_copy transpose_copy
    unbind_copy unfold_copy unsqueeze_copy view_copy
    sym_size sym_numel _local_scalar_dense
"""
_IMAGES = "native_group_norm native_group_norm_backward"
# Views whose result depends on where elements lie, and not only on which there are.
_VIEWS_OF_MEMORY = frozenset({"as_strided", "_reshape_alias", "view_as_complex", "view.dtype"})

_LISTED = {
    **{f"aten::{name}": Strides.ANY for name in _ANY_STRIDES.split()},
    **{f"aten::{name}": Strides.IMAGES for name in _IMAGES.split()},
}


@lru_cache(maxsize=4096)
def strides_taken(target: object) -> Strides:
    """Which strides of its arguments ``target``, of a functional graph, takes; what is no operator has no kernel."""
    if isinstance(target, torch._ops.HigherOrderOperator):
        return Strides.EAGER
    if not isinstance(target, torch._ops.OpOverload):
        return Strides.ANY
    if not is_torchs_own(target) and target.namespace != "prims":
        return Strides.ANY if torch.Tag.flexible_layout in target.tags else Strides.EAGER
    if torch.Tag.nondeterministic_seeded in target.tags:
        return Strides.EAGER  # random numbers are drawn in the order of memory
    if target.is_view or target is torch.ops.aten._unsafe_view.default:
        base = target._opname if target._overloadname == "default" else f"{target._opname}.{target._overloadname}"
        return Strides.EAGER if base in _VIEWS_OF_MEMORY else Strides.ANY
    name = target._schema.name
    listed = _LISTED.get(name.removesuffix("_") if target._schema.is_mutable else name)
    if listed is not None:
        return listed
    return Strides.ANY if torch.Tag.pointwise in target.tags else Strides.EAGER


def listed_operators() -> dict[str, Strides]:
    """The operators this table names, with what it says of each."""
    return dict(_LISTED)


def takes(target: object, arguments: Any) -> bool:
    """Whether ``target`` takes ``arguments``, in which fake tensors stand for tensors, as they are laid out."""
    taken = strides_taken(target)
    if taken is Strides.IMAGES:
        images = [value for value in _tensors(arguments) if value.dim() > 2]
        return all(map(is_row_major, images)) or all(map(is_channels_last, images))
    return taken is Strides.ANY


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Sequence) and not isinstance(value, str):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
