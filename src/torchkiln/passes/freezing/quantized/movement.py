"""Integers stay integers through views, copies, concatenation and max pooling.

Dequantizing commutes with whatever only moves elements or picks the largest. So a reader of dequantized numbers that
does so reads the integers, and its result is dequantized: a quarter of the memory, and a dequantize call for every
reader behind it, to be fused with. Quantizing such numbers again, with the same scale, gives the integers.

Quantizing commutes with padding: what is padded and then quantized is quantized first. The call that computed it then
stores integers itself, and a quarter of the memory is padded.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.fx

from torchkiln.graph.insertion import erase_made, insert_call
from torchkiln.graph.nodes import argument, fake_tensor, replace, replace_if_alike
from torchkiln.graph.operators import named_operators
from torchkiln.graph.quantized_operators import NAMESPACE
from torchkiln.passes.freezing.quantized.affine import Affine, dequantized, is_dequantize, quantizes

_aten = torch.ops.aten
Node = torch.fx.Node

_MOVES = frozenset(
    named_operators("""
        view _unsafe_view reshape permute transpose.int t squeeze.default,dim,dims unsqueeze expand select.int
        slice.Tensor alias detach clone flip roll repeat index_select
    """)
)
"""Operators of one tensor that give elements of it."""


def keep_integers(graph_module: torch.fx.GraphModule) -> bool:
    graph = graph_module.graph
    changed = False
    waiting = [node for node in graph.nodes if dequantized(node) is not None]
    while waiting:
        node = waiting.pop(0)
        if node._erased:
            continue
        for user in list(node.users):
            made = _moved(node, user)
            if made is not None:
                changed = True
                waiting.append(made)
        _erase_unread(node)
    for node in list(graph.nodes):
        changed |= _cancel(node)
    for node in list(graph.nodes):
        changed |= _pad_integers(node)
    return changed


def _moved(node: Node, user: Node) -> Node | None:
    """The dequantize call that takes the place of ``user`` and reads integers that moved."""
    value = dequantized(node)
    assert value is not None
    if user.target in _MOVES and user.args[0] is node:
        integers = [insert_call(user, user.target, value.stored, *user.args[1:], **user.kwargs)]
    elif user.target is _aten.cat.default:
        sources: Any = user.args[0]
        parts = [dequantized(source) for source in sources]
        if not all(part is not None and part.affine == value.affine and part.dtype == value.dtype for part in parts):
            return None
        stored = [part.stored for part in parts if part is not None]
        integers = [insert_call(user, _aten.cat.default, stored, *user.args[1:], **user.kwargs)]
    elif user.target is _aten.max_pool2d_with_indices.default and all(item.args[1] == 0 for item in user.users):
        return _pooled(node, user, value.stored, value.affine)
    else:
        return None
    return _dequantized_again(node, user, integers)


def _dequantized_again(node: Node, user: Node, integers: list[Node]) -> Node | None:
    made = [*integers, *_again(node, user, integers[-1])]
    return made[-1] if replace_if_alike(user, made) else None


def _again(node: Node, before: Node, integers: Node) -> list[Node]:
    """The dequantize call, and the casts after it, that ``node`` is the last of, on other integers."""
    source: Any = node.args[0]
    made = [] if is_dequantize(node) else _again(source, before, integers)
    argument = made[-1] if made else integers
    made.append(insert_call(before, node.target, argument, *node.args[1:], **node.kwargs))  # type: ignore[arg-type]
    return made


def _erase_unread(node: Any) -> None:
    while isinstance(node, Node) and not node.users and dequantized(node) is not None:
        source = node.args[0]
        node.graph.erase_node(node)
        node = source


def _pooled(node: Node, pool: Node, stored: Node, affine: Affine) -> Node | None:
    """Max pooling as the largest of shifted slices: torch has no max pooling of bytes, and loops can be fused.

    3 x 3 by 2 of 4 x 64 x 112 x 112, one thread: 0.20 ms of bytes, 1.5 ms of float32.
    """
    known = fake_tensor(stored)
    names = ("kernel_size", "stride", "padding", "dilation", "ceil_mode")
    kernel, stride, padding, dilation, ceil_mode = (argument(pool, name) for name in names)
    kernel, padding, dilation = _pair(kernel), _pair(padding), _pair(dilation)
    steps = _pair(stride) if stride else kernel
    if known is None or known.dim() != 4 or ceil_mode or kernel[0] * kernel[1] > 25:
        return None
    if not all(isinstance(size, int) for size in known.shape[2:]):
        return None
    made: list[Node] = []

    def call(target: torch._ops.OpOverload, *args: Any) -> Node:
        made.append(insert_call(pool, target, *args))
        return made[-1]

    image = stored
    if any(padding):
        lowest = torch.iinfo(affine.dtype).min
        image = call(_aten.constant_pad_nd.default, image, [padding[1], padding[1], padding[0], padding[0]], lowest)
    result: torch.Tensor = pool.meta["val"][0]
    largest = image
    for dim in (2, 3):  # rows first, then columns: the largest of the largest
        taken: Node | None = None
        reach = steps[dim - 2] * (result.shape[dim] - 1) + 1
        for place in range(kernel[dim - 2]):
            first = place * dilation[dim - 2]
            part = call(_aten.slice.Tensor, largest, dim, first, first + reach, steps[dim - 2])
            taken = part if taken is None else call(_aten.maximum.default, taken, part)
        assert taken is not None
        largest = taken
    made += _again(node, pool, largest)
    again = made[-1]
    items = list(pool.users)
    if not items or again.meta["val"].shape != result.shape:
        erase_made(made)
        return None
    for item in items:
        assert item.target is operator.getitem
        replace(item, again)
    pool.graph.erase_node(pool)
    return again


def _pair(value: Any) -> tuple[int, int]:
    first, second = (value[0], value[-1]) if isinstance(value, (list, tuple)) else (value, value)
    return first, second


def _cancel(node: Node) -> bool:
    """Quantizing what was dequantized in the same way gives the integers back, exactly."""
    again = quantizes(node)
    before = dequantized(again.stored) if again is not None else None
    if again is None or before is None or before.affine != again.affine or not again.affine.is_full_range:
        return False
    if before.dtype != torch.float32:  # rounding of a half type may give a neighbour
        return False
    source = again.stored
    replace(node, before.stored)
    if not source.users:
        source.graph.erase_node(source)
    return True


def _pad_integers(node: Node) -> bool:
    """Quantize in front of a padding that nothing else reads; the number that is padded with is quantized here."""
    found = quantizes(node)
    if found is None or not found.affine.is_static or found.stored.target is not _aten.constant_pad_nd.default:
        return False
    pad, quantize = found.stored, node.target
    assert callable(quantize)
    image, widths, value = (argument(pad, name) for name in ("self", "pad", "value"))
    if len(pad.users) > 1 or not all(isinstance(width, int) and width >= 0 for width in widths):
        return False
    if not isinstance(value, (int, float)):
        return False
    settings = [argument(node, name) for name in ("scale", "zero_point", "quant_min", "quant_max", "dtype")]
    edge = quantize(torch.tensor(value, dtype=found.dtype), *settings).item()
    integers = insert_call(node, quantize, image, *settings)
    return replace_if_alike(node, [integers, insert_call(node, _aten.constant_pad_nd.default, integers, widths, edge)])


def has_quantization(graph: torch.fx.Graph) -> bool:
    """Whether anything is quantized in a graph."""
    return any(getattr(node.target, "namespace", None) == NAMESPACE for node in graph.nodes)
