"""Arguments an operator does not read: dropped where that is so, kept where it is not."""

from __future__ import annotations

import pytest
import torch
import torch.fx
import torch.nn.functional as F
from torch import Tensor

from torchkiln.passes.joint.unused_arguments import drop_unused_arguments

BACKWARD = torch.ops.aten.native_batch_norm_backward.default


def _gradient(train: bool) -> torch.fx.GraphModule:
    graph = torch.fx.Graph()
    grad, x, weight, mean, var, saved_mean, saved_inverse = map(graph.placeholder, "gxwmvsi")
    args = (grad, x, weight, mean, var, saved_mean, saved_inverse, train, 1e-5, [True, True, True])
    graph.output(graph.call_function(BACKWARD, args))
    return torch.fx.GraphModule(torch.nn.Module(), graph)


def _inputs() -> list[Tensor]:
    x = torch.randn(4, 3, dtype=torch.float64)
    inverse = (x.var(0, correction=0) + 1e-5).rsqrt()
    row = [torch.rand(3, dtype=torch.float64) + 0.5 for _ in range(3)]
    return [torch.randn_like(x), x, *row, x.mean(0), inverse]


def test_running_statistics_are_not_kept_for_the_gradient_of_training() -> None:
    gm = _gradient(True)
    inputs = _inputs()
    wanted = gm(*inputs)
    assert drop_unused_arguments(gm)
    (node,) = gm.graph.find_nodes(op="call_function", target=BACKWARD)
    assert node.args[3] is None
    assert node.args[4] is None
    gm.recompile()
    torch.testing.assert_close(gm(*inputs), wanted, rtol=0, atol=0)
    assert not drop_unused_arguments(gm)


def test_running_statistics_are_kept_where_the_gradient_reads_them() -> None:
    gm = _gradient(False)
    before = str(gm.graph)
    assert not drop_unused_arguments(gm)
    assert str(gm.graph) == before


@pytest.mark.parametrize("training", [True, False])
def test_gradients_of_batch_norm(training: bool) -> None:
    def function(x: Tensor, weight: Tensor, mean: Tensor, var: Tensor) -> Tensor:
        return F.batch_norm(x, mean, var, weight, training=training).sin().sum()

    results = []
    for run in (function, torch.compile(function, backend="kiln", fullgraph=True, options={"fallback": False})):
        torch.manual_seed(0)
        x, weight = torch.randn(6, 3, dtype=torch.float64), torch.rand(3, dtype=torch.float64)
        leaves = [x.requires_grad_(), weight.requires_grad_()]
        mean, var = torch.zeros(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64)
        run(*leaves, mean, var).backward()
        results.append([leaf.grad for leaf in leaves] + [mean, var])
    torch.testing.assert_close(results[1], results[0])
