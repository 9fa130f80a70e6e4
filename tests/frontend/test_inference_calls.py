"""Inference calls that go straight to the native function: where they may, and never to be told from others."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils import _pytree as pytree

from torchkiln import compiler
from torchkiln.frontend import adaptive as adaptive_calls
from torchkiln.frontend.adaptive import AdaptiveCall, Times
from torchkiln.frontend.captured_call import CapturedCall
from torchkiln.frontend.dual_numbers import CarriesTangents


@pytest.fixture
def wrapped_calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one with each call that goes through AOTAutograd's wrapper."""
    calls: list[int] = []
    takes_list = compiler.takes_list

    def counting(*args: Any) -> Callable[[list[Any]], Any]:
        compiled = takes_list(*args)

        def call(inputs: list[Any]) -> Any:
            calls.append(len(inputs))
            return compiled(inputs)

        return call

    monkeypatch.setattr(compiler, "takes_list", counting)
    return calls


def _compiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    torch._dynamo.reset()
    return torch.compile(function, backend="kiln", options={"fallback": False}, **options)


def _layer(x: Tensor, w: Tensor) -> Tensor:
    return torch.tanh(x @ w).sin() * x


def test_calls_go_straight_to_the_native_function(wrapped_calls: list[int]) -> None:
    compiled = _compiled(_layer)
    for _ in range(4):
        x, w = torch.randn(6, 6), torch.randn(6, 6)
        result = compiled(x, w)
        torch.testing.assert_close(result, _layer(x, w))
        assert not result.requires_grad
        assert result.grad_fn is None
    assert not wrapped_calls


@pytest.mark.parametrize(
    "function",
    [
        lambda x: (x.sin(), x.exp().sum(-1).squeeze(-1)),  # a view of a value that nobody else is given
        lambda x: {"a": x.sin(), "b": [x.cos(), 3]},
        lambda x: ((y := x.exp()), y.view(-1)),
        lambda x: (x, x.cos()),
        lambda x: (x.sort().values, torch.linalg.eigvals(x[:, :4].clone())),  # operators by way of Python
    ],
    ids=["view", "nested", "two views of one value", "an input", "operators"],
)
def test_results_of_direct_calls(function: Callable[..., Any], wrapped_calls: list[int]) -> None:
    compiled = _compiled(function)
    for _ in range(3):
        x = torch.randn(4, 5)
        results, expected = compiled(x), function(x)
        torch.testing.assert_close(results, expected)
        assert _sharing(results) == _sharing(expected)
    assert not wrapped_calls


def _sharing(results: Any) -> list[bool]:
    """For each pair of results, whether they lie in the same memory."""
    storages = [t.untyped_storage().data_ptr() for t in pytree.tree_leaves(results) if isinstance(t, Tensor)]
    return [a == b for a, b in combinations(storages, 2)]


def test_symbolic_shapes(wrapped_calls: list[int]) -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        return torch.relu(x @ w).sum()

    compiled = _compiled(function, dynamic=True)
    w = torch.randn(8, 5)
    for rows in (3, 7, 1, 12, 30):
        x = torch.randn(rows, 8)
        torch.testing.assert_close(compiled(x, w), function(x, w))
    assert not wrapped_calls


