"""Each rule that forbids recomputing: what it keeps when on, and what is recomputed when off."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.partition.measured import joint_graph
from torchkiln.config import Settings
from torchkiln.partition.classify import NodeInfo
from torchkiln.partition.extract import Schedule, schedule_for
from torchkiln.partition.min_cut import smallest_saved
from torchkiln.partition.rules import LONG_CHAIN, RULES, RuleContext, forbidden, rules_for

X = torch.randn(4, 6, requires_grad=True)
W = torch.randn(6, 6, requires_grad=True)


def _schedule(function: Callable[..., Any], *inputs: Tensor, **options: Any) -> Schedule:
    joint = joint_graph(function, *inputs)
    info = NodeInfo(joint.module.graph, joint.num_fwd_outputs)
    return schedule_for(info, smallest_saved(info, forbidden(RuleContext(info), rules_for(Settings(**options)))))


def _recomputed(schedule: Schedule) -> set[str]:
    return {str(node.target) for node in schedule.recomputed}


def _off(*kept: str) -> dict[str, bool]:
    return {rule.setting: rule.setting in kept for rule in RULES}


def test_matrix_products() -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        return (x @ w).sin().sum()

    assert "aten.mm.default" not in _recomputed(_schedule(function, X, W))
    assert "aten.mm.default" in _recomputed(_schedule(function, X, W, save_matmuls=False, save_unlisted=False))


def test_convolutions() -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        return F.conv2d(x, w).sin().sum()

    inputs = torch.randn(1, 2, 5, 5, requires_grad=True), torch.randn(2, 2, 3, 3, requires_grad=True)
    assert "aten.convolution.default" not in _recomputed(_schedule(function, *inputs))
    again = _recomputed(_schedule(function, *inputs, save_matmuls=False, save_unlisted=False))
    assert "aten.convolution.default" in again


def test_reductions() -> None:
    def function(x: Tensor) -> Tensor:
        return x.exp().sum(1).sin().sum()

    assert "aten.sum.dim_IntList" not in _recomputed(_schedule(function, X))
    assert "aten.sum.dim_IntList" in _recomputed(_schedule(function, X, save_reductions=False, save_unlisted=False))


def test_operators_that_are_not_listed_as_cheap() -> None:
    def function(x: Tensor) -> Tensor:
        return torch.linalg.inv(x).sin().sum()

    name, x = "aten.linalg_inv_ex.default", torch.eye(4).mul(2).requires_grad_()
    assert name not in _recomputed(_schedule(function, x))
    assert name in _recomputed(_schedule(function, x, **_off("save_matmuls")))


def test_random_numbers_from_a_seed() -> None:
    def function(x: Tensor) -> Tensor:
        return F.dropout(x.sin(), 0.5).sum()

    assert "kiln.random.default" in _recomputed(_schedule(function, X))
    assert "kiln.random.default" not in _recomputed(_schedule(function, X, save_random=True))


def _residual(x: Tensor, *weights: Tensor) -> Tensor:
    for first, second in zip(weights[::2], weights[1::2], strict=True):
        x = x + ((x.sin() @ first).softmax(-1).sin() @ second)
    return x.sin().sum()


def test_values_used_far_apart() -> None:
    weights = [torch.randn(6, 6, requires_grad=True) for _ in range(6)]
    kept = {node.name for node in _schedule(_residual, X, *weights).saved}
    assert {"add", "add_1"} <= kept
    near = _schedule(_residual, X, *weights, save_far_used=False)
    wide = _schedule(_residual, X, *weights)
    assert sum(str(n.target) == "aten.add.Tensor" for n in wide.recomputed) <= sum(
        str(n.target) == "aten.add.Tensor" for n in near.recomputed
    )


def _chain(x: Tensor) -> Tensor:
    for _ in range(3 * LONG_CHAIN):
        x = x.sin()
    return x.sum()


def test_long_chains() -> None:
    limited = _schedule(_chain, X)
    assert len(_intermediate(limited)) == 2
    assert _intermediate(_schedule(_chain, X, save_long_chains=False)) == []


def _intermediate(schedule: Schedule) -> list[str]:
    return [node.name for node in schedule.saved if node.op != "placeholder"]


def _materialized(x: Tensor, w: Tensor) -> Tensor:
    return (F.gelu(x) @ w).sum()


def test_values_a_library_call_of_backward_reads() -> None:
    assert "aten.gelu.default" not in _recomputed(_schedule(_materialized, X, W))
    assert "aten.gelu.default" in _recomputed(_schedule(_materialized, X, W, save_materialized=False))


def test_views_are_always_free() -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        a, b = (x @ w).t().split(3)
        return (a.sin() * b).sum()

    schedule = _schedule(function, X, W)
    assert _intermediate(schedule) == ["mm"]
    assert {"aten.t.default", "aten.split.Tensor"} & _recomputed(schedule)
    handed_over = _schedule(function, X, W, save_views=True)
    assert "mm" not in _intermediate(handed_over)


@pytest.mark.parametrize("function", [_materialized, _chain])
def test_aggressive_recomputation_relaxes_rules(function: Callable[..., Tensor]) -> None:
    inputs = (X, W) if function is _materialized else (X,)
    assert len(_intermediate(_schedule(function, *inputs, aggressive_recomputation=True))) < len(
        _intermediate(_schedule(function, *inputs))
    )


def test_aggressive_recomputation_keeps_products_and_what_is_used_far_apart() -> None:
    weights = [torch.randn(6, 6, requires_grad=True) for _ in range(6)]
    schedule = _schedule(_residual, X, *weights, aggressive_recomputation=True)
    assert "aten.mm.default" not in _recomputed(schedule)
    assert {"add", "add_1"} <= {node.name for node in schedule.saved}


def test_what_only_backward_needs_is_not_forbidden() -> None:
    """The one-hot target of a loss is made by a scatter, which is not cheap, but runs once either way."""

    def function(x: Tensor) -> Tensor:
        return F.cross_entropy(x.sin(), torch.arange(4))

    assert not any("scatter" in name for name in _intermediate(_schedule(function, X)))


def test_every_rule_is_a_setting_with_a_description() -> None:
    descriptions = {field.name: field.metadata["doc"] for field in fields(Settings)}
    for rule in RULES:
        assert isinstance(getattr(Settings(), rule.setting), bool)
        assert descriptions[rule.setting]
