"""Equal layers: what is built and generated does not grow with their number, and results stay those of eager."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from torchkiln import reset_stats, stats
from torchkiln.schedule.build import KernelBuilder


class _Layer(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.wide, self.narrow = nn.Linear(32, 64), nn.Linear(64, 32)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.narrow(nn.functional.gelu(self.wide(self.norm(x)))))


def _network(layers: int, dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(_Layer(dropout) for _ in range(layers)))


def _trained(network: nn.Module) -> list[torch.Tensor]:
    """The result of a step and all its gradients."""
    x = torch.linspace(-2, 2, 24 * 32).reshape(24, 32).requires_grad_()
    result = network(x)
    result.square().mean().backward()
    return [result.detach(), *(t.grad for t in (x, *network.parameters()) if t.grad is not None)]


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_kernels_built_do_not_grow_with_the_layers(monkeypatch: pytest.MonkeyPatch, dropout: float) -> None:
    built: list[Any] = []

    build = KernelBuilder.build

    def counted(*args: Any) -> Any:
        built.append(args)
        return build(*args)

    monkeypatch.setattr(KernelBuilder, "build", counted)
    counts = []
    # Draws join kernels up to some layers before them, so that the first layers differ from those in the middle.
    for layers in (8, 16):
        torch._dynamo.reset()
        reset_stats()
        built.clear()
        _trained(torch.compile(_network(layers, dropout), backend="kiln"))
        counts.append((len(built), stats().kernels))
        assert stats().launches > 3 * layers
    assert counts[0] == counts[1]


def test_results_of_equal_layers_are_those_of_eager() -> None:
    expected = _trained(_network(5))
    found = _trained(torch.compile(_network(5), backend="kiln"))
    assert len(found) == len(expected) > 5
    for left, right in zip(found, expected, strict=True):
        torch.testing.assert_close(left, right)


def test_layers_that_share_a_kernel_draw_numbers_of_their_own() -> None:
    """Each launch passes the number of its stream: masks of equal layers differ, forward's and backward's agree."""

    def drop(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(nn.functional.dropout(v, 0.5) for v in x.unbind(0))

    x = torch.ones(3, 4096, requires_grad=True)
    reset_stats()
    results = torch.compile(drop, backend="kiln", options={"rng": "fused"})(x)
    torch.stack(results).sum().backward()
    masks = [result != 0 for result in results]
    for mask in masks:
        assert 0.45 < mask.float().mean() < 0.55
    for left, right in ((0, 1), (0, 2), (1, 2)):
        assert 0.45 < (masks[left] == masks[right]).float().mean() < 0.55
    assert x.grad is not None
    assert torch.equal(x.grad, torch.stack(results).detach())


def test_two_streams_in_one_kernel_stay_two() -> None:
    """One kernel that draws twice from one stream is not the same as one that draws from two."""

    def draws(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        once = torch.rand_like(x)
        return once + once, torch.rand_like(x) + torch.rand_like(x), torch.rand_like(x) + torch.rand_like(x)

    twice, sum_, other = torch.compile(draws, backend="kiln", options={"rng": "fused"})(torch.empty(1 << 14))
    # The spread of a number counted twice is that of two independent ones times the square root of 2.
    assert twice.std().item() == pytest.approx(2 / 12**0.5, rel=0.03)
    assert sum_.std().item() == pytest.approx((2 / 12) ** 0.5, rel=0.03)
    assert not torch.equal(sum_, other)


def test_equal_work_on_other_layouts_has_kernels_of_its_own() -> None:
    def scaled(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.mm(x, x) * 2 + 1, torch.mm(y, y).t().contiguous() * 2 + 1

    x, y = torch.randn(32, 32), torch.randn(32, 32)
    reset_stats()
    found = torch.compile(scaled, backend="kiln")(x, y)
    assert stats().kernels == 2
    for left, right in zip(found, scaled(x, y), strict=True):
        torch.testing.assert_close(left, right)
