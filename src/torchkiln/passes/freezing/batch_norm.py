"""A batch norm of inference after a convolution or a linear layer becomes part of the layer's weight and bias.

A norm that was decomposed is a chain of operations with constants (:mod:`~torchkiln.passes.freezing.pointwise`).
"""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.fx

from torchkiln.graph.insertion import insert_call
from torchkiln.graph.nodes import calls_of, fake_tensor
from torchkiln.graph.operators import CONVERT
from torchkiln.passes.freezing.affine import Read, fold_after
from torchkiln.passes.freezing.layers import ADD, MUL, SUB, Step

_aten = torch.ops.aten
_NORM = _aten._native_batch_norm_legit_no_training.default


def fold_batch_norms(graph_module: torch.fx.GraphModule) -> bool:
    return bool(calls_of(graph_module.graph, _NORM)) and fold_after(graph_module, _steps)


def _steps(
    norm: torch.fx.Node, value: torch.fx.Node, dim: int, channels: int, constant: frozenset[torch.fx.Node]
) -> Read | None:
    if norm.target is not _NORM or norm.args[0] is not value or dim != 1:
        return None
    arguments: Any = norm.args
    _, scale, shift, mean, variance, _, epsilon = arguments
    given = [argument for argument in (scale, shift, mean, variance) if argument is not None]
    if not constant.issuperset(given) or any(fake_tensor(node) is None for node in given):
        return None
    if len(norm.users) != 1:
        return None
    (result,) = norm.users
    if result.target is not operator.getitem or result.args[1] != 0:
        return None

    def call(target: torch._ops.OpOverload, *args: object) -> torch.fx.Node:
        return insert_call(norm, target, *args)

    def as_float(statistic: torch.fx.Node) -> torch.fx.Node:
        dtype = statistic.meta["val"].dtype
        return statistic if dtype in (torch.float32, torch.float64) else call(CONVERT, statistic, torch.float32)

    factor = call(_aten.rsqrt.default, call(ADD, as_float(variance), epsilon))
    if scale is not None:
        factor = call(MUL, factor, as_float(scale))
    steps = [Step(SUB, mean, 0), Step(MUL, factor, 0)]
    if shift is not None:
        steps.append(Step(ADD, shift, 0))
    return Read(tuple(steps), result)
