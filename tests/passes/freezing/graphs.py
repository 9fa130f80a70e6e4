"""Inference graphs of modules as the passes of freezing get them, and compiled modules against eager."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx
from torch import nn

from torchkiln.canonicalize.chains import collapse_chains
from torchkiln.graph.aliases import view_source
from torchkiln.graph.manager import Pass, register_pass, unregister_pass
from torchkiln.graph.subgraphs import copy_graph_module
from torchkiln.recorder import Record, listen


def inference_graph(module: nn.Module, *inputs: torch.Tensor, dynamic: bool = False) -> torch.fx.Graph:
    """The graph that the joint passes get, with canonical operators and its weights marked."""
    kept: list[torch.fx.GraphModule] = []

    def keep(graph_module: torch.fx.GraphModule) -> bool:
        kept.append(copy_graph_module(graph_module))
        return False

    register_pass("joint", "priority_2", Pass("keep", keep))
    try:
        _run(module, inputs, dynamic=dynamic)
    finally:
        unregister_pass("joint", "priority_2", "keep")
    (found,) = kept
    collapse_chains(found)
    return found.graph


def _run(module: nn.Module, inputs: Sequence[Any], *, dynamic: bool = False, **options: Any) -> Any:
    torch._dynamo.reset()
    options = {"fallback": False, "adaptive": False, "cache": False, **options}  # passes are watched
    compiled = torch.compile(module.eval(), backend="kiln", dynamic=dynamic, fullgraph=True, options=options)
    with torch.no_grad():
        return compiled(*inputs)


@dataclass(frozen=True)
class Divided:
    """A compiled inference: what it gave, and the operators of the graph that runs at each call, views left out."""

    result: Any
    operators: tuple[str, ...]


_KERNELS = ("packed_convolutions", "packed_linears", "channels_last")


def divided(module: nn.Module, *inputs: torch.Tensor, dynamic: bool = False, autocast: bool = False) -> Divided:
    """Compile and call ``module`` in inference; all of the graph runs at each call where nothing is hoisted.

    Passes that choose kernels and layouts are off, for the algebra alone to show.
    """
    found: list[tuple[str, ...]] = []

    def listener(record: Record) -> None:
        if record.stage == "hoisted weights":
            found.append(_operators(record.value.rest.graph))

    with listen(listener), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        result = _run(module, inputs, dynamic=dynamic, passes_skip=_KERNELS)
    assert len(found) <= 2, "once more at most, without folding what its weights refused"
    return Divided(result, found[-1] if found else ("nothing was hoisted",))


def _operators(graph: torch.fx.Graph) -> tuple[str, ...]:
    calls = [node for node in graph.nodes if node.op == "call_function" and node.users]
    computed = [node for node in calls if view_source(node) is None and isinstance(node.target, torch._ops.OpOverload)]
    return tuple(str(node.target).removeprefix("aten.").removesuffix(".default") for node in computed)


def _strides(value: torch.Tensor) -> list[int]:
    """Those that show: along a dimension of one element any stride does."""
    return [stride for stride, size in zip(value.stride(), value.shape, strict=True) if size > 1]


def check_against_float64(module: nn.Module, inputs: Sequence[torch.Tensor], found: torch.Tensor) -> None:
    """The error of ``found`` may exceed eager's by rounding of the dtype only, relative to the largest element."""
    with torch.no_grad():
        eager = module(*inputs)
        exact = copy.deepcopy(module).double()(*(value.double() for value in inputs))
    assert found.dtype == eager.dtype
    assert found.shape == eager.shape
    assert _strides(found) == _strides(eager)
    eps = torch.finfo(next(module.parameters()).dtype).eps
    allowed = 2 * (eager.double() - exact).abs().max() + 4 * eps * exact.abs().max()
    assert (found.double() - exact).abs().max() <= allowed
