"""The partition: what is saved, what is recomputed, and gradients as eager has them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch._dynamo
import torch.fx

from tests.interpreted import InterpretingCompiler, targets
from torchkiln.compiler import compile_fx
from torchkiln.config import Settings

aten = torch.ops.aten


def _run(function: Callable[..., Any], *inputs: torch.Tensor) -> tuple[torch.fx.GraphModule, torch.fx.GraphModule]:
    """Forward and backward graph of ``function``, after its results and gradients were compared with eager's."""
    torch._dynamo.reset()
    inner = InterpretingCompiler()
    settings = Settings(fallback=False, checks=True, rng="eager")
    compiled = torch.compile(
        function, fullgraph=True, backend=lambda gm, args: compile_fx(gm, args, inner_compile=inner, settings=settings)
    )
    results = []
    for candidate in (function, compiled):
        copies = [value.detach().clone().requires_grad_(value.requires_grad) for value in inputs]
        torch.manual_seed(0)
        out = candidate(*copies)
        outs = out if isinstance(out, tuple) else (out,)
        sum(o.sin().sum() for o in outs).backward()
        results.append((outs, [value.grad for value in copies], copies))
    torch.testing.assert_close(results[1], results[0])
    forward, backward = inner.graphs
    return forward, backward


def _inputs_of(gm: torch.fx.GraphModule) -> list[str]:
    return [node.name for node in gm.graph.find_nodes(op="placeholder")]


def _saved(backward: torch.fx.GraphModule) -> list[str]:
    return [name for name in _inputs_of(backward) if not name.startswith("tangents")]


X = torch.randn(4, 6, requires_grad=True)


def test_forward_and_backward_meet_in_the_saved_values() -> None:
    forward, backward = _run(lambda x: x.sin().exp(), X)
    saved = [node.name for node in forward.graph.output_node().args[0][1:]]
    assert saved == _saved(backward)


def test_a_value_that_is_output_and_saved_is_one_value() -> None:
    forward, _ = _run(lambda x: x.exp(), X)
    out, saved = forward.graph.output_node().args[0]
    assert out is saved
    assert targets(forward) == [aten.exp.default]


def test_nothing_is_saved_for_a_backward_that_reads_nothing() -> None:
    _, backward = _run(lambda x: x + x.sum(), X)
    assert _saved(backward) == []


def test_views_are_recomputed_and_their_base_is_saved() -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return (x.view(8, 3) @ w.t()).sin()

    _, backward = _run(function, X, torch.randn(5, 3, requires_grad=True))
    assert set(_saved(backward)) == {"primals_1", "primals_2", "mm"}


def test_pieces_of_a_split_are_recomputed() -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        a, b, c = (x @ w).split(2, dim=1)
        return a * b + c

    _, backward = _run(function, X, torch.randn(6, 6, requires_grad=True))
    assert set(_saved(backward)) == {"primals_1", "primals_2", "mm"}


def test_freshly_filled_tensors_are_recomputed() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return x * torch.arange(6, dtype=torch.float32) * torch.full((6,), 2.0)

    _, backward = _run(function, X)
    assert not any("full" in name or "arange" in name or "iota" in name for name in _saved(backward))


def test_random_masks_are_drawn_in_forward_and_saved() -> None:
    forward, backward = _run(lambda x: torch.nn.functional.dropout(x, 0.5) * 2, X)
    assert aten.native_dropout.default in targets(forward)
    assert aten.native_dropout.default not in targets(backward)


def test_updates_of_buffers_stay_in_forward() -> None:
    def function(x: torch.Tensor, mean: torch.Tensor, var: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.batch_norm(x, mean, var, training=True)

    forward, backward = _run(function, X, torch.zeros(6), torch.ones(6))
    assert targets(forward).count(aten.copy_.default) == 2
    assert aten.copy_.default not in targets(backward)


def test_gradients_of_some_inputs_only() -> None:
    _run(lambda x, y, z: (x * y).sum(0) + z, X, torch.randn(4, 6), torch.randn(6, requires_grad=True))


def test_a_value_only_backward_reads_is_computed_in_backward() -> None:
    forward, backward = _run(lambda x: x.sin(), X)
    assert targets(forward) == [aten.sin.default]
    assert aten.cos.default in targets(backward)
    assert _saved(backward) == ["primals_1"]


def test_outputs_that_are_inputs_views_or_repeated() -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        z = x * y
        return z, z, z.view(-1), y[1:], x

    _run(function, X, torch.randn(4, 6, requires_grad=True))


def test_sizes_are_saved_first_and_symbolic_gradients_match() -> None:
    torch._dynamo.reset()
    inner = InterpretingCompiler()

    def function(x: torch.Tensor) -> torch.Tensor:
        return (x.view(-1, 3).sum(0) * x.shape[0]).sin()

    compiled = torch.compile(
        function,
        dynamic=True,
        backend=lambda gm, args: compile_fx(gm, args, inner_compile=inner, settings=Settings(fallback=False)),
    )
    for rows in (4, 7, 4, 9):
        x = torch.randn(rows, 6, requires_grad=True)
        y = copy.copy(x.detach()).requires_grad_()
        compiled(x).sum().backward()
        function(y).sum().backward()
        torch.testing.assert_close(x.grad, y.grad)
    assert len(inner.graphs) == 6  # a forward and a backward for each of three sizes
