"""Linear layers are found in the forms that AOTAutograd leaves of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.fx
from torch import nn

from tests.passes.freezing.graphs import inference_graph
from torchkiln.passes.freezing.linears import linears, weight_of

_aten = torch.ops.aten


class _Stored(nn.Module):
    """A weight that is in by out, as in GPT-2."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(8, 6)), nn.Parameter(torch.randn(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.addmm(self.bias, x, self.weight)


@pytest.mark.parametrize("shape", [(4, 8), (2, 4, 8), (2, 3, 4, 8)])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_linear_layer_is_found_with_its_weight_its_bias_and_what_is_around_it(
    shape: tuple[int, ...], bias: bool, dynamic: bool
) -> None:
    graph = inference_graph(nn.Linear(8, 6, bias=bias), torch.randn(shape), dynamic=dynamic)
    (found,) = linears(graph)
    assert found.weight is not None
    assert found.weight.op == "placeholder"
    assert tuple(found.weight.meta["val"].shape) == (6, 8)
    assert found.features == (8, 6)
    assert (found.bias is not None) == bias
    assert found.source.op == "placeholder"
    assert found.result in graph.output_node().all_input_nodes
    assert found.is_2d == (len(shape) == 2)


def test_a_weight_stored_in_by_out_is_transposed_on_demand() -> None:
    (found,) = linears(inference_graph(_Stored(), torch.randn(4, 8)))
    assert found.weight is None
    made = weight_of(found)
    assert made.target is _aten.permute.default
    assert tuple(made.meta["val"].shape) == (6, 8)


def test_what_a_second_reader_sees_is_the_matrix() -> None:
    layer = nn.Linear(8, 6)

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: torch.Tensor) -> Any:
            made = self.layer(x)
            return made.sin(), made.flatten(0, 1).cos()

    (found,) = linears(inference_graph(Two(), torch.randn(2, 4, 8)))
    assert found.is_2d
    assert found.node.target is _aten.addmm.default


@pytest.mark.parametrize(
    "function",
    [
        lambda x, w, b: torch.addmm(b, x, w, beta=2),
        lambda x, w, b: torch.addmm(x[:, :6], x, w),  # adds what depends on the input
        lambda x, w, b: torch.mm(x, x.t()),
        lambda x, w, b: torch.addmm(b[:1], x, w),  # one number for all features
        lambda x, w, b: torch.addmm(b, w.t(), w[:, :6]),  # of weights alone
    ],
)
def test_other_matmuls_are_no_linear_layers(function: Callable[..., torch.Tensor]) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.bias = nn.Parameter(torch.randn(8, 6)), nn.Parameter(torch.randn(6))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return function(x, self.weight, self.bias) + x.sum()

    assert list(linears(inference_graph(Model(), torch.randn(4, 8)))) == []
