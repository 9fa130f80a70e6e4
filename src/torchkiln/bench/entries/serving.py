"""Six models as they are served: images and texts of published sizes, one and eight at a time, inference alone.

They are not part of a run that names no models: ``make bench-freeze`` measures them, beside frozen peers.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from torchkiln.bench.cells import Job
from torchkiln.bench.entries.entry import Entry, Inputs
from torchkiln.bench.entries.models import built

GROUP = "serving"


def _images(batch: int) -> Callable[[int], Inputs]:
    return lambda variant: {"pixel_values": torch.randn(batch + 4 * variant, 3, 224, 224)}


def _ids(vocabulary: int, batch: int) -> Callable[[int], Inputs]:
    return lambda variant: {"input_ids": torch.randint(vocabulary, (batch + 4 * variant, 128))}


_MODELS = {
    "resnet50": (built("ResNetForImageClassification", "ResNetConfig"), _images),
    "mobilenet-v2": (built("MobileNetV2ForImageClassification", "MobileNetV2Config"), _images),
    "convnext": (built("ConvNextForImageClassification", "ConvNextConfig"), _images),
    "swin": (built("SwinForImageClassification", "SwinConfig"), _images),
    "bert": (built("BertModel", "BertConfig"), lambda batch: _ids(30522, batch)),
    "gpt2": (built("GPT2LMHeadModel", "GPT2Config", use_cache=False), lambda batch: _ids(50257, batch)),
}

SERVING = tuple(
    Entry(f"{name}-x{batch}", GROUP, build, inputs(batch), jobs=(Job.inference,), needs=("transformers",))
    for name, (build, inputs) in _MODELS.items()
    for batch in (1, 8)
)
