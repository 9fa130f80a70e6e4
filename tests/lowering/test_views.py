"""Views and reshapes against eager: of inputs and of computed values, in every layout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.lowering.against_eager import check, layouts, specimen
from tests.lowering.test_pointwise import name_of

Function = Callable[..., Any]

# Views of a tensor of shape (4, 6, 10).
VIEWS: dict[str, Function] = {
    "view": lambda x: x.reshape(24, 10),
    "view flat": lambda x: x.reshape(-1),
    "view split": lambda x: x.reshape(4, 3, 2, 5, 2),
    "view across": lambda x: x.reshape(8, 30),
    "view odd": lambda x: x.reshape(15, 16),
    "flatten": lambda x: x.flatten(1),
    "unflatten": lambda x: x.unflatten(2, (2, -1)),
    "permute": lambda x: x.permute(2, 0, 1),
    "permute view": lambda x: x.permute(1, 2, 0).reshape(12, 20),
    "transpose": lambda x: x.transpose(0, 2),
    "transpose negative": lambda x: x.transpose(-1, -2),
    "t": lambda x: x[0].t(),
    "expand": lambda x: x[:, :1].expand(4, 6, 10),
    "expand new": lambda x: x.expand(3, 4, 6, 10),
    "expand keep": lambda x: x[:1].expand(7, -1, -1),
    "slice": lambda x: x[1:3],
    "slice step": lambda x: x[:, 1::2],
    "slice step last": lambda x: x[..., 2:9:3],
    "slice negative": lambda x: x[-3:-1, :-2],
    "slice empty": lambda x: x[2:2],
    "slice beyond": lambda x: x[1:100, :, 8:50],
    "slice twice": lambda x: x[1:, ::2][:, 1:, ::3],
    "select": lambda x: x.select(1, 2),
    "select negative": lambda x: x[-1, :, -2],
    "select all": lambda x: x[1, 2, 3],
    "squeeze": lambda x: x[:1, :, 3:4].squeeze(),
    "squeeze dim": lambda x: x[:1].squeeze(0),
    "squeeze dims": lambda x: x[:1, :, :1].squeeze((0, 2)),
    "squeeze nothing": lambda x: x.squeeze(1),
    "unsqueeze": lambda x: x.unsqueeze(0),
    "unsqueeze last": lambda x: x.unsqueeze(-1),
    "diagonal": lambda x: x.diagonal(0, 1, 2),
    "diagonal above": lambda x: x.diagonal(3, 0, 2),
    "diagonal below": lambda x: x.diagonal(-2, 1, 2),
    "diagonal outside": lambda x: x.diagonal(40, 0, 1),
    "split": lambda x: x.split(4, 1),
    "split uneven": lambda x: x.split(3, 2),
    "split sizes": lambda x: x.split([1, 4, 5], 2),
    "chunk": lambda x: x.chunk(3, 2),
    "unbind": lambda x: x.unbind(0),
    "unbind last": lambda x: x[..., :3].unbind(-1),
    "narrow": lambda x: x.narrow(2, 3, 4),
    "movedim": lambda x: x.movedim(0, -1),
    "swapaxes select": lambda x: x.swapaxes(0, 1)[2, 1:],
    "view as": lambda x: x.view_as(x),
    "alias": lambda x: x.detach(),
}
# With memory of their own.
COPIES: dict[str, Function] = {
    "flip": lambda x: x.flip(0),
    "flip two": lambda x: x.flip(0, 2),
    "flip none": lambda x: x.flip(()),
    "contiguous": lambda x: x.permute(2, 1, 0).contiguous(),
    "clone": lambda x: x.transpose(0, 1).clone(),
    "roll": lambda x: x.roll(2, 1),
    "rot90": lambda x: x.rot90(1, (0, 2)),
    "repeat": lambda x: x.repeat(2, 1, 3),
    "repeat new": lambda x: x.repeat(2, 1, 1, 1),
    "repeat none": lambda x: x.repeat(0, 1, 1),
    "tile": lambda x: x.tile(1, 2),
}


@pytest.mark.parametrize("layout", ["contiguous", "transposed", "sliced", "expanded", "offset"])
def test_views_of_inputs(layout: str) -> None:
    """Functionalization replays them, so what is compiled may be a copy; the strides stay eager's."""
    x = layouts(specimen(torch.float32, (4, 6, 10)))[layout]
    check({name: (lambda x, f=f: _each(f(x), lambda v: v + 1)) for name, f in VIEWS.items()}, [x], exact=True)
    check(COPIES, [x], exact=True)


