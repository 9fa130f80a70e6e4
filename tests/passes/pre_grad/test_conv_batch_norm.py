"""Batch norm folded into a convolution: values and gradients of eager, and where it must not be done."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.passes.pre_grad.captured import assert_same, capture, text
from torchkiln.canonicalize.torch_calls import normalize_calls
from torchkiln.passes.pre_grad import remove_dead_code
from torchkiln.passes.pre_grad.conv_batch_norm import fold_batch_norms

Tensor = torch.Tensor


def _parameters(channels: int = 4, *, gradients: bool = True, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """An image, weight and bias of a convolution, mean, variance, weight and bias of a norm."""
    values = [
        *(torch.randn(2, 3, 24, 24), torch.randn(channels, 3, 3, 3), torch.randn(channels)),
        *(torch.randn(channels), torch.rand(channels) + 0.5, torch.randn(channels), torch.randn(channels)),
    ]
    needs = [True, True, True, False, False, True, True]
    return [value.to(dtype).requires_grad_(gradients and need) for value, need in zip(values, needs, strict=True)]


def _plain(x: Tensor, w: Tensor, b: Tensor, mean: Tensor, var: Tensor, g: Tensor, s: Tensor) -> Tensor:
    return F.batch_norm(F.conv2d(x, w, b), mean, var, g, s, eps=1e-3)


def _pass(function: Callable[..., Any], *inputs: Any, dynamic: bool = False) -> tuple[bool, str]:
    gm = capture(function, *inputs, dynamic=dynamic)
    normalize_calls(gm)
    for name, node in zip("xwbmvgs", gm.graph.find_nodes(op="placeholder"), strict=False):
        if not dynamic:
            node._rename(name)
    changed = fold_batch_norms(gm)
    remove_dead_code(gm)
    if not dynamic:
        assert_same(gm, function, *inputs, rtol=1e-4, atol=1e-4)
    return changed, text(gm)


def test_the_norm_is_applied_to_the_weights() -> None:
    assert _pass(_plain, *_parameters()) == (
        True,
        """add = add(v, 0.001)
