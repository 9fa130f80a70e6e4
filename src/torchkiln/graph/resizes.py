"""Resizes as reads by index, from the elements that eager's kernels on the CPU read.

torch's own decompositions go by the factor wherever one is given. Some of eager's kernels go by the sizes instead: a
result of a dimension's size is its copy, and one of twice the size repeats each element, whatever the factor was.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch._decomp import decomposition_table
from torch._ops import OpOverload
from torch.fx.experimental.symbolic_shapes import guard_or_false

_aten = torch.ops.aten

Decomposition = Callable[..., Any]

# Sums of height and width up to which images are resized by the kernel for channels last.
_SMALL_IMAGE = 128


def resize_decompositions() -> Mapping[OpOverload, Decomposition]:
    found: dict[OpOverload, Decomposition] = {}
    for rank in (1, 2, 3):
        found[getattr(_aten, f"upsample_nearest{rank}d").default] = partial(_nearest, 0.0)
        found[getattr(_aten, f"_upsample_nearest_exact{rank}d").default] = partial(_nearest, 0.5)
    for op in (_aten.upsample_linear1d, _aten.upsample_bilinear2d, _aten.upsample_trilinear3d):
        found[op.default] = partial(_linear, decomposition_table[op.default])
    return MappingProxyType(found)


def _linear(
    otherwise: Decomposition,
    x: torch.Tensor,
    output_size: Sequence[Any],
    align_corners: bool,
    *factors: float | None,
    **named: float | None,
) -> Any:
    """Each element of the result is the weighted sum of two neighbours in each dimension.

    Infinities ask for a sum of two products: a difference of two infinities would be NaN, and so is zero times one.
    """
    if not x.is_floating_point():
        return otherwise(x, output_size, align_corners, *factors, **named)
    computed = torch.float64 if x.dtype is torch.float64 else torch.float32
    given = _by_dimension(output_size, factors, named)
    taps = []
    for k, (factor, before, after) in enumerate(zip(given, x.shape[2:], output_size, strict=True)):
        shape = [-1, *[1] * (len(given) - k - 1)]
        steps = torch.arange(after, dtype=computed, device=x.device)
        taps.append([part.view(shape) for part in _neighbours(steps, factor, before, after, align_corners)])

    def read(*indices: torch.Tensor) -> torch.Tensor:
        if len(indices) == len(taps):
            found: torch.Tensor = _aten._unsafe_index.Tensor(x, [None, None, *indices])
            return found.to(computed)
        low, high, part = taps[len(indices)]
        return read(*indices, low) * (1 - part) + read(*indices, high) * part

    return _in_format_of(x, read().to(x.dtype))


def _neighbours(
    steps: torch.Tensor, factor: float | None, before: Any, after: Any, align_corners: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Which two elements each one of a dimension reads, and the weight of the second."""
    if guard_or_false(before == after):
        itself = steps.to(torch.int64)
        return itself, itself, torch.zeros_like(steps)
    if align_corners:
        places = steps * ((before - 1) / (after - 1) if after > 1 else 0.0)
    else:
        scale = 1.0 / factor if factor and factor > 0 else before / after
        places = _rounded_once(steps, scale).clamp(min=0.0)
    low = places.to(torch.int64).clamp(max=before - 1)
    return low, (low + 1).clamp(max=before - 1), (places - low).clamp(0.0, 1.0)


def _rounded_once(steps: torch.Tensor, scale: Any) -> torch.Tensor:
    """``(steps + 0.5) * scale - 0.5``, which eager's kernels fuse in float32: a weight may be tiny instead of zero.

    Symbolic sizes are left to kernels, which fuse them too: computing in float64 would halve their lanes.
    """
    if steps.dtype is torch.float64 or not isinstance(scale, float):
        return torch.sub((steps + 0.5) * scale, 0.5)
    exact = torch.full_like(steps, scale).to(torch.float64)  # as far as float32 has it; no product is rounded
    return ((steps.to(torch.float64) + 0.5) * exact - 0.5).to(steps.dtype)


def _nearest(
    offset: float, x: torch.Tensor, output_size: Sequence[Any], *factors: float | None, **named: float | None
) -> torch.Tensor:
    """Element ``i`` of the result reads ``(i + offset) / factor``, rounded down."""
    given = _by_dimension(output_size, factors, named)
    by_pixels = _takes_whole_pixels(x, output_size, given)
    rounded = torch.float64 if x.dtype is torch.float64 and not by_pixels else torch.float32
    indices: list[torch.Tensor | None] = [None, None]
    for k, (factor, before, after) in enumerate(zip(given, x.shape[2:], output_size, strict=True)):
        by_sizes = by_pixels and offset == 0.0 and _goes_by_sizes(before, after)
        scale = 1.0 / factor if factor and factor > 0 and not by_sizes else before / after
        places = (torch.arange(after, dtype=rounded, device=x.device) + offset) * scale
        found = places.to(torch.float32).to(torch.int64)  # eager rounds down a float32 in any case
        if factor is not None and not by_sizes:
            found = found.clamp(max=before - 1)
        indices.append(found.view(-1, *[1] * (len(given) - k - 1)))
    return _in_format_of(x, _aten._unsafe_index.Tensor(x, indices))


def _in_format_of(x: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
    known: torch.memory_format = torch._prims_common.suggest_memory_format(x)
    if known is torch.contiguous_format:
        return result.contiguous()
    return result.clone(memory_format=known)  # a result of one channel counts as contiguous in either format


def _by_dimension(
    output_size: Sequence[Any], factors: Sequence[float | None], named: Mapping[str, float | None]
) -> list[float | None]:
    """The factor of each dimension, or None. By name they are called ``scales``, or by their dimension's letter."""
    letters = ("d", "h", "w")[-len(output_size) :]
    rest = [named.get(f"scales_{letter}", named.get("scales")) for letter in letters[len(factors) :]]
    return [*factors, *rest]


def _goes_by_sizes(before: Any, after: Any) -> bool:
    return bool(guard_or_false(after == before) or guard_or_false(after == 2 * before))


def _takes_whole_pixels(x: torch.Tensor, output_size: Sequence[Any], factors: Sequence[float | None]) -> bool:
    """Whether eager takes the kernel for channels last, which looks at sizes and computes indices in float32.

    It is not asked where it makes no difference: each answer is a guard on symbolic sizes.
    """
    if len(output_size) == 1 or x.device.type != "cpu":
        return False
    if x.dtype is not torch.float64 and all(factor is None or factor in (1.0, 2.0) for factor in factors):
        return False
    if len(output_size) == 2 and guard_or_false(sum(output_size) <= _SMALL_IMAGE):
        return True
    formats = {2: torch.channels_last, 3: torch.channels_last_3d}
    return bool(guard_or_false(x.shape[1] > 3)) and x.is_contiguous(memory_format=formats[len(output_size)])
