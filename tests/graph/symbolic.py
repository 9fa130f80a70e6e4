"""Fake tensors of symbolic sizes, as the inputs of a graph have them."""

from __future__ import annotations

from typing import Any

import torch
from torch._dynamo.source import ConstantSource
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, StatelessSymbolicContext


def symbolic_tensor(mode: FakeTensorMode, name: str, *shape: int) -> torch.Tensor:
    """A contiguous one, each of its sizes a symbol that is as in ``shape`` in the example."""
    context: Any = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC] * len(shape))
    value: torch.Tensor = mode.from_tensor(torch.empty(shape), source=ConstantSource(name), symbolic_context=context)
    return value
