"""Convolutions with channels last, of 1 x 1 or small images as matmuls, and depthwise gradients as loops."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import torchkiln
from tests.passes.joint.graphs import check_same, text, trace
from torchkiln.config import Settings
from torchkiln.graph.fake import is_symbolic, same_metadata
from torchkiln.graph.strides import returned_values
from torchkiln.graph.weights import mark_weights
from torchkiln.passes.joint import channels_last, im2col, pointwise_convolutions
from torchkiln.passes.joint.convolutions import has_channels_last
from torchkiln.passes.joint.depthwise_gradients import sum_depthwise_gradients
from torchkiln.target import Target, capture_target

aten = torch.ops.aten
# Convolutions of inference stay convolutions where their weights are packed.
UNPACKED = {"fallback": False, "prepare_weights": False}
TARGET = capture_target(Settings())
put_channels_last = partial(channels_last.put_channels_last, target=TARGET)
apply_im2col = partial(im2col.apply_im2col, target=TARGET)
replace_pointwise_convolutions = partial(pointwise_convolutions.replace_pointwise_convolutions, target=TARGET)


def _operators(gm: torch.fx.GraphModule) -> list[str]:
    return [line.split(" = ")[1].split("(")[0].removeprefix("aten.").split(".")[0] for line in text(gm)]


def _strides(tensor: Tensor) -> list[int]:
    """Those that say where elements lie."""
    return [stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size != 1]


def _close(found: Sequence[Tensor | None], expected: Sequence[Tensor | None]) -> None:
    for mine, theirs in zip(found, expected, strict=True):
        assert mine is not None
        assert theirs is not None
        assert (mine.dtype, mine.shape, _strides(mine)) == (theirs.dtype, theirs.shape, _strides(theirs))
        scale = theirs.abs().max().item() if theirs.numel() else 0.0
        tolerance = 1e-5 if theirs.dtype == torch.float32 else 2e-2
        torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance * scale)


def _step(function: Callable[[Tensor], Tensor], module: nn.Module, image: Tensor) -> list[Tensor | None]:
    """What a training step gives: the result and the gradients of image and parameters."""
    image = image.detach().requires_grad_()
    module.zero_grad(set_to_none=True)
    result = function(image)
    torch.manual_seed(7)
    (result * torch.randn_like(result)).sum().backward()
    return [result.detach(), image.grad, *(parameter.grad for parameter in module.parameters())]


def _compare(module: nn.Module, image: Tensor) -> None:
    compiled = torch.compile(module, backend="kiln", options={"fallback": False})
    with torch.no_grad():
        _close([compiled(image)], [module(image)])
    _close(_step(compiled, module, image), _step(module, module, image))


# -- the layout ---------------------------------------------------------------------------------------------------


def _two(x: Tensor, v: Tensor, w: Tensor) -> Tensor:
    return F.conv2d(F.conv2d(x, v, padding=1).relu(), w, padding=1)


# The image and both weights, the result at the end, and nothing else between the two convolutions.
TURNED_ONCE = ["clone", "clone", "convolution", "relu", "clone", "convolution", "permute", "clone", "permute"]


def test_the_image_is_converted_once_and_the_result_back() -> None:
    gm = trace(_two, torch.randn(2, 3, 16, 16), torch.randn(8, 3, 3, 3), torch.randn(4, 8, 3, 3))
    expected = gm(*(given := (torch.randn(2, 3, 16, 16), torch.randn(8, 3, 3, 3), torch.randn(4, 8, 3, 3))))
    assert put_channels_last(gm)
    assert _operators(gm) == TURNED_ONCE
    gm.recompile()
    _close([gm(*given)], [expected])


def test_it_is_not_done_where_weights_are_larger_than_images() -> None:
    assert not put_channels_last(
        trace(_two, torch.randn(1, 3, 8, 8), torch.randn(64, 3, 3, 3), torch.randn(64, 64, 3, 3))
    )


def test_weights_that_are_converted_when_they_change_count_nothing() -> None:
    given = torch.randn(1, 3, 20, 20), torch.randn(64, 3, 3, 3), torch.randn(64, 64, 3, 3)
    gm = trace(_two, *given)
    assert not put_channels_last(gm)
    mark_weights(gm.graph, [1, 2])
    assert put_channels_last(gm)
    assert _operators(gm) == TURNED_ONCE
    gm.recompile()
    _close([gm(*given)], [_two(*given)])


@pytest.mark.parametrize(
    ("given", "weight"),
    [((2, 4, 9), (4, 4, 3)), ((2, 4, 5, 6, 7), (4, 4, 3, 3, 3))],
    ids=["one dimension", "three dimensions"],
)
def test_other_dimensions_stay_as_they_are(given: tuple[int, ...], weight: tuple[int, ...]) -> None:
    assert not put_channels_last(
        trace(
            lambda x, w: aten.convolution(
                x, w, None, [1] * (x.dim() - 2), [0] * (x.dim() - 2), [1] * (x.dim() - 2), False, [0] * (x.dim() - 2), 1
            ),
            torch.randn(given),
            torch.randn(weight),
        )
    )


def test_transposed_convolutions_and_double_precision_stay_as_they_are() -> None:
    x, w = torch.randn(2, 4, 16, 16), torch.randn(4, 4, 3, 3)
    assert not put_channels_last(trace(F.conv_transpose2d, x, w))
    assert not put_channels_last(trace(lambda *given: F.conv2d(*given).sum(), x.double(), w.double()))
    assert put_channels_last(trace(lambda *given: F.conv2d(*given).sum(), x, w))


def test_an_image_that_has_its_channels_last_is_not_copied() -> None:
    x, w = torch.randn(2, 4, 16, 16).to(memory_format=torch.channels_last), torch.randn(4, 4, 3, 3)
    gm = trace(F.conv2d, x, w)
    assert put_channels_last(gm)
    assert _operators(gm) == ["clone", "convolution"]  # that of the weight


def _alone(x: Tensor, w: Tensor) -> Tensor:
    return F.conv2d(x, w, padding=1)


ZEN4 = replace(TARGET, cpu="znver4", vector_bits=512, packs=frozenset({"float32", "bfloat16"}))
ZEN5 = replace(ZEN4, cpu="znver5")


@pytest.mark.parametrize("target", [ZEN4, ZEN5, replace(TARGET, cpu="sapphirerapids")], ids=lambda target: target.cpu)
def test_one_convolution_between_two_conversions_is_left_to_the_library(target: Target) -> None:
    x, w = torch.randn(2, 8, 16, 16), torch.randn(8, 8, 3, 3)
    convert = partial(channels_last.put_channels_last, target=target)
    assert not convert(trace(_alone, x, w))
    # Where the library converts at more cost than we do, or copies the image before it does.
    assert convert(trace(_alone, x.bfloat16(), w.bfloat16()))
    assert convert(trace(lambda x, w: _alone(x.transpose(2, 3), w), x, w))
    # Where one of the conversions is none, or part of a kernel.
    assert convert(trace(_alone, x.to(memory_format=torch.channels_last), w))
    assert convert(trace(lambda x, w: _alone(x, w).mean((2, 3)), x, w))
    assert convert(trace(lambda x, w: _alone(x.sin(), w).relu(), x, w))


def test_gradients_of_one_convolution_are_left_to_the_library() -> None:
    def function(x: Tensor, w: Tensor, gradient: Tensor) -> tuple[Tensor, ...]:
        window = [1, 1], [1, 1], [1, 1]
        gradients = aten.convolution_backward(gradient, x, w, None, *window, False, [0, 0], 1, [True, True, False])
        return _alone(x, w), gradients[0], gradients[1]

    x, w = torch.randn(2, 8, 16, 16), torch.randn(8, 8, 3, 3)
    assert not put_channels_last(trace(function, x, w, torch.randn(2, 8, 16, 16)))


def test_one_pointwise_convolution_is_converted_where_onednn_multiplies() -> None:
    x, w = torch.randn(2, 64, 8, 8), torch.randn(32, 64, 1, 1)
    convert = channels_last.put_channels_last
    assert convert(trace(F.conv2d, x, w), ZEN5)
    assert not convert(trace(F.conv2d, x, w), ZEN4)
    few = torch.randn(2, 2, 8, 8), torch.randn(2, 2, 1, 1)
    assert not convert(trace(F.conv2d, *few), ZEN5)  # too little to multiply


def _with_gradients(x: Tensor, w: Tensor, gradient: Tensor) -> tuple[Tensor, ...]:
    window = [1, 1], [0, 0], [1, 1]
    gradients = aten.convolution_backward(gradient, x, w, None, *window, False, [0, 0], 1, [True, True, False])
    return F.conv2d(x, w), gradients[0], gradients[1]


def test_pointwise_convolutions_that_onednn_does_not_multiply_save_a_copy_of_the_image_at_most() -> None:
    x, w, gradient = torch.randn(2, 64, 8, 8), torch.randn(32, 64, 1, 1), torch.randn(2, 32, 8, 8)
    convert = channels_last.put_channels_last
    permuted = x.transpose(1, 2).contiguous().transpose(1, 2)
    assert not convert(trace(F.conv2d, permuted, w), ZEN4)
    assert convert(trace(F.conv2d, permuted, w), replace(TARGET, cpu="sapphirerapids"))
    # With gradients most matmuls are BLAS's.
    assert not convert(trace(_with_gradients, x, w, gradient), ZEN5)
    assert not convert(trace(_with_gradients, permuted, w, gradient), ZEN5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("target", [ZEN4, ZEN5, replace(TARGET, cpu="sapphirerapids")], ids=lambda target: target.cpu)
def test_an_image_that_would_be_gathered_is_left_to_the_library(target: Target, dtype: torch.dtype) -> None:
    x, w = torch.randn(2, 8, 16, 32).to(dtype), torch.randn(8, 8, 3, 3).to(dtype)
    convert = partial(channels_last.put_channels_last, target=target)
    assert not convert(trace(_alone, x[..., ::2], w))
    assert convert(trace(_alone, x.transpose(2, 3)[..., ::2], w))
    # A kernel that computes the image gathers nothing: it has its own layout.
    assert convert(trace(lambda x, w: _alone(x.sin(), w).relu(), x[..., ::2], w))


class _Network(nn.Module):
    """The kinds of convolution there are, with norms, pooling, a residual and views in between."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 7, stride=2, padding=3, bias=False)  # a norm has no use for it
        self.norm = nn.BatchNorm2d(8)
        self.wide = nn.Conv2d(8, 16, 1)
        self.depthwise = nn.Conv2d(16, 16, 7, padding=3, groups=16)
        self.narrow = nn.Conv2d(16, 8, 1, bias=False)
        self.down = nn.Conv2d(8, 12, 1, stride=2)
        self.grouped = nn.Conv2d(12, 12, 3, padding=2, dilation=2, groups=3)
        self.head = nn.Linear(12, 5)

    def forward(self, image: Tensor) -> Tensor:
        x = F.max_pool2d(self.norm(self.first(image)).relu(), 2)
        x = x + self.narrow(F.gelu(self.depthwise(self.wide(x))))
        x = F.layer_norm(self.grouped(self.down(x)).permute(0, 2, 3, 1), (12,))
        result: Tensor = self.head(x.flatten(1, 2)).mean(1)
        return result


