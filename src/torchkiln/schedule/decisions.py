"""What inlining and fusion decided about two loops, for those who watch a compilation."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from torchkiln.ir.program import Loop


@dataclass(frozen=True)
class FusionDecision:
    """Whether the loop of nodes ``second`` is computed with those of nodes ``first``, and the reason where it is not.

    ``kind`` is "inline" for a loop that would be computed where ``first`` reads it, or "fuse".
    """

    kind: Literal["inline", "fuse"]
    first: tuple[str, ...]
    second: tuple[str, ...]
    fused: bool
    reason: str = ""


def nodes_of(loops: Iterable[Loop]) -> tuple[str, ...]:
    """The nodes that loops compute, each once."""
    return tuple(dict.fromkeys(node for loop in loops for node in loop.origin.nodes))
