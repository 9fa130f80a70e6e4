"""Gradients of resizes, paddings and windows, against eager: values, strides and which library calls are left."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

import torchkiln

Function = Callable[[torch.Tensor], torch.Tensor]

FORMATS = {2: torch.channels_last, 3: torch.channels_last_3d}
MODES = {
    "nearest": (1, 2, 3),
    "nearest-exact": (1, 2, 3),
    "linear": (1,),
    "bilinear": (2,),
    "trilinear": (3,),
    "bicubic": (2,),
}


def resize(mode: str, **options: Any) -> Function:
    return lambda x: F.interpolate(x, mode=mode, **options)


def gradient(function: Function, x: torch.Tensor, tangent: torch.Tensor) -> torch.Tensor:
    leaf = x.detach().clone().requires_grad_()
    (found,) = torch.autograd.grad(function(leaf), leaf, tangent)
    return found


def compiled(function: Function, **options: Any) -> Function:
    torch._dynamo.reset()
    settings = {"adaptive": False, "fallback": False}
    made: Function = torch.compile(function, backend="kiln", fullgraph=True, options=settings, **options)
    return made


def check(function: Function, x: torch.Tensor, **options: Any) -> None:
    """The gradient is eager's in dtype and strides, and as near to that in float64."""
    tangent = torch.randn_like(function(x))
    expected = gradient(function, x, tangent)
    found = gradient(compiled(function, **options), x, tangent)
    assert (found.dtype, found.shape, found.stride()) == (expected.dtype, expected.shape, expected.stride())
    exact = gradient(function, x.double(), tangent.double())
    allowed = 2 * (expected - exact).abs().max() + 4 * torch.finfo(x.dtype).eps * exact.abs().max()
    assert (found - exact).abs().max() <= allowed


def image(rank: int, *sizes: int, dtype: torch.dtype = torch.float32, last: bool = False) -> torch.Tensor:
    x = torch.randn(2, 3, *sizes[:rank], dtype=dtype)
    return x.to(memory_format=FORMATS[rank]) if last and rank in FORMATS else x


CASES = [(mode, rank) for mode, ranks in MODES.items() for rank in ranks]


@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels last"])
@pytest.mark.parametrize(("mode", "rank"), CASES)
def test_gradients_of_resizes_are_eagers(mode: str, rank: int, last: bool) -> None:
    check(resize(mode, scale_factor=2), image(rank, 5, 6, 4, last=last))
    check(resize(mode, size=(7, 3, 9)[:rank]), image(rank, 5, 6, 4, last=last))
    check(resize(mode, scale_factor=1.7), image(rank, 6, 5, 7, last=last))


@pytest.mark.parametrize("mode", ["linear", "bilinear", "trilinear", "bicubic"])
def test_gradients_with_aligned_corners_are_eagers(mode: str) -> None:
    (rank,) = MODES[mode]
    for sizes in ((9, 4, 5), (1, 1, 1), (3, 8, 2)):
        check(resize(mode, size=sizes[:rank], align_corners=True), image(rank, 4, 6, 3))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize(("mode", "rank"), CASES)
def test_gradients_in_other_precisions_are_eagers(mode: str, rank: int, dtype: torch.dtype) -> None:
    check(resize(mode, size=(11, 9, 7)[:rank]), image(rank, 5, 6, 4, dtype=dtype))


@pytest.mark.parametrize(("mode", "rank"), CASES)
def test_gradients_of_symbolic_sizes_are_eagers(mode: str, rank: int) -> None:
    def double(x: torch.Tensor) -> torch.Tensor:
        return F.interpolate(x, scale_factor=2.0, mode=mode)  # a number from outside would be symbolic, too

    function = compiled(double, dynamic=True)
    before = torchkiln.stats().graphs
    for sizes in ((5, 6, 4), (7, 3, 6), (8, 9, 5)):
        x = image(rank, *sizes)
        tangent = torch.randn_like(double(x))
        torch.testing.assert_close(gradient(function, x, tangent), gradient(double, x, tangent))
    assert torchkiln.stats().graphs - before == 2  # forward and backward, once


