"""Large matmuls as calls of oneDNN's linear layer where the target multiplies faster so, and those that stay."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.passes.post_grad.functional_graphs import apply, calls, same_numbers, traced
from torchkiln.config import Settings
from torchkiln.native.onednn import packed_dtypes
from torchkiln.passes.post_grad.onednn_matmuls import call_onednn
from torchkiln.target import Target, capture_target

aten = torch.ops.aten
packs = pytest.mark.skipif("float32" not in packed_dtypes(), reason="needs oneDNN")
CLOSE = {"rtol": 1e-4, "atol": 1e-3}

ZEN5 = replace(capture_target(Settings()), cpu="znver5", vector_bits=512, packs=frozenset({"float32"}))
LINEAR = "mkldnn._linear_pointwise.default"


def _rewrite(gm: torch.fx.GraphModule, target: Target = ZEN5) -> bool:
    return apply(partial(call_onednn, target=target), gm)


def _targets(gm: torch.fx.GraphModule) -> list[str]:
    return [line.split(" = ")[1].split("(")[0] for line in calls(gm)]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, True),
        ({"cpu": "znver4"}, False),
        ({"cpu": "sapphirerapids"}, False),
        ({"cpu": "generic"}, False),
        ({"vector_bits": 256}, False),
        ({"packs": frozenset()}, False),
        ({"float32_matmul": "bf16"}, False),
    ],
)
def test_the_target_decides(changes: dict[str, Any], expected: bool) -> None:
    gm = traced(aten.mm.default, torch.randn(256, 128), torch.randn(128, 256))
    assert _rewrite(gm, replace(ZEN5, **changes)) is expected


def _matrix(rows: int, columns: int, layout: str) -> Tensor:
    if layout == "transposed":
        return torch.randn(columns, rows).t()
    return torch.randn(rows, columns + 3)[:, 2:-1] if layout == "of wider rows" else torch.randn(rows, columns)


@packs
@given(
    st.integers(64, 300),
    st.integers(160, 300),
    st.integers(450, 600),
    *[st.sampled_from(["contiguous", "transposed", "of wider rows"])] * 2,
)
@settings(max_examples=20, deadline=None)
def test_operands_of_any_layout(rows: int, terms: int, columns: int, left: str, right: str) -> None:
    given = _matrix(rows, terms, left), _matrix(terms, columns, right)
    gm = traced(aten.mm.default, *given)
    dense = right != "of wider rows"
    assert _rewrite(gm) is dense
    assert _targets(gm) == (["permute.default", LINEAR] if dense else ["mm.default"])
    same_numbers(gm, aten.mm.default, *given, **CLOSE)
    assert gm(*given).is_contiguous()


@packs
@pytest.mark.parametrize(
    ("addend", "rest"),
    [((256,), []), ((1,), ["add.Tensor"]), ((256, 256), ["add.Tensor"]), ((256, 1), ["add.Tensor"])],
)
def test_a_bias_is_added_by_the_call_and_other_addends_after_it(addend: tuple[int, ...], rest: list[str]) -> None:
    given = torch.randn(addend), torch.randn(256, 128), torch.randn(128, 256)
    gm = traced(aten.addmm.default, *given)
    assert _rewrite(gm)
    assert _targets(gm) == ["permute.default", LINEAR, *rest]
    same_numbers(gm, aten.addmm.default, *given, **CLOSE)


@pytest.mark.skipif("bfloat16" not in packed_dtypes(), reason="needs oneDNN of bfloat16")
@pytest.mark.parametrize("cpu", ["znver5", "znver4", "sapphirerapids"])
def test_a_bias_of_bfloat16_is_added_before_the_sum_is_rounded(cpu: str) -> None:
    torch.manual_seed(0)
    given = torch.randn(256).bfloat16(), torch.randn(256, 128).bfloat16(), torch.randn(128, 256).bfloat16()
    target = replace(ZEN5, cpu=cpu, packs=frozenset({"bfloat16"}))
    gm = traced(aten.addmm.default, *given)
    assert _rewrite(gm, target)
    assert _targets(gm) == ["permute.default", LINEAR]
    exact = torch.addmm(*(value.double() for value in given))
    torch.testing.assert_close(gm(*given).double(), exact, rtol=2**-8 * 1.01, atol=2**-12)
    for other in (given[0].expand(256, 256).contiguous(), given[0][:1]):
        assert not _rewrite(traced(aten.addmm.default, other, *given[1:]), target)
    assert not _rewrite(traced(aten.addmm.default, *given), replace(target, packs=frozenset({"float32"})))
    assert not _rewrite(traced(aten.addmm.default, given[0], torch.randn(128, 256).bfloat16().t(), given[2]), target)


@pytest.mark.parametrize(
    ("function", "given"),
    [
        (aten.mm.default, (torch.randn(32, 64), torch.randn(64, 64))),  # small
        (aten.mm.default, (torch.randn(1, 768), torch.randn(768, 768))),
        (aten.mm.default, (torch.randn(1024, 1024).t(), torch.randn(1024, 16))),  # copied for few columns
        (aten.mm.default, (torch.randn(256, 256).double(), torch.randn(256, 256).double())),
        (aten.mm.default, (torch.randn(256, 256).bfloat16(), torch.randn(256, 256).bfloat16())),
        (aten.mm.default, (torch.randn(1, 256).expand(256, 256), torch.randn(256, 256))),  # no matrix of BLAS's
        (aten.mm.default, (torch.randn(256, 512)[:, ::2], torch.randn(256, 256))),
        (partial(aten.addmm.default, beta=2), (torch.randn(256), torch.randn(256, 256), torch.randn(256, 256))),
    ],
)
def test_left_to_blas(function: Callable[..., Any], given: tuple[Tensor, ...]) -> None:
    assert not _rewrite(traced(function, *given))


def test_symbolic_sizes_are_left_to_blas() -> None:
    assert not _rewrite(traced(aten.mm.default, torch.randn(300, 200), torch.randn(200, 400), symbolic=True))


@packs
def test_numbers_that_are_none_are_where_eager_has_them() -> None:
    left, right = torch.randn(256, 128), torch.randn(128, 256)
    left[3, 5], left[7, 0], right[9, 11], right[0, 4] = float("nan"), float("inf"), float("-inf"), 0.0
    gm = traced(aten.mm.default, left, right)
    assert _rewrite(gm)
    same_numbers(gm, aten.mm.default, left, right, **CLOSE)


@packs
def test_a_layer_is_trained_as_in_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Target, "multiplies_by_onednn", True)
    torch.manual_seed(0)
    layer, rows = torch.nn.Linear(256, 300), torch.randn(2, 100, 256, requires_grad=True)
    compiled = torch.compile(layer, backend="kiln", options={"fallback": False, "adaptive": False})
    found, expected = (
        torch.autograd.grad(f(rows).square().mean(), [rows, *layer.parameters()]) for f in (compiled, layer)
    )
    for mine, eagers in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, eagers, rtol=1e-4, atol=1e-6)
        assert mine.stride() == eagers.stride()
