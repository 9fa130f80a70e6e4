"""How the compiler runs an operator: as part of a kernel, as a reduction, as a library call, or not at all."""

from __future__ import annotations

from functools import cache

import torch
import torch.fx

from torchkiln.graph.aliases import view_source
from torchkiln.graph.one_hot import SCATTERS, is_one_hot
from torchkiln.graph.seeded import SEEDED
from torchkiln.lowering.registry import LOWERINGS, overloads
from torchkiln.partition.projections import computing_node, is_projection

_PRODUCT_NAMES = """
    mm addmm bmm baddbmm addbmm mv addmv dot vdot addr linear matmul convolution
    _scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_attention_math
    _scaled_dot_product_fused_attention_overrideable
    mkldnn_rnn_layer lstm _convolution _int_mm _scaled_mm _grouped_mm cdist _cdist_forward
"""
_REDUCTION_NAMES = """
    sum mean var var_mean amax amin aminmax max.default max.dim min.default min.dim argmax argmin any all prod
    logsumexp cumsum cumprod _softmax _log_softmax native_layer_norm native_group_norm _fused_rms_norm
    _native_batch_norm_legit_functional _native_batch_norm_legit native_batch_norm linalg_vector_norm std std_mean norm
    sort topk median nanmedian mode kthvalue count_nonzero
"""
# Beside operators on single elements: those that move elements, which kernels do while reading.
_MOVING_NAMES = """
    cat constant_pad_nd slice_scatter select_scatter diagonal_scatter repeat flip roll embedding index_select gather
    index.Tensor _unsafe_index.Tensor tril triu clone copy _to_copy convert_element_type full full_like zeros ones
    zeros_like ones_like new_zeros new_ones new_full scalar_tensor arange iota fill kiln::random kiln::randint
    masked_fill where lift_fresh_copy alias_copy
"""


def is_product(node: torch.fx.Node) -> bool:
    """Whether ``node`` is a matrix product, a convolution or attention: time grows faster than the data."""
    return computing_node(node).target in _named(_PRODUCT_NAMES)


def is_reduction(node: torch.fx.Node) -> bool:
    """Whether every element of ``node`` needs many elements of an input."""
    return computing_node(node).target in _named(_REDUCTION_NAMES)


def is_seeded(node: torch.fx.Node) -> bool:
    """Whether ``node`` makes random numbers from a seed."""
    return node.target in SEEDED


def is_listed(node: torch.fx.Node) -> bool:
    """Whether ``node`` is known to be cheap to compute again: kernels compute it where they read it."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return is_free(node)
    return target in _cheap()


def is_free(node: torch.fx.Node) -> bool:
    """Whether nothing runs for ``node``: a view, a constant, a number, one of several results."""
    if node.op in ("get_attr", "placeholder") or view_source(node) is not None or is_projection(node):
        return True
    return isinstance(node.meta.get("val"), (int, float, bool, torch.SymInt, torch.SymFloat, torch.SymBool))


def is_fusible(node: torch.fx.Node) -> bool:
    """Whether ``node`` becomes part of the kernels that read it, if it is not needed in memory."""
    return node.target in _cheap()


def runs_outside_kernels(node: torch.fx.Node) -> bool:
    """Whether ``node`` calls a library, which reads its inputs from memory."""
    if node.op != "call_function" or is_free(node):
        return False
    return not is_one_hot(node) if node.target in SCATTERS else node.target not in LOWERINGS


@cache
def _named(names: str) -> frozenset[torch._ops.OpOverload]:
    return frozenset(overload for name in names.split() for overload in overloads(name))


@cache
def _cheap() -> frozenset[torch._ops.OpOverload]:
    import torchkiln.lowering  # noqa: F401  (fills the table)

    other = _named(_PRODUCT_NAMES) | _named(_REDUCTION_NAMES)
    pointwise = frozenset(target for target in LOWERINGS if torch.Tag.pointwise in target.tags)
    return ((pointwise | _named(_MOVING_NAMES)) & LOWERINGS.keys()) - other
