"""Fused groups: loops that will be one kernel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torchkiln.ir.index import Extent, Var
from torchkiln.ir.program import Loop
from torchkiln.schedule.dependencies import extent_product


@dataclass(frozen=True)
class FusedGroup:
    """Loops over ``rows`` and, where there is a reduction, over ``columns`` within each row.

    ``members`` are in program order, in the variables of the group. ``buffers`` are those they access, ``size`` is that
    of their values; both are for fusion, and no part of what the group is.
    """

    rows: tuple[Var, ...]
    columns: tuple[Var, ...]
    members: tuple[Loop, ...]
    buffers: frozenset[str] = field(default=frozenset(), compare=False)
    size: int = field(default=0, compare=False)

    @property
    def row_count(self) -> Extent:
        return extent_product(self.rows)

    @property
    def points(self) -> Extent:
        return extent_product((*self.rows, *self.columns))

    def __str__(self) -> str:
        head = f"rows {loops_text(self.rows)} columns {loops_text(self.columns)}"
        return "\n".join((head, *(f"  {member.statement}" for member in self.members)))


def loops_text(variables: Sequence[Var]) -> str:
    """``i < 4, j < 8``."""
    return ", ".join(f"{v.name} < {v.extent}" for v in variables) or "none"
