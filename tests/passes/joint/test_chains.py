"""Chains of views, permuted axes and casts come down to one link, and only where nothing is lost on the way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.passes.joint.graphs import check_same, compile_and_compare, text, trace, trace_symbolic
from torchkiln.canonicalize.chains import collapse_chains, is_exact_cast
from torchkiln.canonicalize.no_ops import remove_no_ops

aten = torch.ops.aten
X = torch.arange(24.0).reshape(2, 3, 4) - 7


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (
            lambda x: aten.view(aten.view(x, [6, 4]), [3, 8]).sin(),
            ["view_1 = aten.view.default(x_1, [3, 8])", "sin = aten.sin.default(view_1)"],
        ),
        (
            lambda x: aten._unsafe_view(aten.unsqueeze(aten.view(x, [6, 4]), 0), [24]).sin(),
            ["_unsafe_view = aten._unsafe_view.default(x_1, [24])", "sin = aten.sin.default(_unsafe_view)"],
        ),
        (
            lambda x: aten.permute(aten.transpose(x, 0, 2), [1, 0, 2]).sin(),
            ["permute = aten.permute.default(x_1, [1, 2, 0])", "sin = aten.sin.default(permute)"],
        ),
        (
            lambda x: aten._to_copy(aten._to_copy(x, dtype=torch.float64), dtype=torch.bfloat16).sin(),
            ["_to_copy_1 = aten._to_copy.default(x_1, dtype=torch.bfloat16)", "sin = aten.sin.default(_to_copy_1)"],
        ),
    ],
    ids=["view", "unsqueeze", "axes", "cast"],
)
def test_a_chain_becomes_its_last_link(function: Callable[..., Any], expected: list[str]) -> None:
    gm = trace(function, X)
    assert collapse_chains(gm)
    assert text(gm) == expected
    check_same(gm, function, X)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: aten.t(aten.t(x.select(0, 0))).sin(),
        lambda x: aten.transpose(aten.permute(x, [1, 0, 2]), 0, 1).sin(),
        lambda x: aten.view(aten.view(x.exp(), [24]), [2, 3, 4]).sin(),
        lambda x: aten._to_copy(aten._to_copy(x.exp(), dtype=torch.float64), dtype=torch.float32).sin(),
    ],
)
def test_what_undoes_itself_is_a_no_op_then(function: Callable[..., Any]) -> None:
    gm = trace(function, X)
    assert collapse_chains(gm)
    assert remove_no_ops(gm, saves_for_backward=True)
    assert not {"permute", "view", "_to_copy", "t"} & {line.split(" = aten.")[1].split(".")[0] for line in text(gm)}
    check_same(gm, function, X)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: aten.view(aten.permute(x, [1, 0, 2]).contiguous(), [6, 4]).sin(),
        lambda x: aten.view(x, [6, 4]).sin(),
        lambda x: aten._to_copy(aten._to_copy(x, dtype=torch.bfloat16), dtype=torch.float32).sin(),
        lambda x: aten._to_copy(aten._to_copy(x, dtype=torch.int32), dtype=torch.float32).sin(),
        lambda x: aten._to_copy(aten._to_copy(x, dtype=torch.float64), dtype=torch.int32) + 1,
        # Memory with gaps cannot be shown flat: that the first view copies nothing says nothing about the second.
        lambda x: aten.view(aten.view(x[:, :2], [2, 2, 2, 2]).contiguous(), [16]).sin(),
    ],
)
def test_a_step_that_counts_stays(function: Callable[..., Any]) -> None:
    gm = trace(function, X)
    before = text(gm)
    assert not collapse_chains(gm)
    assert text(gm) == before


def test_views_of_any_size_are_collapsed_without_asking_for_sizes() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return aten.view(aten.view(x, [x.shape[0] * x.shape[1], x.shape[2]]), [-1]).sin()

    gm = trace_symbolic(function, X)
    guards = len(gm.graph.find_nodes(op="placeholder")[0].meta["val"].fake_mode.shape_env.guards)
    assert collapse_chains(gm)
    assert [line for line in text(gm) if "view" in line and "sin" not in line] == [
        "view_1 = aten.view.default(x_1, [-1])"
    ]
    assert len(gm.graph.find_nodes(op="placeholder")[0].meta["val"].fake_mode.shape_env.guards) == guards
    check_same(gm, function, X)
    torch.testing.assert_close(gm(torch.ones(5, 4, 3)), torch.ones(60).sin())


DTYPES = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.float16, torch.bfloat16, torch.float32)


@pytest.mark.parametrize("source", DTYPES)
@pytest.mark.parametrize("target", [*DTYPES, torch.int64, torch.float64])
def test_an_exact_cast_is_one_that_can_be_undone(source: torch.dtype, target: torch.dtype) -> None:
    if source.is_floating_point:
        bits = torch.arange(1 << 16, dtype=torch.int32)
        if source == torch.float32:
            values = torch.cat([bits, bits << 16, (bits << 16) + 1]).view(torch.float32)
        else:
            values = bits.to(torch.int16).view(source)
        values = values[values.isfinite()]
    elif source == torch.bool:
        values = torch.tensor([False, True])
    else:
        info = torch.iinfo(source)
        values = torch.cat([torch.arange(-300, 300), info.max - torch.arange(300), torch.tensor([info.min])])
        values = values[(values >= info.min) & (values <= info.max)].to(source)
    back = values.to(target).to(source)
    survives = torch.equal(back, values)
    if source.is_floating_point != target.is_floating_point and source.is_floating_point:
        survives = False  # what is out of range is not defined, and need not show in a round trip
    if not source.is_floating_point and not target.is_floating_point:
        # Out of range, integers wrap, and come back: what counts is the value between.
        survives = torch.equal(values.to(target).to(torch.int64), values.to(torch.int64))
    assert is_exact_cast(source, target) == survives


def test_compiled_training_gives_the_gradients_of_eager() -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = (x @ w).view(2, 12).view(4, 6).transpose(0, 1).permute(1, 0)
        return y.double().float() * 2

    x = torch.randn(8, 5, requires_grad=True)
    w = torch.randn(5, 3, requires_grad=True)
    compile_and_compare(function, x, w, expects="chains", rtol=1e-5)
    compile_and_compare(
        lambda x: x.exp().view(-1, 2).view(-1).view(x.shape) * 2,
        torch.randn(6, 4, requires_grad=True),
        expects="chains",
        dynamic=True,
    )
