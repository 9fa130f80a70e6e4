"""How the operand of an operator lies in memory."""

from __future__ import annotations

from enum import StrEnum

import torch
from torch import Tensor

from conformance.strides import laid_out


class Layout(StrEnum):
    contiguous = "contiguous"
    transposed = "transposed"
    every_second = "every-second"
    broadcast = "broadcast"
    rows = "rows"
    channels_last = "channels-last"
    permuted = "permuted"


# Of four dimensions, which are taken for images; others have the transposed layout instead.
_IMAGE_ORDERS = {Layout.channels_last: (0, 2, 3, 1), Layout.permuted: (0, 2, 1, 3)}

# How much wider the tensor is whose rows are taken: its rows begin at other cache lines.
_WIDER = 40


def in_layout(tensor: Tensor, layout: Layout) -> Tensor | None:
    """The values of ``tensor`` in this layout, which is None where its sizes have none; broadcasting repeats the first.

    The result is a leaf that requires a gradient where ``tensor`` does.
    """
    if tensor.layout is not torch.strided:
        return tensor if layout is Layout.contiguous else None
    found = _in_layout(tensor.detach(), layout)
    return None if found is None else found.requires_grad_(tensor.requires_grad)


def _in_layout(tensor: Tensor, layout: Layout) -> Tensor | None:
    dims, size = tensor.dim(), tensor.shape
    if layout is Layout.contiguous:
        return tensor.contiguous()
    if layout in _IMAGE_ORDERS:
        several = dims == 4 and size[1] > 1 and size[2] * size[3] > 1
        return laid_out(tensor, _IMAGE_ORDERS[layout]) if several else None
    if layout is Layout.transposed:
        if dims < 2 or dims == 4 or min(size[-2:]) < 2:
            return None
        return tensor.mT.contiguous().mT
    if layout is Layout.every_second:
        if dims < 1 or size[-1] < 2:
            return None
        wide = tensor.new_zeros((*size[:-1], 2 * size[-1]))
        wide[..., ::2] = tensor
        return wide[..., ::2]
    if dims < 2 or size[0] < 2:
        return None
    if layout is Layout.broadcast:
        return tensor[:1].contiguous().expand(size)
    wide = tensor.new_zeros((*size[:-1], size[-1] + _WIDER))
    wide[..., : size[-1]] = tensor
    return wide[..., : size[-1]]
