"""What attention keeps for its backward has the dtype that torch returns, whatever torch states."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from torchkiln.passes.joint.attention_statistics import state_dtype_of_statistics


def _attention(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    result: tuple[Tensor, Tensor] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v)
    return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("stated", [torch.float32, torch.float64])
def test_a_wrong_statement_is_put_right(dtype: torch.dtype, stated: torch.dtype) -> None:
    inputs = [torch.randn(2, 3, 5, 8, dtype=dtype) for _ in range(3)]
    graph = make_fx(_attention, tracing_mode="fake")(*inputs)
    (call,) = graph.graph.find_nodes(
        op="call_function", target=torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    )
    (taken,) = [user for user in call.users if user.args[1] == 1]
    result, statistics = call.meta["val"]
    with statistics.fake_mode:
        wrong = torch.empty_strided(statistics.shape, statistics.stride(), dtype=stated)
    call.meta["val"], taken.meta["val"] = (result, wrong), wrong

    eager = _attention(*inputs)[1]
    assert state_dtype_of_statistics(graph) == (stated != eager.dtype)
    for value in (call.meta["val"][1], taken.meta["val"]):
        assert (value.dtype, value.shape, value.stride()) == (eager.dtype, eager.shape, eager.stride())
    assert not state_dtype_of_statistics(graph)


def test_attention_in_double_precision_trains() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(F.scaled_dot_product_attention, backend="kiln", options={"fallback": False})
    inputs = [torch.randn(2, 3, 5, 8, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    results = [function(*inputs).sin().sum() for function in (compiled, F.scaled_dot_product_attention)]
    mine, eagers = (torch.autograd.grad(result, inputs) for result in results)
    torch.testing.assert_close(mine, eagers, rtol=1e-10, atol=1e-12)
