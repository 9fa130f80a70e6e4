"""What became of each matmul and convolution of a quantized model: a line each in the log, and in the statistics."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx
from torch._higher_order_ops.auto_functionalize import auto_functionalized

from torchkiln.graph import quantized_operators as int8
from torchkiln.graph.nodes import argument
from torchkiln.graph.quantized_operators import operator_name
from torchkiln.graph.weights import weight_values
from torchkiln.passes.freezing.quantized import convolutions, integer_matmuls, linears
from torchkiln.passes.freezing.quantized.affine import dequantized
from torchkiln.passes.freezing.quantized.calls import POST_OPERATIONS, gives_numbers, has_int8_matmuls, reached
from torchkiln.target import Target

_aten = torch.ops.aten
Node = torch.fx.Node
_log = logging.getLogger(__name__)

_OBSTACLES = {
    _aten.convolution.default: convolutions.obstacle,
    _aten.mm.default: linears.obstacle,
    _aten.addmm.default: linears.obstacle,
    _aten.bmm.default: linears.obstacle,
    _aten.linear.default: linears.obstacle,
    _aten._int_mm.default: integer_matmuls.obstacle,
}
_REPORT = "int8_report"


@dataclass(frozen=True)
class Int8Report:
    """A call of a quantized model: what it is, what was ``fused`` into it, and ``why_not_more``."""

    name: str
    call: str
    fused: tuple[str, ...]
    why_not_more: str

    @property
    def is_int8(self) -> bool:
        """Whether it multiplies bytes with a packed weight."""
        return self.call.startswith("onednn.")

    def __str__(self) -> str:
        fused = f" with {', '.join(self.fused)}" if self.fused else ""
        return f"{self.name} is {self.call}{fused}" + (f"; not more: {self.why_not_more}" if self.why_not_more else "")


def note_int8_calls(graph_module: torch.fx.GraphModule, target: Target) -> bool:
    for node, report in _reports(graph_module.graph, target):
        node.meta[_REPORT] = report
        _log.debug("%s", report)
    return False


def int8_report(node: Node) -> Int8Report | None:
    """What was noted of a call, or can be told of one that was made later."""
    noted: Int8Report | None = node.meta.get(_REPORT)
    if noted is None and node.target is int8.QCONV_SUM:
        return Int8Report(node.name, str(node.target), _fused(node, "binary_attr", "unary_attr"), "")
    if noted is not None and noted.is_int8 and str(node.target) != noted.call:
        return None  # made for the call, such as a copy of what it adds to
    return noted


def _reports(graph: torch.fx.Graph, target: Target) -> Iterator[tuple[Node, Int8Report]]:
    """Every int8 call, and every matmul and convolution that reads what was dequantized, in graph order."""
    constant = weight_values(graph)
    for node in graph.nodes:
        if node.target in POST_OPERATIONS:
            yield node, _called(node)
        elif node.target in (int8.QLINEAR_BINARY, int8.QLINEAR_BINARY_TENSOR):
            yield node, Int8Report(node.name, str(node.target), _fused(node, "binary_post_op", "unary_post_op"), "")
        elif node.target is auto_functionalized and node.args[0] is int8.QCONV_SUM:
            given: Any = node.kwargs
            functions = [str(given[name]) for name in ("binary_attr", "unary_attr") if given[name] != "none"]
            yield node, Int8Report(node.name, str(int8.QCONV_SUM), (*functions, "requantize"), "")
        elif node.target in _OBSTACLES and (
            node.target is _aten._int_mm.default or any(dequantized(source) for source in node.all_input_nodes)
        ):
            why = _OBSTACLES[node.target](node, constant)
            if not has_int8_matmuls(target):
                why = "the processor sums products of bytes in 16 bits"
            kind = "integers" if node.target is _aten._int_mm.default else "numbers"
            yield node, Int8Report(node.name, f"{node.target} of {kind}", (), why)


def _called(node: Node) -> Int8Report:
    fused = _fused(node, POST_OPERATIONS[node.target].name)
    return Int8Report(node.name, str(node.target), fused, _why_not_more(node))


def _fused(node: Node, *names: str) -> tuple[str, ...]:
    functions = tuple(name for name in (argument(node, part) for part in names) if name != "none")
    return (*functions, *(() if gives_numbers(node) else ("requantize",)))


def _why_not_more(node: Node) -> str:
    if not gives_numbers(node):
        return ""
    if len(node.users) != 1:
        return f"{len(node.users)} readers need its numbers"
    reader = next(iter(node.users))
    while reached(reader) is not None and len(reader.users) == 1:
        reader = next(iter(reader.users))
    if reader.op == "output":
        return "the program returns its numbers"
    if operator_name(reader.target).startswith("quantize"):
        return "it is quantized with a scale or a range that the call cannot take"
    return f"{reader.target} reads its numbers"
