"""Writes through expanded views have eager's meaning to the bit, or are left to eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from torchkiln.errors import FallbackWarning

# Of these, what was written minus what was there before is not what was written.
HARD = torch.tensor([[1e8, float("inf"), -0.0, float("nan")]])


def _of_a_value(write: Callable[[Tensor], Any]) -> Callable[[Tensor], list[Tensor]]:
    def function(x: Tensor) -> list[Tensor]:
        value = x.clone()
        view = write(value)
        return [value, value + 1, view]

    return function


def _of_an_input(write: Callable[[Tensor], Any]) -> Callable[[Tensor], list[Tensor]]:
    def function(x: Tensor) -> list[Tensor]:
        write(x)
        return [x + 1]

    return function


EXACT: dict[str, Callable[[Tensor], Any]] = {
    "its own size": lambda y: y.expand_as(y).fill_(1),
    "its own size, in part": lambda y: y.expand(1, 4)[:, 1:].mul_(0),
    "its own size, broadcast": lambda y: torch.broadcast_to(y, (1, 4)).add_(1),
    "one dimension more": lambda y: y.expand(1, 1, 4).copy_(torch.ones(4)),
    "two dimensions more": lambda y: y.expand(1, 1, 1, 4)[0, 0].clamp_(0, 1),
    "no rows": lambda y: y.expand(0, 4).add_(1),
    "no rows of another size": lambda y: y[:, :1].expand(0, 3).add_(torch.ones(0, 3)),
    "no part": lambda y: y.expand(3, 4)[:0].add_(1),
    "no columns": lambda y: y.expand(3, 4)[:, 2:2].copy_(torch.ones(3, 0)),
    "one value": lambda y: y.expand(3, 4).fill_(2),
    "zeros": lambda y: y.expand(2, 3, 4).zero_(),
    "a row": lambda y: y.expand(3, 4)[1].fill_(1),
    "a column of a row": lambda y: y.expand(2, 3, 4)[1, 2:, 1:3].mul_(0),
    "a piece of a piece": lambda y: y.expand(2, 4).unbind(0)[1].view(2, 2).t()[1].copy_(torch.ones(2)),
    "of two expansions": lambda y: y.expand(3, 4)[:1].expand(5, 1, 4)[2].sub_(1),
    "a row of rows": lambda y: y.expand(3, 4)[-1].clamp_(0, 1).add_(1),
    "twice": lambda y: y.expand(3, 4).fill_(2).sum() + y.expand_as(y).add_(1),
}


@pytest.mark.usefixtures("everything_compiled")
@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("place", [_of_a_value, _of_an_input])
def test_what_is_written_is_what_is_there(
    compile_strictly: Callable[..., Any], name: str, place: Callable[..., Callable[[Tensor], Any]]
) -> None:
    function = place(EXACT[name])
    here, there = HARD.clone(), HARD.clone()
    found, expected = compile_strictly(function)(here), function(there)
    for a, b in zip([*found, here], [*expected, there], strict=True):
        assert torch.equal(a.contiguous().view(torch.int32), b.contiguous().view(torch.int32))


def test_gradients_flow_through_a_written_view(compile_strictly: Callable[..., Any]) -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        value = x.clone()
        value.expand_as(value).mul_(w)
        value.expand(0, 4).add_(w)
        value.expand(3, 4)[1].mul_(w[0])
        return value.sum()

    gradients = []
    for run in (function, compile_strictly(function)):
        x, w = (torch.arange(4.0).view(1, 4).requires_grad_() for _ in range(2))
        run(x, w).backward()
        gradients += [x.grad, w.grad]
    torch.testing.assert_close(gradients[2:], gradients[:2])


@pytest.mark.parametrize("name", ["an item", "a mask"])
def test_what_a_functional_graph_cannot_express_is_left_to_eager(name: str) -> None:
    def function(x: Tensor) -> Tensor:
        value = x.clone()
        wide = value.expand(3, 4)
        if name == "an item":
            wide[1] = 1.0
        else:
            wide.masked_fill_(torch.tensor([[True], [False], [False]]), 5.0)
        return value

    with pytest.warns(FallbackWarning, match="several elements are one place"):
        found = torch.compile(function, backend="kiln")(HARD)
    assert torch.equal(found, function(HARD))
