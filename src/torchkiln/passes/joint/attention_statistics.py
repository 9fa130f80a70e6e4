"""The dtype of what attention keeps for its backward, where torch says another than it returns.

torch 2.11 states float32 for the logarithms of sums of attention in float64 on the CPU, and returns float64. What is
compiled by the statement would read the memory of such a result wrongly, and is refused when it runs.
"""

from __future__ import annotations

import operator
from functools import cache

import torch
import torch.fx
from torch._subclasses.fake_tensor import unset_fake_temporarily

_attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


def state_dtype_of_statistics(graph_module: torch.fx.GraphModule) -> bool:
    changed = False
    for node in graph_module.graph.find_nodes(op="call_function", target=_attention):
        result, statistics = node.meta["val"]
        returned = _returned(result.dtype)
        if statistics.dtype == returned:
            continue
        with statistics.fake_mode:
            right = torch.empty_strided(statistics.shape, statistics.stride(), dtype=returned, device=statistics.device)
        node.meta["val"] = (result, right)
        for user in node.users:
            if user.target is operator.getitem and user.args[1] == 1:
                user.meta["val"] = right
        changed = True
    return changed


@cache
def _returned(dtype: torch.dtype) -> torch.dtype:
    """The dtype of statistics that torch returns for inputs of ``dtype``, asked once."""
    with unset_fake_temporarily(), torch.no_grad():
        one = torch.zeros((1, 1, 1, 1), dtype=dtype)
        statistics: torch.Tensor = _attention(one, one, one)[1]
    return statistics.dtype
