"""What is compiled: BERT-base and Swin as ``kiln bench`` has them, and a Llama of any number of narrow layers."""

from __future__ import annotations

import re
from collections.abc import Callable
from enum import StrEnum
from typing import Any

MODELS = ("bert", "swin", "llama-12", "llama-48")


class Job(StrEnum):
    inference = "inference"
    training = "training"


def built(name: str, job: Job) -> tuple[Any, dict[str, Any]]:
    """A model in the mode of ``job`` and its inputs by name. ``llama-N`` has N layers."""
    import torch

    from torchkiln.bench.entries.models import MODELS as ENTRIES

    torch.manual_seed(0)
    layers = re.fullmatch(r"llama-(\d+)", name)
    if layers:
        model = _llama(int(layers[1]))
        inputs = {"input_ids": torch.randint(model.config.vocab_size, (1, 64))}
    else:
        (entry,) = (entry for entry in ENTRIES if entry.name == name)
        model, inputs = entry.build(), entry.inputs(0)
    return model.train(job is Job.training), inputs


def _llama(layers: int) -> Any:
    """Narrow, so that 48 layers fit in memory: the graph of a layer is that of a wide one."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=512,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            use_cache=False,
        )
    )


def step_of(compiled: Callable[..., Any], inputs: dict[str, Any], job: Job) -> Callable[[], None]:
    """A call, with a backward where it is for training."""
    import torch

    from torchkiln.bench.entries.entry import loss_of

    def step() -> None:
        if job is Job.training:
            loss_of(dict(compiled(**inputs))).backward()
        else:
            with torch.no_grad():
                compiled(**inputs)

    return step
