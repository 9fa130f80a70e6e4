"""Models of text and images together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from tests.models.architectures.architecture import VOCABULARY, Architecture, Inputs, ids, image

_TEXT: Mapping[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 80, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "attention_dropout": 0.1,
}  # fmt: skip
_VISION: Mapping[str, Any] = {
    "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 80, "image_size": 40,
    "patch_size": 8, "attention_dropout": 0.1,
}  # fmt: skip


def _text_and_image() -> Inputs:
    return {**ids(), **image(40)()}


def _text_around_image() -> Inputs:
    """The tokens of an image (id 3) lie in the middle of the text: 25 of them, one for each patch."""
    text = torch.randint(5, VOCABULARY, (2, 34))
    text[:, 4:29] = 3
    return {"input_ids": text, "attention_mask": torch.ones_like(text), **image(40)()}


MULTIMODAL = {
    "clip": Architecture(
        "CLIPModel", "CLIPConfig", {"projection_dim": 24}, _text_and_image,
        parts={"text_config": ("CLIPTextConfig", _TEXT), "vision_config": ("CLIPVisionConfig", _VISION)},
    ),
    "siglip": Architecture(
        "SiglipModel", "SiglipConfig", {}, _text_and_image,
        parts={"text_config": ("SiglipTextConfig", _TEXT), "vision_config": ("SiglipVisionConfig", _VISION)},
    ),
    "blip": Architecture(
        "BlipModel", "BlipConfig", {"projection_dim": 24}, _text_and_image,
        parts={
            "text_config": ("BlipTextConfig", {**_TEXT, "encoder_hidden_size": 48, "projection_dim": 24}),
            "vision_config": ("BlipVisionConfig", _VISION),
        },
    ),
    "llava": Architecture(
        "LlavaForConditionalGeneration", "LlavaConfig",
        {"image_token_index": 3, "image_token_id": 3, "vision_feature_layer": -1}, _text_around_image,
        parts={
            "text_config": ("LlamaConfig", {**_TEXT, "num_key_value_heads": 2, "use_cache": False}),
            "vision_config": ("CLIPVisionConfig", _VISION),
        },
    ),
    "paligemma": Architecture(
        "PaliGemmaForConditionalGeneration", "PaliGemmaConfig",
        {"image_token_id": 3, "image_token_index": 3, "projection_dim": 48}, _text_around_image,
        parts={
            "text_config": ("GemmaConfig", {**_TEXT, "head_dim": 12, "num_key_value_heads": 2, "use_cache": False}),
            "vision_config": ("SiglipVisionConfig", {**_VISION, "projection_dim": 48}),
        },
    ),
    "vilt": Architecture(
        "ViltModel", "ViltConfig",
        {"vocab_size": VOCABULARY, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
         "intermediate_size": 80, "image_size": 40, "patch_size": 8, "max_position_embeddings": 64,
         "hidden_dropout_prob": 0.1, "max_image_length": -1},
        _text_and_image,
    ),
    "git": Architecture(
        "GitForCausalLM", "GitConfig",
        {**{k: v for k, v in _TEXT.items() if k != "attention_dropout"}, "use_cache": False}, _text_and_image,
        parts={"vision_config": ("GitVisionConfig", _VISION)},
    ),
}  # fmt: skip
