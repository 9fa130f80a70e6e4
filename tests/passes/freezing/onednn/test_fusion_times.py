"""The table of measured fusions: what it decides, and for which processors."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from benchmarks.fusions import LAYERS, fusions_of
from torchkiln.config import Settings
from torchkiln.passes.freezing.onednn import fusion_times
from torchkiln.passes.freezing.onednn.fusion_times import FusionTime, measured_on, pays
from torchkiln.target import capture_target


def test_every_fusion_of_every_call_was_measured() -> None:
    measured = {(time.call, time.dtype, time.fusion) for time in fusion_times.fusion_times()}
    names = {call: ["_".join(filter(None, pair)) for pair in fusions_of(call)] for call in LAYERS}
    expected = {(call, dtype, name) for call in LAYERS for dtype in ("float32", "bfloat16") for name in names[call]}
    assert measured == expected


def test_a_fusion_pays_where_it_was_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    times = [
        FusionTime("zen", "linear", "float32", "gelu", 103, 100),
        FusionTime("zen", "linear", "bfloat16", "gelu", 100, 100),
        FusionTime("zen", "convolution", "bfloat16", "relu", 110, 100),
    ]
    known = {(time.processor, time.call, time.dtype, time.fusion): time for time in times}
    monkeypatch.setattr(fusion_times, "_by_name", lambda: known)
    assert pays("zen", "linear", torch.float32, "gelu")
    assert not pays("zen", "linear", torch.bfloat16, "gelu")
    assert pays("zen", "convolution", torch.float16, "relu")  # as bfloat16
    assert not pays("zen", "linear", torch.float32, "relu")  # not measured


def test_a_processor_without_times_of_its_own_takes_those_that_there_are() -> None:
    target = capture_target(Settings())
    processors = {time.processor for time in fusion_times.fusion_times()}
    assert measured_on(replace(target, cpu="a_processor_to_come")) in processors
    for processor in processors:
        assert measured_on(replace(target, cpu=processor)) == processor
