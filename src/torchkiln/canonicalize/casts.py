"""One spelling for casts: a copy to another dtype says nothing about what stays as it is.

``x.float()``, ``softmax(x, dtype=torch.float32)`` and autograd's casts of gradients differ in whether they repeat the
layout and the device of ``x``; rewrites should not have to know.
"""

from __future__ import annotations

import torch
import torch.fx

_CAST = torch.ops.aten._to_copy.default


def shorten_casts(graph_module: torch.fx.GraphModule) -> bool:
    changed = False
    for node in graph_module.graph.find_nodes(op="call_function", target=_CAST):
        source = node.args[0].meta.get("val") if isinstance(node.args[0], torch.fx.Node) else None
        if not isinstance(source, torch.Tensor) or len(node.kwargs) < 2:
            continue
        same = {"layout": source.layout, "device": source.device, "pin_memory": False, "non_blocking": False}
        kept = {key: value for key, value in node.kwargs.items() if value is not None and same.get(key) != value}
        if len(kept) < len(node.kwargs):
            node.kwargs = kept
            changed = True
    return changed
