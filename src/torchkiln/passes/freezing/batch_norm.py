"""A batch norm of inference after a convolution becomes part of the convolution's weight and bias."""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.fx

from torchkiln.graph.insertion import insert_call
from torchkiln.graph.nodes import calls_of, fake_tensor, replace, rewrite_each
from torchkiln.graph.operators import CONVERT
from torchkiln.graph.weights import weight_values

_aten = torch.ops.aten


def fold_batch_norms(graph_module: torch.fx.GraphModule) -> bool:
    graph = graph_module.graph
    norms = calls_of(graph, _aten._native_batch_norm_legit_no_training.default)
    if not norms:
        return False
    constant = weight_values(graph)
    return rewrite_each(norms, lambda norm: _fold(norm, constant))


def _fold(norm: torch.fx.Node, constant: frozenset[torch.fx.Node]) -> bool:
    arguments: Any = norm.args
    convolution, scale, shift, mean, variance, _, epsilon = arguments
    if not isinstance(convolution, torch.fx.Node) or convolution.target is not _aten.convolution.default:
        return False
    if len(convolution.users) > 1 or any(user.args[1] != 0 for user in norm.users):
        return False
    operands: Any = convolution.args
    image, weight, bias, *geometry = operands
    transposed, groups = geometry[3], geometry[5]
    given = [value for value in (weight, bias, scale, shift, mean, variance) if value is not None]
    if not constant.issuperset(given) or (transposed and groups != 1):
        return False

    def call(target: torch._ops.OpOverload, *args: object) -> torch.fx.Node:
        return insert_call(norm, target, *args)

    def as_float(value: torch.fx.Node) -> torch.fx.Node:
        known = fake_tensor(value)
        assert known is not None
        return value if known.dtype in (torch.float32, torch.float64) else call(CONVERT, value, torch.float32)

    factor = call(_aten.rsqrt.default, call(_aten.add.Scalar, as_float(variance), epsilon))
    if scale is not None:
        factor = call(_aten.mul.Tensor, factor, as_float(scale))
    moved = call(_aten.neg.default, as_float(mean))
    if bias is not None:
        moved = call(_aten.add.Tensor, moved, as_float(bias))
    moved = call(_aten.mul.Tensor, moved, factor)
    if shift is not None:
        moved = call(_aten.add.Tensor, moved, as_float(shift))
    known = fake_tensor(weight)
    assert known is not None
    channels = [-1 if dim == (1 if transposed else 0) else 1 for dim in range(known.dim())]
    scaled = call(_aten.mul.Tensor, as_float(weight), call(_aten.view.default, factor, channels))
    folded = [
        value if value.meta["val"].dtype is known.dtype else call(CONVERT, value, known.dtype)
        for value in (scaled, moved)
    ]
    made = call(_aten.convolution.default, image, *folded, *geometry)
    for item in list(norm.users):
        assert item.target is operator.getitem
        replace(item, made)
    norm.graph.erase_node(norm)
    convolution.graph.erase_node(convolution)
    return True