rsqrt = rsqrt(add)
mul = mul(g, rsqrt)
reshape = reshape(mul, shape=(-1, 1, 1, 1))
mul_1 = mul(w, reshape)
sub = sub(b, m)
mul_2 = mul(sub, mul)
add_1 = add(mul_2, s)
conv2d_1 = conv2d(x, mul_1, add_1, stride=1, padding=0, dilation=1, groups=1)
return (conv2d_1,)""",
    )


@pytest.mark.parametrize(
    "function",
    [
        lambda x, w, b, m, v, g, s: F.batch_norm(F.conv2d(x, w), m, v),
        lambda x, w, b, m, v, g, s: F.batch_norm(F.conv2d(x, w, None, 2, 1), m, v, g),
        lambda x, w, b, m, v, g, s: F.max_pool2d(F.batch_norm(F.conv2d(x, w, b), m, v, None, s), 2),
        lambda x, w, b, m, v, g, s: F.batch_norm(F.conv1d(x[:, :, 0], w[:, :, 0], b), m, v, g, s),
        lambda x, w, b, m, v, g, s: F.batch_norm(F.conv2d(x[:, :1], w[:3, :1], b[:3]), m[:3], v[:3], g[:3], s[:3]),
    ],
)
def test_parts_may_be_missing(function: Callable[..., Any]) -> None:
    assert _pass(function, *_parameters())[0]


def _train(x: Tensor, w: Tensor, b: Tensor, m: Tensor, v: Tensor, g: Tensor, s: Tensor) -> Tensor:
    return F.batch_norm(F.conv2d(x, w, b), m, v, g, s, training=True)


def _two_readers(x: Tensor, w: Tensor, b: Tensor, m: Tensor, v: Tensor, g: Tensor, s: Tensor) -> tuple[Tensor, ...]:
    y = F.conv2d(x, w, b)
    return y, F.batch_norm(y, m, v, g, s)


def _written_between(x: Tensor, w: Tensor, b: Tensor, m: Tensor, v: Tensor, g: Tensor, s: Tensor) -> Tensor:
    y = F.conv2d(x, w, b)
    w.mul_(2)
    return F.batch_norm(y, m, v, g, s)


def _image_written_between(x: Tensor, w: Tensor, b: Tensor, m: Tensor, v: Tensor, g: Tensor, s: Tensor) -> Tensor:
    image = x * 2
    y = F.conv2d(image, w, b)
    image.add_(1)
    return F.batch_norm(y, m, v, g, s) + image.sum()


def _conv_without_gradient(x: Tensor, w: Tensor, b: Tensor, m: Tensor, v: Tensor, g: Tensor, s: Tensor) -> Tensor:
    with torch.no_grad():
        y = F.conv2d(x, w, b)
    return F.batch_norm(y, m, v, g, s)


def _followed_by_pointwise(x: Tensor, w: Tensor, b: Tensor, m: Tensor, v: Tensor, g: Tensor, s: Tensor) -> Tensor:
    return F.batch_norm(F.conv2d(x, w, b), m, v, g, s).relu()


def _one_image(x: Tensor, w: Tensor, b: Tensor, m: Tensor, v: Tensor, g: Tensor, s: Tensor) -> Tensor:
    y = F.conv2d(x[0, :, :, :6], w, b)  # 4 x 22 x 4, of which the norm takes the second for channels
    return F.batch_norm(y, m.new_zeros(22), v.new_ones(22))


@pytest.mark.parametrize(
    "function",
    [
        _train,
        _two_readers,
        _written_between,
        _image_written_between,
        _conv_without_gradient,
        _followed_by_pointwise,
        _one_image,
        lambda x, w, b, m, v, g, s: F.batch_norm(F.conv2d(x[:, :, :4, :4], w, b), m, v, g, s),  # weights as large
        lambda x, w, b, m, v, g, s: F.batch_norm(F.conv_transpose2d(x, w[:3], b[:3]), m[:3], v[:3]),
    ],
)
def test_others_stay(function: Callable[..., Any]) -> None:
    # Eager refuses backward where its inputs are written in between.
    written = function in (_written_between, _image_written_between)
    assert not _pass(function, *_parameters(gradients=not written))[0]


def test_half_precision_stays() -> None:
    assert not _pass(_plain, *_parameters(gradients=False, dtype=torch.bfloat16))[0]


def test_sizes_known_at_run_time_stay() -> None:
    assert not _pass(_plain, *_parameters(), dynamic=True)[0]


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
        self.pool = nn.MaxPool2d(2)

    def forward(self, x: Tensor) -> Tensor:
        return self.pool(self.norm(self.conv(x)))


def _net() -> _Net:
    net = _Net()
    for _ in range(3):
        net(torch.randn(8, 3, 12, 12) * 2 + 1)
    nn.init.normal_(net.norm.weight)
    nn.init.normal_(net.norm.bias)
    return net


def test_compiled_gradients_follow_eager_and_so_do_changed_parameters(compile_strictly: Callable[..., Any]) -> None:
    net = _net().eval()
    compiled = compile_strictly(net)
    x = torch.randn(2, 3, 12, 12)
    for _ in range(2):
        expected = net(x)
        result = compiled(x)
        torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-4)
        parameters = list(net.parameters())
        gradients = torch.autograd.grad(result.square().sum(), parameters)
        for got, want in zip(gradients, torch.autograd.grad(expected.square().sum(), parameters), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)
        with torch.no_grad():  # the same code sees other parameters and statistics
            net.norm.weight.mul_(1.5)
            net.norm.running_var.mul_(0.7)
            net.conv.weight.add_(0.1)


def test_compiled_training_mode_updates_statistics(compile_strictly: Callable[..., Any]) -> None:
    net, reference = _net(), _net()
    reference.load_state_dict(net.state_dict())
    compiled, x = compile_strictly(net), torch.randn(4, 3, 12, 12)
    torch.testing.assert_close(compiled(x), reference(x), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(net.norm.running_mean, reference.norm.running_mean)
    net.eval(), reference.eval()
    torch.testing.assert_close(compiled(x), reference(x), rtol=1e-4, atol=1e-4)
    assert net.norm.num_batches_tracked == reference.norm.num_batches_tracked
