"""Checks of classes, given to ``one_hot`` and to margin losses, that torch drops while tracing.

No version keeps the checks of their dtype. torch 2.13 keeps the check that those of ``one_hot`` are in range; before, a
class that is not became a row of zeros.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.fx
import torch.nn.functional as F
from torch._C import DispatchKey

from torchkiln.graph.captured_calls import add_call, tensor_of

_ONE_HOT = torch._C._nn.one_hot

# Where the classes are among the arguments, by position and by name.
_CLASSES: dict[Callable[..., Any], tuple[int, str]] = {
    _ONE_HOT: (0, "input"),
    F.multi_margin_loss: (1, "target"),
    F.multilabel_margin_loss: (1, "target"),
    torch.ops.aten.one_hot: (0, "self"),
    torch.ops.aten.multi_margin_loss: (1, "target"),
    torch.ops.aten.multilabel_margin_loss: (1, "target"),
}


def add_class_checks(graph_module: torch.fx.GraphModule) -> bool:
    changed = False
    for target, (position, name) in _CLASSES.items():
        for node in graph_module.graph.find_nodes(op="call_function", target=target):
            classes = node.args[position] if position < len(node.args) else node.kwargs.get(name)
            value = tensor_of(graph_module, classes)
            if not isinstance(classes, torch.fx.Node) or value is None:
                continue
            if value.dtype is not torch.int64:
                _refuse_dtype(node, classes, value)
                changed = True
            elif target is _ONE_HOT and _drops_checks_of_range():
                changed |= _check_range(node, classes)
    return changed


def _refuse_dtype(node: torch.fx.Node, classes: torch.fx.Node, value: torch.Tensor) -> None:
    """Raise when the graph gets here, as eager does; what follows is compiled for classes of int64."""
    if node.target in (_ONE_HOT, torch.ops.aten.one_hot):
        text = "one_hot is only applicable to index tensor of type LongTensor."
    else:
        found = torch.empty(0, dtype=value.dtype, device="cpu").type().removeprefix("torch.").removesuffix("Tensor")
        text = f"expected scalar type Long but found {found}"
    never = add_call(node, torch.zeros, ((),), {"dtype": torch.bool, "device": value.device})
    add_call(node, torch._assert_async, (never, text))
    node.replace_input_with(classes, add_call(node, torch.zeros_like, (classes,), {"dtype": torch.int64}))


def _check_range(node: torch.fx.Node, classes: torch.fx.Node) -> bool:
    count = node.args[1] if len(node.args) > 1 else node.kwargs.get("num_classes", -1)
    if isinstance(count, int) and count < 0:  # counted from the classes themselves
        return False
    for holds, message in (
        (add_call(node, torch.ge, (classes, 0)), "Class values must be non-negative."),
        (add_call(node, torch.lt, (classes, count)), "Class values must be smaller than num_classes."),
    ):
        add_call(node, torch._assert_async, (add_call(node, torch.all, (holds,)), message))
    return True


def _drops_checks_of_range() -> bool:
    return DispatchKey.CompositeImplicitAutograd not in torch.ops.aten.one_hot.default.py_kernels
