"""Equal computations become one, and results share memory only where eager's do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import torchkiln
from tests.higher_order.against_eager import compiled
from tests.passes.post_grad.functional_graphs import apply, calls, same_numbers, traced
from torchkiln.passes.post_grad.common_subexpressions import merge_common_subexpressions

Results = tuple[Tensor, ...]
aten = torch.ops.aten


@torch.library.custom_op("kiln_test_cse::pair", mutates_args=())
def pair(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.sin(), x.cos()


@pair.register_fake
def _(x: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(x)


# torch 2.11 has no derivative of aminmax.
AMINMAX_HAS_A_GRADIENT = "NotImplemented" not in torch.ones(1, requires_grad=True).aminmax().min.grad_fn.name()

SEVERAL: dict[str, Callable[[Tensor], Results]] = {
    "sort": lambda x: tuple(x.sort()),
    "topk": lambda x: tuple(x.topk(2)),
    "max": lambda x: tuple(x.max(0)),
    "cummax": lambda x: tuple(x.cummax(0)),
    "var_mean": lambda x: tuple(torch.var_mean(x, 1)),
    "aminmax": lambda x: tuple((x if AMINMAX_HAS_A_GRADIENT else x.detach()).aminmax(dim=0)),
    "layer norm": lambda x: (F.layer_norm(x, (4,)), F.layer_norm(x, (4,)).view(-1)),
    "batch norm": lambda x: (F.batch_norm(x, None, None, training=True),),
    "max pool": lambda x: (F.max_pool2d(x[None], 2),),
    "attention": lambda x: (F.scaled_dot_product_attention(x[None, None], x[None, None], x[None, None]),),
    "qr": lambda x: tuple(torch.linalg.qr(x)),
    "solve": lambda x: (torch.linalg.solve(x, x.detach() + 1),),
    "lists": lambda x: (*torch.split_copy(x, 2), *torch.unbind_copy(x)),
    "custom operator": lambda x: pair(x.detach()),
}


def _shared(results: Results) -> set[tuple[int, int]]:
    places = [result.untyped_storage().data_ptr() for result in results]
    return {(i, j) for j in range(len(places)) for i in range(j) if places[i] == places[j]}


def _twice(function: Callable[[Tensor], Results]) -> Callable[[Tensor], Results]:
    def run(x: Tensor) -> Results:
        again = function(x)
        return (*function(x), *again, again[0].t() if again[0].dim() == 2 else again[0].view(-1))

    return run


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", SEVERAL)
def test_results_of_equal_calls_share_memory_where_eagers_do(name: str, training: bool) -> None:
    torch._dynamo.reset()
    function = _twice(SEVERAL[name])
    x = (torch.rand(4, 4, generator=torch.Generator().manual_seed(0)) + torch.eye(4)).requires_grad_(training)
    expected, results = function(x), compiled(function)(x)
    torch.testing.assert_close(results, expected)
    assert _shared(results) == _shared(expected)


def test_a_result_written_before_backward_is_not_what_an_equal_call_saved() -> None:
    def function(x: Tensor) -> Results:
        return x.sort().values, (x.sort().values ** 2).sum() * x.cummax(0).values

    torch._dynamo.reset()
    x = torch.randn(6, 6, requires_grad=True)
    gradients = []
    for run in (function, compiled(function)):
        shown, used = run(x)
        shown.detach().zero_()
        gradients.append(torch.autograd.grad(used.sum(), x))
    torch.testing.assert_close(gradients[1], gradients[0])


@pytest.mark.parametrize(
    ("function", "count"),
    [
        (lambda x: (x.sort().values, x.sort().indices), 1),
        (lambda x: (x.sort().values, x.sort().values + x.sort().indices), 1),
        (lambda x: (x.sort().indices + 1, x.sort().values), 1),
        (lambda x: (x.sort().values, x.sort().values), 2),
        (lambda x: (x.sort().values, x.sort().values, x.sort().values * 2), 2),
        (lambda x: (x.sort().values, aten.view.default(x.sort().values, [-1])), 2),
    ],
)
def test_calls_are_merged_unless_one_of_their_tensors_is_returned_twice(function: Any, count: int) -> None:
    x = torch.randn(3, 4)
    gm = traced(function, x)
    apply(merge_common_subexpressions, gm)
    assert sum("sort" in call.partition("= ")[2].partition("(")[0] for call in calls(gm)) == count
    same_numbers(gm, function, x)


def test_values_that_only_backward_reads_are_saved_once() -> None:
    def function(x: Tensor) -> Tensor:
        first, second = torch.linalg.qr(x)[0], torch.linalg.qr(x)[0]
        return (first.sin() * first).sum() + (second.cos() * second).sum()

    torch._dynamo.reset()
    x = torch.randn(64, 64, dtype=torch.float64, requires_grad=True)
    run = compiled(function)
    before = torchkiln.stats().extern_calls.get("aten.linalg_qr.default", 0)
    result = run(x)
    assert torchkiln.stats().extern_calls["aten.linalg_qr.default"] == before + 1
    torch.testing.assert_close(torch.autograd.grad(result, x), torch.autograd.grad(function(x), x))