@pytest.mark.parametrize("layout", ["contiguous", "transposed"])
def test_views_of_computed_values_keep_their_strides(layout: str) -> None:
    x = layouts(specimen(torch.float32, (4, 6, 10)))[layout]
    check({name: (lambda x, f=f: f(x * 2)) for name, f in VIEWS.items()}, [x], exact=True)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int8, torch.bfloat16, torch.float64], ids=name_of)
def test_views_of_every_width(dtype: torch.dtype) -> None:
    check({**VIEWS, **COPIES}, [specimen(dtype, (4, 6, 10))], exact=True)


def test_views_that_feed_reductions() -> None:
    functions = {
        name: (lambda x, f=f: _each(f(x), lambda v: v.sum(-1) if v.dim() else v.sum())) for name, f in VIEWS.items()
    }
    check(functions, [specimen(torch.float32, (4, 6, 10), tame=True)], slack=8)


@pytest.mark.parametrize("layout", ["contiguous", "transposed", "offset"])
def test_overlapping_windows(layout: str) -> None:
    functions = {
        "unfold": lambda x: x.unfold(2, 4, 2) + 1,
        "unfold first": lambda x: x.unfold(0, 2, 1) * 2,
        "unfold twice": lambda x: x.unfold(1, 3, 1).unfold(2, 2, 3).sum(-1),
        "unfold computed": lambda x: (x * 2).unfold(2, 3, 3),
    }
    check(functions, [layouts(specimen(torch.float32, (4, 6, 10)))[layout]], slack=2)


def test_as_strided_of_dense_memory() -> None:
    functions = {
        "rows": lambda x: x.as_strided((3, 5), (10, 1)) + 1,
        "offset": lambda x: (x * 2).as_strided((2, 2), (7, 2), 3) + 1,  # of an input: tests/memory/test_marked.py
        "overlap": lambda x: x.as_strided((6, 4), (1, 1)) + 1,
        "computed": lambda x: (x * 2).as_strided((4, 6), (1, 5)),
        "zero stride": lambda x: (x * 2).as_strided((3, 4), (0, 2)) + 1,
    }
    check(functions, [specimen(torch.float32, (4, 20))], exact=True)


@pytest.mark.parametrize("shape", [(0,), (3, 0, 2), (0, 4)], ids=name_of)
def test_views_of_nothing(shape: tuple[int, ...]) -> None:
    functions = {
        "flat": lambda x: x.reshape(-1) + 1,
        "shape": lambda x: x.reshape(0, 5) * 2,
        "permute": lambda x: x.permute(*reversed(range(x.dim()))) + 1,
        "unsqueeze": lambda x: x.unsqueeze(0) + 1,
        "flip": lambda x: x.flip(0),
        "expand": lambda x: x.expand(2, *x.shape) + 1,
        "slice": lambda x: x[0:] + 1,
    }
    check(functions, [torch.zeros(shape)], exact=True)


def test_views_of_a_single_number() -> None:
    functions = {
        "flat": lambda x: x.reshape(-1) + 1,
        "expand": lambda x: x.expand(3, 4) + 1,
        "unsqueeze": lambda x: x[None, None] * 2,
        "permute": lambda x: x.permute(()) + 1,
        "squeeze": lambda x: x.squeeze() + 1,
        "repeat": lambda x: x.repeat(3),
    }
    check(functions, [torch.tensor(3.0)], exact=True)


def test_bits_seen_as_another_dtype() -> None:
    functions = {
        "float bits": lambda x: x.view(torch.int32) + 1,
        "narrow": lambda x: x.view(torch.int16) + 1,
        "wide": lambda x: x.view(torch.int64) + 1,
        "computed": lambda x: (x * 2).view(torch.int32),
    }
    check(functions, [specimen(torch.float32, (4, 6))], exact=True, extern=("aten.view_copy.dtype",))


def _each(value: Any, function: Function) -> Any:
    return function(value) if isinstance(value, torch.Tensor) else tuple(map(function, value))
