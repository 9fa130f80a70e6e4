"""oneDNN's calls with packed weights: the operators, and a call of one as the passes about them read it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.fx

from torchkiln.graph.fake_kernels import operator_named
from torchkiln.graph.weights import is_packed_weight


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

NOT_PACKED = "not_packed"
"""In the meta of a matmul or convolution: why its weight is not packed."""

NOT_FUSED = "not_fused"
"""In the meta of a call: why what reads it was not fused into it."""


@dataclass(frozen=True)
class PackedCall:
    """A call of oneDNN with a packed weight, as ``node`` makes it.

    ``kind`` is "convolution", "transposed convolution" or "linear"; ``geometry`` are padding, stride and so on.
    ``binary`` and ``unary`` name what the library does with the result before it stores it: first ``binary`` with
    ``other``, then ``unary``.
    """

    node: torch.fx.Node
    kind: str
    x: torch.fx.Node
    weight: torch.fx.Node
    bias: torch.fx.Node | None
    geometry: tuple[Any, ...]
    binary: str | None = None
    other: torch.fx.Node | None = None
    unary: str | None = None

    @property
    def fused(self) -> tuple[str, ...]:
        """What is fused into the call, in order."""
        return tuple(name for name in (self.binary, self.unary) if name is not None)


def packed_call(node: object) -> PackedCall | None:
    """``node`` as a call of oneDNN with a packed weight, if it is one."""
    if not isinstance(node, torch.fx.Node) or node.op != "call_function" or node.target is None:
        return None
    given: Any = node.args
    if node.target in (OPERATORS.convolution, OPERATORS.convolution_transpose):
        kind = "convolution" if node.target is OPERATORS.convolution else "transposed convolution"
        x, weight, bias, *geometry, unary, _, _ = given
        found = PackedCall(node, kind, x, weight, bias, tuple(geometry), unary=_named(unary))
    elif node.target is OPERATORS.linear:
        x, weight, bias, unary, _, _ = given
        found = PackedCall(node, "linear", x, weight, bias, (), unary=_named(unary))
    elif node.target in (OPERATORS.convolution_binary, OPERATORS.convolution_into):
        first, second, weight, bias, *geometry, binary, _, unary, _, _ = given
        x, other = (first, second) if node.target is OPERATORS.convolution_binary else (second, first)
        found = PackedCall(node, "convolution", x, weight, bias, tuple(geometry), binary, other, _named(unary))
    elif node.target is OPERATORS.linear_binary:
        x, other, weight, bias, binary = given
        found = PackedCall(node, "linear", x, weight, bias, (), binary, other)
    else:
        return None
    return found if is_packed_weight(found.weight) else None


def packed_calls(graph: torch.fx.Graph) -> list[PackedCall]:
    """Those of a graph, in order."""
    if not any(is_packed_weight(node) for node in graph.nodes):
        return []
    found = map(packed_call, graph.nodes)
    return [call for call in found if call is not None]


def _named(attribute: str | None) -> str | None:
    return None if attribute in (None, "", "none") else attribute
