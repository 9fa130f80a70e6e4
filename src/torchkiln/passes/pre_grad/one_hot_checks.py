"""Checks of the classes given to ``one_hot``, on versions of torch that drop them while tracing.

torch 2.13 traces the operator with its checks. Before, a class that is out of range became a row of zeros.
"""

from __future__ import annotations

import torch
import torch.fx
from torch._C import DispatchKey

from torchkiln.config import Settings
from torchkiln.passes.pre_grad.calls import add_call, operand

_ONE_HOT = torch._C._nn.one_hot


def is_wanted(_: Settings) -> bool:
    return DispatchKey.CompositeImplicitAutograd not in torch.ops.aten.one_hot.default.py_kernels


def add_one_hot_checks(graph_module: torch.fx.GraphModule) -> bool:
    changed = False
    for node in graph_module.graph.find_nodes(op="call_function", target=_ONE_HOT):
        classes, count = operand(node), node.args[1] if len(node.args) > 1 else node.kwargs.get("num_classes", -1)
        if classes is None or (isinstance(count, int) and count < 0):  # counted from the classes themselves
            continue
        for holds, message in (
            (add_call(node, torch.ge, (classes, 0)), "Class values must be non-negative."),
            (add_call(node, torch.lt, (classes, count)), "Class values must be smaller than num_classes."),
        ):
            add_call(node, torch._assert_async, (add_call(node, torch.all, (holds,)), message))
        changed = True
    return changed
