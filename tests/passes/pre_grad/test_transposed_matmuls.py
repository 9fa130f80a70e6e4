"""Linear layers with a transposed result, and matmuls of transposed matrices: no copy, and the values of eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.fx
import torch.nn.functional as F

from tests.passes.pre_grad.captured import assert_same, capture, text
from torchkiln.canonicalize.torch_calls import normalize_calls
from torchkiln.passes.pre_grad import remove_dead_code
from torchkiln.passes.pre_grad.linear_permute import transpose_linears
from torchkiln.passes.pre_grad.permute_matmul import read_transposed_matrices

Tensor = torch.Tensor
X = torch.randn(5, 6, requires_grad=True)
BATCH = torch.randn(2, 5, 6, requires_grad=True)
W = torch.randn(4, 6, requires_grad=True)
B = torch.randn(4, requires_grad=True)
Y = torch.randn(5, 3, requires_grad=True)


def _pass(
    run: Callable[[torch.fx.GraphModule], bool], function: Callable[..., Any], *inputs: Any
) -> tuple[bool, list[str]]:
    gm = capture(function, *inputs)
    normalize_calls(gm)
    for name, node in zip("xwb", gm.graph.find_nodes(op="placeholder"), strict=False):
        node._rename(name)
    changed = run(gm)
    remove_dead_code(gm)
    assert_same(gm, function, *inputs, rtol=1e-5, atol=1e-5)
    return changed, text(gm).splitlines()


def test_a_linear_whose_result_is_transposed_is_computed_transposed() -> None:
    assert _pass(transpose_linears, lambda x, w, b: F.linear(x, w, b).t().contiguous(), X, W, B) == (
        True,
        [
            "transpose = transpose(x, dim0=0, dim1=1)",
            "unsqueeze = unsqueeze(b, dim=1)",
            "addmm = addmm(unsqueeze, w, transpose)",
            "return (addmm,)",
        ],
    )
    assert _pass(transpose_linears, lambda x, w: F.linear(x, w).transpose(-1, -2).contiguous(), X, W)[1][1:] == [
        "mm = mm(w, transpose_1)",
        "return (mm,)",
    ]


def test_a_batch_too() -> None:
    assert _pass(transpose_linears, lambda x, w, b: F.linear(x, w, b).permute(0, 2, 1).contiguous(), BATCH, W, B) == (
        True,
        [
            "transpose = transpose(x, dim0=1, dim1=2)",
            "unsqueeze = unsqueeze(b, dim=1)",
            "broadcast_to = broadcast_to(w, (2, 4, 6))",
            "bmm = bmm(broadcast_to, transpose)",
            "add = add(bmm, unsqueeze)",
            "return (add,)",
        ],
    )


def _input_written(x: Tensor, w: Tensor) -> Tensor:
    rows = x.detach() * 2
    y = F.linear(rows, w.detach())
    rows.add_(1)
    return y.t().contiguous() + rows.sum()


def _under_no_grad(x: Tensor, w: Tensor) -> Tensor:
    with torch.no_grad():
        y = F.linear(x, w)
    return y.t().contiguous() + w.sum()


@pytest.mark.parametrize(
    "function",
    [
        lambda x, w: F.linear(x, w).t(),  # no copy to spare
        lambda x, w: (y := F.linear(x, w), y.t().contiguous()),  # the result is needed as it is
        lambda x, w: ((y := F.linear(x, w).t()).contiguous(), y.sin()),
        lambda x, w: F.linear(x, w).contiguous().t(),
        lambda x, w: F.linear(x.expand(2, 3, 5, 6), w).permute(0, 1, 3, 2).contiguous(),
        _input_written,
        _under_no_grad,
    ],
)
def test_other_linears_stay(function: Callable[..., Any]) -> None:
    assert not _pass(transpose_linears, function, X, W)[0]


def test_a_matmul_reads_a_transposed_matrix_without_a_copy() -> None:
    assert _pass(read_transposed_matrices, lambda x, w: x.t().contiguous() @ w, X, Y) == (
        True,
        ["t = transpose(x, dim0=0, dim1=1)", "matmul = matmul(t, w)", "return (matmul,)"],
    )
    changed, lines = _pass(read_transposed_matrices, lambda x, w: torch.mm(w, x.T.contiguous()), X, W)
    assert changed
    assert not any("contiguous" in line for line in lines)
    other = BATCH.detach() + 1
    changed, _ = _pass(read_transposed_matrices, lambda x, w: torch.bmm(x.mT.contiguous(), w), BATCH, other)
    assert changed


def _matrix_written(x: Tensor, w: Tensor) -> Tensor:
    a = x * 2
    transposed = a.t().contiguous()
    a.add_(1)
    return transposed @ w + a.sum()


def _matrix_written_later(x: Tensor, w: Tensor) -> Tensor:
    a = x * 2
    matmul = a.t().contiguous() @ w
    a.add_(1)  # backward of the matmul would read it
    return matmul.sum() + a.sum()


@pytest.mark.parametrize(
    "function",
    [
        lambda x, w: ((y := x.t().contiguous()) @ w, y),
        lambda x, w: x.t().contiguous() @ w[:, 0],
        lambda x, w: x.expand(2, 3, 5, 6).transpose(-1, -2).contiguous() @ w.expand(2, 3, 5, 3),
        _matrix_written,
        _matrix_written_later,
    ],
)
def test_other_matmuls_stay(function: Callable[..., Any]) -> None:
    assert not _pass(read_transposed_matrices, function, X, Y)[0]


def test_compiled(compile_strictly: Callable[..., Any]) -> None:
    def function(x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        transposed = F.linear(x, w, b).transpose(1, 2).contiguous()
        return transposed, torch.bmm(transposed.mT.contiguous(), transposed)

    inputs = (BATCH, W, B)
    results, expected = compile_strictly(function)(*inputs), function(*inputs)
    torch.testing.assert_close(results, expected, rtol=1e-5, atol=1e-5)
    assert [r.stride() for r in results] == [r.stride() for r in expected]
    torch.testing.assert_close(
        torch.autograd.grad(sum(r.sum() for r in results), inputs),
        torch.autograd.grad(sum(r.sum() for r in expected), inputs),
        rtol=1e-4,
        atol=1e-4,
    )