@pytest.mark.parametrize("training", [False, True])
def test_a_network_gives_what_eager_gives(training: bool) -> None:
    torch.manual_seed(0)
    _compare(_Network().train(training), torch.randn(3, 3, 40, 36))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_depthwise_blocks_in_other_types(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(6, 6, 5, padding=2, groups=6), nn.Conv2d(6, 6, 1)).to(dtype)
    _compare(module, torch.randn(2, 6, 17, 15).to(dtype))


def test_an_output_in_the_middle_keeps_eagers_strides() -> None:
    torch.manual_seed(0)
    first, second = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 1)

    def function(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        middle = first(x)
        return middle, middle.transpose(1, 3), second(middle)

    x = torch.randn(2, 3, 20, 20)
    with torch.no_grad():
        _close(torch.compile(function, backend="kiln", options={"fallback": False})(x), function(x))


def test_random_numbers_are_drawn_in_eagers_order() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Dropout(0.5), nn.Conv2d(4, 4, 3)).train()
    compiled = torch.compile(module, backend="kiln", options={"fallback": False, "rng": "eager"})
    x = torch.randn(2, 3, 12, 12)
    torch.manual_seed(3)
    found = compiled(x)
    torch.manual_seed(3)
    _close([found.detach()], [module(x).detach()])


