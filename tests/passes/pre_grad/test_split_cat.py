"""Split-cat cancellation: what goes, what must stay apart in memory, and what writing forbids."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.passes.pre_grad.captured import assert_same, capture, text
from torchkiln.canonicalize.torch_calls import normalize_calls
from torchkiln.passes.pre_grad import remove_dead_code
from torchkiln.passes.pre_grad.split_cat import cancel_splits

X = torch.randn(4, 6, requires_grad=True)
Y = torch.randn(4, 6)


def _pass(function: Callable[..., Any], *inputs: Any, dynamic: bool = False) -> tuple[bool, str]:
    gm = capture(function, *inputs, dynamic=dynamic)
    normalize_calls(gm)
    for number, node in enumerate(gm.graph.find_nodes(op="placeholder")):
        if not dynamic:
            node._rename("xyz"[number])
    changed = cancel_splits(gm)
    remove_dead_code(gm)
    if not dynamic:
        assert_same(gm, function, *inputs)
    return changed, "; ".join(line.partition(" = ")[2] or line for line in text(gm).splitlines())


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda x: torch.cat(x.split(2, 1), 1).sin(), "sin(x); return (sin,)"),
        (lambda x: torch.cat(x.chunk(4, -1), -1).sin(), "sin(x); return (sin,)"),
        (lambda x: torch.stack(x.unbind(1), 1).sin(), "sin(x); return (sin,)"),
        # A result of its own memory stays one.
        (lambda x: torch.cat(x.split(2, 1), 1), "cat([x], dim=1); return (cat_1,)"),
        (lambda x: torch.stack(x.unbind(0)), "cat([x], dim=0); return (cat,)"),
        # Laid out anew: the cat is a copy into rows.
        (lambda x: torch.cat(x.t().split(2, 1), 1).sin(), "transpose(x, dim0=0, dim1=1); cat([t], dim=1); sin(cat_1)"),
        (lambda x: torch.cat([x, *x.split(3), x]), "cat([x, x, x], dim=0); return (cat_1,)"),
        (lambda x: torch.cat([torch.cat([x, x]), x]), "cat([x, x, x], dim=0); return (cat_2,)"),
    ],
)
def test_a_cat_of_all_parts_is_the_whole(function: Callable[..., Any], expected: str) -> None:
    changed, after = _pass(function, X)
    assert changed
    assert after.startswith(expected)


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda x, y: _difference(torch.cat([x, y], 1).split(6, 1)), "sub(x, y)"),
        (lambda x, y: _difference(torch.cat([x, y], 0).chunk(2)), "sub(x, y)"),
        (lambda x, y: _difference(torch.stack([x, y], 1).unbind(1)), "sub(x, y)"),
    ],
)
def test_parts_of_a_cat_are_the_originals(function: Callable[..., Any], expected: str) -> None:
    changed, after = _pass(function, Y, Y + 1)
    assert changed
    assert after.startswith(expected)


def _difference(parts: tuple[torch.Tensor, ...]) -> torch.Tensor:
    return parts[0] - parts[1]


def _write_after(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    z = torch.cat(y.split(2, 1), 1)
    y.add_(1)
    return z * y


def _write_result(x: torch.Tensor) -> torch.Tensor:
    z = torch.cat(x.split(2, 1), 1)
    z.mul_(2)
    return z + x


def _write_part(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    a, b = torch.cat([x, y]).split(4)
    a.view(-1).add_(1)
    return a - b + x


def _write_source(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    a, b = torch.cat([x, y]).split(4)
    x.add_(1)
    return a - b + x


def _write_inner(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    inner = torch.cat([x, y])
    x.add_(1)
    return torch.cat([inner, y])


@pytest.mark.parametrize("function", [_write_after, _write_result])
def test_what_is_written_keeps_its_copy(function: Callable[..., Any]) -> None:
    _, after = _pass(function, Y)
    assert "cat(" in after


@pytest.mark.parametrize("function", [_write_part, _write_source, _write_inner])
def test_what_is_written_is_not_read_elsewhere(function: Callable[..., Any]) -> None:
    changed, _ = _pass(function, Y, Y + 1)
    assert not changed


@pytest.mark.parametrize(
    "function",
    [
        lambda x, y: torch.cat([x, y]).split(4),  # returned: memory of their own in eager
        lambda x, y: _difference(torch.cat([x, y], 1).split(4, 1)[:2]),  # other joints
        lambda x, y: torch.cat(x.split(2, 1)[:2], 1).sin() + y[:, :4],  # not all of it
        lambda x, y: torch.cat(x.split(2, 1)[::-1], 1).sin() + y,  # in another order
        lambda x, y: torch.cat(x.split(2, 1), 0).sin() + y.sum(),  # along another dimension
        lambda x, y: torch.cat([torch.cat([x, y]), x.double()]).sin(),  # x would be rounded once less
        lambda x, y: _difference(torch.stack([x, y.double()]).unbind()),
    ],
)
def test_other_joins_stay(function: Callable[..., Any]) -> None:
    changed, _ = _pass(function, Y, Y + 1)
    assert not changed


def test_a_part_that_needs_a_gradient_because_its_neighbour_does_keeps_it() -> None:
    changed, _ = _pass(lambda x, y: torch.mul(*torch.cat([x, y]).split(4)[::-1]) * 1.0, X, Y)
    assert not changed


def test_sizes_may_be_unknown() -> None:
    changed, after = _pass(lambda x: torch.cat(x.split([1, x.size(1) - 1], 1), 1).sin(), Y, dynamic=True)
    assert changed
    assert "cat" not in after


def test_compiled(compile_strictly: Callable[..., Any]) -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        a, b = torch.cat([x, y], 1).chunk(2, 1)
        whole = torch.cat(x.split(2, 1), 1)
        return a * b, torch.stack(x.unbind(1), 1), whole.sin()

    inputs = (X, Y.clone().requires_grad_())
    results, expected = compile_strictly(function)(*inputs), function(*inputs)
    torch.testing.assert_close(results, expected)
    torch.testing.assert_close(
        torch.autograd.grad(sum(r.square().sum() for r in results), inputs),
        torch.autograd.grad(sum(r.square().sum() for r in expected), inputs),
    )
    results[1].detach().zero_()
    assert X.any()
