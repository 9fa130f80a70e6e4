"""oneDNN's calls with packed weights: the operators, and a call of one as the passes about them read it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torchkiln.graph.fake_kernels import operator_named


@dataclass(frozen=True)
class _Operators:
    """Operators of torch, None where it lacks one: then the target packs nothing, which a pass asks first."""

    pack_convolution: Any
    pack_transposed: Any
    pack_linear: Any
    convolution: Any
    convolution_binary: Any
    convolution_into: Any
    convolution_transpose: Any
    linear: Any
    linear_binary: Any


OPERATORS = _Operators(
    pack_convolution=operator_named("mkldnn::_reorder_convolution_weight.default"),
    pack_transposed=operator_named("mkldnn::_reorder_convolution_transpose_weight.default"),
    pack_linear=operator_named("mkldnn::_reorder_linear_weight.default"),
    convolution=operator_named("mkldnn::_convolution_pointwise.default"),
    convolution_binary=operator_named("mkldnn::_convolution_pointwise.binary"),
    convolution_into=operator_named("mkldnn::_convolution_pointwise_.binary"),
    convolution_transpose=operator_named("mkldnn::_convolution_transpose_pointwise.default"),
    linear=operator_named("mkldnn::_linear_pointwise.default"),
    linear_binary=operator_named("mkldnn::_linear_pointwise.binary"),
)