# -- matmuls --------------------------------------------------------------------------------------------------------


def _last(*shape: int) -> Tensor:
    return torch.randn(shape).to(memory_format=torch.channels_last)


def test_a_pointwise_convolution_is_a_matmul_and_a_sum() -> None:
    given = _last(2, 8, 5, 6), _last(4, 8, 1, 1), torch.randn(4)
    gm = trace(F.conv2d, *given)
    assert replace_pointwise_convolutions(gm)
    assert _operators(gm) == ["permute", "view", "view", "permute", "mm", "view", "permute", "view", "add"]
    check_same(gm, F.conv2d, *given)


@pytest.mark.parametrize(
    "call",
    [
        lambda x, w: F.conv2d(x, w, stride=2),
        lambda x, w: F.conv2d(x, w, padding=1),
        lambda x, w: F.conv2d(x, w[:, :4], groups=2),
        lambda x, w: F.conv2d(x.contiguous(), w),
        lambda x, w: F.conv2d(x.half(), w.half()),
    ],
    ids=["stride", "padding", "groups", "row by row", "float16"],
)
def test_others_are_not(call: Callable[[Tensor, Tensor], Tensor]) -> None:
    assert not replace_pointwise_convolutions(trace(call, _last(2, 8, 5, 6), _last(4, 8, 1, 1)))


