"""One architecture of the transformers library: its configuration, its class, and inputs to call it with."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

Inputs = Mapping[str, Tensor]

# Sizes that are no multiple of a vector, so that tails of kernels run too.
VOCABULARY, LENGTH = 101, 19


@dataclass(frozen=True)
class Architecture:
    """``model`` and ``config`` are names in transformers, or in one of its modules as ``module:name``.

    ``parts`` are settings that are configurations themselves, as (name in transformers, settings). ``eager_dtypes``
    are those in which eager itself runs the model.
    """

    model: str
    config: str
    settings: Mapping[str, Any]
    inputs: Callable[[], Inputs]
    parts: Mapping[str, tuple[str, Mapping[str, Any]]] = field(default_factory=dict)
    eager_dtypes: tuple[str, ...] = ("float32", "bfloat16")

    def build(self) -> nn.Module:
        parts = {name: _named(config)(**settings) for name, (config, settings) in self.parts.items()}
        config = _named(self.config)(**self.settings, **parts)
        model: nn.Module = _named(self.model)(config)
        return model


def _named(name: str) -> Any:
    module, _, member = name.rpartition(":")
    return getattr(importlib.import_module(f"transformers.{module}" if module else "transformers"), member)


def ids(vocabulary: int = VOCABULARY, length: int = LENGTH, *, padded: bool = True) -> Inputs:
    """Two sequences of tokens, the second one half padding. Small ids are special tokens in some models."""
    found = {"input_ids": torch.randint(5, vocabulary, (2, length))}
    if padded:
        found["attention_mask"] = (torch.arange(length) < torch.tensor([[length], [length // 2]])).long()
    return found


def ids_of(**more: Any) -> Callable[[], Inputs]:
    return lambda: ids(**more)


def two_sequences() -> Inputs:
    """For an encoder and a decoder."""
    return {**ids(), "decoder_input_ids": torch.randint(5, VOCABULARY, (2, 13))}


def image(size: int, channels: int = 3) -> Callable[[], Inputs]:
    return lambda: {"pixel_values": torch.randn(2, channels, size, size)}


def waveform(samples: int) -> Callable[[], Inputs]:
    return lambda: {"input_values": torch.randn(2, samples)}
