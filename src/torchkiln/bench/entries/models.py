"""Ten families of the transformers library, as published or, where a step would take seconds, with fewer layers.

Weights are random; attention and dropout are what the library sets by default.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torchkiln.bench.entries.entry import Entry, Inputs


def _bert() -> Any:
    from transformers import BertConfig, BertModel

    return BertModel(BertConfig())


def _gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(vocab_size=8000, use_cache=False))


def _llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=8000,
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=8,
        num_attention_heads=12,
        num_key_value_heads=4,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def _t5_encoder() -> Any:
    from transformers import T5Config, T5EncoderModel

    return T5EncoderModel(T5Config(vocab_size=8000, use_cache=False))


def _resnet50() -> Any:
    from transformers import ResNetConfig, ResNetForImageClassification

    return ResNetForImageClassification(ResNetConfig(num_labels=100))


def _mobilenet_v2() -> Any:
    from transformers import MobileNetV2Config, MobileNetV2ForImageClassification

    return MobileNetV2ForImageClassification(MobileNetV2Config(num_labels=100))


def _convnext() -> Any:
    from transformers import ConvNextConfig, ConvNextForImageClassification

    return ConvNextForImageClassification(ConvNextConfig(num_labels=100))


def _vit() -> Any:
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(ViTConfig(num_hidden_layers=6, num_labels=100))


def _swin() -> Any:
    from transformers import SwinConfig, SwinForImageClassification

    return SwinForImageClassification(SwinConfig(num_labels=100))


def _whisper_encoder() -> Any:
    from transformers import WhisperConfig
    from transformers.models.whisper.modeling_whisper import WhisperEncoder

    return WhisperEncoder(WhisperConfig(encoder_layers=4, max_source_positions=500))


def _ids(vocabulary: int, length: int) -> Callable[[int], Inputs]:
    return lambda variant: {"input_ids": torch.randint(vocabulary, (1, (length, length // 2)[variant]))}


def _images(size: int) -> Callable[[int], Inputs]:
    # Not as many images as channels: torch takes sizes that are equal for one size, and would compile for three images.
    return lambda variant: {"pixel_values": torch.randn((2, 4)[variant], 3, size, size)}


def _speech(variant: int) -> Inputs:
    return {"input_features": torch.randn((1, 2)[variant], 80, 1000)}


def _model(name: str, build: Callable[[], Any], inputs: Callable[[int], Inputs]) -> Entry:
    return Entry(name, "models", build, inputs, needs=("transformers",))


MODELS = (
    _model("bert", _bert, _ids(30522, 128)),
    _model("gpt2", _gpt2, _ids(8000, 128)),
    _model("llama", _llama, _ids(8000, 128)),
    _model("t5-encoder", _t5_encoder, _ids(8000, 128)),
    _model("resnet50", _resnet50, _images(160)),
    _model("mobilenet-v2", _mobilenet_v2, _images(160)),
    _model("convnext", _convnext, _images(160)),
    _model("vit", _vit, _images(224)),
    _model("swin", _swin, _images(224)),
    _model("whisper-encoder", _whisper_encoder, _speech),
)