def test_in_half_precision_the_bias_is_added_before_the_sum_is_rounded() -> None:
    given = _last(2, 8, 5, 6).bfloat16(), _last(4, 8, 1, 1).bfloat16(), torch.randn(4).bfloat16()
    gm = trace(F.conv2d, *given)
    assert replace_pointwise_convolutions(gm)
    assert _operators(gm) == ["permute", "view", "view", "permute", "addmm", "view", "permute"]
    # A sum of 257 is no bfloat16 number: rounded before the bias is added, it would be 256.
    x, w, b = torch.ones(2, 257, 5, 6), torch.ones(4, 257, 1, 1), torch.full((4,), -256.0)
    module = nn.Conv2d(257, 4, 1).to(torch.bfloat16)
    with torch.no_grad():
        module.weight.copy_(w)
        assert module.bias is not None
        module.bias.copy_(b)
        image = x.bfloat16().to(memory_format=torch.channels_last)
        found = torch.compile(module, backend="kiln", options={"fallback": False})(image)
    assert torch.equal(found, torch.ones_like(found))


def test_one_matmul_after_the_other() -> None:
    given = _last(2, 8, 5, 6), _last(4, 8, 1, 1), _last(3, 4, 1, 1)

    def function(x: Tensor, v: Tensor, w: Tensor) -> Tensor:
        return F.conv2d(F.conv2d(x, v), w)

    gm = trace(function, *given)
    assert replace_pointwise_convolutions(gm)
    assert _operators(gm).count("mm") == 2
    check_same(gm, function, *given)
    module = nn.Sequential(nn.Conv2d(8, 16, 1), nn.BatchNorm2d(16), nn.Conv2d(16, 8, 1), nn.Conv2d(8, 8, 7, groups=8))
    _compare(module.eval(), torch.randn(2, 8, 24, 24))


@pytest.mark.parametrize("wanted", [[True, True, True], [False, True, False], [True, False, True]])
def test_gradients_of_pointwise_convolutions_are_matmuls(wanted: list[bool]) -> None:
    given = _last(2, 4, 5, 6), _last(2, 8, 5, 6), _last(4, 8, 1, 1)

    def function(g: Tensor, x: Tensor, w: Tensor) -> list[Tensor]:
        found = aten.convolution_backward(g, x, w, [4], [1, 1], [0, 0], [1, 1], False, [0, 0], 1, wanted)
        return [part for part in found if part is not None]

    gm = trace(function, *given)
    assert replace_pointwise_convolutions(gm)
    assert _operators(gm).count("mm") == wanted[0] + wanted[1]
    assert "convolution_backward" not in _operators(gm)
    gm.recompile()
    _close(gm(*given), function(*given))


