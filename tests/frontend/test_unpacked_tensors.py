"""Saved tensors as hooks unpack them: with other strides than they were saved with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

import torchkiln.runtime.executable
from torchkiln.native.tensor_layout import LayoutCheck

pytestmark = pytest.mark.usefixtures("everything_compiled")


def _permuted(x: Tensor) -> Tensor:
    """The same values with the dimensions in the opposite order in memory."""
    order = tuple(reversed(range(x.dim())))
    return x.permute(order).contiguous().permute(order)


def _channels_last(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x


def _apart(x: Tensor) -> Tensor:
    """With gaps between the elements, and not at the start of the storage."""
    return torch.stack((x, x), -1)[..., 1]


UNPACKED: list[Callable[[Tensor], Tensor]] = [Tensor.contiguous, _permuted, _channels_last, _apart]


def _products(x: Tensor, w: Tensor) -> Tensor:
    y = x.sin()
    return (y.flatten(1) @ w).tanh().exp() * y.sum()


def _images(x: Tensor, w: Tensor) -> Tensor:
    images = torch.nn.functional.conv2d(x, w.view(4, 3, 3, 3).relu())
    return torch.nn.functional.gelu(images).softmax(1)


def _check(
    step: Callable[..., Tensor],
    compiled: Callable[..., Tensor],
    unpack: Callable[[Tensor], Tensor],
    batches: tuple[int, ...] = (4, 4),
) -> None:
    for batch in batches:
        x = torch.randn(batch, 3, 6, 6, dtype=torch.float64).transpose(2, 3)
        w = (torch.randn(4, 27) if step is _images else torch.randn(5, 108).t()).double()
        mine, eagers = [[t.detach().requires_grad_() for t in (x, w)] for _ in range(2)]
        with saved_tensors_hooks(lambda saved: saved, unpack):
            result = compiled(*mine)
        expected = step(*eagers)
        gradient = torch.randn_like(expected)
        result.backward(gradient)
        expected.backward(gradient)
        for one, other in zip(mine, eagers, strict=True):
            torch.testing.assert_close(one.grad, other.grad)
            assert one.grad is not None
            assert other.grad is not None
            assert one.grad.stride() == other.grad.stride()


@pytest.mark.parametrize("step", [_products, _images])
@pytest.mark.parametrize("unpack", UNPACKED)
def test_strides_of_unpacked_tensors_do_not_matter(
    compile_strictly: Callable[..., Any], step: Callable[..., Tensor], unpack: Callable[[Tensor], Tensor]
) -> None:
    _check(step, compile_strictly(step), unpack)


def test_strides_do_not_matter_where_sizes_are_symbolic() -> None:
    options: Any = {"fallback": False}
    compiled = torch.compile(_products, backend="kiln", fullgraph=True, dynamic=True, options=options)
    for unpack in UNPACKED:
        _check(_products, compiled, unpack, batches=(4, 7))


def test_strides_do_not_matter_to_graphs_called_through_handles(
    compile_strictly: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    unusable = LayoutCheck(usable=False, reason="not looked at")
    monkeypatch.setattr(torchkiln.runtime.executable, "check_layout", lambda: unusable)
    _check(_products, compile_strictly(_products), _permuted)


def test_a_copy_is_used_again_in_place_of_the_unpacked_tensor(compile_strictly: Callable[..., Any]) -> None:
    """Large saved values give their memory to later ones, which nobody who holds the unpacked tensor may see."""

    def chain(x: Tensor) -> Tensor:
        for _ in range(4):
            x = (x @ x).sigmoid().cumsum(0).softmax(1)
        return x

    held: list[tuple[Tensor, Tensor]] = []

    def unpack(saved: Tensor) -> Tensor:
        given = _permuted(saved)
        held.append((given, given.clone()))
        return given

    compiled = compile_strictly(chain)
    for _ in range(3):
        x = torch.randn(128, 128, dtype=torch.float64)
        mine, eagers = x.clone().requires_grad_(), x.clone().requires_grad_()
        with saved_tensors_hooks(lambda saved: saved, unpack):
            result = compiled(mine)
        result.sum().backward()
        chain(eagers).sum().backward()
        torch.testing.assert_close(mine.grad, eagers.grad)
    assert held
    for given, before in held:
        torch.testing.assert_close(given, before, rtol=0, atol=0)


@pytest.mark.parametrize(
    "change", [Tensor.double, lambda t: t[1:], lambda t: t.unsqueeze(0)], ids=["dtype", "size", "dim"]
)
def test_other_differences_are_still_refused(
    compile_strictly: Callable[..., Any], change: Callable[[Tensor], Tensor]
) -> None:
    x = torch.randn(4, 4, requires_grad=True)
    with saved_tensors_hooks(lambda saved: saved, change):
        result = compile_strictly(lambda x: x.sin().exp())(x)
    with pytest.raises(RuntimeError, match="is not a tensor of the type, sizes and strides"):
        result.sum().backward()
