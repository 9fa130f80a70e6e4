"""Calling conventions: what they say of a graph, and why a graph keeps AOTAutograd's wrapper."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._functorch import config as functorch_config
from torch.testing._internal.two_tensor import TwoTensor

from torchkiln.artifact import CallingConvention
from torchkiln.artifact.convention import Tangent
from torchkiln.recorder import Record, listen


def _convention(function: Callable[..., Any], *inputs: Any, dynamic: bool = False) -> CallingConvention:
    found: list[CallingConvention] = []

    def hear(record: Record) -> None:
        if record.stage == "calling convention":
            found.append(record.value)

    with listen(hear):
        torch.compile(function, backend="kiln", dynamic=dynamic, options={"fallback": False})(*inputs)
    (convention,) = found
    return convention


def _leaf(*sizes: int) -> Tensor:
    return torch.randn(*sizes, requires_grad=True)


def test_an_inference_graph() -> None:
    found = _convention(lambda x: (x.sin(), x.argmax()), torch.randn(3, 4))
    assert (found.inputs, found.wrapped, found.mutated, found.tangents) == (1, "", (), ())
    assert [result.requires_grad for result in found.results] == [False, False]


@pytest.mark.parametrize(("like_outputs", "strides"), [(True, (1, 5)), (False, (3, 1))])
def test_a_training_graph(like_outputs: bool, strides: tuple[int, int]) -> None:
    """AOTAutograd decides on the strides of gradients: those of the result by default in torch 2.13, not in 2.11."""
    with functorch_config.patch(guess_tangent_strides_as_outputs=like_outputs):
        found = _convention(lambda x, w: ((x @ w).T, x.argmax(), w.exp()), _leaf(3, 4), _leaf(4, 5))
    assert not found.wrapped
    assert [result.requires_grad for result in found.results] == [True, False, True]
    assert found.tangents == (Tangent(0, (5, 3), strides), Tangent(2, (4, 5), (5, 1)))
    assert str(found).splitlines() == [
        "2 inputs, called directly",
        "result 0: with gradient",
        "result 1: without gradient",
        "result 2: with gradient",
        f"tangent of result 0: [5, 3] strides {list(strides)}",
        "tangent of result 2: [4, 5] strides [5, 1]",
    ]


def test_sizes_that_follow_those_of_inputs() -> None:
    found = _convention(lambda x: (x.sin().mean(1), x.sum()), _leaf(3, 4), dynamic=True)
    assert not found.wrapped
    assert [result.dynamic for result in found.results] == [(0,), ()]
    assert found.saved_numbers > 0  # backward divides by a size


@pytest.mark.parametrize("train", [False, True])
def test_inputs_that_the_graph_writes_to(train: bool) -> None:
    def count(x: Tensor, times: Tensor) -> Tensor:
        times.add_(1)
        return x * times

    found = _convention(count, _leaf(3) if train else torch.randn(3), torch.zeros(()))
    assert not found.wrapped
    assert len(found.mutated) == 1


def _doubled(x: Tensor) -> Tensor:
    x.mul_(2)
    return x.sin()


@pytest.mark.parametrize(
    ("function", "inputs", "reason"),
    [
        (lambda x: (x.view(-1), x.sin()), lambda: (torch.randn(3, 4),), "share memory"),
        (lambda x: ((y := x.exp()).view(-1), y), lambda: (_leaf(3, 4),), "share memory"),
        (_doubled, lambda: (_leaf(3) * 1,), "written to after the graph"),
        (torch.sin, lambda: (TwoTensor(torch.randn(3), torch.randn(3)),), "subclass"),
        (lambda x: TwoTensor(x, x + 1) * 2, lambda: (torch.randn(3),), "subclass"),
        (lambda x: TwoTensor(x, x + 1) * 2, lambda: (_leaf(3),), "subclass"),
    ],
    ids=[
        *("view of an input", "two views of one value", "write that autograd follows"),
        *("subclass", "subclass made inside", "subclass made inside in training"),
    ],
)
def test_what_keeps_the_wrapper(function: Callable[..., Any], inputs: Callable[[], Any], reason: str) -> None:
    assert reason in _convention(function, *inputs()).wrapped


def test_a_graph_captured_under_autocast_is_noted_as_such() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        convention = _convention(torch.mm, torch.randn(4, 4), torch.randn(4, 4))
    assert convention.autocast
    assert not convention.wrapped
    assert not _convention(torch.mm, torch.randn(4, 4), torch.randn(4, 4)).autocast


def test_hooks_that_are_part_of_the_graph_keep_the_wrapper() -> None:
    pack, unpack = torch.fx.symbolic_trace(lambda x: x * 2), torch.fx.symbolic_trace(lambda x: x / 2)
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        assert _convention(torch.sin, _leaf(3)).wrapped == "hooks for saved tensors in the graph"
        assert not _convention(torch.cos, torch.randn(3)).wrapped
