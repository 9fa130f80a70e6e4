"""Gradients that arrive with a negation or conjugation still to be done.

torch marks such a tensor instead of computing it. Code that reads memory must not be given one, and no guard tells a
compiled backward: what flows into it is whatever the code after the compiled function hands back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.fx


def with_plain_tangents(backward: torch.fx.GraphModule, compiled: Callable[..., Any]) -> Callable[..., Any]:
    """``compiled``, the code of ``backward``, given gradients with everything done."""
    placeholders = backward.graph.find_nodes(op="placeholder")
    positions = [
        position
        for position, node in enumerate(placeholders)
        if str(node.target).startswith("tangents") and isinstance(node.meta.get("val"), torch.Tensor)
    ]
    takes_list = getattr(compiled, "_boxed_call", False)

    def call(arguments: list[Any]) -> Any:
        for position in positions:
            tangent = arguments[position]  # None for the token of an operator with effects
            if tangent is not None and (tangent.is_neg() or tangent.is_conj()):
                arguments[position] = tangent.resolve_conj().resolve_neg()
        return compiled(arguments) if takes_list else compiled(*arguments)

    call._boxed_call = True  # type: ignore[attr-defined]
    return call
