"""How large the errors of eager may be: a program run with its roundings drawn anew.

One run of eager may be lucky, as where a sum cancels: the gradient of a bias in front of a batch norm is zero, and what
is left of it is rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from torchkiln.debug.float64 import wide

T = TypeVar("T")
_RUNS = 3
# Kernels sum in float32, those of narrower types too.
_ULP = torch.finfo(torch.float32).eps


def rounded_anew(run: Callable[[], T]) -> list[T]:
    """What ``run`` gives with other roundings, a few times; nothing where it does not run so."""
    try:
        return [_rounded(run, seed) for seed in range(_RUNS)]
    except Exception:  # such as an operator with a body, which a mode stops
        return []


def _rounded(run: Callable[[], T], seed: int) -> T:
    with _RoundedAnew(seed):
        return run()


class _RoundedAnew(TorchDispatchMode):
    """Elements that an operator rounds are rounded in another way; those it computes exactly stay as they are.

    The operator is given arguments that are a unit in the last place off, as another order of a sum may be, and the
    error it made is drawn anew, up to twice as large and of either sign. One that sums, as norms do for a mean, may be
    off by as much in all elements: a unit of the largest.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._generator = torch.Generator().manual_seed(seed)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = (tuple(args), dict(kwargs or {}))
        made = func(*given[0], **given[1])
        if not _is_pure(func):
            return made
        try:
            exact = _called(func, tree_map(wide, given))
            if any(map(_differs, tree_leaves(made), tree_leaves(exact))):
                off = _called(func, tree_map(self._off, given))
                for parts in zip(tree_leaves(made), tree_leaves(exact), tree_leaves(off), strict=True):
                    self._round(*parts, shifts=torch.Tag.pointwise not in func.tags)
        except Exception:  # of an operator that has no float64, errors stay what they are
            return made
        return made

    def _off(self, argument: Any) -> Any:
        known = wide(argument)
        return known if known is argument or not isinstance(known, Tensor) else known * (1 + _ULP * self._drawn(known))

    def _drawn(self, like: Tensor) -> Tensor:
        return torch.rand(like.shape, generator=self._generator, dtype=torch.float64) * 2 - 1

    def _round(self, value: Any, exact: Any, off: Any, *, shifts: bool) -> None:
        if _differs(value, exact):
            error = value - exact
            rounded = off + 2 * self._drawn(error) * error
            if shifts:
                rounded += _ULP * exact.abs().max() * self._drawn(exact.new_empty(())).sign()
            value.copy_(torch.where((error != 0) & rounded.isfinite(), rounded, value))


def _called(func: Callable[..., Any], given: tuple[Any, Any]) -> Any:
    return func(*given[0], **given[1])


def _differs(value: Any, exact: Any) -> bool:
    if not isinstance(value, Tensor) or not (value.is_floating_point() or value.is_complex()):
        return False
    return value.layout is torch.strided and value.shape == exact.shape and bool((value != exact).any())


def _is_pure(func: Any) -> bool:
    """Whether an operator makes its results anew and draws no random numbers."""
    schema = getattr(func, "_schema", None)
    if schema is None or schema.is_mutable or any(returned.alias_info is not None for returned in schema.returns):
        return False
    return torch.Tag.nondeterministic_seeded not in getattr(func, "tags", ())
