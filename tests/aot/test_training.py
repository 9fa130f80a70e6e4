"""Packages for training: gradients of inputs and weights are those of eager."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.export import Dim

import torchkiln
from tests.aot.models import Attention, ConvNet, Mlp
from torchkiln.errors import ArgumentError, PackageError


def _same_gradients(package: torchkiln.Package, model: nn.Module, x: torch.Tensor) -> None:
    mine, eagers = x.clone().requires_grad_(), x.clone().requires_grad_()
    result, expected = package(mine), model(eagers)
    torch.testing.assert_close(result, expected)
    gradient = torch.randn_like(expected)
    result.backward(gradient)
    expected.backward(gradient)
    torch.testing.assert_close(mine.grad, eagers.grad)
    found = dict(package.named_parameters())
    assert set(found) == {name for name, _ in model.named_parameters()}
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name].grad, parameter.grad)


@pytest.mark.parametrize("make", [Mlp, Attention, ConvNet])
def test_gradients_are_those_of_eager(make: type[nn.Module], tmp_path: Path) -> None:
    torch.manual_seed(0)
    sizes = {Mlp: (5, 8), Attention: (2, 7, 16), ConvNet: (2, 3, 16, 16)}[make]
    model = make()
    example = torch.randn(sizes, requires_grad=True)
    path = torchkiln.aot_compile(copy.deepcopy(model), (example,), train=True, path=tmp_path / "model.kiln")
    package = torchkiln.load(path)
    for _ in range(2):  # gradients add up, statistics of batch norm go on
        _same_gradients(package, model, torch.randn(sizes))
    for name, buffer in model.named_buffers():
        torch.testing.assert_close(package.weights[name], buffer)


def test_steps_of_an_optimizer_are_those_of_eager(tmp_path: Path) -> None:
    model, rows = Mlp(), Dim("rows", min=2, max=32)
    shapes = {"x": {0: rows}}
    path = torchkiln.aot_compile(
        copy.deepcopy(model), (torch.randn(5, 8),), dynamic_shapes=shapes, train=True, path=tmp_path / "model.kiln"
    )
    package = torchkiln.load(path)
    mine, eagers = (torch.optim.AdamW(m.parameters(), lr=0.1) for m in (package, model))
    for count in (5, 9, 2):
        x = torch.randn(count, 8)
        for callee, optimizer in ((package, mine), (model, eagers)):
            optimizer.zero_grad()
            callee(x).square().sum().backward()
            optimizer.step()
    x = torch.randn(4, 8)
    with torch.no_grad():
        result = package(x)
        torch.testing.assert_close(result, model(x))
    assert not result.requires_grad


def test_parameters_that_get_no_gradient_are_none_to_train(tmp_path: Path) -> None:
    class Partly(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.trained, self.frozen = nn.Linear(3, 4), nn.Linear(3, 3).requires_grad_(False)
            self.shown = nn.Parameter(torch.ones(3))

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self.trained(self.frozen(x)), (x * self.shown).detach()

    model = Partly()
    path = torchkiln.aot_compile(model, (torch.randn(5, 2, 3),), train=True, path=tmp_path / "model.kiln")
    package, x = torchkiln.load(path), torch.randn(5, 2, 3)
    results, expected = package(x), model(x)
    torch.testing.assert_close(results, expected)
    assert [r.requires_grad for r in results] == [r.requires_grad for r in expected]
    results[0].square().sum().backward()
    expected[0].square().sum().backward()
    found = dict(package.named_parameters())
    assert set(found) == {f"trained.{name}" for name, _ in model.trained.named_parameters()}
    for name, parameter in found.items():
        torch.testing.assert_close(parameter.grad, model.get_parameter(name).grad)


def test_a_gradient_that_is_not_computed_is_refused(tmp_path: Path) -> None:
    path = torchkiln.aot_compile(Mlp(), (torch.randn(5, 8),), train=True, path=tmp_path / "model.kiln")
    package = torchkiln.load(path)
    with pytest.raises(ArgumentError, match="x requires a gradient, which the package does not compute"):
        package(torch.randn(5, 8, requires_grad=True))
    with pytest.raises(PackageError, match="nothing to train"):
        torchkiln.aot_compile(
            Mlp().requires_grad_(False), (torch.randn(5, 8),), train=True, path=tmp_path / "other.kiln"
        )


def test_an_lstm_is_trained_without_onednn(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = nn.LSTM(4, 6), torch.randn(3, 2, 4)
    with pytest.raises(PackageError, match=r"torch\.backends\.mkldnn\.flags\(enabled=False\)"):
        torchkiln.aot_compile(model, (x,), train=True, path=tmp_path / "model.kiln")
    with torch.backends.mkldnn.flags(enabled=False):
        torchkiln.aot_compile(model, (x,), train=True, path=tmp_path / "model.kiln")
    package = torchkiln.load(tmp_path / "model.kiln")
    names, parameters = zip(*package.named_parameters(), strict=True)
    found = torch.autograd.grad(package(x)[0].square().sum(), parameters)
    expected = torch.autograd.grad(model(x)[0].square().sum(), [model.get_parameter(name) for name in names])
    torch.testing.assert_close(found, expected)
