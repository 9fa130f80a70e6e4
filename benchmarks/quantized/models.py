"""The models that are quantized, and how: residual blocks, an encoder layer, linears with int8 weights alone, and whole
models with random weights."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
    from torchao.quantization.pt2e.quantizer import x86_inductor_quantizer as x86


class _Block(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.ReLU())
        self.second = nn.Sequential(nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels))
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.relu(self.second(self.first(x)) + x)
        return result


class _FeedForward(nn.Module):
    """The wide half of a BERT layer."""

    def __init__(self, width: int = 768) -> None:
        super().__init__()
        self.wide, self.gelu, self.narrow = nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.norm(self.narrow(self.gelu(self.wide(x))) + x)
        return result


class _WeightOnly(nn.Module):
    def __init__(self, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.register_buffer("weight", torch.randint(-127, 128, (width, width)).to(torch.int8))
        self.register_buffer("scale", (torch.rand(width) * 0.01).to(dtype))

    def forward(self, x: Tensor) -> Tensor:
        return x @ (self.weight.to(x.dtype) * self.scale)


@dataclass(frozen=True)
class Case:
    """``converted`` is what is measured; ``original`` the float model it was made of, where there is one."""

    converted: nn.Module
    original: nn.Module | None
    inputs: tuple[Tensor, ...]


def _quantized(model: nn.Module, x: Tensor, *, dynamic: bool = False) -> Case:
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        exported = torch.export.export(model.eval(), (x,)).module(check_guards=False)
        quantizer = x86.X86InductorQuantizer()
        quantizer.set_global(x86.get_default_x86_inductor_quantization_config(is_dynamic=dynamic))
        prepared = prepare_pt2e(exported, quantizer)
        prepared(x)
        return Case(convert_pt2e(prepared), model, (x,))


def _blocks(channels: int, size: int, batch: int) -> Case:
    model = nn.Sequential(_Block(channels), _Block(channels))
    return _quantized(model, torch.randn(batch, channels, size, size))


class _First(nn.Module):
    """A model of transformers as a function of one tensor to one tensor."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.model(x)[0]
        return result


def _resnet(depths: tuple[int, ...], kind: str, widths: tuple[int, ...], batch: int) -> Case:
    import transformers

    config = transformers.ResNetConfig(depths=list(depths), layer_type=kind, hidden_sizes=list(widths))
    model = _First(transformers.ResNetForImageClassification(config))
    with torch.no_grad():
        model.train()(torch.randn(4, 3, 64, 64))  # statistics for the norms
    return _quantized(model, torch.randn(batch, 3, 224, 224))


def _resnet18(batch: int) -> Case:
    return _resnet((2, 2, 2, 2), "basic", (64, 128, 256, 512), batch)


def _resnet50(batch: int) -> Case:
    return _resnet((3, 4, 6, 3), "bottleneck", (256, 512, 1024, 2048), batch)


def _bert(layers: int, batch: int, *, dynamic: bool = False) -> Case:
    """BERT-base, 128 tokens, with so many layers."""
    import transformers

    config = transformers.BertConfig(num_hidden_layers=layers, attn_implementation="sdpa")
    model = _First(transformers.BertModel(config, add_pooling_layer=False))
    return _quantized(model, torch.randint(0, config.vocab_size, (batch, 128)), dynamic=dynamic)


CASES: dict[str, Callable[[], Case]] = {
    "two residual blocks, 64 channels, 56 x 56, batch 4": lambda: _blocks(64, 56, 4),
    "two residual blocks, 256 channels, 14 x 14, batch 1": lambda: _blocks(256, 14, 1),
    "feed-forward 768, 128 rows": lambda: _quantized(_FeedForward(), torch.randn(1, 128, 768)),
    "feed-forward 768, 128 rows, dynamic": lambda: _quantized(_FeedForward(), torch.randn(1, 128, 768), dynamic=True),
    "int8 weight 4096 x 4096, float32, 1 row": lambda: Case(
        _WeightOnly(4096, torch.float32), None, (torch.randn(1, 4096),)
    ),
    "int8 weight 4096 x 4096, bfloat16, 1 row": lambda: Case(
        _WeightOnly(4096, torch.bfloat16), None, (torch.randn(1, 4096).bfloat16(),)
    ),
    **{f"resnet-18, batch {batch}": partial(_resnet18, batch) for batch in (1, 8)},
    **{f"resnet-50, batch {batch}": partial(_resnet50, batch) for batch in (1, 8)},
    **{f"bert, 4 layers, batch {batch}": partial(_bert, 4, batch) for batch in (1, 8)},
    "bert, 4 layers, batch 1, dynamic": partial(_bert, 4, 1, dynamic=True),
}
