"""Sizes that packages serve: all those declared, and of several those that fit together."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
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


_DERIVED: dict[str, Callable[[Any], Any]] = {
    "2 times a Dim": lambda dim: 2 * dim,
    "1 plus a Dim": lambda dim: dim + 1,
    "-4 plus 2 times a Dim": lambda dim: 2 * dim - 4,
}


@pytest.mark.parametrize("said", _DERIVED)
def test_a_size_made_of_one_that_no_argument_has_is_refused_in_one_sentence(said: str, tmp_path: Path) -> None:
    rows = _DERIVED[said](Dim("dim", min=4, max=20))
    with pytest.raises(PackageError, match=rf"The size x\.size\(0\) is {said} that no size of an argument is"):
        _package(Mlp(), torch.randn(12, 8), rows, tmp_path)


@dataclass(frozen=True)
class _Related:
    """A function of vectors, and when their sizes fit together; ``unsaid`` are those that torch may refuse as well."""

    function: Callable[[Tensor, Tensor], Tensor]
    fits: Callable[[int, int], bool]
    unsaid: Callable[[int, int], bool] = lambda m, n: False


class _Of(nn.Module):
    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.function(x, y)


def _checked(x: Tensor, y: Tensor) -> Tensor:
    torch._check(y.shape[0] <= x.shape[0])
    return x[: y.shape[0]] * y


_RELATED = {
    "a slice inside": _Related(lambda x, y: x[: y.shape[0]] + y.sum(), lambda m, n: n <= m, lambda m, n: m == n),
    "a part": _Related(lambda x, y: x.narrow(0, 0, y.shape[0]) + 1, lambda m, n: n <= m),
    "a branch": _Related(lambda x, y: x.sum() + (y if x.shape[0] > y.shape[0] else -y), lambda m, n: n < m),
    "a promise": _Related(_checked, lambda m, n: n <= m, lambda m, n: m == n),
    "a divisor": _Related(lambda x, y: x.view(y.shape[0], -1) + 1, lambda m, n: m % n == 0, lambda m, n: m == n),
    "a divisor of the sum": _Related(lambda x, y: torch.cat([x, y]).view(3, -1).sum(0), lambda m, n: (m + n) % 3 == 0),
    "a branch by a remainder": _Related(lambda x, y: y * (2 if x.shape[0] % 4 == 0 else 1), lambda m, n: m % 4 == 0),
}


@pytest.mark.parametrize("name", _RELATED)
def test_sizes_that_do_not_fit_together_are_refused_and_others_served(name: str, tmp_path: Path) -> None:
    case = _RELATED[name]
    model = _Of(case.function)
    any_size = ({0: Dim.AUTO}, {0: Dim.AUTO})
    path = torchkiln.aot_compile(
        model, (torch.randn(12), torch.randn(6)), dynamic_shapes=any_size, path=tmp_path / "model.kiln"
    )
    package = torchkiln.load(path)
    served = 0
    for m, n in product(range(2, 13), range(2, 9)):
        x, y = torch.randn(m), torch.randn(n)
        if not case.fits(m, n):
            with pytest.raises(ArgumentError, match=f"for sizes where .*x.* is {m}|argument x must be .* not {m}"):
                package(x, y)
        elif not case.unsaid(m, n):
            torch.testing.assert_close(package(x, y), model(x, y))
            served += 1
    assert served > 3


def _from_a_file(model: nn.Module, args: tuple[Tensor, ...], sizes: Any, folder: Path) -> torchkiln.Package:
    """The package of a program that was exported, saved and loaded."""
    file = io.BytesIO()
    torch.export.save(torch.export.export(model, args, dynamic_shapes=sizes), file)
    file.seek(0)
    return torchkiln.load(torchkiln.aot_compile(torch.export.load(file), path=folder / "model.kiln"))


def test_a_program_from_a_file_serves_all_sizes_that_were_declared(tmp_path: Path) -> None:
    model = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    sizes = ({0: Dim("batch", min=1, max=9), 1: Dim("length", min=1, max=20)},)
    package = _from_a_file(model, (torch.randn(3, 5, 8),), sizes, tmp_path)
    for batch, length in ((1, 1), (1, 20), (9, 1), (4, 7)):
        x = torch.randn(batch, length, 8)
        with torch.no_grad():
            torch.testing.assert_close(package(x), model(x))
    with pytest.raises(ArgumentError, match=r"Size 0 of the argument src must be 1 to 9, not 10"):
        package(torch.randn(10, 5, 8))


def test_no_rows_of_a_program_from_a_file_are_refused_where_no_least_size_is_declared(tmp_path: Path) -> None:
    package = _from_a_file(Mlp(), (torch.randn(5, 8),), ({0: Dim("rows")},), tmp_path)
    with pytest.raises(ArgumentError, match=r"Size 0 of the argument x must be 1 or more, not 0\."):
        package(torch.randn(0, 8))


def test_a_program_from_a_file_is_for_the_sizes_it_was_exported_for(tmp_path: Path) -> None:
    model = _Of(lambda x, y: x.sum() + (y if x.shape[0] > y.shape[0] else -y))
    sizes = ({0: Dim.AUTO}, {0: Dim.AUTO})
    package = _from_a_file(model, (torch.randn(12), torch.randn(6)), sizes, tmp_path)
    x, y = torch.randn(5), torch.randn(4)
    torch.testing.assert_close(package(x, y), model(x, y))
    with pytest.raises(ArgumentError, match=r"where x\.size\(0\) > y\.size\(0\), and size 0 of the argument x is 4"):
        package(y, x)
