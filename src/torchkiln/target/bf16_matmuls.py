"""How many multiplications of bfloat16 numbers are few: up to so many, BLAS is faster than torch's operator.

The figures are in :mod:`torchkiln.lowering.matmul`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from torchkiln.target.target import Target


@dataclass(frozen=True)
class FewMultiplications:
    """Up to which BLAS is faster: in a whole batch, and in one of matmuls with one row or one column.

    BLAS is called for each of ``matrices``, the operator once: so many calls take as long as it takes to begin.
    ``matrices_of_one`` are those with one row or one column. None where calls were not seen to add up.
    """

    work: int
    work_of_one: int
    matrices: int | None
    matrices_of_one: int | None


MOST_WORK = 2**25
"""Multiplications of one matmul above which torch's operator is as fast on any processor."""

_ANY = FewMultiplications(MOST_WORK, MOST_WORK, None, None)
_AMD = FewMultiplications(3 * 2**18, 2**15, 24, 24)
_AMX = FewMultiplications(3 * 2**22, MOST_WORK, 64, None)


def few_multiplications(target: Target) -> FewMultiplications:
    """Those of a batch, where the processor has instructions for bfloat16 that oneDNN uses; of one matmul elsewhere.

    BLAS has none of AMD's instructions, and takes longer than oneDNN to fill the tiles of AMX.
    """
    if not target.packs_weights_of(torch.bfloat16):
        return _ANY
    return _AMD if target.is_amd else _AMX if "+amx-bf16" in target.features.split(",") else _ANY
