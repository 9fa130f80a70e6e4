"""Peers through their own interfaces: what a conversion is given, and what calls give back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torchkiln.bench import own_apis
from torchkiln.bench.own_apis import converted_at_first_call


class _Model(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> dict[str, Any]:
        return {"difference": x - y, "count": torch.tensor(2), "parts": (x * 2,)}


def test_a_conversion_is_made_once_with_arguments_by_position_and_gives_the_floating_point_results() -> None:
    seen: list[tuple[Tensor, ...]] = []

    def convert(model: nn.Module, given: tuple[Tensor, ...]) -> own_apis.Call:
        seen.append(given)
        return lambda inputs: model(*inputs)

    call = converted_at_first_call(convert)(_Model(), False)
    x, y = torch.ones(3), torch.full((3,), 4.0)
    for _ in range(2):
        difference, double = call(x=x, y=y)
        assert torch.equal(difference, torch.full((3,), -3.0))
        assert torch.equal(double, torch.full((3,), 2.0))
    assert len(seen) == 1
    assert all(a is b for a, b in zip(seen[0], (x, y), strict=True))


def test_symbolic_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="static sizes alone"):
        own_apis.openvino_api(_Model(), True)


def test_exported_models_which_know_no_eval_are_converted() -> None:
    given = {"input": torch.ones(1, 3)}
    exported = torch.export.export(nn.Linear(3, 2).eval(), (), given).module(check_guards=False)
    with pytest.raises(NotImplementedError):
        exported.eval()
    trained: list[bool] = []

    def convert(model: nn.Module, _: tuple[Tensor, ...]) -> own_apis.Call:
        trained.append(model.training)
        return lambda inputs: model(*inputs)

    (found,) = converted_at_first_call(convert)(exported, False)(**given)
    torch.testing.assert_close(found, exported(**given))
    assert trained == [False]