def test_results_whose_sizes_depend_on_those_of_inputs_are_marked_as_by_the_wrapper(wrapped_calls: list[int]) -> None:
    def function(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        return torch.relu(x @ w), w.sin()

    marks = []
    for backend in ("kiln", "aot_eager"):
        torch._dynamo.reset()
        compiled = torch.compile(function, backend=backend, dynamic=True)
        for rows in (3, 7, 12):
            x, w = torch.randn(rows, 8), torch.randn(8, 5)
            results = compiled(x, w)
            torch.testing.assert_close(results, function(x, w))
            marks.append([vars(result) for result in results])
    assert not wrapped_calls
    assert list(marks[0][0].values()) == [{0, 1}]
    assert all(other == marks[0] for other in marks)


def _writes(x: Tensor) -> Tensor:
    x.add_(1)
    return x.sin()


@pytest.mark.parametrize(
    ("function", "wrapped"),
    [(_writes, 0), (lambda x: (x.view(-1), x.sin()), 3)],
    ids=["writes to an input", "view of an input"],
)
def test_inputs_that_are_written_to_or_handed_out(
    function: Callable[..., Any], wrapped: int, wrapped_calls: list[int]
) -> None:
    compiled = _compiled(function)
    for _ in range(3):
        mine = torch.randn(4, 5)
        eagers = mine.clone()
        results, expected = compiled(mine), function(eagers)
        torch.testing.assert_close(results, expected)
        torch.testing.assert_close(mine, eagers)
        assert mine._version == eagers._version
    assert len(wrapped_calls) == wrapped


@torch.library.custom_op("kiln_tests::tripled", mutates_args=())
def _tripled(x: Tensor) -> Tensor:
    return x * 3


_tripled.register_fake(torch.empty_like)


def test_the_first_call_of_operators_of_users_is_left_to_the_wrapper_which_looks_at_them(
    wrapped_calls: list[int],
) -> None:
    compiled = _compiled(lambda x: _tripled(x).sin())
    for _ in range(3):
        x = torch.randn(4)
        torch.testing.assert_close(compiled(x), (x * 3).sin())
    assert len(wrapped_calls) == 1


def test_autocast_is_off_inside_a_direct_call(wrapped_calls: list[int]) -> None:
    def function(x: Tensor) -> Tensor:
        return torch.cdist(torch.mm(x, x), x)  # which autocast would have in float32

    compiled = _compiled(function)
    x = torch.randn(4, 4)
    for _ in range(3):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            result, eagers = compiled(x), function(x)
        assert result.dtype == eagers.dtype
        torch.testing.assert_close(result, eagers, rtol=2e-2, atol=2e-2)
    assert not wrapped_calls


def test_one_tensor_given_twice(wrapped_calls: list[int]) -> None:
    compiled = _compiled(_layer)
    x = torch.randn(5, 5)
    for _ in range(3):
        torch.testing.assert_close(compiled(x, x), _layer(x, x))


def test_operators_of_a_direct_call_record_no_graph() -> None:
    compiled = _compiled(lambda x: torch.sort(x.sin()).values)
    for _ in range(3):
        x = torch.randn(7)
        assert torch.is_grad_enabled()
        assert not compiled(x).requires_grad
        assert torch.is_grad_enabled()


def test_dual_numbers_after_direct_calls() -> None:
    compiled = _compiled(_layer)
    x, w, tangent = torch.randn(4, 4), torch.randn(4, 4), torch.randn(4, 4)
    for _ in range(3):
        compiled(x, w)
    with forward_ad.dual_level():
        mine = forward_ad.unpack_dual(compiled(forward_ad.make_dual(x, tangent), w))
        eagers = forward_ad.unpack_dual(_layer(forward_ad.make_dual(x, tangent), w))
    torch.testing.assert_close(mine.primal, eagers.primal)
    torch.testing.assert_close(mine.tangent, eagers.tangent)


@pytest.mark.parametrize("adaptive", [False, True])
def test_later_calls_pass_no_layer_that_has_nothing_left_to_find_out(
    adaptive: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The compiled graph is kept.
    monkeypatch.setattr(adaptive_calls, "compare", lambda *_: Times(compiled=1.0, eager=2.0))
    torch._dynamo.reset()
    compiled = torch.compile(_layer, backend="kiln", options={"fallback": True, "adaptive": adaptive})
    x, w, tangent = torch.randn(4, 4), torch.randn(4, 4), torch.randn(4, 4)
    compiled(x, w)
    passed: list[type] = []
    for layer in (CarriesTangents, AdaptiveCall, CapturedCall):
        monkeypatch.setattr(layer, "__call__", _noting(layer, passed))
    torch.testing.assert_close(compiled(x, w), _layer(x, w))
    assert not passed
    with forward_ad.dual_level():
        mine = forward_ad.unpack_dual(compiled(forward_ad.make_dual(x, tangent), w)).tangent
        torch.testing.assert_close(mine, forward_ad.unpack_dual(_layer(forward_ad.make_dual(x, tangent), w)).tangent)
    assert passed
    passed.clear()
    torch.testing.assert_close(compiled(x, w), _layer(x, w))
    assert not passed


def _noting(layer: type, passed: list[type]) -> Callable[..., Any]:
    original: Callable[..., Any] = layer.__call__

    def call(self: Any, *inputs: Any) -> Any:
        passed.append(layer)
        return original(self, *inputs)

    return call


def test_inputs_that_were_not_compiled_for_are_refused() -> None:
    """Without Dynamo no guard looks at them: the native function does."""
    graph = torch.fx.symbolic_trace(_layer)
    x, w = torch.randn(4, 4), torch.randn(4, 4)
    call = compiler.compile_fx(graph, [x, w])
    for _ in range(3):
        torch.testing.assert_close(call(x, w), _layer(x, w))
    for wrong in (torch.randn(5, 4), x.double(), torch.randn(4, 4).t()):
        with pytest.raises(RuntimeError, match="input 0"):
            call(wrong, w)
    with pytest.raises(TypeError):
        call(x)
