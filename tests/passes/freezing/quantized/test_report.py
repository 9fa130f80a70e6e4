"""The log and the statistics say what was fused into each int8 call, and why not more."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import Tensor, nn

import torchkiln
from tests.passes.freezing.quantized.pt2e import SUMS_IN_PLACE, compiled, quantized


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.relu, self.second = nn.Conv2d(4, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1)
        self.last, self.third, self.up = nn.ReLU(), nn.Conv2d(8, 4, 1), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.first(x))
        y = self.third(self.last(self.second(y) + y))
        result: Tensor = self.up(torch.softmax(y, 1).mean((2, 3)))
        return result


def test_each_call_has_one_line_with_what_was_fused(caplog: pytest.LogCaptureFixture) -> None:
    x = torch.randn(2, 4, 8, 8)
    converted = quantized(_Model(), x)
    with caplog.at_level(logging.DEBUG, logger="torchkiln.passes.freezing.quantized.report"):
        compiled(converted, x)
    lines = [r.message.partition(" is ")[2] for r in caplog.records if r.name.endswith("quantized.report")]
    assert lines == [
        "onednn.qconv_pointwise.default with relu, requantize",
        "onednn.qconv2d_pointwise.binary with sum, relu, requantize"
        if SUMS_IN_PLACE
        else "onednn.qconv_pointwise.default; not more: aten.add.Tensor reads its numbers",
        "onednn.qconv_pointwise.default; not more: aten._softmax.default reads its numbers",
        "onednn.qlinear_pointwise.default; not more: the program returns its numbers",
    ]


def test_a_convolution_that_stays_in_numbers_says_why(caplog: pytest.LogCaptureFixture) -> None:
    ops = torch.ops.quantized_decomposed

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 4, 3, 3))

        def forward(self, x: Tensor) -> Tensor:
            x = ops.quantize_per_tensor(x, 0.03, 120, 0, 255, torch.uint8)
            return nn.functional.conv2d(ops.dequantize_per_tensor(x, 0.03, 120, 0, 255, torch.uint8), self.weight)

    with caplog.at_level(logging.DEBUG, logger="torchkiln.passes.freezing.quantized.report"):
        run = compiled(Model(), torch.randn(2, 4, 8, 8))
    torch.testing.assert_close(run.result, run.expected, atol=1e-4, rtol=1e-4)
    lines = [r.message.partition(" is ")[2] for r in caplog.records if r.name.endswith("quantized.report")]
    assert lines == ["aten.convolution.default of numbers; not more: the weight is not int8 with symmetric scales"]


def test_stats_name_each_call_with_what_was_fused_and_why_not_more() -> None:
    x = torch.randn(2, 4, 8, 8)
    converted = quantized(_Model(), x)
    torchkiln.reset_stats()
    compiled(converted, x)
    records = [(record.form, record.sizes, record.reason) for record in torchkiln.stats().matmuls]
    assert records == [
        ("onednn.qconv_pointwise.default, packed, then relu, then requantize", "2x8x6x6", ""),
        ("onednn.qconv2d_pointwise.binary, packed, then sum, then relu, then requantize", "2x8x6x6", "")
        if SUMS_IN_PLACE
        else ("onednn.qconv_pointwise.default, packed", "2x8x6x6", "aten.add.Tensor reads its numbers"),
        ("onednn.qconv_pointwise.default, packed", "2x4x6x6", "aten._softmax.default reads its numbers"),
        ("onednn.qlinear_pointwise.default, packed", "2x4", "the program returns its numbers"),
    ]
