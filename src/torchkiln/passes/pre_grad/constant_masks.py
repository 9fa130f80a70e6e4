"""Masks of attention made of positions: one that hides nothing is none, a causal one is a flag.

Libraries make masks whether or not anything is hidden: the BERT of transformers 5.17, called without one, compares
positions with zero. A mask, whatever it says, keeps attention from the flash kernels of GPUs, and it must go before
autograd, which chooses the kernel. The joint pass of this name sees what this one does not, where sizes are numbers.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from torchkiln.passes.attention_masks import HIDES
from torchkiln.passes.pre_grad.positions import Choice, Linear, Positions
from torchkiln.passes.pre_grad.rewriting import CapturedGraph, rewrite_calls

_ATTENTION = torch._C._nn.scaled_dot_product_attention
_NAMES = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")


def use_constant_masks(graph_module: torch.fx.GraphModule) -> bool:
    return rewrite_calls(graph_module, {_ATTENTION}, _simplify)


def _simplify(graph: CapturedGraph, node: torch.fx.Node) -> bool:
    given: dict[str, Any] = {**dict(zip(_NAMES, node.args, strict=False)), **node.kwargs}
    mask = given.get("attn_mask")
    if not isinstance(mask, torch.fx.Node) or given.get("is_causal", False) is not False:
        return False
    if not _fits(graph, given, mask):
        return False
    contents = Positions(graph).contents(mask)
    if not isinstance(contents, Choice):
        return False
    if not _sees(contents.inside):
        contents = contents.with_negated_condition()
    if not _sees(contents.inside):
        return False
    if contents.conditions:
        if not _hides(contents.outside) or not _is_causal(contents):
            return False
        given["is_causal"] = True
    given["attn_mask"] = None
    node.args = tuple(given.pop(name) for name in _NAMES[:3])
    node.kwargs = given
    return True


def _sees(value: float) -> bool:
    return value is True or (type(value) is float and value == 0)


def _hides(value: float) -> bool:
    return value is False or (type(value) is float and value <= HIDES)


def _is_causal(mask: Choice) -> bool:
    """Whether query number ``i`` sees key ``j`` just where ``j <= i``."""
    if len(mask.conditions) != 1:
        return False
    (condition,) = mask.conditions
    constant = condition.constant
    return isinstance(constant, int) and condition == Linear((0,) * (len(condition.coefficients) - 2) + (1, -1), 0)


def _fits(graph: CapturedGraph, given: dict[str, Any], mask: torch.fx.Node) -> bool:
    """Whether the operator takes the mask: its dtype, and sizes that are those of the scores, or one."""
    query, key, seen = graph.tensor(given["query"]), graph.tensor(given["key"]), graph.tensor(mask)
    if query is None or key is None or seen is None:
        return False
    scores = [*query.shape[:-1], key.shape[-2]]
    if seen.dtype not in (torch.bool, query.dtype) or not 2 <= seen.dim() <= len(scores):
        return False
    pairs = zip(reversed(seen.shape), reversed(scores), strict=False)
    return all(statically_known_true(size == 1) or statically_known_true(size == score) for size, score in pairs)
