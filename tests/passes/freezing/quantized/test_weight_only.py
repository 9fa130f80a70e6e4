"""Matmuls with int8 and int4 weights: the plain form is recognized, and packing runs where weights change."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.passes.freezing.quantized.pt2e import compiled


class _Weights(nn.Module):
    """A function of an input and an int8 weight with a scale for each result."""

    def __init__(self, function: Callable[..., Tensor], *, columns: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.register_buffer("weight", torch.randint(-127, 128, (96, 256) if columns else (256, 96)).to(torch.int8))
        self.register_buffer("scale", (torch.rand(256) * 0.01 + 0.01).to(dtype))
        self.register_buffer("bias", torch.randn(256).to(dtype))
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.weight, self.scale, self.bias)


_ROWS = {
    "scaled weight": lambda x, w, s, b: F.linear(x, w.to(x.dtype) * s[:, None]),
    "scaled weight and bias": lambda x, w, s, b: F.linear(x, w.to(x.dtype) * s[:, None], b),
    "scaled result": lambda x, w, s, b: F.linear(x, w.to(x.dtype)) * s,
    "scaled transpose": lambda x, w, s, b: x @ (w.to(x.dtype).t() * s) + b,
}
_COLUMNS = {"columns": lambda x, w, s, b: x @ (w.to(x.dtype) * s)}
_FORMS = {**{name: (form, False) for name, form in _ROWS.items()}, **{n: (f, True) for n, f in _COLUMNS.items()}}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", _FORMS)
def test_the_plain_form_with_few_rows_reads_integers(form: str, dtype: torch.dtype) -> None:
    function, columns = _FORMS[form]
    model = _Weights(function, columns=columns, dtype=dtype)
    x = torch.randn(2, 2, 96).to(dtype)
    run = compiled(model, x)
    exact = model.double()(x.double()) if dtype == torch.float32 else _Weights.forward(_float(model), x.float())
    error, eager = ((value.double() - exact).abs().max().item() for value in (run.result, run.expected))
    assert error <= 1.5 * eager + 1e-6 * exact.abs().max().item()
    assert run.count("aten.mm") == run.count("aten.addmm") == 0
    assert run.count("_weight_int8pack_mm") == (dtype == torch.bfloat16)
    assert not any("float" in call for call in run.prepared), "the weight stays int8"


def _float(model: nn.Module) -> nn.Module:
    for name in ("scale", "bias"):
        setattr(model, name, getattr(model, name).float())
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_many_rows_are_a_matmul_of_numbers(dtype: torch.dtype) -> None:
    model = _Weights(_ROWS["scaled weight"], columns=False, dtype=dtype)
    run = compiled(model, torch.randn(64, 96).to(dtype))
    torch.testing.assert_close(run.result, run.expected, atol=1e-4 if dtype == torch.float32 else 0.3, rtol=1e-2)
    assert run.count("_weight_int8pack_mm") == run.count("aten.sum") == 0


def test_a_scale_along_the_contraction_is_not_taken_for_one_of_results() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("weight", torch.randint(-127, 128, (64, 64)).to(torch.int8))
            self.register_buffer("scale", torch.rand(64) * 0.01 + 0.01)

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, self.weight.to(x.dtype) * self.scale)

    run = compiled(Model(), torch.randn(2, 64))
    torch.testing.assert_close(run.result, run.expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_changed_int8_weight_is_used_at_the_next_call(dtype: torch.dtype) -> None:
    model = _Weights(_COLUMNS["columns"], columns=True, dtype=dtype)
    run = torch.compile(model, backend="kiln", options={"fallback": False, "adaptive": False})
    x = torch.randn(1, 96).to(dtype)
    with torch.no_grad():
        before = run(x)
        model.weight.neg_()
        torch.testing.assert_close(run(x), model(x), atol=1e-3 if dtype == torch.float32 else 0.3, rtol=1e-2)
        assert not torch.allclose(run(x), before)


def test_torchs_int8_and_int4_matmuls_are_called_with_weights_packed_once() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("bytes", torch.randint(-127, 128, (64, 64)).to(torch.int8))
            self.register_buffer("scale", (torch.rand(64) * 0.01 + 0.01).to(torch.bfloat16))
            self.register_buffer("halves", torch.randint(0, 16, (64, 64), dtype=torch.int32))
            self.register_buffer("groups", (torch.rand(2, 64, 2) * 0.01).to(torch.bfloat16))

        def forward(self, x: Tensor) -> Tensor:
            y = torch._weight_int8pack_mm(x, self.bytes, self.scale)
            packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(self.halves, 1)
            result: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(y.relu(), packed, 32, self.groups)
            return result

    run = compiled(Model(), torch.randn(3, 64).to(torch.bfloat16))
    torch.testing.assert_close(run.result, run.expected)
    assert run.count("_weight_int8pack_mm") == run.count("_weight_int4pack_mm_for_cpu") == 1
    assert run.count("_convert_weight") == 0
    assert sum("_convert_weight_to_int4pack" in call for call in run.prepared) == 1
