"""Advice to the user about settings of torch that decide how fast a card computes, given once in a process."""

from __future__ import annotations

import threading

import torch

from torchkiln.errors import AdviceWarning, warn_user
from torchkiln.ir.program import WRITES_INTO, ExternCall, Program
from torchkiln.schedule.dependencies import tensors_of
from torchkiln.target import Target

_MATMULS = WRITES_INTO | {torch.ops.aten.convolution.default}

_lock = threading.Lock()
_given = False


def advise_tf32(program: Program, target: Target) -> None:
    """Say that float32 matmuls of a card could use its tensor cores, where the user has not allowed that."""
    global _given
    card = target.card
    if program.card is None or card is None or card.tf32 or not card.has_tf32 or not _multiplies_float32(program):
        return
    with _lock:
        first, _given = not _given, True
    if first:
        warn_user(
            "float32 matmuls on this card do not use its tensor cores. If about three decimal digits are enough, call"
            ' torch.set_float32_matmul_precision("high") before compiling.',
            AdviceWarning,
        )


def _multiplies_float32(program: Program) -> bool:
    for operation in program.operations:
        if isinstance(operation, ExternCall) and operation.target in _MATMULS:
            views = tensors_of(operation.arguments)
            if views and all(program.buffers[v.buffer].device == "cuda" and v.dtype == torch.float32 for v in views):
                return True
    return False
