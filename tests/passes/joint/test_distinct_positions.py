"""Positions known to be distinct are neither checked nor summed into one by one; others are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import torchkiln
from tests.passes.joint.graphs import check_same, compile_and_compare, text, trace, trace_symbolic
from torchkiln.passes.joint.distinct_positions import use_distinct_positions

aten = torch.ops.aten
X = torch.randn(8, 5)
SRC = torch.randn(4, 5)


def _operators(gm: torch.fx.GraphModule) -> list[str]:
    return [line.split(" = ")[1].split("(")[0] for line in text(gm)]


def test_a_sum_into_permuted_rows_is_a_gather_and_a_store() -> None:
    gm = trace(lambda x, src: x.index_add(0, torch.randperm(8)[:4], src), X, SRC)
    assert use_distinct_positions(gm)
    assert text(gm) == [
        "randperm = aten.randperm.default(8, device=cpu, pin_memory=False)",
        "slice_1 = aten.slice.Tensor(randperm, 0, 0, 4)",
        "_unsafe_index_tensor = aten._unsafe_index.Tensor(x_1, [slice_1])",
        "add_tensor = aten.add.Tensor(_unsafe_index_tensor, src_1)",
        "index_put_default = aten.index_put.default(x_1, [slice_1], add_tensor)",
    ]
    gm.recompile()
    torch.manual_seed(3)
    found = gm(X, SRC)
    torch.manual_seed(3)
    torch.testing.assert_close(found, X.index_add(0, torch.randperm(8)[:4], SRC), rtol=0, atol=0)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, src: x.index_add(1, torch.argsort(src[0]), torch.ones(8, 5)),
        lambda x, src: x.index_add(-2, torch.topk(x[:, 0], 4)[1], src),
        lambda x, src: x.index_add(0, torch.arange(2, 6), src),
        lambda x, src: x.index_add(0, torch.sort(x[:, 1])[1][2:6].to(torch.int32), src),
        lambda x, src: aten.index_put(x, [torch.sort(x[:, 0])[1].flip(0)[:4]], src, True),
        lambda x, src: aten.index_put(x, [None, torch.sort(x[0])[1]], torch.ones(8, 5), True),
        lambda x, src: x[torch.sort(x[:, 0])[1]] * 2,
        lambda x, src: x.index_select(1, torch.sort(x[0])[1]) * 2,
        lambda x, src: torch.nn.functional.embedding(torch.sort(x[:, 0])[1], x) * 2,
    ],
)
def test_distinct_positions_are_used(function: Callable[..., Any]) -> None:
    gm = trace(function, X, SRC)
    assert use_distinct_positions(gm)
    assert "aten._unsafe_index.Tensor" in _operators(gm)
    assert not {"aten.index_add.default", "aten.index.Tensor", "aten.embedding.default"} & set(_operators(gm))
    check_same(gm, function, X, SRC)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, src: x.index_add(0, torch.randint(0, 8, (4,)), src),
        lambda x, src: x.index_add(0, torch.randperm(9)[:4], src),  # one of them may be out of range
        lambda x, src: x.index_add(0, torch.randperm(8)[:4] // 2, src),
        lambda x, src: x.index_add(0, torch.randperm(8)[:4], src, alpha=2),
        lambda x, src: x.index_add(0, torch.arange(0, 8, 2) - 1, src),
        lambda x, src: x[torch.randperm(9)[:4]],
        lambda x, src: aten.index_put(x, [torch.randperm(8), torch.arange(5).repeat(2)[:8]], x[:, 0], True),
        lambda x, src: aten.index_put(x, [torch.randperm(8)[:4]], src),
        lambda x, src: x[torch.topk(x, 3)[1][:, 0]],  # the best column of each row may be one
        lambda x, src: x[x[:, 0] > 0],
    ],
)
def test_others_are_checked_and_summed(function: Callable[..., Any]) -> None:
    try:
        gm = trace(function, X, SRC)
    except Exception:  # sizes that depend on data need a shape environment
        gm = trace_symbolic(function, X, SRC)
    before = text(gm)
    assert not use_distinct_positions(gm)
    assert text(gm) == before


def test_symbolic_bounds_are_compared_as_expressions() -> None:
    gm = trace_symbolic(lambda x: x[torch.randperm(x.shape[0])], X)
    assert use_distinct_positions(gm)
    assert "aten._unsafe_index.Tensor" in _operators(gm)
    assert not use_distinct_positions(trace_symbolic(lambda x: x[torch.randperm(x.shape[0] + 1)], X))


def test_compiled_training_gives_the_gradients_of_eager() -> None:
    def shuffled(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        order = torch.randperm(8)
        return (x[order] * w[:, None]).index_add(0, order, x)

    x, w = torch.randn(8, 5, requires_grad=True), torch.randn(8, requires_grad=True)
    compile_and_compare(shuffled, x, w, expects="distinct_positions", rtol=1e-5)
    compile_and_compare(shuffled, x, w, expects="distinct_positions", dynamic=True, rtol=1e-5)
    calls = torchkiln.stats().extern_calls
    assert not any("check" in name or "index_add" in name for name in calls)
