"""Operations with constants, before and after convolutions and linear layers, disappear into their weights."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from tests.passes.freezing.graphs import check_against_float64, divided

Function = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

_OPERATIONS: dict[str, Function] = {
    "add": lambda y, c: y + c,
    "sub": lambda y, c: y - c,
    "sub from": lambda y, c: c - y,
    "mul": lambda y, c: y * c,
    "div": lambda y, c: y / c,
    "neg": lambda y, c: -y,
    "chain": lambda y, c: 2 - ((y + c) * c - 3) / c,
}
_LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(8, 6), (5, 8)),
    "linear of a sequence": (lambda: nn.Linear(8, 6, bias=False), (2, 5, 8)),
    "1d": (lambda: nn.Conv1d(8, 6, 3, bias=False), (2, 8, 9)),
    "2d": (lambda: nn.Conv2d(8, 6, 3), (2, 8, 9, 9)),
    "2d in groups": (lambda: nn.Conv2d(8, 6, 3, groups=2), (2, 8, 9, 9)),
    "3d": (lambda: nn.Conv3d(8, 6, 3), (2, 8, 4, 4, 4)),
    "transposed in groups": (lambda: nn.ConvTranspose2d(8, 6, 3, groups=2), (2, 8, 5, 5)),
}
_PADDED: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "padded": (lambda: nn.Conv2d(8, 6, 3, padding=1), (2, 8, 9, 9)),
    "transposed": (lambda: nn.ConvTranspose2d(8, 6, 3, groups=2), (2, 8, 5, 5)),
}
_CALLS = {"convolution", "addmm", "mm", "clone", "full"}


class _Around(nn.Module):
    """A layer with an operation before or after it, whose constant is for all elements or for each channel."""

    def __init__(self, layer: nn.Module, shape: tuple[int, ...], function: Function, *, before: bool) -> None:
        super().__init__()
        self.layer, self._function, self._before = layer, function, before
        self.constant = nn.Parameter(torch.rand(shape) + 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self._before:
            return self.layer(self._function(x, self.constant))
        return self._function(self.layer(x), self.constant)


def _around(
    layer: str, function: Function, *, per_channel: bool = True, before: bool = False
) -> tuple[nn.Module, torch.Tensor]:
    make, shape = (_LAYERS | _PADDED)[layer]
    channels = 8 if before else 6
    dims = (channels,) if layer.startswith("linear") else (channels, *(1 for _ in shape[2:]))
    return _Around(make(), dims if per_channel else (), function, before=before).eval(), torch.randn(shape)


_AFTER = [*((layer, "chain") for layer in _LAYERS), *(("2d", operation) for operation in _OPERATIONS)]
_BEFORE = [
    *((layer, "chain") for layer in _LAYERS if not layer.startswith("transposed")),
    *(("2d in groups", operation) for operation in _OPERATIONS),
]


@pytest.mark.parametrize(("layer", "operation"), _AFTER)
def test_an_operation_after_a_layer_is_folded(layer: str, operation: str) -> None:
    model, given = _around(layer, _OPERATIONS[operation])
    found = divided(model, given)
    check_against_float64(model, [given], found.result)
    assert set(found.operators) <= _CALLS


@pytest.mark.parametrize(("layer", "operation"), _BEFORE)
def test_an_operation_before_a_layer_is_folded(layer: str, operation: str) -> None:
    model, given = _around(layer, _OPERATIONS[operation], before=True)
    found = divided(model, given)
    check_against_float64(model, [given], found.result)
    assert set(found.operators) <= _CALLS


@pytest.mark.parametrize("layer", _PADDED)
@pytest.mark.parametrize("operation", ["mul", "div"])
def test_a_scale_before_a_padded_convolution_is_folded(layer: str, operation: str) -> None:
    model, given = _around(layer, _OPERATIONS[operation], before=True)
    found = divided(model, given)
    check_against_float64(model, [given], found.result)
    assert set(found.operators) <= _CALLS


@pytest.mark.parametrize("layer", _PADDED)
@pytest.mark.parametrize("operation", ["add", "sub from"])
def test_an_addition_before_a_padded_convolution_stays(layer: str, operation: str) -> None:
    model, given = _around(layer, _OPERATIONS[operation], before=True)
    check_against_float64(model, [given], divided(model, given).result)


@pytest.mark.parametrize("operation", ["div", "chain"])
@pytest.mark.parametrize(("layer", "before"), [("linear of a sequence", True), ("2d", False)])
def test_a_constant_may_be_one_for_all_elements(layer: str, operation: str, before: bool) -> None:
    model, given = _around(layer, _OPERATIONS[operation], per_channel=False, before=before)
    found = divided(model, given)
    check_against_float64(model, [given], found.result)
    assert set(found.operators) <= _CALLS


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize(("layer", "before"), [("linear of a sequence", False), ("2d in groups", True)])
def test_every_dtype_is_folded(layer: str, dtype: torch.dtype, before: bool) -> None:
    model, given = _around(layer, _OPERATIONS["chain"], before=before)
    model, given = model.to(dtype), given.to(dtype)
    found = divided(model, given)
    check_against_float64(model, [given], found.result)
    assert set(found.operators) <= _CALLS


@pytest.mark.parametrize("layer", ["linear", "2d"])
def test_a_float32_constant_is_folded_into_a_bfloat16_layer_whose_result_is_cast_back(layer: str) -> None:
    model, given = _around(layer, lambda y, c: (y * c + c).bfloat16())
    model.layer.to(torch.bfloat16)  # type: ignore[union-attr]
    found = divided(model, given.bfloat16())
    assert set(found.operators) <= _CALLS
    with torch.no_grad():
        expected = model(given.bfloat16())
    torch.testing.assert_close(found.result, expected, atol=0.03, rtol=0.03)


@pytest.mark.parametrize("layer", ["linear", "2d"])
def test_a_result_that_stays_float32_is_not_rounded_to_the_dtype_of_its_layer(layer: str) -> None:
    model, given = _around(layer, lambda y, c: y * 1e-3 + c)
    model.layer.to(torch.bfloat16)  # type: ignore[union-attr]
    found = divided(model, given.bfloat16())
    with torch.no_grad():
        expected = model(given.bfloat16())
    assert found.result.dtype == torch.float32
    torch.testing.assert_close(found.result, expected, atol=1e-4, rtol=1e-4)  # bfloat16 has steps of 4e-3 here


def test_a_layer_with_a_second_reader_keeps_its_result() -> None:
    model, given = _around("2d", lambda y, c: y * c + y.sin())
    found = divided(model, given)
    check_against_float64(model, [given], found.result)
    assert "mul.Tensor" in found.operators or found.operators == ("nothing was hoisted",)


def test_an_operation_whose_result_something_else_reads_is_not_folded_into_the_layer_after_it() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.constant = nn.Linear(8, 8), nn.Parameter(torch.rand(8) + 0.5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            scaled = x * self.constant
            return self.layer(scaled) + scaled.sin()

    model, given = Model().eval(), torch.randn(5, 8)
    check_against_float64(model, [given], divided(model, given).result)


def test_a_constant_of_other_channels_than_the_layers_stays() -> None:
    make, shape = _LAYERS["2d"]
    model, given = _Around(make(), (7,), lambda y, c: y * c, before=False).eval(), torch.randn(shape)  # of columns
    check_against_float64(model, [given], divided(model, given).result)


@pytest.mark.parametrize("layer", ["linear of a sequence", "2d"])
def test_operations_are_folded_with_symbolic_sizes(layer: str) -> None:
    model, given = _around(layer, _OPERATIONS["chain"])
    found = divided(model, given, dynamic=True)
    check_against_float64(model, [given], found.result)
    assert set(found.operators) <= _CALLS


def test_a_division_by_zero_gives_what_eager_gives() -> None:
    model, given = _around("linear", lambda y, c: y / 0)
    found = divided(model, given)
    with torch.no_grad():
        assert torch.equal(found.result, model(given))


def test_what_a_kernel_computes_before_a_layer_is_scaled_there() -> None:
    """The weight of a linear layer would be a copy that saves no work."""
    model, given = _around("linear", lambda x, c: x.exp() * c, before=True)
    found = divided(model, given)
    check_against_float64(model, [given], found.result)
    assert found.operators == ("nothing was hoisted",)


_UNDEFINED = {
    "division by zeros": lambda y, c: y / torch.where(c > c.mean(), c, 0),
    "infinite factors": lambda y, c: y * torch.where(c > c.mean(), c, torch.inf),
    "an infinite number": lambda y, c: y * torch.inf,
    "numbers that overflow": lambda y, c: y * 1e30 * 1e30 * 1e-30 * 1e-30,
    "tensors that overflow": lambda y, c: y * (c * 1e30) * (c * 1e30),
}


@pytest.mark.parametrize("operation", _UNDEFINED)
@pytest.mark.parametrize("layer", ["linear", "2d"])
def test_a_result_that_overflows_is_what_eager_gives(layer: str, operation: str) -> None:
    """A weight that overflows would make NaN of what the layer sums."""
    model, given = _around(layer, _UNDEFINED[operation])
    found = divided(model, given)
    with torch.no_grad():
        torch.testing.assert_close(found.result, model(given), equal_nan=True)


@pytest.mark.parametrize("factor", [1e-4, 1e-2, 0.125, 8.0, 1e3])
@pytest.mark.parametrize("before", [False, True])
def test_a_factor_takes_no_digits_of_weights_of_float16(factor: float, before: bool) -> None:
    model, given = _around("2d", lambda y, c: y * factor, before=before)
    model, given = model.half(), given.half()
    check_against_float64(model, [given], divided(model, given).result)


_PRODUCTS: dict[str, Function] = {
    "square": lambda y, c: y * c * c,
    "ratio": lambda y, c: y / c / c,
    "back and forth": lambda y, c: y * c * 1000 / c,
    "shifted": lambda y, c: (y * c + c) * c,
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize(("layer", "product"), [*(("2d in groups", p) for p in _PRODUCTS), ("linear", "square")])
def test_only_the_product_of_all_constants_decides(layer: str, product: str, before: bool, dtype: torch.dtype) -> None:
    """Constants of moderate size overflow together or take digits, and extreme ones may cancel out."""
    for size in (2000.0, 100.0, 1e-2, 1e-4, 1e-6):
        torch._dynamo.reset()
        model, given = _around(layer, _PRODUCTS[product], before=before)
        with torch.no_grad():
            model.constant.mul_(size)  # type: ignore[operator, union-attr]
        model, given = model.to(dtype), (given * min(1.0, size**-2)).to(dtype)
        with torch.no_grad():
            expected = model(given)
        found = divided(model, given).result
        if bool(expected.isfinite().all()):
            check_against_float64(model, [given], found)
        else:
            assert not bool((found.isnan() & ~expected.isnan()).any())


def test_numbers_of_the_graph_are_not_folded_into_each_other_at_each_call() -> None:
    """Neither is a weight, so nothing could look at them where weights are prepared."""

    class Blur(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gain = nn.Parameter(torch.rand(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            window, counts = torch.ones(4, 1, 3, 3), torch.arange(4.0).view(4, 1, 1)
            return nn.functional.conv2d(x * self.gain.exp(), window) / counts

    model, given = Blur(), torch.randn(2, 1, 8, 8)
    found = divided(model, given)
    with torch.no_grad():
        torch.testing.assert_close(found.result, model(given), equal_nan=True)
    assert not any("foldable" in name for name in found.operators)
