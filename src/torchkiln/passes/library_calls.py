"""What each matmul and convolution of a graph became: which library call, what is fused into it, and why not more."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.fx

from torchkiln.graph.aliases import view_source
from torchkiln.graph.nodes import fake_tensor
from torchkiln.graph.operators import Kind, kind_of
from torchkiln.passes.freezing.onednn.calls import NOT_FUSED, NOT_PACKED, OPERATORS, packed_call
from torchkiln.passes.freezing.quantized.report import int8_report
from torchkiln.stats import MatmulRecord

_MOST_READERS = 3


def matmul_records(graph: torch.fx.Graph, kind: str) -> Iterator[MatmulRecord]:
    """One for each matmul and convolution of a ``kind`` of graph that is ready to be lowered."""
    for node in graph.nodes:
        report = int8_report(node) if node.op == "call_function" else None
        if node.op != "call_function" or not (_multiplies(node.target) or report is not None):
            continue
        call, value = packed_call(node), fake_tensor(node)
        sizes = "x".join(map(str, value.shape)) if value is not None else ""
        if report is not None:
            why = report.why_not_more if report.is_int8 else f"not of packed integers: {report.why_not_more}"
            yield MatmulRecord(str(node.target), node.name, sizes, report.is_int8, report.fused, why)
            continue
        fused = call.fused if call is not None else ()
        reason = _not_more(node) if call is not None else node.meta.get(NOT_PACKED, _unpacked(kind))
        yield MatmulRecord(str(node.target), node.name, sizes, call is not None, fused, reason)


def _multiplies(target: object) -> bool:
    return kind_of(target) is Kind.MATMUL or (target is OPERATORS.convolution_into and target is not None)


def _unpacked(kind: str) -> str:
    return "its weight is not packed: no parameter or buffer" if kind == "inference" else "only inference packs weights"


def _not_more(node: torch.fx.Node) -> str:
    """Why nothing further is fused into a call with a packed weight."""
    noted: str | None = node.meta.get(NOT_FUSED)
    if noted is not None:
        return noted
    readers = list(dict.fromkeys(_readers(node)))
    shown = ", ".join(readers[:_MOST_READERS]) + (", ..." if len(readers) > _MOST_READERS else "")
    return f"read by {shown}" if shown else ""


def _readers(node: torch.fx.Node) -> Iterator[str]:
    for user in node.users:
        if user.op == "output":
            yield "the caller"
        elif view_source(user) is not None:
            yield from _readers(user)
        else:
            yield str(user.target)
