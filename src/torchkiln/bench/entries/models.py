"""Ten families of the transformers library, as published or, where a step would take seconds, with fewer layers.

Weights are random; attention and dropout are what the library sets by default.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch

from torchkiln.bench.entries.entry import Entry, Inputs


def built(model: str, config: str, /, *, module: str = "transformers", **sizes: Any) -> Callable[[], Any]:
    """Builds a model of the library from its configuration, imported when it is asked for."""

    def build() -> Any:
        configuration = getattr(import_module("transformers"), config)(**sizes)
        return getattr(import_module(module), model)(configuration)

    return build


def _ids(vocabulary: int, length: int) -> Callable[[int], Inputs]:
    return lambda variant: {"input_ids": torch.randint(vocabulary, (1, (length, length // 2)[variant]))}


def _images(size: int) -> Callable[[int], Inputs]:
    # Not as many images as channels: torch takes sizes that are equal for one size, and would compile for three images.
    return lambda variant: {"pixel_values": torch.randn((2, 4)[variant], 3, size, size)}


def _speech(variant: int) -> Inputs:
    return {"input_features": torch.randn((1, 2)[variant], 80, 1000)}


def _model(name: str, build: Callable[[], Any], inputs: Callable[[int], Inputs]) -> Entry:
    return Entry(name, "models", build, inputs, needs=("transformers",))


_gpt2 = built("GPT2LMHeadModel", "GPT2Config", vocab_size=8000, use_cache=False)
_llama = built(
    "LlamaForCausalLM",
    "LlamaConfig",
    vocab_size=8000,
    hidden_size=768,
    intermediate_size=2048,
    num_hidden_layers=8,
    num_attention_heads=12,
    num_key_value_heads=4,
    use_cache=False,
)
_t5 = built("T5EncoderModel", "T5Config", vocab_size=8000, use_cache=False)
_resnet = built("ResNetForImageClassification", "ResNetConfig", num_labels=100)
_mobilenet = built("MobileNetV2ForImageClassification", "MobileNetV2Config", num_labels=100)
_convnext = built("ConvNextForImageClassification", "ConvNextConfig", num_labels=100)
_vit = built("ViTForImageClassification", "ViTConfig", num_hidden_layers=6, num_labels=100)
_swin = built("SwinForImageClassification", "SwinConfig", num_labels=100)
_whisper = built(
    "WhisperEncoder",
    "WhisperConfig",
    module="transformers.models.whisper.modeling_whisper",
    encoder_layers=4,
    max_source_positions=500,
)

MODELS = (
    _model("bert", built("BertModel", "BertConfig"), _ids(30522, 128)),
    _model("gpt2", _gpt2, _ids(8000, 128)),
    _model("llama", _llama, _ids(8000, 128)),
    _model("t5-encoder", _t5, _ids(8000, 128)),
    _model("resnet50", _resnet, _images(160)),
    _model("mobilenet-v2", _mobilenet, _images(160)),
    _model("convnext", _convnext, _images(160)),
    _model("vit", _vit, _images(224)),
    _model("swin", _swin, _images(224)),
    _model("whisper-encoder", _whisper, _speech),
)
