"""Activation checkpointing: what is kept, what is recomputed, and gradients as eager has them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import torchkiln
from tests.higher_order.against_eager import check
from tests.interpreted import InterpretingCompiler, targets
from torchkiln.compiler import compile_fx
from torchkiln.config import Settings

Tensor = torch.Tensor
aten = torch.ops.aten


def _block(x: Tensor, weight: Tensor) -> Tensor:
    return F.gelu((x @ weight).sin()).cos()


def _chain(x: Tensor, *weights: Tensor) -> Tensor:
    for weight in weights:
        x = checkpoint(_block, x, weight, use_reentrant=False)
    return x.exp()


def _matrices(count: int) -> list[Tensor]:
    return [torch.randn(4, 4, requires_grad=True) for _ in range(count)]


def _graphs(function: Callable[..., Any], *inputs: Tensor) -> tuple[torch.fx.GraphModule, torch.fx.GraphModule]:
    inner = InterpretingCompiler()
    settings = Settings(fallback=False)
    run = torch.compile(
        function, fullgraph=True, backend=lambda gm, args: compile_fx(gm, args, inner_compile=inner, settings=settings)
    )
    run(*inputs).sum().backward()
    forward, backward = inner.graphs
    return forward, backward


def _saved(backward: torch.fx.GraphModule) -> list[str]:
    names = [node.name for node in backward.graph.find_nodes(op="placeholder")]
    return [name for name in names if not name.startswith(("tangents", "primals"))]


def test_gradients_through_checkpointed_blocks() -> None:
    check(_chain, *_matrices(4))


def test_only_what_enters_and_leaves_a_region_is_kept() -> None:
    _, backward = _graphs(_chain, *_matrices(4))
    assert _saved(backward) == ["cos", "cos_1", "exp"]  # of three regions: two arguments, and what exp keeps
    assert targets(backward).count(aten.mm.default) == 3 + 2 * 3  # each product again, and two for its gradients


def test_regions_are_recomputed_one_after_the_other() -> None:
    _, backward = _graphs(_chain, *_matrices(3))
    names = [node.name for node in backward.graph.nodes]
    # The second region is done with before the first is begun.
    assert names.index("mm_1") < names.index("gelu_backward") < names.index("mm") < names.index("gelu_backward_1")


def _ends_in_view(x: Tensor, *weights: Tensor) -> Tensor:
    for weight in weights:
        x = checkpoint(lambda x, w: (F.gelu(x) @ w).transpose(0, 1).unsqueeze(0)[0], x, weight, use_reentrant=False)
    return x.tanh()


def test_of_a_region_that_ends_in_views_what_they_show_is_kept() -> None:
    """Otherwise nothing is kept between regions, and all of them are recomputed at once."""
    matrices = _matrices(4)
    check(_ends_in_view, *matrices)
    torch._dynamo.reset()
    _, backward = _graphs(_ends_in_view, *matrices)
    assert _saved(backward) == ["mm", "mm_1", "tanh"]
    assert targets(backward).count(aten.mm.default) == 2 * 3  # the products are what is kept


def test_what_leaves_a_region_and_nothing_outside_needs_is_recomputed() -> None:
    def function(x: Tensor, weight: Tensor) -> Tensor:
        return checkpoint(lambda x, w: (x @ w).tanh(), x, weight, use_reentrant=False).sum(0)

    check(function, *_matrices(2))
    torch._dynamo.reset()
    _, backward = _graphs(function, *_matrices(2))
    assert _saved(backward) == []


@pytest.mark.parametrize("policy", [p for p in CheckpointPolicy if "OFFLOAD" in p.name])
def test_what_a_policy_keeps_in_the_memory_of_the_processor_is_kept(policy: CheckpointPolicy) -> None:
    def choose(_ctx: Any, target: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
        return policy if target == aten.mm.default else CheckpointPolicy.PREFER_RECOMPUTE

    def function(x: Tensor, weight: Tensor) -> Tensor:
        contexts = partial(create_selective_checkpoint_contexts, choose)
        return checkpoint(_block, x, weight, use_reentrant=False, context_fn=contexts).sum(0)

    _, backward = _graphs(function, *_matrices(2))
    assert _saved(backward) == ["mm"]


def test_without_checkpointing_more_is_kept() -> None:
    def plain(x: Tensor, weight: Tensor) -> Tensor:
        return _block(x, weight).exp()

    _, kept = _graphs(plain, *_matrices(2))
    torch._dynamo.reset()
    _, computed = _graphs(_chain, *_matrices(2))
    assert len(_saved(kept)) > len(_saved(computed))
    assert targets(kept).count(aten.mm.default) == 2


def test_dropout_in_a_checkpointed_region_keeps_its_mask() -> None:
    def function(x: Tensor, weight: Tensor) -> Tensor:
        return checkpoint(lambda x, w: F.dropout((x @ w).sin(), 0.5).cos(), x, weight, use_reentrant=False).exp()

    with torchkiln.settings(rng="eager"):
        check(function, *_matrices(2))


def _save_matmuls(_ctx: Any, target: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if target == aten.mm.default else CheckpointPolicy.PREFER_RECOMPUTE


def _selective(x: Tensor, weight: Tensor) -> Tensor:
    contexts = partial(create_selective_checkpoint_contexts, _save_matmuls)
    return checkpoint(_block, x, weight, use_reentrant=False, context_fn=contexts) @ weight


def test_a_policy_chooses_what_is_kept() -> None:
    check(_selective, *_matrices(2))
    torch._dynamo.reset()
    _, backward = _graphs(_selective, *_matrices(2))
    assert _saved(backward) == ["mm", "cos"]
    assert targets(backward).count(aten.mm.default) == 4  # gradients only


def test_a_module_with_normalization_that_counts_batches() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.ReLU())
    reference = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.ReLU())
    reference.load_state_dict(module.state_dict())

    def call(module: torch.nn.Module, x: Tensor) -> Tensor:
        return checkpoint(module, x, use_reentrant=False)

    x = torch.randn(6, 4)
    run = torch.compile(call, backend="kiln", options={"fallback": False})
    for candidate, function in ((module, run), (reference, _plain_call)):
        function(candidate, x).square().sum().backward()
    for (name, got), wanted in zip(module.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(got.grad, wanted.grad, msg=lambda text, name=name: f"{name}: {text}")
    torch.testing.assert_close(module[1].running_mean, reference[1].running_mean)


def _plain_call(module: torch.nn.Module, x: Tensor) -> Tensor:
    return module(x)


@pytest.mark.parametrize("nested", [False, True])
def test_a_checkpoint_with_several_results(nested: bool) -> None:
    def inner(x: Tensor) -> tuple[Tensor, Tensor]:
        values, order = x.sin().sort(1)
        return values.exp(), order

    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        body = (lambda x: checkpoint(inner, x.cos(), use_reentrant=False)) if nested else inner
        values, order = checkpoint(body, x, use_reentrant=False)
        return values * 2, order

    check(function, torch.randn(3, 5, requires_grad=True))


def test_fused_random_numbers_in_a_checkpointed_region_are_recomputed_from_their_seed() -> None:
    def function(x: Tensor) -> Tensor:
        return checkpoint(lambda x: F.dropout(x.exp(), 0.5), x, use_reentrant=False)

    x = torch.zeros(200, requires_grad=True)
    result = torch.compile(function, backend="kiln", fullgraph=True, options={"fallback": False, "rng": "fused"})(x)
    (gradient,) = torch.autograd.grad(result.sum(), x)
    torch.testing.assert_close(gradient, result.detach())  # at 0, the slope of exp is its value
    assert 50 < int((gradient == 0).sum()) < 150
