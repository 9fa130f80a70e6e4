"""What is measured: models from transformers with random weights, small models, and backends by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


@dataclass(frozen=True)
class Entry:
    """``make`` gives a model on the card and the arguments of a call, whose first result is reduced to a loss."""

    make: Callable[[], tuple[nn.Module, dict[str, Any]]]
    jobs: tuple[str, ...] = ("inference", "training")


def _tokens(batch: int, length: int, words: int) -> torch.Tensor:
    return torch.randint(0, words, (batch, length), device="cuda")


def _bert() -> tuple[nn.Module, dict[str, Any]]:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(attn_implementation="sdpa")
    return _placed(BertForMaskedLM(config)), {"input_ids": _tokens(16, 512, config.vocab_size)}


def _gpt2() -> tuple[nn.Module, dict[str, Any]]:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(attn_implementation="sdpa", use_cache=False)
    return _placed(GPT2LMHeadModel(config)), {"input_ids": _tokens(8, 1024, config.vocab_size)}


def _llama() -> tuple[nn.Module, dict[str, Any]]:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=2048,
        intermediate_size=5504,
        num_hidden_layers=8,
        num_attention_heads=16,
        num_key_value_heads=16,
        vocab_size=32000,
        use_cache=False,
        attn_implementation="sdpa",
    )
    return _placed(LlamaForCausalLM(config)), {"input_ids": _tokens(4, 1024, config.vocab_size)}


def _images(size: int = 224) -> dict[str, Any]:
    return {"pixel_values": torch.randn(64, 3, size, size, device="cuda", dtype=torch.bfloat16)}


def _resnet() -> tuple[nn.Module, dict[str, Any]]:
    from transformers import ResNetConfig, ResNetForImageClassification

    return _placed(ResNetForImageClassification(ResNetConfig(num_labels=1000))), _images()


def _convnext() -> tuple[nn.Module, dict[str, Any]]:
    from transformers import ConvNextConfig, ConvNextForImageClassification

    return _placed(ConvNextForImageClassification(ConvNextConfig(num_labels=1000))), _images()


def _vit() -> tuple[nn.Module, dict[str, Any]]:
    from transformers import ViTConfig, ViTForImageClassification

    return _placed(ViTForImageClassification(ViTConfig(num_labels=1000, attn_implementation="sdpa"))), _images()


def _placed(model: nn.Module) -> nn.Module:
    return model.to("cuda", torch.bfloat16)


MODELS = {
    "bert": Entry(_bert),
    "gpt2": Entry(_gpt2),
    "llama": Entry(_llama),
    "resnet50": Entry(_resnet),
    "convnext": Entry(_convnext),
    "vit": Entry(_vit),
}


class _Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.taken, self.given = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.taken(self.norm(x)).chunk(3, -1)
        return x + self.given(F.gelu(F.scaled_dot_product_attention(query, key, value)))


class _Chain(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(10):
            x = (F.gelu(x) * 1.1 + 0.1).roll(1, 0)
        return x


def _small(*layers: nn.Module) -> nn.Module:
    return _placed(nn.Sequential(*layers))


def _rows(*sizes: int) -> dict[str, Any]:
    return {"input": torch.randn(*sizes, device="cuda", dtype=torch.bfloat16)}


SMALL = {
    "mlp 64": Entry(lambda: (_small(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.LayerNorm(64)), _rows(8, 64))),
    "6 layers of 128": Entry(lambda: (_small(*(_Layer(128) for _ in range(6))), _rows(1, 32, 128))),
    "chain": Entry(lambda: (_Chain(), _rows(64, 256)), jobs=("inference",)),
}

BACKENDS: dict[str, dict[str, Any] | None] = {
    "eager": None,
    "kiln": {"backend": "kiln", "options": {"fallback": False, "adaptive": False}},
    "inductor": {"backend": "inductor"},
    # As options, which go with no mode: the mode alone would leave a graph to eager where that is faster.
    "kiln reduce-overhead": {"backend": "kiln", "options": {"fallback": False, "adaptive": False, "cuda_graphs": True}},
    "inductor reduce-overhead": {"backend": "inductor", "mode": "reduce-overhead"},
}


def loss_of(results: Any) -> torch.Tensor:
    """A number to differentiate, of whatever a model returns."""
    found = results if isinstance(results, torch.Tensor) else results[0]
    return found.float().square().mean()