# -- im2col ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weight_last", [False, True], ids=["weight row by row", "weight with channels last"])
@pytest.mark.parametrize(
    ("window", "stride", "padding"),
    [((3, 3), (1, 1), (1, 1)), ((3, 2), (2, 1), (0, 2)), ((1, 1), (2, 2), (0, 0)), ((1, 1), (1, 1), (1, 0))],
)
@pytest.mark.parametrize("biased", [False, True])
def test_small_images_take_im2col(
    window: tuple[int, int],
    stride: tuple[int, int],
    padding: tuple[int, int],
    weight_last: bool,
    biased: bool,
    dtype: torch.dtype,
) -> None:
    torch.manual_seed(0)
    x, w = _last(2, 6, 4, 5).to(dtype), torch.randn(128, 6, *window).to(dtype)
    b = torch.randn(128).to(dtype) if biased else None
    w = w.to(memory_format=torch.channels_last) if weight_last else w

    def function(x: Tensor, w: Tensor, *b: Tensor) -> Tensor:
        return F.conv2d(x, w, *b, stride=stride, padding=padding).relu()

    given = (x, w) if b is None else (x, w, b)
    gm = trace(function, *given)
    assert apply_im2col(gm)
    assert "convolution" not in _operators(gm)
    gm.recompile()
    _close([gm(*given)], [function(*given)])


def test_what_im2col_inserts() -> None:
    gm = trace(lambda x, w: F.conv2d(x, w, padding=1).relu(), _last(1, 4, 3, 3), torch.randn(32, 4, 3, 3))
    assert apply_im2col(gm)
    written = ["constant_pad_nd", "unfold", "unfold", "permute", "clone", "view"]
    assert _operators(gm) == [*written, "view", "permute", "mm", "view", "permute", "relu"]


@pytest.mark.parametrize(
    "call",
    [
        lambda x, w: F.conv2d(x.repeat(9, 1, 1, 1).contiguous(memory_format=torch.channels_last), w),
        lambda x, w: F.conv2d(x, w[:, :3].contiguous(), groups=2),
        lambda x, w: F.conv2d(x, w, dilation=2, padding=2),
        lambda x, w: F.conv2d(x, w[:, :, :1, :1].contiguous()),
        lambda x, w: F.conv2d(x, w[:, :, ::2, :]),
        lambda x, w: F.conv2d(x.contiguous(), w),
        lambda x, w: F.conv2d(x.half(), w.half()),
        lambda x, w: F.conv2d(x.double(), w.double()),
    ],
    ids=["large", "groups", "dilation", "one pixel", "weights with gaps", "row by row", "float16", "float64"],
)
def test_others_do_not_take_im2col(call: Callable[[Tensor, Tensor], Tensor]) -> None:
    x, w = _last(2, 6, 5, 5), torch.randn(64, 6, 3, 3)
    assert apply_im2col(trace(F.conv2d, x, w))
    assert not apply_im2col(trace(call, x, w))


def test_im2col_wants_more_channels_on_processors_of_amd() -> None:
    x, w = _last(2, 6, 5, 5), torch.randn(30, 6, 3, 3)  # 18 pixels
    apply = im2col.apply_im2col
    assert apply(trace(F.conv2d, x, w), replace(TARGET, cpu="sapphirerapids"))
    assert not apply(trace(F.conv2d, x, w), ZEN5)
    assert apply(trace(F.conv2d, x, w.repeat(2, 1, 1, 1)), ZEN5)


def test_weights_that_matmuls_read_are_not_converted() -> None:
    """By themselves they would be too many for the channels to be put last."""
    x, v, w = torch.randn(1, 3, 16, 16), torch.randn(8, 3, 3, 3), torch.randn(256, 8, 3, 3)

    def function(x: Tensor, v: Tensor, w: Tensor) -> Tensor:
        return F.conv2d(F.conv2d(x, v, padding=1).relu(), w, stride=4).sum((2, 3))

    gm = trace(function, x, v, w)
    assert put_channels_last(gm)
    assert _operators(gm) == ["clone", "clone", "convolution", "relu", "convolution", "sum"]
    assert apply_im2col(gm)
    assert "clone" in _operators(gm)[3:]
    gm.recompile()
    _close([gm(x, v, w)], [function(x, v, w)])


