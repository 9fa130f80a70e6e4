"""How many multiplications of bfloat16 numbers are few: up to so many, BLAS is faster than torch's operator.

The figures are in :mod:`torchkiln.lowering.matmul`.
"""

from __future__ import annotations

import torch

from torchkiln.target.target import Target

MOST_WORK = 2**25
"""Multiplications of one matmul above which torch's operator is as fast on any processor."""

# Those of a whole batch on AMD's processors with instructions for bfloat16, and where there is one row or one column.
_MOST_WORK_AMD, _MOST_WORK_OF_ONE_AMD = 3 * 2**18, 2**15


def most_work(target: Target) -> tuple[int, int]:
    """Multiplications up to which BLAS is faster than the operator, and those where there is one row or one column."""
    return (_MOST_WORK_AMD, _MOST_WORK_OF_ONE_AMD) if has_fast_operator(target) else (MOST_WORK, MOST_WORK)


def has_fast_operator(target: Target) -> bool:
    """Whether the processor has instructions for bfloat16 that oneDNN uses, and BLAS does not."""
    return target.is_amd and target.packs_weights_of(torch.bfloat16)
