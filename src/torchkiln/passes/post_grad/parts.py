"""Writes of a part of a tensor as functional graphs have them (``slice_scatter`` and the like), and what part it is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.fx

_aten = torch.ops.aten

WRITES_OF_PARTS: dict[Any, torch._ops.OpOverload] = {
    _aten.slice_scatter.default: _aten.slice.Tensor,
    _aten.select_scatter.default: _aten.select.int,
    _aten.diagonal_scatter.default: _aten.diagonal.default,
}
"""Operators that give a copy of their first argument with a part replaced, and the view that shows the part."""


@dataclass(frozen=True)
class Part:
    """A part of a tensor: the view operator and its arguments after the tensor, defaults filled in."""

    view: torch._ops.OpOverload
    parameters: tuple[Any, ...]

    def is_shown_by(self, value: object, base: object) -> bool:
        """Whether ``value`` is this part of ``base``."""
        if not isinstance(value, torch.fx.Node) or value.target is not self.view or value.args[0] is not base:
            return False
        return not value.kwargs and _filled_in(self.view, value.args[1:]) == self.parameters


def written_part(write: torch.fx.Node) -> Part | None:
    """The part that a write of a part replaces; None where arguments are given by name."""
    view = WRITES_OF_PARTS[write.target]
    return None if write.kwargs else Part(view, _filled_in(view, write.args[2:]))


def _filled_in(view: torch._ops.OpOverload, given: tuple[Any, ...]) -> tuple[Any, ...]:
    """What a view takes after the tensor, and a write after two tensors, with the defaults of the schema."""
    return (*given, *(missing.default_value for missing in view._schema.arguments[1 + len(given) :]))
