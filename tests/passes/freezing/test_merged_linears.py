"""Linear layers of one input become one matmul where that pays, and their readers read its parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.passes.freezing.graphs import check_against_float64, divided
from torchkiln.passes.freezing import merged_linears


@pytest.fixture
def anything_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers small enough for tests are merged too."""
    monkeypatch.setattr(merged_linears, "_MOST_ROWS", {torch.float32: 16, torch.bfloat16: 32})
    monkeypatch.setattr(merged_linears, "_LEAST_WORK", 0)


class _Parallel(nn.Module):
    """Layers of one input, each followed by what keeps its result from leaving the graph."""

    def __init__(
        self, sizes: list[int], biases: list[bool], after: Callable[..., torch.Tensor], width: int = 16
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, size, bias=bias) for size, bias in zip(sizes, biases, strict=True))
        self._after = after

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._after(*(layer(x) for layer in self.layers))


def _sum(*parts: torch.Tensor) -> torch.Tensor:
    total = parts[0].sum(-1)
    for part in parts[1:]:
        total = total * part.tanh().sum(-1)
    return total


@pytest.mark.parametrize("biases", [[True, True], [False, False], [True, True, True], [False] * 3, [True, False, True]])
@pytest.mark.parametrize("shape", [(1, 16), (2, 3, 16)])
@pytest.mark.usefixtures("anything_pays")
def test_layers_of_one_input_are_one_matmul(biases: list[bool], shape: tuple[int, ...]) -> None:
    sizes = [8, 4, 6][: len(biases)]
    model, given = _Parallel(sizes, biases, _sum).eval(), torch.randn(shape)
    found = divided(model, given)
    check_against_float64(model, [given], found.result)
    assert [name for name in found.operators if name in ("mm", "addmm")] == ["addmm" if any(biases) else "mm"]


@pytest.mark.parametrize("shape", [(8, 16), (2, 16, 16)])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.usefixtures("anything_pays")
def test_layers_of_some_rows_of_bfloat16_are_one_matmul(shape: tuple[int, ...], bias: bool) -> None:
    model = _Parallel([8, 6, 4], [bias] * 3, lambda a, b, c: torch.cat([a.relu(), b.sigmoid(), c.tanh()], -1))
    model, given = model.eval().bfloat16(), torch.randn(shape).bfloat16()
    found = divided(model, given)
    check_against_float64(model, [given], found.result)
    assert [name for name in found.operators if name in ("mm", "addmm")] == ["addmm" if bias else "mm"]


@pytest.mark.parametrize(
    ("rows", "width", "dtype", "merged"),
    [
        (32, 1024, torch.bfloat16, True),
        (33, 1024, torch.bfloat16, False),
        (32, 256, torch.bfloat16, False),
        (1, 1024, torch.float32, False),
    ],
)
def test_layers_are_merged_where_that_was_measured_to_pay(
    rows: int, width: int, dtype: torch.dtype, merged: bool
) -> None:
    model = _Parallel([512, 640], [True, True], _sum, width=width).eval().to(dtype)
    given = torch.randn(rows, width, dtype=dtype)
    found = divided(model, given)
    check_against_float64(model, [given], found.result)
    assert found.operators.count("addmm") == 1 if merged else found.operators == ("nothing was hoisted",)


@pytest.mark.parametrize(("rows", "dtype"), [(1, torch.float32), (1, torch.bfloat16), (16, torch.bfloat16)])
@pytest.mark.usefixtures("anything_pays")
def test_queries_keys_and_values_of_attention_are_one_matmul(rows: int, dtype: torch.dtype) -> None:
    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        heads = [t.unflatten(2, (8, 16)).transpose(1, 2) for t in (q, k, v)]
        return F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)

    model = _Parallel([128] * 3, [True] * 3, attention, width=160).eval().to(dtype)
    given = torch.randn(1, rows, 160, dtype=dtype)
    found = divided(model, given)
    check_against_float64(model, [given], found.result)
    assert found.operators.count("addmm") == 1


@pytest.mark.usefixtures("anything_pays")
def test_results_that_leave_the_graph_stay_tensors_of_their_own() -> None:
    returned: Callable[..., Any] = lambda a, b: (a, b)  # noqa: E731
    model, given = _Parallel([8, 6], [True, True], returned).eval(), torch.randn(1, 16)
    found = divided(model, given).result
    with torch.no_grad():
        expected: Any = model(given)
    for left, right in zip(found, expected, strict=True):
        torch.testing.assert_close(left, right)
    assert found[0].untyped_storage().data_ptr() != found[1].untyped_storage().data_ptr()


@pytest.mark.usefixtures("anything_pays")
def test_weights_stored_in_by_out_are_put_side_by_side() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Parameter(torch.randn(16, 8)), nn.Parameter(torch.randn(16, 8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x @ self.first).sin() * (x @ self.second).cos()

    model, given = Model().eval(), torch.randn(1, 16)
    found = divided(model, given)
    check_against_float64(model, [given], found.result)
    assert found.operators.count("mm") == 1


@pytest.mark.usefixtures("anything_pays")
def test_weights_that_are_cast_are_put_side_by_side_after_the_cast() -> None:
    model, given = _Parallel([8, 6], [True, True], _sum).eval(), torch.randn(4, 16)
    found = divided(model, given, autocast=True)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(found.result, model(given), atol=0.05, rtol=0.05)
    assert found.operators.count("addmm") == 1
