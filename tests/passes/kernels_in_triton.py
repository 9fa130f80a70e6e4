"""Kernels in Triton for tests; importing this needs Triton."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def add_kernel(x, y, out, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = places < n
    tl.store(out + places, tl.load(x + places, there) + tl.load(y + places, there), there)


@triton.jit
def double_kernel(x, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = places < n
    tl.store(x + places, tl.load(x + places, there) * 2, there)


@triton.autotune(configs=[triton.Config({"BLOCK": size}) for size in (128, 512)], key=["n"])
@triton.jit
def tuned_kernel(x, out, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = places < n
    tl.store(out + places, tl.load(x + places, there) + 1, there)


def add(x: Tensor, y: Tensor) -> Tensor:
    out, count = torch.empty_like(x), x.numel()
    add_kernel[(triton.cdiv(count, 64),)](x, y, out, count, BLOCK=64)
    return out


def double(x: Tensor) -> Tensor:
    """``x`` is doubled in place."""
    count = x.numel()
    double_kernel[(triton.cdiv(count, 64),)](x, count, BLOCK=64)
    return x


def tuned(x: Tensor) -> Tensor:
    """``x + 1``, with the block size that was measured to be best, which the grid depends on."""

    def grid(chosen: Any) -> tuple[int]:
        return (triton.cdiv(x.numel(), chosen["BLOCK"]),)

    out = torch.empty_like(x)
    tuned_kernel[grid](x, out, x.numel())
    return out
