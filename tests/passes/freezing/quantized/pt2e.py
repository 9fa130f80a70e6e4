"""Models quantized by torch's PT2E flow, compiled and compared with the converted model in eager."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from torchkiln.recorder import Record, listen

logging.getLogger("torchao").setLevel(logging.ERROR)
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
    from torchao.quantization.pt2e.quantizer import x86_inductor_quantizer as x86

# Before 2.13, the quantizer knows layers only by what a strict export notes of them.
STRICT_EXPORT = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13)

# Before 2.13, torch does not say that this operator writes to what it sums up, so it cannot be used.
SUMS_IN_PLACE = torch.ops.onednn.qconv2d_pointwise.binary._schema.is_mutable


def quantized(
    model: nn.Module, *inputs: Tensor, dynamic: bool = False, dynamic_shapes: Any = None, autocast: bool = False
) -> nn.Module:
    """``model`` with int8 weights and activations, calibrated on ``inputs``."""
    with warnings.catch_warnings(), torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        warnings.simplefilter("ignore")
        exported = torch.export.export(model.eval(), inputs, dynamic_shapes=dynamic_shapes, strict=STRICT_EXPORT)
        quantizer = x86.X86InductorQuantizer()
        quantizer.set_global(x86.get_default_x86_inductor_quantization_config(is_dynamic=dynamic))
        prepared = prepare_pt2e(exported.module(check_guards=False), quantizer)
        for _ in range(2):
            prepared(*inputs)
        converted: nn.Module = convert_pt2e(prepared)
    return converted


@dataclass(frozen=True)
class Compiled:
    """What a compiled model answered, what eager did, and the calls of its graph as text, ``prepared`` those that run
    when weights change."""

    result: Tensor
    expected: Tensor
    calls: tuple[str, ...]
    prepared: tuple[str, ...]

    def count(self, name: str) -> int:
        return sum(name in call.split()[0] for call in self.calls)

    def check(self, *, steps: float = 1.0, mean: float = 0.02) -> None:
        """At most ``steps`` of 255 apart, and ``mean`` of a step on average."""
        step = (self.expected.max() - self.expected.min()).item() / 255
        error = (self.result.float() - self.expected.float()).abs()
        assert self.result.dtype == self.expected.dtype
        assert self.result.shape == self.expected.shape
        assert self.result.stride() == self.expected.stride()
        assert error.max().item() <= steps * step * 1.05
        assert error.mean().item() <= mean * step


def compiled(model: nn.Module, *inputs: Tensor, dynamic: bool | None = False, autocast: bool = False) -> Compiled:
    graphs: dict[str, list[str]] = {"hoisted weights": [], "inference graph": []}

    def note(record: Record) -> None:
        if record.stage == "inference graph":
            graphs[record.stage] += _calls(record.value)
        elif record.stage == "hoisted weights":
            graphs[record.stage] += _calls(record.value.weights)

    run = torch.compile(
        model, backend="kiln", fullgraph=True, dynamic=dynamic, options={"fallback": False, "adaptive": False}
    )
    with torch.no_grad(), listen(note), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        expected = model(*inputs)
        result = run(*inputs)
    return Compiled(result, expected, tuple(graphs["inference graph"]), tuple(graphs["hoisted weights"]))


def _calls(graph_module: torch.fx.GraphModule) -> Sequence[str]:
    return [f"{node.target} {node.args}" for node in graph_module.graph.nodes if node.op == "call_function"]
