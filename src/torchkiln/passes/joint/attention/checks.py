"""Whether a fused kernel would serve a match; where none would, attention stays as it is written."""

from __future__ import annotations

import math
from typing import Any

import torch

from torchkiln.graph.fake import same_metadata
from torchkiln.patterns.match import Match

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)

# A hidden score that is higher than this may have a weight that shows.
_LOWEST_VISIBLE = -1e4


def has_fused_kernel(match: Match) -> bool:
    """Whether ``scaled_dot_product_attention`` gives what the match computes, by a fused kernel of its device."""
    reason = _numbers(match) or _tensors(match) or _mask(match)
    if not reason and match.value("query").device.type == "cpu":
        reason = _cpu(match)
    return match.decline(reason) if reason else True


def _numbers(match: Match) -> str:
    for name in ("scale", "fill", "dropout_p"):
        number = match.captures.get(name, 1.0)
        if isinstance(number, bool) or not isinstance(number, (int, float)):
            return f"{name} is not a number known while compiling"
    scale = match.captures.get("scale", 1.0)
    if scale == 0 or not math.isfinite(scale):
        return f"scores are scaled by {scale}"
    if not match.captures.get("fill", -math.inf) <= _LOWEST_VISIBLE:
        return f"hidden scores become {match.captures['fill']}, which does not hide them"
    return ""


def _tensors(match: Match) -> str:
    query, key, value = (match.value(name) for name in ("query", "key", "value"))
    if query.dtype not in _DTYPES or not query.dtype == key.dtype == value.dtype:
        return "query, key and value are not of one floating-point type"
    if not query.device == key.device == value.device:
        return "query, key and value are on several devices"
    if not same_metadata(list(query.shape[:-3]), list(key.shape[:-3])) or not same_metadata(
        list(key.shape[:-1]), list(value.shape[:-1])
    ):
        return "query, key and value have other batches or lengths"
    return ""


def _mask(match: Match) -> str:
    query, key = match.value("query"), match.value("key")
    for name in ("mask", "bias"):
        if name not in match.captures:
            continue
        mask = match.value(name)
        if not isinstance(mask, torch.Tensor) or mask.device != query.device:
            return f"the {name} is not on the device of the query"
        if mask.dim() < 2 or not same_metadata(list(mask.shape[-1:]), [key.shape[-2]]):
            return f"the {name} is not given for every key"
        if "fill" in match.captures:
            if mask.dtype != torch.bool:
                return f"the {name} does not hold truth values"
        elif mask.dtype not in (query.dtype, torch.float32):
            return f"the {name} is {mask.dtype} where queries are {query.dtype}"
        elif query.dtype == torch.float16:
            return "float16 scores with a mask added may overflow, and fused ones do not"
    return ""


def _cpu(match: Match) -> str:
    if match.captures.get("dropout_p", 0.0) > 0:
        return "the CPU has no fused attention with dropout"
    if match.value("query").shape[-1:] != match.value("value").shape[-1:]:
        return "the CPU has no fused attention for values of another width than keys"
    if any(match.value(name).stride(-1) != 1 for name in ("query", "key", "value")):
        return "the CPU has no fused attention for rows that are not contiguous"
    return ""


def mask_has_no_gradient(match: Match) -> bool:
    """For spellings whose mask is learned."""
    if match.value("query").device.type == "cpu":
        return match.decline("the CPU has no fused attention with a gradient of the mask")
    return has_fused_kernel(match)


def typical(size: Any) -> int:
    """A size, or what it was in the example where it is symbolic."""
    return size if isinstance(size, int) else int(size.node.hint or 0)