@given(data=st.data())
@hypothesis_settings(max_examples=30, deadline=None)
def test_gradients_for_any_pair_of_sizes_are_eagers(data: st.DataObject) -> None:
    mode, rank = data.draw(st.sampled_from(CASES))
    sizes = data.draw(st.lists(st.integers(1, 40 if rank == 1 else 12), min_size=rank, max_size=rank))
    options: dict[str, Any] = {"size": data.draw(st.lists(st.integers(1, 40), min_size=rank, max_size=rank))}
    if data.draw(st.booleans()):
        factors = st.floats(0.3, 3.5).filter(lambda f: all(int(n * f) for n in sizes))
        options = {"scale_factor": data.draw(st.lists(factors, min_size=rank, max_size=rank))}
    if "linear" in mode or mode == "bicubic":
        options["align_corners"] = data.draw(st.booleans())
    function = resize(mode, **options)
    # Strides of a single pixel do not tell a format.
    pixels = min(torch.Size([*sizes, *function(image(rank, *sizes)).shape[2:]]))
    check(function, image(rank, *sizes, last=pixels > 1 and data.draw(st.booleans())))


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize(("mode", "rank"), CASES)
def test_infinite_gradients_reach_what_was_read_and_nothing_else(mode: str, rank: int, value: float) -> None:
    function = resize(mode, scale_factor=2)
    x = image(rank, 5, 6, 4)
    tangent = torch.randn_like(function(x))
    tangent.view(6, -1)[:, 7::13] = value
    torch.testing.assert_close(gradient(compiled(function), x, tangent), gradient(function, x, tangent), equal_nan=True)


def test_a_gradient_of_negative_zeros_has_eagers_sign() -> None:
    for mode, rank in CASES:
        function = resize(mode, scale_factor=2)
        x = image(rank, 3, 4, 2)
        tangent = -torch.zeros_like(function(x))
        found, expected = gradient(compiled(function), x, tangent), gradient(function, x, tangent)
        assert torch.equal(found.signbit(), expected.signbit()), mode


PADS: dict[str, Function] = {
    "reflect": lambda x: F.pad(x, (2, 1, 0, 3), mode="reflect"),
    "replicate": lambda x: F.pad(x, (2, 1, 0, 3), mode="replicate"),
    "circular": lambda x: F.pad(x, (2, 1, 0, 3), mode="circular"),
    "reflect cut": lambda x: F.pad(x, (-1, 2, 1, -2), mode="reflect"),
    "replicate cut": lambda x: F.pad(x, (-1, 2, 1, -2), mode="replicate"),
}


@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels last"])
@pytest.mark.parametrize("name", PADS)
def test_gradients_of_paddings_are_eagers(name: str, last: bool) -> None:
    check(PADS[name], image(2, 5, 6, last=last))


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("mode", ["reflect", "replicate"])
def test_gradients_of_paddings_of_lines_and_volumes_are_eagers(mode: str, dynamic: bool) -> None:
    check(lambda x: F.pad(x, (2, 3), mode=mode), image(1, 6), dynamic=dynamic)
    check(lambda x: F.pad(x, (2, 1, 1, 2, 0, 2), mode=mode), image(3, 6, 5, 4), dynamic=dynamic)
    check(lambda x: F.pad(x, (2, 1, 1, 2, 0, 2), mode=mode), image(3, 6, 5, 4, last=True), dynamic=dynamic)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("window", [(3, 1, 1, 1), (2, 2, 0, 2), ((3, 2), (2, 1), (1, 0), (1, 2))], ids=str)
def test_gradients_of_windows_are_eagers(window: Any, dynamic: bool) -> None:
    kernel, dilation, padding, stride = window
    check(lambda x: F.unfold(x, kernel, dilation, padding, stride), image(2, 7, 9), dynamic=dynamic)
    check(lambda x: F.unfold(x, kernel, dilation, padding, stride), image(2, 7, 9, last=True), dynamic=dynamic)
    columns = F.unfold(image(2, 7, 9), kernel, dilation, padding, stride)
    check(lambda x: F.fold(x, (7, 9), kernel, dilation, padding, stride), columns, dynamic=dynamic)


def test_second_derivatives_of_a_resize_are_eagers() -> None:
    def loss(x: torch.Tensor) -> torch.Tensor:
        return (F.interpolate(x, scale_factor=2, mode="bilinear") ** 3).sum()

    def second(x: torch.Tensor) -> torch.Tensor:
        return torch.func.grad(lambda y: (torch.func.grad(loss)(y) ** 2).sum())(x)

    x = image(2, 3, 4)
    torch.testing.assert_close(compiled(second)(x), second(x))


def test_torchs_kernels_are_back_once_a_trace_has_ended() -> None:
    ops = [torch.ops.aten.upsample_bilinear2d.vec, torch.ops.aten.upsample_nearest2d.default]
    before = [dict(op.py_kernels) for op in ops]
    check(resize("bilinear", scale_factor=2), image(2, 3, 4))
    assert [dict(op.py_kernels) for op in ops] == before
