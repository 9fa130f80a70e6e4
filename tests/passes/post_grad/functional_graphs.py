"""What tests of post-grad passes share: graphs of ATen calls, a pass applied to them, and the graph as text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils import _pytree as pytree

from torchkiln import config
from torchkiln.graph.dead_code import eliminate_dead_code
from torchkiln.graph.effects import has_effect
from torchkiln.graph.manager import Pass, PassManager, PassPipeline

RunPass = Callable[[torch.fx.GraphModule], bool]


def traced(function: Callable[..., Any], *inputs: torch.Tensor, symbolic: bool = False) -> torch.fx.GraphModule:
    """``function``, written in ATen operators, as a graph; with ``symbolic``, for sizes known only at run time."""
    if symbolic:
        return make_fx(function, tracing_mode="symbolic")(*inputs)
    mode = FakeTensorMode(shape_env=ShapeEnv())
    with mode:  # for tensors that the function makes
        return make_fx(function)(*(mode.from_tensor(value, static_shapes=True) for value in inputs))


def apply(run: RunPass, gm: torch.fx.GraphModule) -> bool:
    """Run the pass with the manager's checks: a graph in order, the same values out, fake tensors that fit."""
    pipeline = PassPipeline("test", (Pass("under_test", run),))
    changed = PassManager(config.resolve({"checks": True})).run(pipeline, gm, kind="inference")
    eliminate_dead_code(gm.graph, has_effect)
    gm.recompile()
    return changed


def calls(gm: torch.fx.GraphModule) -> list[str]:
    """The graph as text, one line per call; inputs keep the names of the function's arguments."""
    return [
        f"{node.name} = {_target(node)}({', '.join(map(_text, [*node.args, *node.kwargs.values()]))})"
        for node in gm.graph.nodes
        if node.op == "call_function"
    ]


def _target(node: torch.fx.Node) -> str:
    target = node.target
    return str(target).removeprefix("aten.") if isinstance(target, torch._ops.OpOverload) else target.__name__  # type: ignore[union-attr]


def _text(value: Any) -> str:
    return f"[{', '.join(map(_text, value))}]" if isinstance(value, (list, tuple)) else str(value)


def same_numbers(gm: torch.fx.GraphModule, function: Callable[..., Any], *inputs: Any, **tolerance: float) -> None:
    """The graph gives the function's results and leaves the same values in its inputs; bit for bit unless told."""
    mine, eagers = ([value.clone() for value in inputs] for _ in range(2))
    results = [pytree.tree_leaves(run(*values)) for run, values in ((gm, mine), (function, eagers))]
    torch.testing.assert_close(*results, **{"rtol": 0, "atol": 0, "equal_nan": True, **tolerance})
    torch.testing.assert_close(mine, eagers, rtol=0, atol=0, equal_nan=True)
