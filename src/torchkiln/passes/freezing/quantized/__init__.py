"""Quantized models: int8 convolutions and matmuls of oneDNN, with packed weights and what surrounds them folded in.

Graphs of torch's PT2E flow compute in numbers between dequantize and quantize calls. The passes below find where the
integers can be multiplied as they are; what is left becomes arithmetic in fused loops.
"""

from __future__ import annotations

from torchkiln.config import Settings
from torchkiln.graph.manager import Pass
from torchkiln.passes.freezing.quantized.activations import fuse_activations
from torchkiln.passes.freezing.quantized.arithmetic import write_out_quantization
from torchkiln.passes.freezing.quantized.convolutions import multiply_convolution_integers
from torchkiln.passes.freezing.quantized.integer_matmuls import pack_integer_matmuls
from torchkiln.passes.freezing.quantized.linears import multiply_linear_integers
from torchkiln.passes.freezing.quantized.movement import keep_integers
from torchkiln.passes.freezing.quantized.report import note_int8_calls
from torchkiln.passes.freezing.quantized.requantize import quantize_results
from torchkiln.passes.freezing.quantized.sums import fuse_sums
from torchkiln.passes.freezing.quantized.tokens import multiply_tokens
from torchkiln.passes.freezing.quantized.weight_only import use_weight_integers

_INFERENCE = frozenset({"inference"})


def _wanted(settings: Settings) -> bool:
    return settings.prepare_weights and settings.precision != "eager"


QUANTIZED = (
    Pass("quantized_movement", keep_integers, kinds=_INFERENCE),
    Pass("quantized_convolutions", multiply_convolution_integers, wanted=_wanted, kinds=_INFERENCE, needs_target=True),
    Pass("quantized_linears", multiply_linear_integers, wanted=_wanted, kinds=_INFERENCE, needs_target=True),
    Pass("quantized_tokens", multiply_tokens, wanted=_wanted, kinds=_INFERENCE, needs_target=True),
    Pass("integer_matmuls", pack_integer_matmuls, wanted=_wanted, kinds=_INFERENCE, needs_target=True),
    Pass("quantized_activations", fuse_activations, wanted=_wanted, kinds=_INFERENCE),
    Pass("quantized_sums", fuse_sums, wanted=_wanted, kinds=_INFERENCE),
    Pass("requantize", quantize_results, wanted=_wanted, kinds=_INFERENCE),
    Pass("weight_only_matmuls", use_weight_integers, wanted=_wanted, kinds=_INFERENCE),
)
"""In the rounds of freezing, before anything else looks at convolutions and matmuls."""

AFTER_FREEZING = (
    Pass("quantized_report", note_int8_calls, kinds=_INFERENCE, needs_target=True),
    Pass("quantized_arithmetic", write_out_quantization),
)
"""In every graph, where what is left of quantization is turned into arithmetic."""
