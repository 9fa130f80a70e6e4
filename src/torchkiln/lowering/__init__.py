"""Lowering: ATen nodes to loop IR. One module per operator family; :func:`lower` does a whole graph."""

from __future__ import annotations

import torch.fx

from torchkiln.actions import Actions
from torchkiln.config import Settings
from torchkiln.ir.program import Program
from torchkiln.lowering import (
    activations,
    attention,
    creation,
    indexing,
    matmul,
    normalization,
    pointwise,
    pooling,
    random,
    reduction,
    resizing,
    scans,
    sorting,
    views,
    window_pooling,
)
from torchkiln.lowering.graph import lower_graph
from torchkiln.lowering.registry import LOWERINGS
from torchkiln.target import Target

FAMILIES = (
    pointwise, activations, views, reduction, normalization, creation, indexing, random, sorting, scans, resizing,
    pooling, window_pooling, matmul, attention,
)  # fmt: skip


def lower(
    gm: torch.fx.GraphModule,
    settings: Settings,
    target: Target,
    *,
    kind: str = "inference",
    actions: Actions | None = None,
) -> Program:
    """The functional graph ``gm`` (inference, forward or backward) as loops and extern calls for ``target``.

    ``actions`` counts the operators that are called.
    """
    return lower_graph(gm, target, exact_half=settings.precision == "eager", kind=kind, actions=actions)


__all__ = ["FAMILIES", "LOWERINGS", "lower"]
