"""Sums of an int8 call's result and another tensor that are quantized again become part of the call.

A sum that stays in numbers is left to the loops that read it: they read both terms anyway.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.fx
from torch._higher_order_ops.auto_functionalize import auto_functionalized

from torchkiln.graph import quantized_operators as int8
from torchkiln.graph.fake import computing_with, fake_mode_of, is_channels_last, same_metadata, same_sizes
from torchkiln.graph.insertion import insert_call, insert_known
from torchkiln.graph.nodes import argument, argument_names, fake_tensor, replace
from torchkiln.graph.operators import CASTS
from torchkiln.graph.program_memory import NOTED, memory_of_its_own
from torchkiln.passes.freezing.quantized.activations import activation
from torchkiln.passes.freezing.quantized.affine import Affine, dequantized, is_rounding, quantizes
from torchkiln.passes.freezing.quantized.calls import (
    Reached,
    arguments_of,
    erase_unread,
    fuse_each,
    is_plain,
    reached,
    views_again,
)

_aten = torch.ops.aten
Node = torch.fx.Node


def fuse_sums(graph_module: torch.fx.GraphModule) -> bool:
    return fuse_each(graph_module, _fuse)


def _fuse(node: Node) -> bool:
    found = quantizes(node)
    if found is None or not found.affine.is_static or not found.affine.is_full_range:
        return False
    value: Any = found.stored
    inner: list[Node] = []
    function = "none"
    while isinstance(value, Node) and len(value.users) == 1 and value.target is not _aten.add.Tensor:
        inner.append(value)
        applied = activation(value)
        if applied is not None and applied.name == "relu" and function == "none":
            function = "relu"
        elif not is_rounding(value):
            return False
        value = value.args[0]
    if not isinstance(value, Node) or value.target is not _aten.add.Tensor or argument(value, "alpha") != 1:
        return False
    if len(value.users) != 1:
        return False
    for first, second in (value.args, value.args[::-1]):
        source = reached(first)
        if source is None or not isinstance(second, Node) or not is_plain(source.call):
            continue
        made = _summed(node, source, second, found.affine, function)
        if made is not None:
            replace(node, made)
            erase_unread((*inner, value, *reversed(source.between), source.call))
            return True
    return False


def _summed(node: Node, source: Reached, other: Node, affine: Affine, function: str) -> Node | None:
    if source.call.target is int8.QCONV:
        return _accumulated(node, source, other, affine, function) if int8.QCONV_SUM is not None else None
    return _added(node, source, other, affine, function)


def _accumulated(node: Node, source: Reached, other: Node, affine: Affine, function: str) -> Node | None:
    """A convolution that adds to integers in place, in the functional form of a mutating call.

    :mod:`torchkiln.passes.post_grad.mutating_calls` copies the integers where they are still needed.
    """
    value, mode = dequantized(other), fake_mode_of(node.graph)
    if value is None or not value.affine.is_static or value.affine.dtype != affine.dtype or mode is None:
        return None
    known, result = fake_tensor(value.stored), fake_tensor(node)
    if known is None or result is None or any(v.target not in CASTS for v in source.between):
        return None
    if not same_sizes(known, result) or result.dim() != 4 or not is_channels_last(result):
        return None
    integers = value.stored
    if not is_channels_last(known):
        integers = insert_call(node, _aten.clone.default, integers, memory_format=torch.channels_last)
    assert int8.QCONV_SUM is not None
    given = arguments_of(source.call)
    changed: dict[str, Any] = {
        "qaccum": integers,
        "output_scale": affine.scale,
        "output_zero_point": affine.zero_point,
        "output_dtype": affine.dtype,
        "accum_scale": value.affine.scale,
        "accum_zero_point": value.affine.zero_point,
        "binary_attr": "sum",
        "alpha": None,  # 1; a number would need a call through Python
        "unary_attr": function,
        "unary_scalars": [],
        "unary_algorithm": "",
    }
    arguments = {name: changed.get(name, given.get(name)) for name in argument_names(int8.QCONV_SUM)}
    with computing_with(mode):
        fakes = tuple(torch.empty_like(integers.meta["val"]) for _ in range(2))
    call = insert_known(node, fakes, auto_functionalized, int8.QCONV_SUM, **arguments)
    call.meta[NOTED] = memory_of_its_own(arguments)  # the image may be what is added to
    return insert_known(node, fakes[1], operator.getitem, call, 1)


def _added(node: Node, source: Reached, other: Node, affine: Affine, function: str) -> Node | None:
    """A linear that adds numbers to its result, which is as large."""
    call = int8.QLINEAR_BINARY if source.call.target is int8.QLINEAR else int8.QLINEAR_BINARY_TENSOR
    known, result = fake_tensor(other), source.call.meta["val"]
    last = source.between[-1] if source.between else source.call
    if call is None or known is None or known.dtype != torch.float32 or result.dtype != torch.float32:
        return None
    if not same_metadata(known, last.meta["val"]) or not known.is_contiguous():
        return None
    if any(view.target is not _aten.view.default for view in source.between):
        return None
    terms = other
    if source.between:
        terms = insert_call(node, _aten.view.default, other, [-1, result.shape[-1]])
    given = arguments_of(source.call)
    changed: dict[str, Any] = {
        "other": terms,
        "output_scale": affine.scale,
        "output_zero_point": affine.zero_point,
        "output_dtype": affine.dtype,
        "other_scale": 1.0,
        "other_zp": 0,
        "binary_post_op": "add",
        "binary_alpha": 1.0,
        "unary_post_op": function,
        "unary_post_op_args": [],
        "unary_post_op_algorithm": "",
    }
    made = insert_call(node, call, *(changed.get(name, given.get(name)) for name in argument_names(call)))
    views = views_again(node, made, source.between)
    return views[-1] if views else made