def test_weights_that_a_backward_turns_count() -> None:
    x, v, w = torch.randn(1, 3, 16, 16), torch.randn(8, 3, 3, 3), torch.randn(256, 8, 3, 3)

    def function(x: Tensor, v: Tensor, w: Tensor) -> Tensor:
        middle = F.conv2d(x, v, padding=1).relu()
        result = F.conv2d(middle, w, stride=4)
        window = [4, 4], [0, 0], [1, 1]
        return aten.convolution_backward(result, middle, w, None, *window, False, [0, 0], 1, [True, False, False])[0]

    assert not put_channels_last(trace(function, x, v, w))


class _Narrowing(nn.Module):
    """Images become small and weights large, as they do towards the end of a network for images."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.narrow = nn.Conv2d(8, 64, 3, stride=4, padding=1, bias=False)
        self.short = nn.Conv2d(8, 64, 1, stride=4)
        self.last = nn.Conv2d(64, 64, 3, padding=1)
        self.mixed = nn.Conv2d(64, 12, 1)

    def forward(self, image: Tensor) -> Tensor:
        x = F.max_pool2d(self.norm(self.wide(image)).relu(), 2)
        result: Tensor = self.mixed(self.last((self.narrow(x) + self.short(x)).relu()).relu())
        return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_network_of_small_images_gives_what_eager_gives(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    module = _Narrowing().to(dtype).eval()
    before = dict(torchkiln.stats().extern_calls)
    image = torch.randn(1, 3, 24, 24).to(dtype)
    with torch.no_grad():
        _close([torch.compile(module, backend="kiln", options=UNPACKED)(image)], [module(image)])
    calls = torchkiln.stats().extern_calls["aten.convolution.default"] - before.get("aten.convolution.default", 0)
    assert calls == 1  # the first
    torch._dynamo.reset()
    _compare(module, image)


def test_one_compilation_applies_im2col_to_images_of_all_sizes() -> None:
    torch.manual_seed(0)
    module = _Narrowing().eval()
    compiled = torch.compile(module, backend="kiln", dynamic=True, options=UNPACKED)
    before = torchkiln.stats()
    with torch.no_grad():
        for shape in [(2, 3, 24, 24), (3, 3, 32, 32), (5, 3, 40, 40)]:
            image = torch.randn(shape)
            _close([compiled(image)], [module(image)])
    after = torchkiln.stats()
    assert [graph.kind for graph in after.by_graph[len(before.by_graph) :]] == ["inference"]
    calls = after.extern_calls["aten.convolution.default"] - before.extern_calls.get("aten.convolution.default", 0)
    assert calls == 1


@pytest.mark.parametrize("given", [{"stride": [2]}, {"padding": [1]}, {"stride": [2], "padding": [1]}])
def test_one_number_for_height_and_width(given: dict[str, list[int]]) -> None:
    x, w = _last(2, 6, 5, 5), torch.randn(128, 6, 3, 3)
    gm = trace(lambda x, w: F.conv2d(x, w, **given), x, w)
    assert apply_im2col(gm)
    gm.recompile()
    _close([gm(x, w)], [F.conv2d(x, w, **given)])


@pytest.mark.parametrize(
    ("sizes", "apply"), [((64, 6, 3, 3), apply_im2col), ((64, 6, 1, 1), replace_pointwise_convolutions)]
)
def test_less_precise_matmuls_are_not_for_convolutions(sizes: tuple[int, ...], apply: Callable[..., bool]) -> None:
    x, w = _last(2, 6, 5, 5), torch.randn(sizes)
    assert apply(trace(F.conv2d, x, w))
    torch.set_float32_matmul_precision("medium")
    try:
        assert not apply(trace(F.conv2d, x, w), target=capture_target(Settings()))
    finally:
        torch.set_float32_matmul_precision("highest")


def test_data_dependent_counts_of_images_do_not_take_im2col() -> None:
    """Nothing is known of their number, and all that the windows cover would be written out."""
    environment = ShapeEnv()
    graph = torch.fx.Graph()
    x, w = graph.placeholder("x"), graph.placeholder("w")
    window = [1, 1], [0, 0], [1, 1], False, [0, 0], 1
    node = graph.call_function(aten.convolution.default, (x, w, None, *window))
    graph.output((node,))
    with FakeTensorMode(shape_env=environment):
        count = environment.create_unbacked_symint()
        torch._check(count >= 2)
        x.meta["val"] = torch.empty_strided((count, 6, 5, 5), (150, 1, 30, 6))
        w.meta["val"] = torch.empty(64, 6, 3, 3)
        node.meta["val"] = torch.empty_strided((count, 64, 3, 3), (576, 1, 192, 64))
    assert has_channels_last(x)
    assert not apply_im2col(torch.fx.GraphModule(nn.Module(), graph))


# -- gradients of depthwise weights ---------------------------------------------------------------------------------


@pytest.mark.parametrize("padding", [(0, 0), (3, 3), (1, 4)])
@pytest.mark.parametrize("window", [(7, 7), (2, 6), (11, 1)])
def test_gradients_of_large_depthwise_windows(window: tuple[int, int], padding: tuple[int, int]) -> None:
    torch.manual_seed(0)
    x, w = _last(2, 6, 13, 12), _last(6, 1, *window)
    g = torch.randn_like(aten.convolution(x, w, None, [1, 1], padding, [1, 1], False, [0, 0], 6))

    def function(g: Tensor, x: Tensor, w: Tensor) -> list[Tensor]:
        window = [1, 1], padding, [1, 1]
        return list(aten.convolution_backward(g, x, w, [6], *window, False, [0, 0], 6, [True, True, True]))

    gm = trace(function, g, x, w)
    assert sum_depthwise_gradients(gm)
    names = _operators(gm)
    assert names.count("sum") == 3  # lines, all of them, and the bias
    gm.recompile()
    _close(gm(g, x, w), function(g, x, w))


def test_small_windows_are_left_to_the_library() -> None:
    g, x, w = _last(2, 6, 12, 12), _last(2, 6, 12, 12), _last(6, 1, 3, 3)

    def function(g: Tensor, x: Tensor, w: Tensor) -> Tensor:
        gradients = aten.convolution_backward(
            g, x, w, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 6, [False, True, False]
        )
        return gradients[1]

    assert not sum_depthwise_gradients(trace(function, g, x, w))


def test_what_the_library_does_is_counted() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(
        nn.Conv2d(8, 8, 7, padding=3, groups=8),
        nn.Conv2d(8, 16, 1),
        nn.ReLU(),
        nn.Conv2d(16, 8, 1),
        nn.AdaptiveAvgPool2d(1),
    )
    before = dict(torchkiln.stats().extern_calls)
    compiled = torch.compile(module, backend="kiln", options=UNPACKED)
    with torch.no_grad():
        compiled(torch.randn(2, 8, 24, 24))
    made = {name: count - before.get(name, 0) for name, count in torchkiln.stats().extern_calls.items()}
    assert made["aten.convolution.default"] == 1
    assert made["aten.mm.default"] + made.get("aten.addmm.default", 0) == 2


def test_a_chain_stays_in_one_layout() -> None:
    weights = [torch.randn(8, 8, 3, 3) for _ in range(5)]

    def function(x: Tensor, *weights: Tensor) -> Tensor:
        for left, right in pairwise(weights):
            x = F.conv2d(F.avg_pool2d(F.conv2d(x, left, padding=1), 3, 1, 1) + x, right, padding=1)
        return x.sum((2, 3))

    gm = trace(function, torch.randn(2, 8, 32, 32), *weights)
    assert put_channels_last(gm)
    assert _operators(gm).count("clone") == 1 + len(weights)


# -- symbolic sizes -----------------------------------------------------------------------------------------------


def _symbolic(function: Callable[..., Tensor], image: Tensor, *weights: Tensor) -> torch.fx.GraphModule:
    """A graph of images of any number, height and width, and of weights of known sizes."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    values = [mode.from_tensor(image), *(mode.from_tensor(weight, static_shapes=True) for weight in weights)]
    assert is_symbolic(values[0])
    with mode:
        return make_fx(function)(*values)


