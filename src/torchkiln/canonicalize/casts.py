"""One form for casts: a copy to another dtype says nothing about what stays as it is.

``x.float()``, ``softmax(x, dtype=torch.float32)`` and autograd's casts of gradients differ in whether they repeat the
layout and the device of ``x``; rewrites should not have to know.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.fx

from torchkiln.graph.nodes import calls_of, fake_tensor


def shorten_casts(graph_module: torch.fx.GraphModule) -> bool:
    changed = False
    for node in calls_of(graph_module.graph, torch.ops.aten._to_copy.default):
        source = fake_tensor(node.args[0])
        if source is None or len(node.kwargs) < 2:
            continue
        same = {"layout": source.layout, "device": source.device, "pin_memory": False, "non_blocking": False}
        kept: dict[str, Any] = {k: v for k, v in node.kwargs.items() if v is not None and same.get(k) != v}
        if len(kept) < len(node.kwargs):
            node.kwargs = kept
            changed = True
    return changed
