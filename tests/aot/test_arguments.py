"""Calls of packages with wrong arguments: one sentence that names the argument and both values."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

import torchkiln
from torchkiln.errors import ArgumentError


class _Model(nn.Module):
    def forward(self, x: Tensor, pair: dict[str, Tensor], n: int = 2, *, twice: bool = True) -> Tensor:
        joined = torch.cat([x, pair["a"]], 0) * n
        return joined.sum() + pair["b"].sum() * (2 if twice else 1)


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> torchkiln.Package:
    rows = Dim("rows", min=2, max=16)
    shapes = {"x": {0: rows}, "pair": {"a": {0: rows}, "b": {0: 2 * rows}}, "n": Dim.DYNAMIC, "twice": None}
    path = tmp_path_factory.mktemp("package") / "model.kiln"
    args = (torch.ones(4, 3), {"a": torch.ones(4, 3), "b": torch.ones(8)}, 5)
    return torchkiln.load(
        torchkiln.aot_compile(_Model(), args, {"twice": True}, dynamic_shapes=shapes, path=path)
    )


def _arguments(rows: int = 4, **changed: Any) -> dict[str, Any]:
    pair = {"a": torch.ones(rows, 3), "b": torch.ones(2 * rows)}
    return {"x": torch.ones(rows, 3), "pair": pair, "n": 5, "twice": True, **changed}


def test_right_arguments_are_served_by_position_and_by_name(package: torchkiln.Package) -> None:
    model = _Model()
    for rows, n in ((2, 5), (9, 1), (16, 3)):
        given = _arguments(rows, n=n)
        expected = model(**given)
        torch.testing.assert_close(package(**given), expected)
        torch.testing.assert_close(package(given["x"], given["pair"], n, twice=True), expected)


_WRONG = {
    "x must be torch.float32, not torch.float64": {"x": torch.ones(4, 3).double()},
    r"x must have 2 dimensions, not 1 \(sizes \[4\]\)": {"x": torch.ones(4)},
    "Size 1 of the argument x must be 3, not 2": {"x": torch.ones(4, 2)},
    "Size 0 of the argument x must be 2 to 16, not 1": {"x": torch.ones(1, 3)},
    "Size 0 of the argument x must be 2 to 16, not 17": {"x": torch.ones(17, 3)},
    r"Size 0 of the argument pair\['a'\] must be 5, not 4: it goes with size 0 of the argument x": {
        "x": torch.ones(5, 3)
    },
    r"pair\['b'\] must be a multiple of 2, not 7": {"pair": {"a": torch.ones(4, 3), "b": torch.ones(7)}},
    r"pair\['b'\] must be 8, not 10": {"pair": {"a": torch.ones(4, 3), "b": torch.ones(10)}},
    "x must be on the CPU, not on meta": {"x": torch.ones(4, 3, device="meta")},
    "x must be torch.strided, not torch.sparse_coo": {"x": torch.ones(4, 3).to_sparse()},
    "x must be a tensor, not 3": {"x": 3},
    "The argument n must be 0 or more, not -3": {"n": -3},
    "n must be an integer, not 2.5": {"n": 2.5},
    "twice must be True, which the package was compiled for, not False": {"twice": False},
    "'pair' is a tensor or a number, the package was compiled for a dict of 2 leaves": {"pair": torch.ones(4, 3)},
    r"'pair' is a dict of 1 leaves with the keys \['a'\]": {"pair": {"a": torch.ones(4, 3)}},
    "compiled without an argument 'other'; it takes: x, pair, n, twice": {"other": 1},
}


@pytest.mark.parametrize("message", _WRONG)
def test_a_wrong_argument_is_named_with_both_values(message: str, package: torchkiln.Package) -> None:
    with pytest.raises(ArgumentError, match=message):
        package(**_arguments(**_WRONG[message]))


def test_missing_and_repeated_arguments_are_named(package: torchkiln.Package) -> None:
    given = _arguments()
    with pytest.raises(ArgumentError, match="'pair' is missing; the package takes: x, pair, n, twice"):
        package(given["x"])
    with pytest.raises(ArgumentError, match="'x' is given twice"):
        package(given["x"], **given)
    with pytest.raises(ArgumentError, match="takes 3 positional arguments, not 4"):
        package(given["x"], given["pair"], 5, True)
