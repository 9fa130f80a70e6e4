"""The emulator shows what a card would do wrong."""

from __future__ import annotations

import pytest
import torch

from tests.codegen.llvm.gpu.emulator import Emulated
from tests.codegen.llvm.gpu.on_threads import kernels_of, module_of, plan_for
from tests.codegen.llvm.gpu.turns import Stuck

_BARRIER = "call void @llvm.nvvm.barrier0()"


def _sums_of_rows(edit: tuple[str, str]) -> list[torch.Tensor]:
    """Sums of rows that a block shares, with a piece of the code replaced: the first thread ahead, then the last."""
    kernels = kernels_of(plan_for(lambda x: x.sum(-1), [torch.zeros(3, 4096)]))
    text = module_of(kernels)
    assert edit[0] in text
    emulated = Emulated(text.replace(*edit), kernels)
    found = []
    for _ in range(2):
        result = torch.full((4,), float("nan"))
        emulated.launch("kernel0", [torch.ones(3 * 4096), result], [], 3)
        found.append(result[:3])
    return found


def test_a_missing_barrier_shows() -> None:
    good = torch.full((3,), 4096.0)
    assert all(torch.equal(result, good) for result in _sums_of_rows((_BARRIER, _BARRIER)))
    first_ahead, _ = _sums_of_rows((_BARRIER, ""))
    assert bool(first_ahead.isnan().all())  # it reads what the others have not written


def test_a_barrier_that_only_some_threads_reach_is_an_error() -> None:
    lone = f"br i1 %lone, label %wait, label %go\nwait:\n{_BARRIER}\nbr label %go\ngo:\n"
    start = "%lone = icmp eq i32 %v1, 0\n"
    with pytest.raises(Stuck, match="not all threads reach"):
        _sums_of_rows((_BARRIER, f"{_BARRIER}\n{start}{lone}"))
    assert all(bool((result == 4096).all()) for result in _sums_of_rows((_BARRIER, _BARRIER)))
