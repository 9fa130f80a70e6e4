"""Whether a fused kernel would serve a match; where none would, attention stays as it is written."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx

from torchkiln.graph.dtypes import FLOATS, HALF
from torchkiln.graph.fake import same_metadata, size_hint
from torchkiln.graph.nodes import calls_of, fake_tensor
from torchkiln.patterns.match import Match

# Where the fused kernel of the CPU pays for float32, against the same attention compiled operator by operator: many
# scores, which it keeps out of memory; or, in inference, few queries for many keys, which it does not copy.
# CPU time on one thread (AVX-512), inputs with positions before heads, unfused / fused, inference and training:
#     4 x 8 heads, 64 x 64 scores      0.63  0.96        1 x 12 heads, 384 x 384 scores    1.22  1.03
#     1 x 12 heads, 128 x 128          0.79  0.72        1 x 12 heads, 512 x 512           1.34  1.00
#     1 x 12 heads, 256 x 256          0.79  0.86        4 x 8 heads, 256 x 256            1.22  1.57
#     8 x 12 heads, 128 x 128          1.02  1.08        2 x 8 heads, 16 x 1024            1.48  1.21
#     8 x 12 heads, 1 x 256            2.24  1.03        1 x 8 heads, 1 x 2048             0.99  0.51
# Least of 7 runs, the two in turn, without a mask, on a busy machine; the limits below were read off these ten sizes.
# bfloat16 is fused: 13 sizes in inference (wall clock, contiguous inputs) gave 0.75 and 0.93 for 1 x 1 heads of 4 x 4
# and 4 x 8 heads of 16 x 16, and 1.02 to 2.67 for the others. But not in training with symbolic sizes where the example
# has few scores: the fused backward is written out for known sizes only (``lowering/attention.py``), and a network of
# two layers with 4 x 4 heads of 64 x 64 takes 12.3 ms a step fused and 6.4 as written (two threads); 2 x 12 heads of
# 128 x 128 and 240 x 240 alone take as long either way. float16 was not measured.
LEAST_SCORES = 3 << 19
MOST_QUERIES_OF_FEW = 16
LEAST_KEY_ELEMENTS_FOR_FEW = 1 << 20

# With fewer keys than a vector register holds numbers, and no mask, the fused kernel of the CPU gives zeros for a query
# that is NaN. Seen (AVX-512) for 1 to 15 keys of float32, bfloat16 and float16 and for 1 to 7 of float64; not for 16 to
# 39 keys, nor for a few more than 256, 512 or 1024. Masked attention counts too, as a constant mask may go later.
LEAST_KEYS = 16

# A hidden score that is higher than this may have a weight that shows.
_LOWEST_VISIBLE = -1e4


def check_for(positions_first: Sequence[str], *, learned: bool) -> Callable[[Match], bool]:
    """The check of a form: whether ``scaled_dot_product_attention`` gives what a match computes, by a fused kernel.

    Tensors named in ``positions_first`` have positions before heads; a ``learned`` mask gets a gradient.
    """

    def has_fused_kernel(match: Match) -> bool:
        tensors = [match.value(name) for name in ("query", "key", "value")]
        if any(not isinstance(tensor, torch.Tensor) or tensor.dim() < 3 for tensor in tensors):
            return match.decline("query, key and value are not heads of rows")
        query, key, value = (
            _Heads.of(tensor, positions_first=name in positions_first)
            for name, tensor in zip(("query", "key", "value"), tensors, strict=True)
        )
        reason = _numbers(match) or _tensors(query, key, value) or _mask(match, query, key)
        if not reason and query.device.type == "cpu":
            reason = _cpu(match, query, key, value, learned=learned)
        return match.decline(reason, for_good=True) if reason else True

    return has_fused_kernel


@dataclass(frozen=True)
class _Heads:
    """What the checks ask of a query, key or value with heads before positions; taking sizes alone spares views."""

    shape: tuple[Any, ...]
    column_stride: Any
    dtype: torch.dtype
    device: torch.device

    @staticmethod
    def of(tensor: torch.Tensor, *, positions_first: bool) -> _Heads:
        order = list(range(tensor.dim()))
        if positions_first:
            order[1], order[2] = order[2], order[1]
        shape, strides = tensor.shape, tensor.stride()
        return _Heads(tuple(shape[place] for place in order), strides[order[-1]], tensor.dtype, tensor.device)


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


def _tensors(query: _Heads, key: _Heads, value: _Heads) -> str:
    if query.dtype not in FLOATS or not query.dtype == key.dtype == value.dtype:
        return "query, key and value are not of one floating-point type"
    if not query.device == key.device == value.device:
        return "query, key and value are on several devices"
    if not same_metadata(list(query.shape[:-3]), list(key.shape[:-3])) or not same_metadata(
        list(key.shape[:-1]), list(value.shape[:-1])
    ):
        return "query, key and value have other batches or lengths"
    return ""


def _mask(match: Match, query: _Heads, key: _Heads) -> str:
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
                return f"the {name} does not hold booleans"
        elif mask.dtype not in (query.dtype, torch.float32):
            return f"the {name} is {mask.dtype} where queries are {query.dtype}"
        elif query.dtype == torch.float16:
            return "float16 scores with a mask added may overflow, and fused ones do not"
    return ""


def _cpu(match: Match, query: _Heads, key: _Heads, value: _Heads, *, learned: bool) -> str:
    if match.captures.get("dropout_p", 0.0) > 0:
        return "the CPU has no fused attention with dropout"
    if learned:
        return "the CPU has no fused attention with a gradient of the mask"
    if not same_metadata(list(query.shape[-1:]), list(value.shape[-1:])):
        return "the CPU has no fused attention for values of another width than keys"
    if any(not same_metadata(tensor.column_stride, 1) for tensor in (query, key, value)):
        return "the CPU has no fused attention for rows that are not contiguous"
    keys = key.shape[-2]
    if isinstance(keys, int) and keys < LEAST_KEYS:
        return f"fused attention of the CPU hides a query that is NaN where there are fewer than {LEAST_KEYS} keys"
    return "" if _pays_on_cpu(query, key, training=match.trains) else "fused attention is not faster at these sizes"


def _pays_on_cpu(query: _Heads, key: _Heads, *, training: bool) -> bool:
    queries, keys = size_hint(query.shape[-2]), size_hint(key.shape[-2])
    heads = math.prod(size_hint(size) for size in query.shape[:-2])
    if query.dtype in HALF:
        symbolic = any(isinstance(size, torch.SymInt) for size in (*query.shape, *key.shape))
        return not (training and symbolic) or heads * queries * keys >= LEAST_SCORES
    if heads * queries * keys >= LEAST_SCORES:
        return True
    few = queries <= MOST_QUERIES_OF_FEW and heads * keys * size_hint(key.shape[-1]) >= LEAST_KEY_ELEMENTS_FOR_FEW
    return few and not training


def may_pay(graph: torch.fx.Graph) -> bool:
    """A quick look before any matching: False where every softmax of the graph is too small for fused attention."""
    for node in calls_of(graph, torch.ops.aten.bmm.default, torch.ops.aten.baddbmm.default):
        value = fake_tensor(node)
        if value is not None and (value.device.type != "cpu" or value.dtype not in (torch.float32, torch.float64)):
            return True
    for node in calls_of(graph, torch.ops.aten._softmax.default):
        value = fake_tensor(node)
        if value is None or value.dim() < 3:
            continue
        sizes = [size_hint(size) for size in value.shape]
        if math.prod(sizes) >= LEAST_SCORES or sizes[-2] <= MOST_QUERIES_OF_FEW < sizes[-1]:
            return True
    return False
