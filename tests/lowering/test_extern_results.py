"""What operators of torch return besides tensors: nothing at all, numbers, results that are left out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

pytestmark = pytest.mark.usefixtures("everything_compiled")


@pytest.fixture
def library() -> Iterator[torch.library.Library]:
    with torch.library._scoped_library("kiln_tests_results", "FRAGMENT") as found:
        yield found


def _assert_same(found: Any, expected: Any) -> None:
    assert type(found) is type(expected)
    if isinstance(expected, torch.Tensor):
        torch.testing.assert_close(found, expected)
    else:
        assert found == expected


@pytest.mark.parametrize("weights", [False, True])
def test_attention_in_one_call_leaves_its_weights_out(compile_strictly: Callable[..., Any], weights: bool) -> None:
    layer = nn.MultiheadAttention(8, 2, batch_first=True).eval()
    parameters = layer.in_proj_weight, layer.in_proj_bias, layer.out_proj.weight, layer.out_proj.bias

    def fn(x: torch.Tensor) -> Any:
        out, scores = torch._native_multi_head_attention(x, x * 2, x * 2, 8, 2, *parameters, None, weights)
        return out.sin(), scores

    compiled = compile_strictly(fn)
    with torch.no_grad():
        for _ in range(3):  # the last goes past AOTAutograd's wrapper
            x = torch.randn(2, 5, 8)
            for found, expected in zip(compiled(x), fn(x), strict=True):
                _assert_same(found, expected)


@pytest.mark.parametrize("make", [nn.MultiheadAttention, nn.TransformerEncoderLayer])
def test_modules_with_a_fast_path_for_inference(compile_strictly: Callable[..., Any], make: type[nn.Module]) -> None:
    layer = make(8, 2, batch_first=True).eval()

    def fn(x: torch.Tensor) -> torch.Tensor:
        return layer(x) if make is nn.TransformerEncoderLayer else layer(x, x, x)[0]

    compiled, x = compile_strictly(fn), torch.randn(2, 5, 8)
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(compiled(x), fn(x))


def test_a_number_that_an_operator_returns_is_a_size(
    compile_strictly: Callable[..., Any], library: torch.library.Library
) -> None:
    library.define("counted(Tensor x) -> (Tensor, SymInt, Tensor)")
    library.impl("counted", lambda x: (x * 2, int((x > 0).sum()), x + 1), "CPU")

    @torch.library.register_fake("kiln_tests_results::counted", lib=library)
    def _(x: torch.Tensor) -> Any:
        return torch.empty_like(x), torch.library.get_ctx().new_dynamic_size(), torch.empty_like(x)

    def fn(x: torch.Tensor) -> Any:
        twice, count, more = torch.ops.kiln_tests_results.counted(x * 3)
        return twice + count, count * 2, torch.ones(count).cumsum(0), more.sin()

    compiled = compile_strictly(fn)
    for _ in range(3):
        x = torch.randn(9)
        for found, expected in zip(compiled(x), fn(x), strict=True):
            _assert_same(found, expected)


def test_a_tensor_that_an_operator_may_leave_out(
    compile_strictly: Callable[..., Any], library: torch.library.Library
) -> None:
    library.define("maybe(Tensor x, bool there) -> Tensor?")
    library.impl("maybe", lambda x, there: x * 2 if there else None, "CompositeExplicitAutograd")

    def fn(x: torch.Tensor) -> Any:
        maybe = torch.ops.kiln_tests_results.maybe
        return maybe(x * 3, False), maybe(x * 3, True) + 1

    x = torch.randn(3)
    for found, expected in zip(compile_strictly(fn)(x), fn(x), strict=True):
        _assert_same(found, expected)
