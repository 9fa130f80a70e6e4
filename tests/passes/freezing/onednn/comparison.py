"""Compiled modules against eager by their errors against float64, and what oneDNN was called for."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import torchkiln
from torchkiln.native.onednn import packed_dtypes

DTYPES = [dtype for dtype in (torch.float32, torch.bfloat16, torch.float16) if str(dtype)[6:] in packed_dtypes()]


def calls_since(before: torchkiln.Stats) -> Counter[str]:
    """Calls of operators compiled since, by name."""
    found = Counter(torchkiln.stats().extern_calls)
    found.subtract(before.extern_calls)
    return +found


def packed_calls(before: torchkiln.Stats) -> int:
    """Calls of oneDNN with packed weights compiled since."""
    return sum(count for name, count in calls_since(before).items() if "_pointwise" in name)


def compiled(module: nn.Module | Callable[..., Any], *, dynamic: bool = False, **options: Any) -> Callable[..., Any]:
    given = {"fallback": False, "adaptive": False, **options}
    return torch.compile(module, backend="kiln", fullgraph=True, dynamic=dynamic, options=given)


def agree(module: nn.Module, *inputs: Tensor, dynamic: bool = False, **options: Any) -> Callable[..., Any]:
    """Compile ``module`` and compare it with eager; returns it compiled."""
    run = compiled(module, dynamic=dynamic, **options)
    compare(run, module, *inputs)
    return run


def compare(run: Callable[..., Any], module: nn.Module, *inputs: Tensor) -> None:
    """The error against float64 is that of eager but for rounding, and results are laid out as eager's."""
    with torch.no_grad():
        reference = copy.deepcopy(module).double()(*(x.double() if x.is_floating_point() else x for x in inputs))
        expected, found = module(*inputs), run(*inputs)
    assert (found.dtype, found.shape, strides(found)) == (expected.dtype, expected.shape, strides(expected))
    scale = reference.abs().max().item()
    allowed = 2 * (expected - reference).abs().max().item() + 2 * torch.finfo(expected.dtype).eps * scale
    assert (found - reference).abs().max().item() <= allowed


def strides(tensor: Tensor) -> list[int]:
    """Those that say where elements lie."""
    return [stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size != 1]
