"""Matrices with a pixel in each row: what convolutions written as products read, and images made of their results."""

from __future__ import annotations

from typing import Any

import torch
import torch.fx

from torchkiln.graph.fake import fake_mode_of, is_channels_last
from torchkiln.graph.insertion import SizeArguments, insert_call, insert_known
from torchkiln.passes.joint.convolutions import Convolution
from torchkiln.target import Target

_aten = torch.ops.aten

# The types in which products were compared with convolutions.
_TYPES = (torch.float32, torch.bfloat16)


def may_be_product(convolution: Convolution, target: Target) -> bool:
    """Whether a product has the numbers of a convolution: what users allow of float32 products is not for these."""
    dtype = convolution.weight.meta["val"].dtype
    return dtype in _TYPES and (dtype != torch.float32 or target.full_float32_matmul)


def pixels(before: torch.fx.Node, image: torch.fx.Node, channels: int) -> torch.fx.Node:
    """An image with its channels last as a matrix."""
    turned = insert_call(before, _aten.permute.default, image, [0, 2, 3, 1])
    return insert_call(before, _aten.view.default, turned, [-1, channels])


def image_of_product(
    convolution: torch.fx.Node,
    rows: torch.fx.Node,
    matrix: torch.fx.Node,
    bias: torch.fx.Node | None,
    like: torch.fx.Node,
    sizes: SizeArguments,
) -> torch.fx.Node:
    """What a convolution gives: the product of ``rows`` and a matrix with a row for each channel of the result, as
    images as many and as large as those of ``like`` (dimensions 0, 2 and 3), with the bias.

    Of float32, the bias is added by whatever reads the result, where the library for products would write it first; in
    half precision it has to be added before the sum is rounded, as the library for convolutions does.
    """
    known: torch.Tensor = convolution.meta["val"]
    columns = insert_call(convolution, _aten.permute.default, matrix, [1, 0])
    if bias is None or known.dtype == torch.float32:
        product = insert_call(convolution, _aten.mm.default, rows, columns)
    else:
        product = insert_call(convolution, _aten.addmm.default, bias, rows, columns)
        bias = None
    result = as_image(convolution, product, like, matrix.meta["val"].shape[0], sizes, known)
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
        turned = insert_call(before, _aten.view.default, rows, arguments)
        return insert_call(before, _aten.permute.default, turned, [0, 3, 1, 2])
    with mode, torch.no_grad():
        value = known.permute(0, 2, 3, 1)
    turned = insert_known(before, value, _aten.view.default, rows, arguments)
    return insert_known(before, known, _aten.permute.default, turned, [0, 3, 1, 2])