def test_images_of_symbolic_sizes_are_converted_once_too() -> None:
    v, w = torch.randn(8, 3, 3, 3), torch.randn(4, 8, 3, 3)
    gm = _symbolic(_two, torch.randn(5, 3, 16, 16), v, w)
    assert put_channels_last(gm)
    assert _operators(gm) == TURNED_ONCE
    gm.recompile()
    for shape in [(5, 3, 16, 16), (2, 3, 11, 19)]:
        x = torch.randn(shape)
        _close([gm(x, v, w)], [_two(x, v, w)])


def test_matmuls_of_pixels_keep_the_sizes_as_they_were_written() -> None:
    """torch would write the width of the result as a division, which every size behind it would go on to hold."""
    w = torch.randn(4, 8, 1, 1)

    def function(x: Tensor, v: Tensor) -> Tensor:
        return F.conv2d(F.max_pool2d(x, 2), v).relu()

    gm = _symbolic(function, torch.randn(5, 8, 16, 16).to(memory_format=torch.channels_last), w)
    before = returned_values(gm.graph)
    assert replace_pointwise_convolutions(gm)
    assert "convolution" not in _operators(gm)
    assert same_metadata(returned_values(gm.graph)[0], before[0])
    relu = next(node for node in gm.graph.nodes if node.target is aten.relu.default)
    assert list(map(str, relu.meta["val"].shape)) == list(map(str, before[0].shape))
    gm.recompile()
    x = torch.randn(3, 8, 14, 14).to(memory_format=torch.channels_last)
    _close([gm(x, w)], [function(x, w)])


