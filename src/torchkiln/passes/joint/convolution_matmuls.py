"""Convolutions as matmuls: images as matrices with a pixel in each row, and the results of matmuls as images."""

from __future__ import annotations

from typing import Any

import torch
import torch.fx

from torchkiln.graph.fake import fake_mode_of, is_channels_last
from torchkiln.graph.insertion import SizeArguments, insert_call, insert_known
from torchkiln.passes.joint.convolutions import Convolution
from torchkiln.target import Target

_aten = torch.ops.aten

# The types in which matmuls were compared with convolutions.
_TYPES = (torch.float32, torch.bfloat16)


def may_be_matmul(convolution: Convolution, target: Target) -> bool:
    """Whether a matmul has the precision of a convolution: reduced precision of float32 matmuls is not for these."""
    dtype = convolution.weight.meta["val"].dtype
    return dtype in _TYPES and (dtype != torch.float32 or target.full_float32_matmul)


def pixel_rows(before: torch.fx.Node, image: torch.fx.Node, channels: int) -> torch.fx.Node:
    """An image with its channels last as a matrix."""
    channels_last = insert_call(before, _aten.permute.default, image, [0, 2, 3, 1])
    return insert_call(before, _aten.view.default, channels_last, [-1, channels])


def matmul_as_image(
    convolution: torch.fx.Node,
    rows: torch.fx.Node,
    matrix: torch.fx.Node,
    bias: torch.fx.Node | None,
    like: torch.fx.Node,
    sizes: SizeArguments,
) -> torch.fx.Node:
    """The result of a convolution as a matmul: ``rows`` times the transpose of a matrix with a row per output channel.

    The images are as many and as large as those of ``like`` (dimensions 0, 2 and 3). In float32 the bias is added by
    whatever reads the result, where the library for matmuls would write it first; in half precision it has to be added
    before the sum is rounded, as the library for convolutions does.
    """
    known: torch.Tensor = convolution.meta["val"]
    columns = insert_call(convolution, _aten.permute.default, matrix, [1, 0])
    if bias is None or known.dtype == torch.float32:
        matmul = insert_call(convolution, _aten.mm.default, rows, columns)
    else:
        matmul = insert_call(convolution, _aten.addmm.default, bias, rows, columns)
        bias = None
    result = as_image(convolution, matmul, like, matrix.meta["val"].shape[0], sizes, known)
    if bias is not None:
        added = insert_call(convolution, _aten.view.default, bias, [1, -1, 1, 1])
        result = insert_call(convolution, _aten.add.Tensor, result, added)
    return result


def as_image(
    before: torch.fx.Node,
    rows: torch.fx.Node,
    like: torch.fx.Node,
    channels: int,
    sizes: SizeArguments,
    known: torch.Tensor,
) -> torch.fx.Node:
    """Rows of pixels as images, as many and as large as those of ``like``; ``known`` is what the library returned."""
    shape = like.meta["val"].shape

    def size(dim: int) -> Any:
        found = sizes.argument(shape[dim], before)
        return insert_call(before, _aten.sym_size.int, like, dim) if found is None else found

    arguments = [size(0), size(2), size(3), channels]
    mode = fake_mode_of(before.graph)
    if mode is None or not is_channels_last(known):
        pixels = insert_call(before, _aten.view.default, rows, arguments)
        return insert_call(before, _aten.permute.default, pixels, [0, 3, 1, 2])
    with mode, torch.no_grad():
        value = known.permute(0, 2, 3, 1)
    pixels = insert_known(before, value, _aten.view.default, rows, arguments)
    return insert_known(before, known, _aten.permute.default, pixels, [0, 3, 1, 2])
