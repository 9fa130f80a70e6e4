"""A plain function that Dynamo inlines."""

from torch import Tensor


def bounded(x: Tensor) -> Tensor:
    top = x.clamp(-1.0, 1.0)  # clamped
    return top * top.sigmoid()  # gated