def test_symbolic_images_that_do_not_outweigh_the_weights_stay_as_they_are() -> None:
    v, w = torch.randn(64, 3, 3, 3), torch.randn(64, 64, 3, 3)
    assert not put_channels_last(_symbolic(_two, torch.randn(2, 3, 8, 8), v, w))


def test_one_compilation_serves_images_of_all_sizes() -> None:
    network = nn.Sequential(
        *(nn.Conv2d(3, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.ReLU6()),
        *(nn.Conv2d(16, 16, 5, 1, 2, groups=16), nn.ReLU6(), nn.Conv2d(16, 24, 1), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(24, 10)),
    ).eval()
    compiled = torch.compile(network, backend="kiln", dynamic=True, options={"fallback": False})
    before = torchkiln.stats()
    for shape in [(5, 3, 64, 64), (2, 3, 64, 64), (7, 3, 32, 32), (4, 3, 33, 33)]:
        image = torch.randn(shape)
        _close(_step(compiled, network, image), _step(network, network, image))
    after = torchkiln.stats()
    assert after.graphs == before.graphs + 2  # forward and backward
    calls = after.extern_calls["aten.convolution.default"] - before.extern_calls.get("aten.convolution.default", 0)
    assert calls == 2  # the third is a matmul


# -- cards --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "groups", "changes"),
    [(torch.bfloat16, 1, True), (torch.float16, 1, True), (torch.float32, 1, False), (torch.bfloat16, 8, False)],
    ids=str,
)
def test_images_of_a_card_are_converted_for_its_tensor_cores(dtype: torch.dtype, groups: int, changes: bool) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        image = torch.empty(4, 8, 64, 64, device="cuda", dtype=dtype)
        weight = torch.empty(16, 8 // groups, 3, 3, device="cuda", dtype=dtype)

    def function(x: Tensor, w: Tensor) -> Tensor:
        return aten.convolution(x, w, None, [1, 1], [1, 1], [1, 1], False, [0, 0], groups).sum((2, 3))

    gm = make_fx(function)(image, weight)
    assert put_channels_last(gm) == changes
    (convolution,) = [node for node in gm.graph.nodes if node.target is aten.convolution.default]
    # The layout of the result is what cuDNN would choose, which this torch may not have.
    given = convolution.all_input_nodes[0].meta["val"]
    assert given.is_contiguous(memory_format=torch.channels_last) == changes
