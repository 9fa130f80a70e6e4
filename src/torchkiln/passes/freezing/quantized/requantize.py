"""Quantizing the result of an int8 call becomes part of the call, which then stores integers."""

from __future__ import annotations

import torch
import torch.fx

from torchkiln.graph.fake import same_metadata
from torchkiln.graph.insertion import erase_made
from torchkiln.graph.nodes import replace
from torchkiln.graph.operators import CONVERT
from torchkiln.passes.freezing.quantized.affine import Affine, is_dequantize, quantizes
from torchkiln.passes.freezing.quantized.calls import (
    FLIP_SIGN,
    Reached,
    erase_unread,
    fuse_each,
    gives_numbers,
    insert_changed,
    reached,
    take_over,
)

Node = torch.fx.Node


def quantize_results(graph_module: torch.fx.GraphModule) -> bool:
    return fuse_each(graph_module, _fold)


def _fold(node: Node) -> bool:
    found = quantizes(node)
    source = reached(found.stored) if found is not None else None
    if found is None or source is None or not gives_numbers(source.call):
        return False
    affine = found.affine
    if not affine.is_static or not affine.is_full_range or affine.dtype not in (torch.uint8, torch.int8):
        return False
    if affine.dtype == torch.int8 and _store_unsigned(node, source, affine):
        return True
    scale = {"output_scale": affine.scale, "output_zero_point": affine.zero_point, "output_dtype": affine.dtype}
    return take_over(node, source, **scale)


def _store_unsigned(node: Node, source: Reached, affine: Affine) -> bool:
    """Store bytes without a sign, where every reader would move those with one up by 128."""
    erase_unread(tuple(user for user in node.users if is_dequantize(user)))
    flips = list(node.users)
    readers = [reader for flip in flips for reader in flip.users]
    if not readers or not all(flip.target is FLIP_SIGN and flip.args[1] == -128 for flip in flips):
        return False
    if not all(reader.target is CONVERT and reader.args[1] == torch.uint8 for reader in readers):
        return False
    assert isinstance(affine.zero_point, int)
    scale = {"output_scale": affine.scale, "output_zero_point": affine.zero_point + 128, "output_dtype": torch.uint8}
    made = insert_changed(node, source, **scale)
    if not all(same_metadata(made[-1].meta["val"], reader.meta["val"]) for reader in readers):
        erase_made(made)
        return False
    for reader in readers:
        replace(reader, made[-1])
    erase_unread((*flips, node, *reversed(source.between), source.call))
    return True
