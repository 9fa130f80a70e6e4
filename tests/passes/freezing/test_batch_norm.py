"""A batch norm of inference disappears into the layer before it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.passes.freezing.graphs import check_against_float64, divided

_LAYERS: dict[str, tuple[Callable[..., nn.Module], type[nn.Module], tuple[int, ...]]] = {
    "linear": (lambda **o: nn.Linear(8, 6, **o), nn.BatchNorm1d, (5, 8)),
    "1d": (lambda **o: nn.Conv1d(8, 6, 3, padding=1, **o), nn.BatchNorm1d, (2, 8, 9)),
    "2d": (lambda **o: nn.Conv2d(8, 6, 3, stride=2, **o), nn.BatchNorm2d, (2, 8, 9, 9)),
    "2d in groups": (lambda **o: nn.Conv2d(8, 6, 3, groups=2, dilation=2, **o), nn.BatchNorm2d, (2, 8, 9, 9)),
    "depthwise": (lambda **o: nn.Conv2d(6, 6, 3, groups=6, **o), nn.BatchNorm2d, (2, 6, 9, 9)),
    "3d": (lambda **o: nn.Conv3d(8, 6, 3, **o), nn.BatchNorm3d, (2, 8, 5, 5, 5)),
    "transposed 1d": (lambda **o: nn.ConvTranspose1d(8, 6, 3, **o), nn.BatchNorm1d, (2, 8, 9)),
    "transposed 2d in groups": (
        lambda **o: nn.ConvTranspose2d(8, 6, 3, stride=2, groups=2, output_padding=1, **o),
        nn.BatchNorm2d,
        (2, 8, 5, 5),
    ),
    "transposed 3d in groups": (
        lambda **o: nn.ConvTranspose3d(4, 6, 2, groups=2, **o),
        nn.BatchNorm3d,
        (2, 4, 4, 4, 4),
    ),
}
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def _model(name: str, *, bias: bool = True, affine: bool = True) -> tuple[nn.Module, torch.Tensor]:
    make, norm, shape = _LAYERS[name]
    batch_norm: Any = norm(6, affine=affine)
    batch_norm.running_mean.normal_()
    batch_norm.running_var.uniform_(0.5, 2)
    if affine:
        nn.init.normal_(batch_norm.weight)
        nn.init.normal_(batch_norm.bias)
    return nn.Sequential(make(bias=bias), batch_norm).eval(), torch.randn(shape)


@pytest.mark.parametrize("name", _LAYERS)
def test_a_norm_after_any_layer_is_folded(name: str) -> None:
    model, given = _model(name)
    found = divided(model, given)
    check_against_float64(model, [given], found.result)
    assert set(found.operators) <= {"convolution", "addmm", "clone"}


@pytest.mark.parametrize("dtype", _DTYPES)
@pytest.mark.parametrize(
    ("name", "bias", "affine"),
    [("linear", False, True), ("2d", True, False), ("2d", False, False), ("transposed 2d in groups", False, True)],
)
def test_a_norm_is_folded_in_every_dtype_with_and_without_bias_and_affine_parameters(
    name: str, dtype: torch.dtype, bias: bool, affine: bool
) -> None:
    model, given = _model(name, bias=bias, affine=affine)
    model, given = model.to(dtype), given.to(dtype)
    found = divided(model, given)
    check_against_float64(model, [given], found.result)
    assert not any("batch_norm" in target for target in found.operators)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_statistics_may_be_float32_for_a_layer_of_half_precision(dtype: torch.dtype) -> None:
    model, given = _model("2d")
    model[0].to(dtype)  # type: ignore[index]
    found = divided(model, given.to(dtype))
    check_against_float64(model, [given.to(dtype)], found.result)
    assert not any("batch_norm" in target for target in found.operators)


def test_a_norm_is_folded_under_autocast() -> None:
    model, given = _model("2d")
    found = divided(model, given, autocast=True)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(found.result, model(given), atol=0.05, rtol=0.05)
    assert not any("batch_norm" in target for target in found.operators)


@pytest.mark.parametrize("name", ["linear", "2d"])
def test_a_norm_is_folded_with_symbolic_sizes(name: str) -> None:
    model, given = _model(name)
    found = divided(model, given, dynamic=True)
    check_against_float64(model, [given], found.result)
    assert not any("batch_norm" in target for target in found.operators)


def test_a_norm_over_features_of_a_sequence_is_folded_through_the_transpose() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.norm = nn.Linear(8, 6), nn.BatchNorm1d(6)
            self.norm.running_mean.normal_()  # type: ignore[union-attr]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(self.linear(x).transpose(1, 2)).flatten(1)

    model, given = Model().eval(), torch.randn(3, 5, 8)
    found = divided(model, given)
    check_against_float64(model, [given], found.result)
    assert not any("batch_norm" in target for target in found.operators)


def test_a_norm_that_is_written_out_is_folded() -> None:
    class Frozen(nn.Module):
        """As detection models have it."""

        def __init__(self) -> None:
            super().__init__()
            self.convolution = nn.Conv2d(3, 6, 3, bias=False)
            for name in ("weight", "bias", "running_mean"):
                self.register_buffer(name, torch.randn(6))
            self.register_buffer("running_var", torch.rand(6) + 0.5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            weight, bias, mean, variance = (
                getattr(self, name).reshape(1, -1, 1, 1) for name in ("weight", "bias", "running_mean", "running_var")
            )
            scale = weight * (variance + 1e-5).rsqrt()
            return self.convolution(x) * scale + (bias - mean * scale)

    model, given = Frozen().eval(), torch.randn(2, 3, 8, 8)
    found = divided(model, given)
    check_against_float64(model, [given], found.result)
    assert set(found.operators) <= {"convolution", "clone"}


def test_a_norm_stays_where_something_else_reads_the_convolution() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = _model("2d")[0]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            made = self.layers[0](x)  # type: ignore[index]
            return self.layers[1](made) + made.sin()  # type: ignore[index]

    model, given = Model().eval(), torch.randn(2, 8, 9, 9)
    found = divided(model, given)
    check_against_float64(model, [given], found.result)
    assert found.operators == ("nothing was hoisted",)


def test_a_norm_without_variance_and_epsilon_is_divided_by_zero_and_leaves_other_channels_alone() -> None:
    model, given = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, eps=0.0)).eval(), torch.randn(2, 3, 6, 6)
    model[1].running_var[2] = 0  # type: ignore[index, operator, union-attr]
    found = divided(model, given)
    with torch.no_grad():
        eagers = model(given)
        # Eager has NaN there, for it takes infinity times the mean from infinity; the norm alone gives infinities.
        assert not found.result[:, 2].isfinite().any()
        assert not eagers[:, 2].isfinite().any()
        others = [0, 1, 3]
        torch.testing.assert_close(found.result[:, others], eagers[:, others])
        model[1].running_var.fill_(2)  # type: ignore[operator, union-attr]
    check_against_float64(model, [given], divided(model, given).result)
