"""What is measured: a function and how its arguments are made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from benchmarks.operators.layouts import Layout, in_layout


@dataclass(frozen=True)
class Call:
    """A function with its arguments; ``for_gradient`` picks what is differentiated from its results.

    ``has_values`` is whether eager determines the results: memory that nobody wrote and random numbers vary.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    for_gradient: Callable[[Any], Any] | None = None
    has_values: bool = True

    @property
    def sizes(self) -> str:
        """The sizes of its tensors."""
        found = [leaf for leaf in pytree.tree_leaves((self.args, self.kwargs)) if isinstance(leaf, Tensor)]
        return ", ".join("×".join(map(str, tensor.shape)) or "scalar" for tensor in found)


@dataclass(frozen=True)
class Entry:
    """``make`` gives the call for a dtype, with gradients of all floating-point arguments that have one."""

    name: str
    make: Callable[[torch.dtype], Call]
    layouts: tuple[Layout, ...] = tuple(Layout)


def in_layouts(call: Call, layout: Layout) -> Call | None:
    """The call with its first argument, or all tensors of it where that is a list, in this layout.

    None where none of them has it. Other arguments stay contiguous: operands that lie differently are the harder case.
    """
    if not call.args:
        return call if layout is Layout.contiguous else None
    changed = 0

    def change(leaf: Any) -> Any:
        nonlocal changed
        found = in_layout(leaf, layout) if isinstance(leaf, Tensor) else None
        changed += found is not None
        return leaf if found is None else found

    first = pytree.tree_map(change, call.args[0])
    if not changed and layout is not Layout.contiguous:
        return None
    return replace(call, args=(first, *call.args[1:]))
