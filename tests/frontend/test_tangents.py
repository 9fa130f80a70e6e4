"""Gradients as they arrive at a compiled backward."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch


@pytest.mark.parametrize("function", [torch.linalg.eig, torch.linalg.eigvals], ids=["eig", "eigvals"])
def test_operators_with_effects_have_a_backward(function: Callable[..., object]) -> None:
    """torch hands the backward of such an operator a token, which has no gradient."""

    def program(x: torch.Tensor) -> torch.Tensor:
        found = function(x)
        values = found if isinstance(found, torch.Tensor) else found[0]  # type: ignore[index]
        return values.abs().sum()

    torch._dynamo.reset()
    compiled = torch.compile(program, backend="kiln", options={"fallback": False})
    x = torch.tensor([[4.0, 1.0, 0.0], [1.0, 3.0, 0.5], [0.2, 0.0, 1.0]], dtype=torch.float64)
    for _ in range(2):
        mine, eagers = x.clone().requires_grad_(), x.clone().requires_grad_()
        result, expected = compiled(mine), program(eagers)
        torch.testing.assert_close(result, expected)
        result.backward()
        expected.backward()
        torch.testing.assert_close(mine.grad, eagers.grad)
