"""Well-known models at their published width, with fewer layers or smaller images where those would take minutes."""

from __future__ import annotations

import torch

from tests.models.architectures.architecture import Architecture, Inputs, ids, ids_of, image


def _t5_inputs() -> Inputs:
    return {**ids(8000, 64), "decoder_input_ids": torch.randint(8000, (2, 32))}


PUBLISHED = {
    "bert_base": Architecture("BertModel", "BertConfig", {}, ids_of(vocabulary=30522, length=64)),
    "gpt2_base": Architecture(
        "GPT2LMHeadModel", "GPT2Config", {"vocab_size": 8000, "use_cache": False}, ids_of(vocabulary=8000, length=64)
    ),
    "llama_4_layers": Architecture(
        "LlamaForCausalLM",
        "LlamaConfig",
        {"vocab_size": 8000, "hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 4,
         "num_attention_heads": 8, "num_key_value_heads": 4, "use_cache": False},
        ids_of(vocabulary=8000, length=64),
    ),
    "t5_small": Architecture(
        "T5Model",
        "T5Config",
        {"vocab_size": 8000, "num_layers": 2, "num_decoder_layers": 2, "use_cache": False},
        _t5_inputs,
    ),
    "resnet50": Architecture("ResNetForImageClassification", "ResNetConfig", {"num_labels": 100}, image(96)),
    "mobilenet_v2_full": Architecture(
        "MobileNetV2ForImageClassification", "MobileNetV2Config", {"num_labels": 100}, image(96)
    ),
    "convnext_tiny": Architecture(
        "ConvNextForImageClassification", "ConvNextConfig", {"depths": [2, 2, 3, 2], "num_labels": 100}, image(96)
    ),
    "vit_4_layers": Architecture(
        "ViTForImageClassification",
        "ViTConfig",
        {"num_hidden_layers": 4, "image_size": 112, "hidden_dropout_prob": 0.1, "num_labels": 100},
        image(112),
    ),
    "swin_tiny": Architecture(
        "SwinForImageClassification", "SwinConfig", {"depths": [2, 2, 2, 2], "num_labels": 100}, image(224)
    ),
    "whisper_encoder": Architecture(
        "models.whisper.modeling_whisper:WhisperEncoder",
        "WhisperConfig",
        {"encoder_layers": 4, "dropout": 0.1, "attention_dropout": 0.1, "max_source_positions": 200},
        lambda: {"input_features": torch.randn(2, 80, 400)},
    ),
}  # fmt: skip
