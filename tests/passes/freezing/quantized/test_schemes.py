"""Int8 layers for any scheme: signs, zero points, saturation, dimensions, layouts, empty and symbolic batches."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import torchkiln
from tests.passes.freezing.quantized.layers import ASYMMETRIC, SIGNED, Chain, Convolution, Linear, Scheme
from tests.passes.freezing.quantized.pt2e import compiled

_SCHEMES = {
    "middle": Scheme(),
    "asymmetric": ASYMMETRIC,
    "zero": Scheme(0.03, 0),
    "high": Scheme(0.03, 255),
    "signed": SIGNED,
    "signed, symmetric": Scheme(0.03, 0, torch.int8),
    "signed, lowest": Scheme(0.03, -128, torch.int8),
    "seven bits": Scheme(0.05, 60, torch.uint8, 0, 127),
}


@pytest.mark.parametrize("per_tensor", [False, True])
@pytest.mark.parametrize("scheme", _SCHEMES)
def test_linears_multiply_the_bytes_of_every_scheme(scheme: str, per_tensor: bool) -> None:
    layers = Linear(48, 40, per_tensor=per_tensor), nn.ReLU(), Linear(40, 24, per_tensor=per_tensor)
    run = compiled(Chain(_SCHEMES[scheme], *layers), torch.randn(6, 48))
    run.check()
    assert run.count("qlinear_pointwise") == 2
    assert run.count("aten.addmm") == run.count("aten.mm") == 0


@pytest.mark.parametrize("scheme", _SCHEMES)
@pytest.mark.parametrize("dimensions", [1, 2, 3])
def test_convolutions_multiply_the_bytes_of_every_scheme_in_every_number_of_dimensions(
    dimensions: int, scheme: str
) -> None:
    layers = Convolution(dimensions, 8, 16, 3, padding=1), nn.ReLU(), Convolution(dimensions, 16, 8, 1)
    run = compiled(Chain(_SCHEMES[scheme], *layers), torch.randn(2, 8, *(7, 6, 5)[:dimensions]))
    run.check()
    assert run.count("qconv") == 2
    assert run.count("aten.convolution") == 0


def test_a_call_stores_bytes_without_a_sign_for_readers_that_want_them_so() -> None:
    run = compiled(Chain(SIGNED, Convolution(2, 8, 8, 3), nn.ReLU(), Convolution(2, 8, 8, 3)), torch.randn(2, 8, 9, 9))
    run.check()
    assert run.count("bitwise_xor") == 1, "that of the image, which a loop quantizes"
    assert any("torch.uint8, 'relu'" in call for call in run.calls)


@pytest.mark.parametrize("options", [{"stride": 2}, {"dilation": 2, "padding": 2}, {"groups": 8}, {"groups": 2}])
@pytest.mark.parametrize("dimensions", [1, 3])
def test_geometry_of_lines_and_volumes(dimensions: int, options: dict[str, int]) -> None:
    layer = Convolution(dimensions, 8, 16, 3, **options)
    run = compiled(
        Chain(ASYMMETRIC, layer, nn.ReLU(), Convolution(dimensions, 16, 8, 1)),
        torch.randn(2, 8, *(9, 8, 7)[:dimensions]),
    )
    run.check()
    assert run.count("qconv") == 2


@pytest.mark.parametrize("scheme", ["asymmetric", "signed"])
@pytest.mark.parametrize("size", [1e3, 1e-3])
def test_values_far_out_of_range_saturate_as_in_eager(scheme: str, size: float) -> None:
    x = torch.randn(4, 48) * size
    run = compiled(Chain(_SCHEMES[scheme], Linear(48, 40), nn.ReLU(), Linear(40, 24)), x)
    run.check()
    assert run.count("qlinear_pointwise") == 2


@pytest.mark.parametrize("scheme", ["asymmetric", "signed"])
@pytest.mark.parametrize("kind", ["linear", "convolution"])
def test_a_program_may_return_bytes(scheme: str, kind: str) -> None:
    layer, x = (
        (Linear(48, 40), torch.randn(4, 48)) if kind == "linear" else (Convolution(2, 8, 8, 3), torch.randn(2, 8, 6, 6))
    )
    given = _SCHEMES[scheme]
    run = compiled(Chain(given, layer, last=replace(given, scale=0.1)), x)
    assert run.result.dtype == run.expected.dtype == given.dtype
    assert run.result.stride() == run.expected.stride()
    difference = (run.result.int() - run.expected.int()).abs()
    assert difference.max().item() <= 1
    assert difference.float().mean().item() <= 0.02
    assert run.count("qlinear_pointwise") + run.count("qconv") == 1
    assert run.expected.unique().numel() > 20, "not all saturated"


def test_channel_scales_and_one_scale_may_meet_in_a_program_with_shared_weights() -> None:
    shared = Linear(32, 32)

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.chain = Chain(ASYMMETRIC, shared, nn.ReLU(), Linear(32, 32, per_tensor=True), shared)

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.chain(x)
            return result

    run = compiled(Twice(), torch.randn(5, 32))
    run.check()
    assert run.count("qlinear_pointwise") == 3
    assert sum("qlinear_prepack" in call for call in run.prepared) == 2, "the shared weight is packed once"


@pytest.mark.parametrize("shape", [(0, 48), (1, 48), (0, 3, 48), (1, 1, 48), (2, 3, 4, 48)])
def test_linears_of_empty_and_single_batches_and_several_leading_dimensions(shape: tuple[int, ...]) -> None:
    run = compiled(Chain(ASYMMETRIC, Linear(48, 40), nn.ReLU(), Linear(40, 24, bias=False)), torch.randn(shape))
    assert run.result.shape == run.expected.shape
    if run.result.numel():
        run.check()


@pytest.mark.parametrize("batch", [0, 1])
@pytest.mark.parametrize("dimensions", [1, 2, 3])
def test_convolutions_of_empty_and_single_batches(dimensions: int, batch: int) -> None:
    layers = Convolution(dimensions, 8, 16, 3), nn.ReLU(), Convolution(dimensions, 16, 8, 1)
    run = compiled(Chain(ASYMMETRIC, *layers), torch.randn(batch, 8, *(7, 6, 5)[:dimensions]))
    assert run.result.shape == run.expected.shape
    if batch:
        run.check()


def test_inputs_that_are_not_contiguous_are_read_as_they_lie() -> None:
    model = Chain(ASYMMETRIC, Linear(48, 40), nn.ReLU(), Linear(40, 24))
    for x in (torch.randn(48, 6).t(), torch.randn(6, 96)[:, ::2], torch.randn(3, 48, 2).transpose(1, 2)):
        compiled(model, x).check()
    images = Chain(ASYMMETRIC, Convolution(2, 8, 8, 3))
    for image in (torch.randn(2, 9, 9, 8).permute(0, 3, 1, 2), torch.randn(2, 8, 18, 9)[:, :, ::2]):
        compiled(images, image).check()


@pytest.mark.parametrize("kind", ["linear", "lines", "images", "volumes"])
def test_a_symbolic_batch_is_served_by_one_compilation(kind: str) -> None:
    if kind == "linear":
        model, shape = Chain(SIGNED, Linear(48, 40), nn.ReLU(), Linear(40, 24)), (48,)
    else:
        dimensions = ("lines", "images", "volumes").index(kind) + 1
        layers = Convolution(dimensions, 8, 8, 3, padding=1), nn.ReLU(), Convolution(dimensions, 8, 8, 1)
        model, shape = Chain(SIGNED, *layers), (8, *(7, 6, 5)[:dimensions])
    run = torch.compile(model, backend="kiln", dynamic=True, options={"fallback": False, "adaptive": False})
    torchkiln.reset_stats()
    with torch.no_grad():
        for batch in (4, 7, 3):
            x = torch.randn(batch, *shape)
            expected, result = model(x), run(x)
            step = (expected.max() - expected.min()).item() / 255
            assert (result - expected).abs().max().item() <= 1.05 * step
    assert torchkiln.stats().graphs == 2, "one for weights, one for calls"


def test_a_residual_of_bytes_with_a_sign_that_is_read_twice_keeps_its_value() -> None:
    class Residuals(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = (Convolution(2, 8, 8, 3, padding=1) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            residual = SIGNED.through(x)
            first = SIGNED.through(torch.relu(self.a(residual) + residual))
            second = SIGNED.through(self.b(first) + residual)
            return self.c(second) + first  # type: ignore[no-any-return]

    run = compiled(Residuals(), torch.randn(2, 8, 9, 9))
    run.check(steps=2)
    assert run.count("qconv") == 3


class _Cast(nn.Module):
    """To another dtype and back before the layer, or after it and before an activation or a quantize call."""

    def __init__(self, layer: nn.Module, dtype: torch.dtype, *, after: bool, activation: nn.Module | None) -> None:
        super().__init__()
        self.layer, self.dtype, self.after, self.activation = layer, dtype, after, activation

    def forward(self, x: Tensor) -> Tensor:
        x = ASYMMETRIC.through(x)
        if not self.after:
            return self.layer(x.to(self.dtype).float())  # type: ignore[no-any-return]
        result: Tensor = self.layer(x).to(self.dtype).float()
        return ASYMMETRIC.quantize(result) if self.activation is None else self.activation(result)


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8, torch.bool])
@pytest.mark.parametrize("place", ["before", "requantized", "activated"])
@pytest.mark.parametrize("kind", ["linear", "convolution"])
def test_casts_that_are_not_between_floats_are_not_looked_through(kind: str, place: str, dtype: torch.dtype) -> None:
    layer, shape = (Linear(16, 12), (8, 16)) if kind == "linear" else (Convolution(2, 4, 8, 3), (2, 4, 9, 9))
    activation = nn.ReLU() if place == "activated" else None
    model = _Cast(layer, dtype, after=place != "before", activation=activation)
    with torch.no_grad():
        if layer.bias is not None:
            layer.bias.add_(30)  # results above 0: what a cast of others to uint8 gives is not defined
    run = compiled(model, torch.randn(shape).abs())
    # Where a number is next to an integer, its cast is either of two.
    error = (run.result.float() - run.expected.float()).abs()
    assert run.result.dtype == run.expected.dtype
    assert error.max().item() <= (1 / ASYMMETRIC.scale if place == "requantized" else 1) * 1.01
    assert error.mean().item() <= 0.01 * run.expected.float().abs().max().item()


@pytest.mark.parametrize("scheme", ["middle", "signed"])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_a_residual_may_be_what_the_convolution_reads(scheme: str, layout: torch.memory_format) -> None:
    """The library adds in place, and must not write to the image it is reading."""

    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.scheme = Convolution(2, 8, 8, 3, padding=1), _SCHEMES[scheme]

        def forward(self, stored: Tensor) -> Tensor:
            x = self.scheme.dequantize(stored)
            return self.scheme.quantize(torch.relu(self.layer(x) + x))

    stored = _SCHEMES[scheme].quantize(torch.randn(2, 8, 9, 9)).contiguous(memory_format=layout)
    before = stored.clone()
    run = compiled(Residual(), stored)
    assert run.count("onednn.qconv2d_pointwise.binary") == 1
    assert (run.result.int() - run.expected.int()).abs().max() <= 1
    assert run.result.stride() == run.expected.stride()
    assert torch.equal(stored, before)
