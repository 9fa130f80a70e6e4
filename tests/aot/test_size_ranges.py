"""Sizes that packages serve: all those declared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import Dim
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

import torchkiln
from tests.aot.models import ConvNet, Mlp
from torchkiln.aot.size_ranges import for_all_sizes
from torchkiln.errors import ArgumentError, PackageError


def _package(model: nn.Module, example: torch.Tensor, rows: Any, folder: Path, **options: Any) -> torchkiln.Package:
    path = torchkiln.aot_compile(model, (example,), dynamic_shapes=({0: rows},), path=folder / "model.kiln", **options)
    return torchkiln.load(path)


def test_a_package_serves_a_single_row(tmp_path: Path) -> None:
    model = Mlp()
    package = _package(model, torch.randn(5, 8), Dim("rows", min=1, max=9), tmp_path)
    for rows in (1, 2, 9):
        x = torch.randn(rows, 8)
        with torch.no_grad():
            torch.testing.assert_close(package(x), model(x))


# The example and the calls lie on both sides of 16, where torch takes another kernel for a convolution.
@pytest.mark.parametrize("example", [4, 20])
def test_convolutions_serve_batches_of_all_sizes(example: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = ConvNet().eval()
    package = _package(model, torch.randn(example, 3, 16, 16), Dim("batch", min=1, max=32), tmp_path)
    for batch in (1, 15, 16, 32):
        x = torch.randn(batch, 3, 16, 16)
        with torch.no_grad():
            torch.testing.assert_close(package(x), model(x))


def test_gradients_of_a_single_row_are_those_of_eager(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = ConvNet().eval()
    package = _package(model, torch.randn(4, 3, 16, 16), Dim("batch", min=1, max=32), tmp_path, train=True)
    for batch in (1, 32):
        x = torch.randn(batch, 3, 16, 16)
        names, parameters = zip(*package.named_parameters(), strict=True)
        expected = torch.autograd.grad(model(x).square().sum(), [model.get_parameter(name) for name in names])
        torch.testing.assert_close(torch.autograd.grad(package(x).square().sum(), parameters), expected)


def test_no_rows_are_refused_where_no_least_size_is_declared(tmp_path: Path) -> None:
    package = _package(Mlp(), torch.randn(5, 8), Dim("rows"), tmp_path)
    with pytest.raises(ArgumentError, match=r"Size 0 of the argument x must be 1 or more, not 0\."):
        package(torch.randn(0, 8))


def test_an_answer_that_some_declared_sizes_contradict_is_refused() -> None:
    mode = FakeTensorMode(shape_env=ShapeEnv())
    context = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC])
    x = mode.from_tensor(torch.randn(6), symbolic_context=context)
    graph = make_fx(torch.sin, tracing_mode="real")(x)
    graph.graph.find_nodes(op="placeholder")[0].meta["val"] = x
    with for_all_sizes(graph, [x]):
        assert x.shape[0] >= 2  # of any size that torch traces with
    with (
        pytest.raises(PackageError, match=r"only where \w+\.size\(0\) < 10; declare smaller ranges"),
        for_all_sizes(graph, [x]),
    ):
        assert x.shape[0] < 10
