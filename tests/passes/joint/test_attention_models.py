"""Attention of models from ``transformers``, as their eager code writes it: every layer is fused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers

import torchkiln
from torchkiln.passes.joint.attention import checks

FLASH = "aten._scaled_dot_product_flash_attention_for_cpu.default"
FLASH_BACKWARD = "aten._scaled_dot_product_flash_attention_for_cpu_backward.default"
EAGER = {"attn_implementation": "eager"}
SMALL: dict[str, Any] = {
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 18, **EAGER,
}  # fmt: skip
TEXT = {**SMALL, "vocab_size": 50, "max_position_embeddings": 16}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def _bert() -> torch.nn.Module:
    return transformers.BertModel(transformers.BertConfig(**TEXT, **NO_DROPOUT), add_pooling_layer=False)


def _distilbert() -> torch.nn.Module:
    config = transformers.DistilBertConfig(
        dim=16, n_layers=2, n_heads=4, hidden_dim=18, vocab_size=50, max_position_embeddings=16,
        dropout=0.0, attention_dropout=0.0, **EAGER,
    )  # fmt: skip
    return transformers.DistilBertModel(config)


def _gpt2() -> torch.nn.Module:
    config = transformers.GPT2Config(
        n_embd=16, n_layer=2, n_head=4, vocab_size=50, n_positions=16, bos_token_id=1, eos_token_id=2, use_cache=False,
        attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0, **EAGER,
    )  # fmt: skip
    return transformers.GPT2Model(config)


def _llama() -> torch.nn.Module:
    return transformers.LlamaModel(transformers.LlamaConfig(**TEXT, num_key_value_heads=2, use_cache=False))


def _t5() -> torch.nn.Module:
    config = transformers.T5Config(
        d_model=16, d_kv=4, d_ff=18, num_layers=2, num_heads=4, vocab_size=50, dropout_rate=0.0, **EAGER
    )
    return transformers.T5EncoderModel(config)


def _vit() -> torch.nn.Module:
    config = transformers.ViTConfig(**SMALL, **NO_DROPOUT, image_size=8, patch_size=4)
    return transformers.ViTModel(config, add_pooling_layer=False)


MODELS: dict[str, Callable[[], torch.nn.Module]] = {
    "BERT": _bert, "DistilBERT": _distilbert, "GPT-2": _gpt2, "Llama": _llama, "T5": _t5, "ViT": _vit,
}  # fmt: skip


def _inputs(name: str, *, padded: bool) -> dict[str, torch.Tensor]:
    if name == "ViT":
        return {"pixel_values": torch.randn(2, 3, 8, 8)}
    inputs = {"input_ids": torch.randint(3, 50, (2, 7))}
    if padded:
        inputs["attention_mask"] = torch.tensor([[1] * 7, [1] * 4 + [0] * 3])
    return inputs


@pytest.fixture(autouse=True)
def _any_size_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    """The examples are small, so that they are quick; what the limits are for has tests of its own."""
    torchkiln.reset_stats()
    monkeypatch.setattr(checks, "LEAST_SCORES", 0)
    monkeypatch.setattr(checks, "LEAST_KEYS", 0)


def _fused() -> tuple[int, int]:
    calls = torchkiln.stats().extern_calls
    return calls.get(FLASH, 0), calls.get(FLASH_BACKWARD, 0)


@pytest.mark.parametrize("name", MODELS)
def test_every_layer_is_fused_in_inference(name: str, compile_strictly: Callable[..., Any]) -> None:
    model, inputs = MODELS[name]().eval(), _inputs(name, padded=True)
    with torch.no_grad():
        result, expected = (called(**inputs)[0] for called in (compile_strictly(model), model))
    torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-5)
    assert _fused() == (2, 0)


@pytest.mark.parametrize("name", MODELS)
def test_training_has_the_gradients_of_eager(name: str, compile_strictly: Callable[..., Any]) -> None:
    model, inputs = MODELS[name]().train(), _inputs(name, padded=name in ("BERT", "Llama"))
    parameters = dict(model.named_parameters())
    results = []
    for called in (compile_strictly(model), model):
        result = called(**inputs)[0]
        gradients = torch.autograd.grad(result.sin().sum(), list(parameters.values()), allow_unused=True)
        results.append((result, dict(zip(parameters, gradients, strict=True))))
    (result, found), (expected, wanted) = results
    torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-5)
    for parameter, gradient in wanted.items():
        if gradient is not None:  # compiled, a parameter that nothing depends on has a gradient of zeros
            torch.testing.assert_close(found[parameter], gradient, rtol=1e-3, atol=1e-5, msg=parameter)
    # T5's bias is learned, and the CPU has no fused attention that gives its gradient.
    assert _fused() == ((0, 0) if name == "T5" else (2, 2))
