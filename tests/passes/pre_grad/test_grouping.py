"""Parallel linear layers and layer norms as one call: which are grouped, and which must be computed alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.fx
import torch.nn.functional as F

from tests.passes.pre_grad.captured import assert_same, capture, text
from torchkiln.canonicalize.torch_calls import normalize_calls
from torchkiln.passes.pre_grad import remove_dead_code
from torchkiln.passes.pre_grad.group_layer_norms import group_layer_norms
from torchkiln.passes.pre_grad.group_linears import group_linears

Tensor = torch.Tensor
X, Y = torch.randn(5, 6), torch.randn(5, 6)
V, W = torch.randn(4, 6), torch.randn(4, 6)
B, C = torch.randn(4), torch.randn(4)


def _pass(
    run: Callable[[torch.fx.GraphModule], bool], function: Callable[..., Any], *inputs: Any
) -> tuple[bool, list[str]]:
    gm = capture(function, *inputs)
    normalize_calls(gm)
    for name, node in zip("xyvwbc", gm.graph.find_nodes(op="placeholder"), strict=False):
        node._rename(name)
    changed = run(gm)
    remove_dead_code(gm)
    assert_same(gm, function, *inputs, rtol=1e-5, atol=1e-5)
    return changed, text(gm).splitlines()


def test_linears_of_one_input_are_one_matmul() -> None:
    def function(x: Tensor, y: Tensor, v: Tensor, w: Tensor, b: Tensor, c: Tensor) -> Tensor:
        return F.linear(x, v, b).relu() + F.linear(x, w, c) + y.sum()

    changed, lines = _pass(group_linears, function, X, Y, V, W, B, C)
    assert changed
    assert lines[:9] == [
        "reshape = reshape(x, shape=(1, 5, 6))",
        "broadcast_to = broadcast_to(reshape, (2, 5, 6))",
        "stack = stack([v, w], dim=0)",
        "transpose = transpose(stack, dim0=1, dim1=2)",
        "bmm = bmm(broadcast_to, transpose)",
        "stack_1 = stack([b, c], dim=0)",
        "unsqueeze = unsqueeze(stack_1, dim=1)",
        "add_2 = add(bmm, unsqueeze)",
        "reshape_1 = reshape(add_2, shape=(2, 5, 4))",
    ]


def test_linears_of_several_inputs_are_one_matmul() -> None:
    changed, lines = _pass(group_linears, lambda x, y, v, w: F.linear(x, v) * F.linear(y, w), X, Y, V, W)
    assert changed
    assert sum(" = bmm(" in line for line in lines) == 1
    assert "stack = stack([x, y], dim=0)" in lines
    assert _pass(group_linears, lambda x, y, v, w: F.linear(x, v) * F.linear(y, w), X[None, None], Y[None, None], V, W)[
        0
    ]


def _written_between(x: Tensor, y: Tensor, v: Tensor, w: Tensor) -> Tensor:
    first = F.linear(x, v).sin()
    y.add_(1)
    return first * F.linear(y, w)


def _result_written(x: Tensor, y: Tensor, v: Tensor, w: Tensor) -> Tensor:
    first, second = F.linear(x, v), F.linear(x, w)
    first.add_(y.sum())
    return first * second


@pytest.mark.parametrize(
    "function",
    [
        lambda x, y, v, w: (F.linear(x, v), F.linear(y, w)),  # returned: memory of their own
        lambda x, y, v, w: F.linear(F.linear(x, v).repeat(1, 2)[:, :6], w),  # one after the other
        lambda x, y, v, w: F.linear(x, v)[:, :3] * F.linear(y[:, :3], w[:3, :3]),  # of other shapes
        lambda x, y, v, w: F.linear(x, v) * F.linear(y, w, y[0, :4]),  # one with bias
        lambda x, y, v, w: F.linear(x.repeat(900, 1), v).sum() * F.linear(y.repeat(900, 1), w),  # too much to copy
        _written_between,
        _result_written,
    ],
)
def test_other_linears_stay(function: Callable[..., Any]) -> None:
    assert not _pass(group_linears, function, X, Y, V, W)[0]


def test_linears_that_need_gradients_stay() -> None:
    weights = (V.clone().requires_grad_(), W.clone().requires_grad_())
    function = lambda x, y, v, w: F.linear(x, v) * F.linear(y, w)  # noqa: E731
    assert not _pass(group_linears, function, X, Y, *weights)[0]
    with torch.no_grad():
        assert _pass(group_linears, function, X, Y, *weights)[0]


def _norms(x: Tensor, y: Tensor, v: Tensor, w: Tensor) -> Tensor:
    return F.layer_norm(x, (6,), v, w) * F.layer_norm(y, (6,), w, v).sin()


def test_layer_norms_of_one_shape_are_one() -> None:
    inputs = [value.clone().requires_grad_() for value in (X, Y, V[0], W[0])]
    changed, lines = _pass(group_layer_norms, _norms, *inputs)
    assert changed
    assert lines[:7] == [
        "stack = stack([x, y], dim=0)",
        "layer_norm_2 = layer_norm(stack, normalized_shape=(6,), weight=None, bias=None, eps=1e-05)",
        "stack_1 = stack([v, w], dim=0)",
        "reshape = reshape(stack_1, shape=(2, 1, 6))",
        "mul_1 = mul(layer_norm_2, reshape)",
        "stack_2 = stack([w, v], dim=0)",
        "reshape_1 = reshape(stack_2, shape=(2, 1, 6))",
    ]


@pytest.mark.parametrize(
    "function",
    [
        lambda x, y, v, w: F.layer_norm(x, (6,), v) * F.layer_norm(y, (6,), w, v),
        lambda x, y, v, w: F.layer_norm(x, (6,)) * F.layer_norm(y, (6,), eps=1e-3),
        lambda x, y, v, w: F.layer_norm(x, (6,)) * F.layer_norm(y, (5, 6)),
        lambda x, y, v, w: F.layer_norm(F.layer_norm(x, (6,), v, w), (6,), w, v) + y,
        lambda x, y, v, w: (F.layer_norm(x, (6,)), F.layer_norm(y, (6,))),
    ],
)
def test_other_layer_norms_stay(function: Callable[..., Any]) -> None:
    assert not _pass(group_layer_norms, function, X, Y, V[0], W[0])[0]


def test_compiled(compile_strictly: Callable[..., Any]) -> None:
    def function(x: Tensor, y: Tensor, v: Tensor, w: Tensor) -> Tensor:
        first, second = F.linear(x, v), F.linear(x, w)
        return F.layer_norm(first, (4,)) * F.layer_norm(second, (4,)) + F.linear(y, v).sum()

    inputs = (X, Y, V, W)
    for setting in (False, True):
        result = compile_strictly(function, group_layer_norms=setting, check_numerics=True)(*inputs)
        torch.testing.assert_close(result, function(*inputs), rtol=1e-5, atol=1e-5)


class _Heads(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = torch.nn.Linear(6, 4), torch.nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.left(x).relu() + self.right(x)


def test_a_size_that_a_weight_settled_counts_as_known() -> None:
    # One row is compiled for by itself; the width is symbolic until the first matmul shows that it is 6.
    with torch.no_grad():
        heads, x = _Heads(), torch.randn(1, 6)
        gm = capture(heads, x, dynamic=True)
        normalize_calls(gm)
        assert group_linears(gm)
        assert "shape=(1, 1, 6)" in text(gm)
        compiled = torch.compile(heads, backend="kiln", dynamic=True, options={"fallback": False})
        for rows in (1, 3, 5):
            x = torch.randn(rows, 6)
            torch.testing.assert_close(compiled(x), heads(x))
