"""Which library kernels give the same values whatever the strides of their arguments are.

Runs samples of the operator database in eager, with gradients, and calls every ATen operator on the way once more with
its arguments laid out in other ways. ``python -m conformance.strides`` prints those that fail or give other values.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from conformance.cases import Case, cases, database, differentiable, samples
from conformance.check import call_eager
from conformance.forced_layouts import orders

_CALLS_OF_EACH = 24


@dataclass
class Seen:
    """By name of the operator: how many calls with other strides agreed, and what was wrong with those that did not."""

    agreed: dict[str, int] = field(default_factory=dict)
    differences: dict[str, list[str]] = field(default_factory=dict)


class OtherStrides(TorchDispatchMode):
    """Calls each operator a second time with its arguments laid out in other ways, and compares the values.

    Views, random operators and operators that write to their arguments are called as they are. So is anything but
    ``only``, where that is given.
    """

    def __init__(self, seen: Seen, only: frozenset[str] | None = None, where: str = "") -> None:
        super().__init__()
        self._seen, self._only, self._where = seen, only, where
        self.comparing = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = (args, kwargs or {})
        result = func(*given[0], **given[1])
        name = func._schema.name
        if func._schema.is_mutable or func.is_view or torch.Tag.nondeterministic_seeded in func.tags:
            return result
        if self._only is not None and name not in self._only:
            return result
        if self._seen.agreed.get(name, 0) < _CALLS_OF_EACH and not self._seen.differences.get(name):
            self.comparing = True
            call_with_other_strides(func, given, self._seen, self._where)
            self.comparing = False
        return result


def call_with_other_strides(func: Any, given: Any, seen: Seen, where: str = "") -> None:
    """Compare ``func`` of ``given``, positional and named arguments, with the same laid out in other ways."""
    name, expected = func._schema.name, func(*given[0], **given[1])
    for changed, which in _other_layouts(given):
        try:
            found = func(*changed[0], **changed[1])
        except Exception as error:
            wrong: str | None = str(error).partition("\n")[0]
        else:
            wrong = None if values_agree(found, expected) else "other values"
        if wrong is None:
            seen.agreed[name] = seen.agreed.get(name, 0) + 1
        else:
            sizes = [tuple(t.shape) for t in _tensors(given)]
            text = f"{wrong} ({where}, arguments of {sizes}, {which})"
            seen.differences.setdefault(name, []).append(text)


def values_agree(found: Any, expected: Any) -> bool:
    """Whether results agree but for rounding."""
    for mine, theirs in zip(tree_leaves(found), tree_leaves(expected), strict=True):
        if not isinstance(theirs, torch.Tensor):
            continue
        if mine.shape != theirs.shape or mine.dtype != theirs.dtype:
            return False
        if not (theirs.is_floating_point() or theirs.is_complex()) or theirs.layout is not torch.strided:
            if not torch.equal(mine, theirs):
                return False
            continue
        finite = theirs[theirs.isfinite()].abs()
        scale = 1 + (finite.max().item() if finite.numel() else 0)
        if not torch.allclose(mine, theirs, rtol=1e-3, atol=1e-3 * scale, equal_nan=True):
            return False
    return True


def laid_out(tensor: torch.Tensor, order: Sequence[int]) -> torch.Tensor:
    """A copy with the dimensions in memory in this order, outermost first."""
    inverse = sorted(range(len(order)), key=order.__getitem__)
    return tensor.permute(*order).clone(memory_format=torch.contiguous_format).permute(*inverse)


def _changes(value: Any) -> bool:
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return False
    return sum(size > 1 for size in value.shape) > 1


def _tensors(given: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(given) if isinstance(leaf, torch.Tensor)]


def _other_layouts(given: Any) -> Iterator[tuple[Any, str]]:
    """``given`` with all its tensors, and each alone, laid out in each of the other orders."""
    places = [place for place, tensor in enumerate(_tensors(given)) if _changes(tensor)]
    for which in range(3):
        for alone in [None, *places] if len(places) > 1 else [None] if places else []:
            counted = iter(range(len(_tensors(given))))

            def change(value: Any, which: int = which, alone: int | None = alone, counted: Any = counted) -> Any:
                if not isinstance(value, torch.Tensor):
                    return value
                if (place := next(counted)) not in places or alone not in (None, place):
                    return value
                choices = orders(value.dim())
                return laid_out(value, choices[which % len(choices)])

            yield tree_map(change, given), "all of them" if alone is None else f"tensor {alone}"


def stress(only: frozenset[str] | None = None, each: int = 4, chosen: Sequence[Case] = ()) -> Seen:
    """Call operators (``only`` those named) with other strides, on ``each`` samples of each case."""
    seen = Seen()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for case in chosen or cases(dtypes=["float32"]):
            _stress_case(case, seen, only, each)
    return seen


def _stress_case(case: Case, seen: Seen, only: frozenset[str] | None, each: int) -> None:
    operator = database()[case.operator].op
    made = samples(case)
    for number in range(0, len(made), max(1, len(made) // each)):
        mode = OtherStrides(seen, only, f"{case} {number}")
        try:
            with mode:
                call_eager(operator, made[number], differentiable(case))
        except Exception:
            if mode.comparing:
                raise
            continue  # eager itself fails, or its gradient does


def main() -> None:
    torch.set_num_threads(1)
    seen = stress(each=12)
    for name, found in sorted(seen.differences.items()):
        print(f"{name}: {found[0]}")
    agreed = sorted(set(seen.agreed) - set(seen.differences))
    print(f"{len(agreed)} operators take any strides: {' '.join(agreed)}")
    sys.exit(0)


if __name__ == "__main__":
    main()
