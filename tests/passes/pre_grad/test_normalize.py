"""Normalization: every form of an operation becomes one, with arguments by name, and means what it meant."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.passes.pre_grad.captured import assert_same, capture, text
from torchkiln.canonicalize.torch_calls import normalize_calls

X = torch.randn(4, 6, requires_grad=True)
RELU = nn.ReLU()


def _normalized(function: Callable[..., Any], *inputs: Any) -> str:
    gm = capture(function, *inputs)
    normalize_calls(gm)
    gm.graph.find_nodes(op="placeholder")[0]._rename("x")
    assert_same(gm, function, *inputs)
    assert not normalize_calls(gm)  # canonical form is its own canonical form
    return "\n".join(line.partition(" = ")[2] for line in text(gm).splitlines()[:-1])


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda x: F.relu(x), "relu(x)"),
        (lambda x: x.relu(), "relu(x)"),
        (lambda x: torch.relu(x), "relu(x)"),
        (RELU, "relu(x)"),
        (lambda x: x.sigmoid(), "sigmoid(x)"),
        (lambda x: F.sigmoid(x), "sigmoid(x)"),
        (lambda x: F.leaky_relu(x, 0.2), "leaky_relu(x, negative_slope=0.2)"),
        (lambda x: F.gelu(x, approximate="tanh"), "gelu(x, approximate='tanh')"),
        (lambda x: -x, "neg(x)"),
        (lambda x: x.softmax(-1), "softmax(x, dim=1, dtype=None)"),
        (lambda x: F.softmax(x, dim=1), "softmax(x, dim=1, dtype=None)"),
        (lambda x: x + 1, "add(x, 1)"),
        (lambda x: x.add(x), "add(x, x)"),
        (lambda x: torch.sub(x, 2, alpha=1), "sub(x, 2)"),
        (lambda x: x.div(2), "div(x, 2)"),
        (lambda x: x.permute(1, 0), "permute(x, dims=(1, 0))"),
        (lambda x: x.permute((-1, 0)), "permute(x, dims=(1, 0))"),
        (lambda x: torch.permute(x, [1, -2]), "permute(x, dims=(1, 0))"),
        (lambda x: x.transpose(-1, -2), "transpose(x, dim0=1, dim1=0)"),
        (lambda x: torch.swapaxes(x, axis0=0, axis1=1), "transpose(x, dim0=0, dim1=1)"),
        (lambda x: x.t(), "transpose(x, dim0=0, dim1=1)"),
        (lambda x: x.T.sin(), "transpose(x, dim0=0, dim1=1)\nsin(getattr_1)"),
        (lambda x: x.mT.sin(), "transpose(x, dim0=0, dim1=1)\nsin(getattr_1)"),
        (lambda x: x.unsqueeze(-1), "unsqueeze(x, dim=2)"),
        (lambda x: x.squeeze(), "squeeze(x)"),
        (lambda x: torch.squeeze(x, -1), "squeeze(x, dim=1)"),
        (lambda x: x.squeeze((0, -1)), "squeeze(x, dim=(0, 1))"),
        (lambda x: x.flatten(), "flatten(x, start_dim=0, end_dim=1)"),
        (lambda x: x.reshape(3, -1), "reshape(x, shape=(3, -1))"),
        (lambda x: torch.reshape(x, [8, 3]), "reshape(x, shape=(8, 3))"),
        (lambda x: torch.concat([x, x], axis=-1), "cat([x, x], dim=1)"),
        (lambda x: torch.cat((x, x)), "cat([x, x], dim=0)"),
        (lambda x: torch.stack((x, x), -1), "stack([x, x], dim=2)"),
    ],
)
def test_forms_become_one(function: Callable[..., Any], expected: str) -> None:
    assert _normalized(function, X) == expected


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda x: x.split(2, -1), "split(x, split_size_or_sections=2, dim=1)"),
        (lambda x: torch.split(x, [1, 3]), "split(x, split_size_or_sections=[1, 3], dim=0)"),
        (lambda x: x.split_with_sizes([1, 3]), "split(x, split_size_or_sections=[1, 3], dim=0)"),
        (lambda x: x.chunk(4, dim=-1), "split(x, split_size_or_sections=2, dim=1)"),
        (lambda x: x.unbind(-1), "unbind(x, dim=1)"),
        (lambda x: torch.unbind(x), "unbind(x, dim=0)"),
    ],
)
def test_forms_that_make_parts_become_one(function: Callable[..., Any], expected: str) -> None:
    assert _normalized(function, X).splitlines()[0] == expected


@pytest.mark.parametrize(
    "function",
    [
        lambda x: F.relu(x * 2, inplace=True),
        lambda x: torch.add(x, x, alpha=2),
        lambda x: torch.div(x, 2, rounding_mode="floor"),
        lambda x: torch.cat([x, x], out=torch.empty(8, 6)) if not x.requires_grad else x.clone(),
        lambda x: x.to(torch.float64),
    ],
)
def test_calls_that_say_more_stay(function: Callable[..., Any]) -> None:
    x = torch.randn(4, 6)
    gm = capture(function, x)
    before = text(gm).splitlines()[-2]
    normalize_calls(gm)
    assert text(gm).splitlines()[-2] == before
    assert_same(gm, function, x)


def test_arithmetic_on_sizes_and_with_a_number_first_stays() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return (2 - x).reshape(x.size(0) * x.size(1))

    gm = capture(function, torch.randn(4, 6), dynamic=True)
    normalize_calls(gm)
    assert "sub(2, " in text(gm)
    assert "mul(" in text(gm)


@pytest.mark.filterwarnings("ignore:Tensor.mT is deprecated")
def test_a_tensor_without_dimensions_has_none_to_transpose() -> None:
    assert _normalized(lambda x: x.mT.sin(), torch.tensor(1.0)) == "getattr(x, 'mT')\nsin(getattr_1)"


def test_no_dimension_is_counted_from_the_front_where_tensors_change_their_rank() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        z = y.transpose(0, -1).clone()
        y.unsqueeze_(0)
        return z.sum() + y

    gm = capture(function, torch.randn(4, 6))
    normalize_calls(gm)
    assert "transpose(y, dim0=0, dim1=-1)" in text(gm).replace("add", "y")
    assert_same(gm, function, torch.randn(4, 6))


def test_modules_become_functions_of_their_parameters() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.LayerNorm(8), nn.Dropout(0.3), nn.Flatten(0, -1)).eval()
    gm = torch.fx.symbolic_trace(model)
    assert normalize_calls(gm)
    assert [line.partition(" = ")[2] for line in text(gm).splitlines()[:-1]] == [
        "linear(input_1, _0_weight, _0_bias)",
        "relu(_0)",
        "layer_norm(_1, normalized_shape=(8,), weight=_2_weight, bias=_2_bias, eps=1e-05)",
        "dropout(_2, p=0.3, training=False)",
        "flatten(_3, start_dim=0, end_dim=-1)",
    ]
    assert_same(gm, model, X)


def test_modules_with_hooks_or_of_the_users_own_class_stay() -> None:
    class Doubled(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * 2

    hooked = nn.Linear(6, 6)
    hooked.register_forward_hook(lambda module, args, result: result + 1)
    for module in (hooked, nn.BatchNorm1d(6), nn.Conv1d(4, 4, 3, padding=1, padding_mode="circular")):
        gm = torch.fx.symbolic_trace(nn.Sequential(module))
        assert not normalize_calls(gm)
    graph = torch.fx.Graph()
    graph.output(graph.call_module("inner", (graph.placeholder("x"),)))
    root = nn.Module()
    root.inner = Doubled(6, 6)
    assert not normalize_calls(torch.fx.GraphModule(root, graph))


def test_models_compile_after_normalization(compile_strictly: Callable[..., Any]) -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        a, b, c = x.chunk(3, -1)
        return torch.concat([a.relu(), b], axis=-1).t(), c.T, x.unsqueeze(-1).squeeze(-1).flatten()

    torch.testing.assert_close(compile_strictly(function)(X), function(X))


def test_sizes_given_as_those_of_another_tensor_are_passed_on() -> None:
    def flat_and_back(x: torch.Tensor) -> torch.Tensor:
        return x.reshape(-1, x.shape[-1]).softmax(-1).reshape(x.shape) + 1

    compiled = torch.compile(flat_and_back, backend="kiln", dynamic=True, options={"fallback": False})
    for sizes in ((3, 5), (4, 6)):
        x = torch.randn(sizes)
        torch.testing.assert_close(compiled(x), flat_and_back(x))
