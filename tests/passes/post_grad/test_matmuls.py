"""Matmuls merged, batched, decomposed and given their addend; and those that are better left alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.fx
from torch import Tensor

from tests.higher_order.against_eager import check
from tests.passes.post_grad.functional_graphs import apply, calls, same_numbers, traced
from torchkiln.compiler import compile_fx_inner
from torchkiln.passes.post_grad.addmm import fuse_or_split_addmm
from torchkiln.passes.post_grad.batched_matmuls import batch_matmuls
from torchkiln.passes.post_grad.merged_matmuls import merge_matmuls
from torchkiln.passes.post_grad.small_matmuls import decompose_small_matmuls

aten = torch.ops.aten
CLOSE = {"rtol": 1e-5, "atol": 1e-5}

# -- a matmul and its addend ---------------------------------------------------------------------------------------

X, W, B = torch.randn(5, 16), torch.randn(16, 7), torch.randn(7)
LARGE = LARGE_X, LARGE_W, LARGE_B = torch.randn(512, 16), torch.randn(16, 512), torch.randn(512)


@pytest.mark.parametrize(
    ("function", "inputs", "expected"),
    [
        (lambda x, w, b: aten.mm.default(x, w) + b, LARGE, "addmm_default = addmm.default(b_1, x_1, w_1)"),
        (lambda x, w, b: b + aten.mm.default(x, w), LARGE, "addmm_default = addmm.default(b_1, x_1, w_1)"),
        (
            lambda x, w, b: aten.view.default(aten.mm.default(x, w) + b, [-1]),
            (LARGE_X, LARGE_W, torch.randn(512, 512)),
            "addmm_default = addmm.default(b_1, x_1, w_1)",
        ),
        (
            lambda x, w, b: aten.sort.default(aten.mm.default(x, w) + b)[0],  # which reads memory, as torch's do
            LARGE,
            "addmm_default = addmm.default(b_1, x_1, w_1)",
        ),
        (
            lambda x, w, b: aten.bmm.default(x, w) + b,
            (X.expand(3, -1, -1).clone(), W.expand(3, -1, -1).clone(), torch.randn(3, 5, 7)),
            "baddbmm_default = baddbmm.default(b_1, x_1, w_1)",
        ),
    ],
)
def test_fused_with_the_matmul(function: Callable[..., Any], inputs: tuple[Tensor, ...], expected: str) -> None:
    gm = traced(function, *inputs)
    assert apply(fuse_or_split_addmm, gm)
    assert calls(gm)[0] == expected
    same_numbers(gm, function, *inputs, **CLOSE)


@pytest.mark.parametrize(
    ("function", "inputs"),
    [
        (lambda x, w, b: aten.relu.default(aten.mm.default(x, w) + b), (X, W, B)),  # our kernel adds for nothing
        (lambda x, w, b: aten.view.default(aten.mm.default(x, w) + b, [-1]).sin(), (X, W, B)),
        (lambda x, w, b: aten.add.Tensor(aten.mm.default(x, w), b, alpha=2), (X, W, B)),
        (lambda x, w, b: aten.mm.default(x, w) + b, (X, W, torch.randn(3, 5, 7))),  # more than the matmul
        (lambda x, w, b: aten.mm.default(x, w) + b, (X, W, torch.randn(1))),
        (lambda x, w, b: aten.mm.default(x, w) + b, (X, W, B.double())),
        (lambda x, w, b: aten.mm.default(x, w) + b, (X.bfloat16(), W.bfloat16(), B.bfloat16())),
        (lambda x, w, b: (p := aten.mm.default(x, w), p + b), LARGE),  # the matmul itself is wanted
        (lambda x, w, b: aten.mm.default(x, w) + b, (X, W, B)),  # so few that a call costs more than the addition
        (lambda x, w, b: aten.relu.default(aten.mm.default(x, w) + b), LARGE),
    ],
)
def test_added_after_the_matmul(function: Callable[..., Any], inputs: tuple[Tensor, ...]) -> None:
    gm = traced(function, *inputs)
    before = calls(gm)
    assert not apply(fuse_or_split_addmm, gm)
    assert calls(gm) == before


@pytest.mark.parametrize(
    "function",
    [
        lambda x, w, b: aten.relu.default(aten.addmm.default(b, x, w)),
        lambda x, w, b: (t := aten.view.default(aten.addmm.default(b, x, w), [-1]), t.sin(), t.cos())[1:],
        lambda x, w, b: aten.addmm.default(b, x, w),  # so few that a call costs more than the addition
        lambda x, w, b: aten.mm.default(aten.addmm.default(b, x, w), w.t()),
    ],
)
@pytest.mark.parametrize("addend", [B, torch.randn(5, 1), torch.randn(1), torch.full((5, 7), float("nan"))])
def test_addmm_is_decomposed(function: Callable[..., Any], addend: Tensor) -> None:
    gm = traced(function, X, W, addend)
    assert apply(fuse_or_split_addmm, gm)
    assert calls(gm)[:2] == ["mm_default = mm.default(x_1, w_1)", "add_tensor = add.Tensor(mm_default, b_1)"]
    same_numbers(gm, function, X, W, addend, **CLOSE)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, w, b: aten.addmm.default(b, x, w),  # the caller reads it
        lambda x, w, b: (t := aten.addmm.default(b, x, w), t.sin()),
        lambda x, w, b: aten.view.default(aten.addmm.default(b, x, w), [-1]),
        lambda x, w, b: aten.mm.default(aten.addmm.default(b, x, w), w.t()),  # the library does
        lambda x, w, b: aten.relu.default(aten.addmm.default(b, x, w, beta=2)),
        lambda x, w, b: aten.relu.default(aten.addmm.default(b.bfloat16(), x.bfloat16(), w.bfloat16())),
    ],
)
def test_addmm_is_left(function: Callable[..., Any]) -> None:
    gm = traced(function, *LARGE)
    before = calls(gm)
    assert not apply(fuse_or_split_addmm, gm)
    assert calls(gm) == before


def test_addmm_of_symbolic_sizes_is_decomposed() -> None:
    def function(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return torch.relu(aten.addmm.default(b, torch.relu(aten.addmm.default(b, x, w)), w))

    inputs = torch.randn(6, 8), torch.randn(8, 8), torch.randn(8)
    gm = traced(function, *inputs, symbolic=True)
    assert apply(fuse_or_split_addmm, gm)
    assert not any("addmm" in call for call in calls(gm))
    same_numbers(gm, function, *inputs, **CLOSE)


@pytest.mark.parametrize(("rows", "left"), [(6, False), (6000, True)])
def test_the_example_says_whether_a_matmul_of_symbolic_sizes_is_small(rows: int, left: bool) -> None:
    def function(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return aten.addmm.default(b, x, w)

    inputs = torch.randn(rows, 5), torch.randn(5, 64), torch.randn(64)
    gm = traced(function, *inputs, symbolic=True)
    assert apply(fuse_or_split_addmm, gm) != left
    assert any("addmm" in call for call in calls(gm)) == left
    same_numbers(gm, function, *inputs, **CLOSE)


# -- thin and small ones -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("left", "right", "expected"),
    [
        (torch.randn(9, 1), torch.randn(1, 12), ["mul_tensor = mul.Tensor(x_1, y_1)"]),
        (
            torch.randn(9, 2),
            torch.randn(2, 12),
            [
                "slice_tensor = slice.Tensor(x_1, 1, 0, 1)",
                "slice_tensor_1 = slice.Tensor(y_1, 0, 0, 1)",
                "mul_tensor = mul.Tensor(slice_tensor, slice_tensor_1)",
                "slice_tensor_2 = slice.Tensor(x_1, 1, 1, 2)",
                "slice_tensor_3 = slice.Tensor(y_1, 0, 1, 2)",
                "mul_tensor_1 = mul.Tensor(slice_tensor_2, slice_tensor_3)",
                "add_tensor = add.Tensor(mul_tensor, mul_tensor_1)",
            ],
        ),
        (torch.randn(6, 4, 3), torch.randn(6, 3, 2), None),
        (torch.randn(6, 40, 1), torch.randn(6, 1, 20), ["mul_tensor = mul.Tensor(x_1, y_1)"]),
    ],
)
def test_written_out(left: Tensor, right: Tensor, expected: list[str] | None) -> None:
    def function(x: Tensor, y: Tensor) -> Tensor:
        return aten.mm.default(x, y) if x.dim() == 2 else aten.bmm.default(x, y)

    gm = traced(function, left, right)
    assert apply(decompose_small_matmuls, gm)
    assert expected is None or calls(gm) == expected
    assert not any("mm.default" in call for call in calls(gm))
    same_numbers(gm, function, left, right, **CLOSE)


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (torch.randn(9, 16), torch.randn(16, 12)),
        (torch.randn(9, 2), torch.randn(12, 2).t()),  # its rows are not contiguous
        (torch.randn(9, 0), torch.randn(0, 12)),
        (torch.randn(1, 64), torch.randn(64, 12)),
        (torch.randn(9, 2).bfloat16(), torch.randn(2, 12).bfloat16()),
        (torch.randn(6, 40, 3), torch.randn(6, 3, 2)),
    ],
)
def test_left_to_the_library(left: Tensor, right: Tensor) -> None:
    def function(x: Tensor, y: Tensor) -> Tensor:
        return aten.mm.default(x, y) if x.dim() == 2 else aten.bmm.default(x, y)

    gm = traced(function, left, right)
    before = calls(gm)
    assert not apply(decompose_small_matmuls, gm)
    assert calls(gm) == before


# -- stacks --------------------------------------------------------------------------------------------------------

STACK, MATRICES = torch.randn(3, 4, 8), torch.randn(3, 8, 6)


def _experts(x: Tensor, w: Tensor) -> Tensor:
    first, second, third = (aten.mm.default(x[e], w[e]) for e in range(3))
    return first + second * 2 - third


def _linear_experts(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    parts = x.unbind(1)
    made = [aten.addmm.default(b[e], parts[e], w[e].t()) for e in range(3)]
    return aten.cat.default(made, 1)


def test_multiplied_together() -> None:
    gm = traced(_experts, STACK, MATRICES)
    assert apply(batch_matmuls, gm)
    assert calls(gm)[:4] == [
        "bmm_default = bmm.default(x_1, w_1)",
        "select_int = select.int(bmm_default, 0, 0)",
        "select_int_1 = select.int(bmm_default, 0, 1)",
        "select_int_2 = select.int(bmm_default, 0, 2)",
    ]
    assert not any(" mm.default" in call for call in calls(gm))
    same_numbers(gm, _experts, STACK, MATRICES, **CLOSE)


def test_layers_multiplied_together() -> None:
    inputs = torch.randn(4, 3, 8), torch.randn(3, 6, 8), torch.randn(3, 6)
    gm = traced(_linear_experts, *inputs)
    assert apply(batch_matmuls, gm)
    assert any("baddbmm" in call for call in calls(gm))
    assert not any("addmm.default(" in call and "baddbmm" not in call for call in calls(gm))
    same_numbers(gm, _linear_experts, *inputs, **CLOSE)


@pytest.mark.parametrize(
    ("function", "inputs"),
    [
        (lambda x, w: aten.mm.default(x[0], w[0]) + aten.mm.default(x[1], w[1]), (STACK, MATRICES)),  # not all
        (lambda x, w: sum(aten.mm.default(x[k], w[2 - k]) for k in range(3)), (STACK, MATRICES)),  # crossed
        (lambda x, w: [aten.mm.default(x[k], w[k]) for k in range(3)], (STACK, MATRICES)),  # returned
        (
            lambda x, w: sum(aten.mm.default(x[k], w[k]) for k in range(2)),
            (torch.randn(2, 128, 64), torch.randn(2, 64, 64)),
        ),
    ],
)
def test_multiplied_one_by_one(function: Callable[..., Any], inputs: tuple[Tensor, ...]) -> None:
    gm = traced(function, *inputs)
    before = calls(gm)
    assert not apply(batch_matmuls, gm)
    assert calls(gm) == before


# -- side by side --------------------------------------------------------------------------------------------------


def _with_constants(function: Callable[..., Any], x: Tensor, *matrices: Tensor) -> torch.fx.GraphModule:
    """The graph of ``function`` in which all inputs but the first are constants."""
    gm = traced(function, x, *matrices)
    for number, node in enumerate(gm.graph.find_nodes(op="placeholder")[1:]):
        gm.register_buffer(f"matrix{number}", matrices[number], persistent=False)
        with gm.graph.inserting_before(node):
            constant = gm.graph.get_attr(f"matrix{number}")
        constant.meta = dict(node.meta)
        node.replace_all_uses_with(constant)
        gm.graph.erase_node(node)
    gm.recompile()
    return gm


def _queries_keys_values(x: Tensor, *matrices: Tensor) -> Tensor:
    q, k, v = (aten.mm.default(x, matrix) for matrix in matrices)
    return aten.mm.default(aten.mm.default(q, aten.t.default(k)), v)


_SEEDED = torch.Generator().manual_seed(0)  # constants are part of a key: these are the same in every process
CONSTANTS = tuple(torch.randn(8, 6, generator=_SEEDED) for _ in range(3))


def test_side_by_side() -> None:
    x = torch.randn(2, 8)
    gm = _with_constants(_queries_keys_values, x, *CONSTANTS)
    assert apply(merge_matmuls, gm)
    assert calls(gm)[:5] == [
        "mm_default = mm.default(arg0_1, _side_by_side0)",
        "split_with_sizes_default = split_with_sizes.default(mm_default, [6, 6, 6], 1)",
        "getitem = getitem(split_with_sizes_default, 0)",
        "getitem_1 = getitem(split_with_sizes_default, 1)",
        "getitem_2 = getitem(split_with_sizes_default, 2)",
    ]
    wanted = _queries_keys_values(x, *CONSTANTS)
    torch.testing.assert_close(gm(x), wanted, **CLOSE)
    got = compile_fx_inner(_with_constants(_queries_keys_values, x, *CONSTANTS), [x], is_inference=True)([x])
    torch.testing.assert_close(got[0], wanted, **CLOSE)


@pytest.mark.parametrize(
    ("x", "constants"),
    [
        (torch.randn(64, 8), CONSTANTS),  # enough rows for each matmul
        (torch.randn(2, 8), tuple(torch.randn(6, 8).t() for _ in range(3))),
    ],
)
def test_apart(x: Tensor, constants: tuple[Tensor, ...]) -> None:
    gm = _with_constants(_queries_keys_values, x, *constants)
    assert not apply(merge_matmuls, gm)


def test_parameters_stay_apart() -> None:
    assert not apply(merge_matmuls, traced(_queries_keys_values, torch.randn(2, 8), *CONSTANTS))


# -- compiled ------------------------------------------------------------------------------------------------------


def _all_of_them(x: Tensor, w: Tensor, b: Tensor, thin: Tensor) -> tuple[Tensor, ...]:
    total = sum(x[e] @ w[e] for e in range(3))
    return total @ thin, torch.mm(thin, thin.t()) + b, (total * 2 @ thin[:, :1] @ thin[:, :1].t()).sin()


def test_as_eager() -> None:
    inputs = [torch.randn(3, 4, 8), torch.randn(3, 8, 6), torch.randn(6), torch.randn(6, 3)]
    check(_all_of_them, *inputs, tolerance={"rtol": 1e-4, "atol": 1e-4})
    check(_all_of_them, *(t.requires_grad_() for t in inputs), tolerance={"rtol": 1e-4, "atol": 1e-4})
