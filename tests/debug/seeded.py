"""For each planted bug a program that meets it, and what is to be found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Seeded:
    """``node`` and ``graph_pass`` are what shadow names, ``action`` how the name of what bisect finds begins."""

    program: Callable[..., Any]
    node: str
    action: tuple[str, str]
    graph_pass: str | None = None
    failure: str = "wrong result"


def _rewrite(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x * w).exp()


def _fusion(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return (torch.cos(x) * w + 2).sum(-1)


def _constant(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.exp(x * 0.1 + w) - 1


def _lowering(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.erf(x @ w) + 1


def _crash(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.where(torch.isinf(x + w), 0.0, x)


def _nan(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.sigmoid(x * 200) + w


def _dtype(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.sin(x @ w) * 2


def _strides(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.relu(x @ w.t()) + 1


def _transposed(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.sigmoid(x.t()) + w.t()


SEEDED = {
    "wrong_rewrite": Seeded(_rewrite, "tanh", ("rewrite", "NearlyTanh at tanh"), "joint/NearlyTanh"),
    "wrong_fusion": Seeded(_fusion, "mul", ("fusion", "cos computed where it is read")),
    "wrong_constant": Seeded(_constant, "exp", ("call", "aten.exp.default at exp")),
    "crash_in_lowering": Seeded(_lowering, "erf", ("call", "aten.erf.default at erf"), failure="ValueError: planted"),
    "segfault": Seeded(_crash, "isinf", ("call", "aten.isinf.default at isinf"), failure="SIGSEGV"),
    "nan": Seeded(_nan, "sigmoid", ("call", "aten.sigmoid.default at sigmoid"), failure="non-finite"),
    "dtype_in_joint_pass": Seeded(
        _dtype, "convert_element_type", ("pass", "joint/rounds_sines"), "joint/rounds_sines"
    ),
    "strides_of_library_call": Seeded(_strides, "mm", ("call", "aten.mm.default at mm")),
}

# Bugs that only the caller of a compiled graph can see: numbers are right.
SEEDED_STRIDES = {
    "strides_in_joint_pass": Seeded(
        _transposed, "clone", ("pass", "joint/lays_out_sigmoids"), "joint/lays_out_sigmoids", failure="other strides"
    ),
    "strides_of_result": Seeded(_transposed, "add", ("", ""), failure="other strides"),
}


def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(16, 16, requires_grad=True), torch.randn(16, 16, requires_grad=True)
