"""Is a result as accurate as eager's? Both are compared with a float64 reference."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from torchkiln.native.tensor_classes import is_no_subclass

DivergenceKind = Literal["wrong result", "non-finite", "other metadata", "other strides"]

# Another order of sums changes single elements by more than the error over all of them.
_RMS_FACTOR, _MAX_FACTOR = 2.0, 6.0
# For results that eager happens to get exactly, in units of the last place of the largest magnitude.
_SLACK_ULPS = 16.0
# Of the largest magnitude, where there is no reference: how far two right results may be apart.
_APART = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 4e-2, torch.float16: 5e-3}
_PARTS = {torch.complex128: torch.float64, torch.complex64: torch.float32, torch.complex32: torch.float16}

Results = Mapping[str, Any]
"""What a run gave, by a name for the user: "output 0", "gradient of input 2"."""
OtherRuns = Callable[[], Sequence[Results]]
"""Gives what eager gives where it rounds in other ways."""


def _no_other_runs() -> Sequence[Results]:
    return ()


@dataclass(frozen=True)
class Expected:
    """What results are judged by: eager's, the same in float64 where it is known, and eager's with other roundings.

    Of those named in ``strides``, strides are compared too.
    """

    eager: Results
    reference: Results | None = None
    others: OtherRuns = _no_other_runs
    strides: Collection[str] = ()


@dataclass(frozen=True)
class Divergence:
    """A result that differs from eager's by more than eager differs from float64."""

    what: str
    kind: DivergenceKind
    detail: str

    def __str__(self) -> str:
        return f"{self.what}: {self.kind}, {self.detail}"


def first_divergence(results: Results, expected: Expected) -> Divergence | None:
    """The first of ``results`` that diverges; those that eager does not have are left out.

    Numbers of all come before strides. Eager's own error is the largest of its runs; the other ones are made where a
    result would be wrong without them.
    """
    eager, reference = expected.eager, expected.reference
    for what, value in eager.items():
        if what not in results:
            return Divergence(what, "other metadata", "it is missing")
        exact = None if reference is None else reference.get(what)
        found = divergence(what, results[what], value, exact)
        if found is not None and found.kind == "wrong result":
            found = divergence(what, results[what], value, exact, [run.get(what) for run in expected.others()])
        if found is not None:
            return found
    for what, value in eager.items():
        if what in expected.strides and not same_layout(layout_of(results[what]), layout_of(value)):
            got, known = results[what].stride(), value.stride()
            return Divergence(what, "other strides", f"{got}, eager gives {known} for sizes {tuple(value.shape)}")
    return None


Layout = tuple[tuple[int, ...], tuple[int, ...]]
"""Sizes and strides."""


def layout_of(value: Any) -> Layout | None:
    """The sizes and strides of a plain strided tensor."""
    if not isinstance(value, Tensor) or value.layout is not torch.strided or not is_no_subclass(value):
        return None
    return tuple(value.shape), value.stride()


def same_layout(left: Layout | None, right: Layout | None) -> bool:
    """Whether strides are the same where a dimension is stepped along; so they are where nothing is known."""
    if left is None or right is None or 0 in right[0]:
        return True
    return all(a == b for a, b, size in zip(left[1], right[1], right[0], strict=True) if size > 1)


def divergence(
    what: str, value: Any, eager: Any, reference: Any, others: Sequence[Any] = ()
) -> Divergence | None:
    """How ``value`` diverges from ``eager``, judged by ``reference``, the same in float64 where it is known.

    ``others`` are what eager gives in other runs.
    """
    if isinstance(eager, (tuple, list)) and isinstance(value, (tuple, list)) and len(value) == len(eager):
        exact = reference if isinstance(reference, (tuple, list)) else [None] * len(eager)
        each = zip(*others, strict=True) if others else [()] * len(eager)
        parts = (divergence(what, *part) for part in zip(value, eager, exact, each, strict=True))
        return next((found for found in parts if found is not None), None)
    if isinstance(eager, (int, float)) and isinstance(value, (int, float)):
        same = value == eager or (value != value and eager != eager)
        return None if same else _wrong(what, f"{value}, eager gives {eager}")
    if not isinstance(eager, Tensor) or not isinstance(value, Tensor):
        return None
    if (value.dtype, value.shape) != (eager.dtype, eager.shape):
        got, known = (f"{t.dtype} of shape {tuple(t.shape)}" for t in (value, eager))
        return Divergence(what, "other metadata", f"{got}, eager gives {known}")
    value, eager = _plain(value), _plain(eager)
    if value.numel() == 0:
        return None
    if not (eager.dtype.is_floating_point or eager.dtype.is_complex):
        differing = int((value != eager).sum())
        return _wrong(what, f"{differing} elements differ from eager's") if differing else None
    finite = eager.isfinite()
    if bool((finite & ~value.isfinite()).any()):
        count = int((finite & ~value.isfinite()).sum())
        return Divergence(what, "non-finite", f"{count} of {value.numel()} elements that are finite in eager")
    if not torch.equal(value.isfinite(), finite) or not _same_nans(value, eager, finite):
        return _wrong(what, "finite, or another non-finite value, where eager is not finite")
    runs = [_plain(other)[finite] for other in others if _is_like(other, finite)]
    return _compare_finite(what, value[finite], [eager[finite], *runs], reference, finite)


def _compare_finite(
    what: str, value: Tensor, runs: Sequence[Tensor], reference: Any, finite: Tensor
) -> Divergence | None:
    """Compare with what eager gives in several ``runs``, first the one that has the numbers it gave."""
    eager = runs[0]
    if eager.numel() == 0:
        return None
    wide = torch.complex128 if eager.dtype.is_complex else torch.float64
    value, known = value.to(wide), [run.to(wide) for run in runs if bool(run.isfinite().all())]
    base = _part(eager.dtype)
    exact = _plain(reference).to(wide)[finite] if _is_like(reference, finite) else None
    if exact is None or not bool(exact.isfinite().all()):
        apart, scale = _largest(value - known[0]), _largest(known[0])
        between = max(_largest(run - known[0]) for run in known)
        allowed = max(_APART.get(base, 0.0) * max(scale, 1e-30), _MAX_FACTOR * between)
        return None if apart <= allowed else _wrong(what, f"apart by {apart:.3g}, {allowed:.3g} is expected")
    slack = _SLACK_ULPS * torch.finfo(base).eps
    for measure, factor, of in (("largest", _MAX_FACTOR, _largest), ("root mean square", _RMS_FACTOR, _rms)):
        error, own = of(value - exact), max(of(run - exact) for run in known)
        if error > factor * own + slack * of(exact):
            return _wrong(what, f"{measure} error {error:.3g}, eager's own is {own:.3g}")
    return None


def _wrong(what: str, detail: str) -> Divergence:
    return Divergence(what, "wrong result", detail)


def _plain(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor.to_dense() if tensor.layout is not torch.strided else tensor.resolve_conj().resolve_neg()


def _part(dtype: torch.dtype) -> torch.dtype:
    return _PARTS.get(dtype, dtype)


def _is_like(reference: Any, finite: Tensor) -> bool:
    return isinstance(reference, Tensor) and reference.shape == finite.shape


def _same_nans(value: Tensor, eager: Tensor, finite: Tensor) -> bool:
    left, right = value[~finite], eager[~finite]
    return bool(((left == right) | (left.isnan() & right.isnan())).all())


def _rms(error: Tensor) -> float:
    return float(error.abs().square().mean().sqrt())


def _largest(error: Tensor) -> float:
    return float(error.abs().max())
