"""Values that eager refuses: a loop looks for them, and a step after it raises."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from torchkiln.graph.native_operators import CHECK
from torchkiln.ir.expr import Constant
from torchkiln.ir.index import Extent
from torchkiln.lowering.builder import Builder, Element, dimension_variables, indices


def refuse(
    builder: Builder, shape: Sequence[Extent], bad: Element, error: str, text: str, value: Element | None = None
) -> None:
    """Raise ``error`` (a name of Python's) with ``text`` at run time where ``bad`` holds for some element of ``shape``.

    ``value`` is the int64 that the text has in place of ``{}``, the largest of all: ``LEAST`` where nothing is bad. On
    a card nothing is raised, which would have to be waited for: loops read element 0 in place of one out of range.
    """
    if builder.device == "cuda":
        return
    probe = bad(indices(dimension_variables(shape)))
    if 0 in shape or (isinstance(probe, Constant) and not probe.value):
        return
    flag = builder.materialize(builder.reduce("any", (), shape, lambda _, r: bad(r)))
    named = None if value is None else builder.materialize(builder.reduce("max", (), shape, lambda _, r: value(r)))
    builder.extern(CHECK, (flag, error, text, named), [])


LEAST = Constant(torch.iinfo(torch.int64).min, torch.int64)
