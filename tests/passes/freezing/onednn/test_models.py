"""Small models of the transformers library, with packed weights and fused calls, against eager and float64."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import torchkiln
from torchkiln.native.onednn import packed_dtypes
from torchkiln.passes.freezing.onednn import fusion, packed_linears

pytestmark = pytest.mark.skipif("float32" not in packed_dtypes(), reason="needs oneDNN")

Made = tuple[nn.Module, Tensor]


def _image(size: int = 32) -> Tensor:
    return torch.randn(2, 3, size, size)


def _tokens() -> Tensor:
    return torch.randint(0, 90, (2, 12))


def _resnet() -> Made:
    sizes: Any = {"embedding_size": 8, "hidden_sizes": [16, 24], "depths": [2, 1], "layer_type": "bottleneck"}
    return transformers.ResNetForImageClassification(transformers.ResNetConfig(**sizes)), _image()


def _mobilenet() -> Made:
    config = transformers.MobileNetV2Config(depth_multiplier=0.35, image_size=32, finegrained_output=False)
    return transformers.MobileNetV2ForImageClassification(config), _image()


def _convnext() -> Made:
    config = transformers.ConvNextConfig(hidden_sizes=[8, 16, 16, 16], depths=[1, 1, 1, 1])
    return transformers.ConvNextForImageClassification(config), _image()


def _swin() -> Made:
    config = transformers.SwinConfig(image_size=32, embed_dim=12, depths=[2, 1], num_heads=[2, 2], window_size=4)
    return transformers.SwinForImageClassification(config), _image()


_TEXT: Any = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 90}


def _bert() -> Made:
    return transformers.BertForMaskedLM(transformers.BertConfig(intermediate_size=64, **_TEXT)), _tokens()


def _gpt2() -> Made:
    config = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=90, use_cache=False)
    return transformers.GPT2LMHeadModel(config), _tokens()


_MODELS: dict[str, tuple[Callable[[], Made], int]] = {
    "ResNet": (_resnet, 13),
    "MobileNetV2": (_mobilenet, 50),
    "ConvNeXt": (_convnext, 8),
    "Swin": (_swin, 2),
    "BERT": (_bert, 8),
    "GPT-2": (_gpt2, 9),
}


@pytest.mark.usefixtures("no_cache")  # what calls became is noted while compiling
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", _MODELS)
def test_a_model_with_packed_weights_gives_what_eager_gives(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every layer is packed and all that can be is fused, however small the model is."""
    monkeypatch.setattr(packed_linears, "_pays", lambda *_: True)
    monkeypatch.setattr(fusion, "pays", lambda *_: True)
    torch.manual_seed(0)
    (make, packed), before = _MODELS[name], torchkiln.stats()
    model, x = make()
    model = _with_statistics(model).eval().to(dtype)
    given = x.to(dtype) if x.is_floating_point() else x
    options = {"fallback": False, "adaptive": False}
    run = torch.compile(model, backend="kiln", fullgraph=True, options=options)
    with torch.no_grad():
        reference = copy.deepcopy(model).double()(x.double() if x.is_floating_point() else x).logits
        expected = model(given).logits
        for _ in range(2):
            found = run(given).logits
    assert (found.dtype, found.shape, found.stride()) == (expected.dtype, expected.shape, expected.stride())
    scale = reference.abs().max().item()
    allowed = 2 * (expected - reference).abs().max().item() + 4 * torch.finfo(dtype).eps * scale
    assert (found - reference).abs().max().item() <= allowed
    records = torchkiln.stats().matmuls[len(before.matmuls) :]
    assert sum(record.packed for record in records) >= packed


def _with_statistics(model: nn.Module) -> nn.Module:
    """Batch norms that have seen something."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.running_mean, std=0.1)
            nn.init.uniform_(module.running_var, 0.5, 1.5)
    return model
