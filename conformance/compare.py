"""Results of two runs side by side: what differs, and whether a difference in rounding is one to be expected."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.testing import assert_close
from torch.testing._comparison import default_tolerances
from torch.utils import _pytree as pytree


def difference(ours: Any, eager: Any, *, values: bool = True) -> str | None:
    """How two results differ: structure, type, dtype, sizes, strides, and values unless told otherwise."""
    mine, theirs = pytree.tree_leaves(ours), pytree.tree_leaves(eager)
    if _outline(ours) != _outline(eager):
        return f"structure: {_outline(ours)} instead of {_outline(eager)}"
    for position, (a, b) in enumerate(zip(mine, theirs, strict=True)):
        found = _leaf_difference(a, b, values)
        if found is not None:
            return f"result {position}: {found}" if len(mine) > 1 else found
    return None


def _outline(value: Any) -> Any:
    """Which containers hold how much; a named tuple counts as the tuple it is."""
    if isinstance(value, (list, tuple)):
        return [_outline(item) for item in value]
    if isinstance(value, dict):
        return {key: _outline(item) for key, item in value.items()}
    return "-"


def _leaf_difference(a: Any, b: Any, values: bool) -> str | None:
    if isinstance(a, torch.Tensor) != isinstance(b, torch.Tensor):
        return f"a {type(a).__name__} instead of a {type(b).__name__}"
    if not isinstance(a, torch.Tensor):
        same = a == b or (a != a and b != b)
        return None if same or not values else f"{a!r} instead of {b!r}"
    if a.dtype != b.dtype:
        return f"dtype {a.dtype} instead of {b.dtype}"
    if a.shape != b.shape:
        return f"sizes {tuple(a.shape)} instead of {tuple(b.shape)}"
    if a.layout != b.layout:
        return f"layout {a.layout} instead of {b.layout}"
    if a.layout == torch.strided and not _same_strides(a, b):
        return f"strides {a.stride()} instead of {b.stride()} of sizes {tuple(a.shape)}"
    if a.requires_grad != b.requires_grad:
        return f"requires_grad is {a.requires_grad} instead of {b.requires_grad}"
    if not values:
        return None
    try:
        assert_close(a.detach(), b.detach(), equal_nan=True, check_stride=False)
    except AssertionError as error:
        return "values: " + " ".join(str(error).split())[:300]
    return None


def _same_strides(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Strides of dimensions that are stepped along; of a tensor without elements none is."""
    if a.numel() == 0:
        return True
    return all(s == t for size, s, t in zip(a.shape, a.stride(), b.stride(), strict=True) if size > 1)


def as_near_as_eager(ours: Any, eager: Any, exact: Any) -> str | None:
    """None where ours is about as near to ``exact`` (computed in float64) as eager is; else what is farther off.

    Every element must be within the dtype's default tolerance of the exact one, or no farther from it than twice
    the largest error eager makes in that tensor and one unit in the last place, which is as fine as errors are known.
    """
    for position, (a, b, c) in enumerate(zip(*map(pytree.tree_leaves, (ours, eager, exact)), strict=True)):
        if not isinstance(a, torch.Tensor):
            continue
        if not a.dtype.is_floating_point and not a.dtype.is_complex:
            if not torch.equal(a, b):
                return f"result {position}: integers differ"
            continue
        found = _farther(a.detach(), b.detach(), c.detach())
        if found is not None:
            return f"result {position}: {found}"
    return None


def roughly_equal(some: Any, others: Any) -> bool:
    """Whether floating-point tensors agree to a twentieth of their largest element: the same but for rounding."""
    for a, b in zip(pytree.tree_leaves(some), pytree.tree_leaves(others), strict=True):
        if isinstance(a, torch.Tensor) and a.dtype.is_floating_point and a.numel():
            wide, exact = a.detach().double(), b.detach().double()
            if bool(((wide - exact).abs() > exact.abs().max() / 20).any()):
                return False
    return True


def _farther(a: torch.Tensor, b: torch.Tensor, exact: torch.Tensor) -> str | None:
    rtol, atol = default_tolerances(a)
    wide = torch.complex128 if a.dtype.is_complex else torch.float64
    x, y, reference = a.to(wide), b.to(wide), exact.to(wide)
    # What rounds to an infinity of the dtype is one.
    rounded = exact.to(a.dtype).to(wide)
    reference = torch.where(rounded.isinf(), rounded, reference)
    ours, theirs = _error(x, reference), _error(y, reference)
    finite = theirs[theirs.isfinite()]
    allowed = 2 * float(finite.max()) if finite.numel() else 0.0
    magnitude = reference.abs().nan_to_num(0.0, 0.0, 0.0)
    unit = torch.finfo(a.dtype).eps * magnitude
    bad = (ours > atol + rtol * magnitude) & ~(ours <= allowed + unit) & ~_identical(x, y)
    if not bool(bad.any()):
        return None
    worst = int(torch.where(bad, ours, -1.0).flatten().argmax())
    return (
        f"{int(bad.sum())} of {a.numel()} elements farther from float64 than eager: {x.flatten()[worst].item():.9g},"
        f" eager {y.flatten()[worst].item():.9g}, float64 {reference.flatten()[worst].item():.9g}"
    )


def _identical(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (x == y) | (x.isnan() & y.isnan())


def _error(x: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """Distance from the reference; infinite where just one of the two is not finite."""
    gap = (x - reference).abs()
    gap = torch.where(gap.isnan(), torch.inf, gap)
    return torch.where(_identical(x, reference), 0.0, gap)


def in_float64(value: Any) -> Any:
    """Arguments with floating-point tensors and dtypes widened to float64."""

    def widen(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor) and leaf.dtype.is_floating_point:
            return leaf.detach().to(torch.float64).requires_grad_(leaf.requires_grad)
        if isinstance(leaf, torch.Tensor) and leaf.dtype == torch.complex64:
            return leaf.detach().to(torch.complex128).requires_grad_(leaf.requires_grad)
        if isinstance(leaf, torch.dtype) and leaf.is_floating_point:
            return torch.float64
        return leaf

    return pytree.tree_map(widen, value)


def copy_arguments(value: Any) -> Any:
    """Arguments in memory of their own, with the strides, overlaps and gradient flags of the originals."""
    storages: dict[int, torch.UntypedStorage] = {}
    tensors: dict[int, torch.Tensor] = {}

    def copy(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if id(leaf) not in tensors:
            tensors[id(leaf)] = _copy_tensor(leaf, storages)
        return tensors[id(leaf)]

    return pytree.tree_map(copy, value)


def _copy_tensor(tensor: torch.Tensor, storages: dict[int, torch.UntypedStorage]) -> torch.Tensor:
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
        return tensor.detach().clone().requires_grad_(tensor.requires_grad)
    storage = tensor.untyped_storage()
    if storage.data_ptr() not in storages or storage.nbytes() == 0:
        storages[storage.data_ptr()] = storage.clone()
    copied = torch.empty(0, dtype=tensor.dtype)
    copied.set_(storages[storage.data_ptr()], tensor.storage_offset(), tensor.shape, tensor.stride())
    return copied.requires_grad_(tensor.requires_grad)


def tensors_of(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def cotangents(outputs: Sequence[torch.Tensor], seed: int = 1) -> list[torch.Tensor]:
    """What to multiply results by when differentiating: the same numbers for equal sizes and dtypes."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(o.shape, generator=generator, dtype=torch.complex128 if o.dtype.is_complex else torch.float64).to(
            o.dtype
        )
        for o in outputs
    ]
