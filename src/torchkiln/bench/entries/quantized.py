"""Models in int8: quantized by torch's PT2E flow for x86, calibrated on the inputs they are timed with."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from torchkiln.bench.entries.entry import Inputs, tensors
from torchkiln.errors import OptionError

PACKAGE = "torchao"
"""Which has the flow."""


# Before 2.13, the quantizer knows layers only by what a strict export notes of them.
_STRICT = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13)


class _Tensors(nn.Module):
    """``model``, which returns a tuple of its floating-point tensors."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **given: Any) -> tuple[Tensor, ...]:
        return tuple(tensors(self.model(**given)))


def quantized(model: Callable[..., Any], given: Inputs) -> nn.Module:
    """``model`` with int8 convolutions and linear layers, to be called with the names of ``given``."""
    if not isinstance(model, nn.Module):
        raise OptionError("A plain function has no weights to quantize; leave it out with: --dtypes float32,bfloat16.")
    if find_spec(PACKAGE) is None:
        raise OptionError(f"Cells in int8 need {PACKAGE}; install it with: pip install {PACKAGE}.")
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
        from torchao.quantization.pt2e.quantizer import x86_inductor_quantizer as x86

        exported = torch.export.export(_Tensors(model.eval()), (), dict(given), strict=_STRICT)
        quantizer = x86.X86InductorQuantizer().set_global(x86.get_default_x86_inductor_quantization_config())
        prepared = prepare_pt2e(exported.module(check_guards=False), quantizer)
        prepared(**given)
        converted: nn.Module = convert_pt2e(prepared)
        return converted
