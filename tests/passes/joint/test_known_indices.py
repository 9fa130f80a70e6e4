"""Positions known to be in range are not checked, and distinct ones not summed into one by one; others are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import torchkiln
from tests.passes.joint.graphs import check_same, compile_and_compare, text, trace, trace_symbolic
from torchkiln.passes.joint.known_indices import use_known_indices

aten = torch.ops.aten
X = torch.randn(8, 5)
SRC = torch.randn(4, 5)


def _operators(gm: torch.fx.GraphModule) -> list[str]:
    return [line.split(" = ")[1].split("(")[0] for line in text(gm)]


def test_a_sum_into_all_rows_is_a_sum_in_another_order() -> None:
    gm = trace(lambda x, src: x.index_add(0, torch.randperm(8), src), X, -X)
    assert use_known_indices(gm)
    assert text(gm) == [
        "randperm = aten.randperm.default(8, device=cpu, pin_memory=False)",
        "arange_start_step = aten.arange.start_step(0, 8, 1, dtype=torch.int64, device=cpu, pin_memory=False)",
        "scatter_src = aten.scatter.src(randperm, 0, randperm, arange_start_step)",
        "_unsafe_index_tensor = aten._unsafe_index.Tensor(src_1, [scatter_src])",
        "add_tensor = aten.add.Tensor(x_1, _unsafe_index_tensor)",
    ]
    gm.recompile()
    torch.manual_seed(3)
    found = gm(X, -X)
    torch.manual_seed(3)
    torch.testing.assert_close(found, X.index_add(0, torch.randperm(8), -X), rtol=0, atol=0)


def test_a_sum_into_some_rows_is_a_store_where_sums_are_atomic() -> None:
    def function(x: torch.Tensor, src: torch.Tensor) -> torch.Tensor:
        order = torch.sort(torch.select(x, 1, 0))[1]
        return x.index_add(0, torch.narrow(order, 0, 0, 4), src)

    with FakeTensorMode():
        gm = make_fx(function)(torch.empty(8, 5, device="cuda"), torch.empty(4, 5, device="cuda"))
    assert use_known_indices(gm)
    indices = text(gm)[-4].split(" = ")[0]
    assert text(gm)[-3:] == [
        f"_unsafe_index_tensor = aten._unsafe_index.Tensor(x_1, [{indices}])",
        "add_tensor = aten.add.Tensor(_unsafe_index_tensor, src_1)",
        f"index_put_default = aten.index_put.default(x_1, [{indices}], add_tensor)",
    ]
    gm.recompile()
    torch.testing.assert_close(gm(X, SRC), function(X, SRC), rtol=0, atol=0)  # what it says holds on any device
    assert not use_known_indices(trace(function, X, SRC))


@pytest.mark.parametrize(
    "function",
    [
        lambda x, src: x.index_add(1, torch.argsort(src[0]), torch.ones(8, 5)),
        lambda x, src: x.index_add(-2, torch.topk(x[:, 0], 8)[1], -x),
        lambda x, src: x.index_add(0, torch.arange(8), -x),
        lambda x, src: x.index_add(0, torch.sort(x[:, 1])[1].to(torch.int32), -x),
        lambda x, src: aten.index_put(torch.zeros(8, 5), [torch.sort(x[:, 0])[1]], x * -0.0, True),
        lambda x, src: aten.index_put(x, [torch.arange(2, 6)], src, True),
        lambda x, src: aten.index_put(x, [torch.sort(x[:, 0])[1].flip(0)[:4]], src, True),
        lambda x, src: aten.index_put(x, [None, torch.sort(x[0])[1]], torch.ones(8, 5), True),
        lambda x, src: x[torch.sort(x[:, 0])[1]] * 2,
        lambda x, src: x.index_select(1, torch.sort(x[0])[1]) * 2,
        lambda x, src: torch.nn.functional.embedding(torch.sort(x[:, 0])[1], x) * 2,
    ],
)
def test_distinct_indices_are_used(function: Callable[..., Any]) -> None:
    gm = trace(function, X, SRC)
    assert use_known_indices(gm)
    assert "aten._unsafe_index.Tensor" in _operators(gm)
    assert not {"aten.index_add.default", "aten.index.Tensor", "aten.embedding.default"} & set(_operators(gm))
    check_same(gm, function, X, SRC)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, src: x.index_add(0, torch.randint(0, 8, (4,)), src),
        lambda x, src: x.index_add(0, torch.randperm(9)[:4], src),  # one of them may be out of range
        lambda x, src: x.index_add(0, torch.randperm(8)[:4] // 2, src),
        lambda x, src: x.index_add(0, torch.randperm(8), x, alpha=2),
        lambda x, src: x.index_add(0, torch.randperm(8)[:4], src),
        lambda x, src: x.index_add(0, torch.arange(0, 8, 2) - 1, src),
        lambda x, src: x[torch.randperm(9)[:4]],
        lambda x, src: aten.index_put(x, [torch.randperm(8), torch.arange(5).repeat(2)[:8]], x[:, 0], True),
        lambda x, src: aten.index_put(x, [torch.randperm(8)[:4]], src),
        # The best column of several rows may be one.
        lambda x, src: aten.index_put(x, [torch.topk(x, 3)[1][:, 0]], x, True),
        lambda x, src: x[x[:, 0] > 0],
    ],
)
def test_others_are_checked_and_summed(function: Callable[..., Any]) -> None:
    try:
        gm = trace(function, X, SRC)
    except Exception:  # sizes that depend on data need a shape environment
        gm = trace_symbolic(function, X, SRC)
    before = text(gm)
    assert not use_known_indices(gm)
    assert text(gm) == before


@pytest.mark.parametrize(
    "indices",
    [
        lambda x: torch.argmax(x, 0),
        lambda x: torch.argmax(x[:, 0]).unsqueeze(0),
        lambda x: torch.topk(x, 2, 0)[1],
        lambda x: torch.sort(x, dim=0, stable=True)[1].t().contiguous(),
        lambda x: x.max(0)[1].view(5, 1).expand(5, 3).contiguous(),
        lambda x: (x * 100).long().clamp(0, 7),
        lambda x: (x * 100).long() % 8,
        lambda x: torch.arange(4).unsqueeze(0),
        lambda x: ((x * 100).long() % 8).to(torch.int32)[2],
    ],
)
def test_indices_in_range_are_not_checked(indices: Callable[..., Any]) -> None:
    def by_index(x: torch.Tensor) -> torch.Tensor:
        return x[indices(x)] + 1

    def by_embedding(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.embedding(indices(x), x) + 1

    for function in (by_index, by_embedding):
        gm = trace(function, X)
        assert use_known_indices(gm)
        assert "aten._unsafe_index.Tensor" in _operators(gm)
        assert not {"aten.index.Tensor", "aten.embedding.default"} & set(_operators(gm))
        check_same(gm, function, X)


def test_embedding_by_a_transposed_index_stays() -> None:
    # Indexing would lay its result out as the index lies.
    gm = trace(lambda x: torch.nn.functional.embedding(torch.sort(x, dim=0)[1].t(), x), X)
    assert not use_known_indices(gm)


@pytest.mark.parametrize(
    "indices",
    [
        lambda x: torch.argmax(x, 1) + 4,
        lambda x: torch.argmax(x).view(1),  # counts all elements
        lambda x: torch.topk(x.view(4, 10), 2)[1],
        lambda x: (x * 100).long().clamp(-1, 7),
        lambda x: (x * 100).long().clamp(0, 8),
        lambda x: (x * 100).long().clamp(max=7),
        lambda x: torch.fmod((x * 100).long(), 8),  # has the sign of what is divided
        lambda x: (x * 100).long() % 9,
        lambda x: torch.randint(-1, 8, (4,)),
        lambda x: torch.randint(0, 9, (4,)),
    ],
)
def test_indices_that_may_be_out_of_range_are_checked(indices: Callable[..., Any]) -> None:
    gm = trace(lambda x: x[indices(x)] + 1, X)
    assert not use_known_indices(gm)
    assert "aten.index.Tensor" in _operators(gm)


def test_random_indices_are_not_checked_when_compiled() -> None:
    def sample(x: torch.Tensor) -> torch.Tensor:
        return x[torch.randint(0, 8, (64,))]

    for numbers in ("fused", "eager"):
        torch._dynamo.reset()
        torchkiln.reset_stats()
        options = {"fallback": False, "checks": True, "record_passes": True, "rng": numbers}
        found = torch.compile(sample, backend="kiln", fullgraph=True, options=options)(X)
        assert all(any(torch.equal(row, known) for known in X) for row in found)
        (record,) = (p for p in torchkiln.stats().passes if p.name == "known_indices")
        assert record.changed


def test_symbolic_bounds_are_compared_as_expressions() -> None:
    gm = trace_symbolic(lambda x: x[torch.randperm(x.shape[0])], X)
    assert use_known_indices(gm)
    assert "aten._unsafe_index.Tensor" in _operators(gm)
    assert not use_known_indices(trace_symbolic(lambda x: x[torch.randperm(x.shape[0] + 1)], X))


def test_compiled_training_gives_the_gradients_of_eager() -> None:
    def shuffled(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        order = torch.randperm(8)
        return (x[order] * w[:, None]).index_add(0, order, x)

    x, w = torch.randn(8, 5, requires_grad=True), torch.randn(8, requires_grad=True)
    compile_and_compare(shuffled, x, w, expects="known_indices", rtol=1e-5)
    compile_and_compare(shuffled, x, w, expects="known_indices", dynamic=True, rtol=1e-5)
    calls = torchkiln.stats().extern_calls
    assert not any("check" in name or "index_add" in name for name in calls)
