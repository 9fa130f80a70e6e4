"""Kernels of whole training steps become machine code of a card, and no registers are spilled."""

from __future__ import annotations

import pytest
import torch

import torchkiln
from tests.codegen.llvm.gpu.assembler import assemble, assembler
from tests.gpu.emulated_card import emulated
from tests.gpu.test_models import MODELS, step
from torchkiln.codegen.llvm import Generated
from torchkiln.native.jit import assembly_of
from torchkiln.recorder import Record, listen
from torchkiln.target import gpu_target

pytestmark = pytest.mark.skipif(assembler() is None, reason="nvJitLink is for Linux on x86-64: nvidia-nvjitlink-cu12")


@pytest.mark.parametrize("name", MODELS)
def test_kernels_of_models_are_assembled_without_spills(name: str) -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()
    make, inputs = MODELS[name]
    given = inputs(torch.device("cpu"))
    model = make().to(torch.bfloat16)
    given = given.to(torch.bfloat16) if given.is_floating_point() else given
    codes: list[bytes] = []

    def keep(record: Record) -> None:
        if isinstance(record.value, Generated) and record.value.artifact.card_code:
            codes.append(record.value.artifact.card_code)

    with emulated(), torchkiln.settings(cache=False, fallback=False), listen(keep):
        step(model, torch.compile(model, backend="kiln", fullgraph=True), given)
    target = gpu_target((9, 0))
    assert len(codes) == 2  # forward and backward
    for code in codes:
        found = assemble(assembly_of(code.decode(), target.processor), target.cpu)
        assert found
        assert {symbol: kernel.spilled for symbol, kernel in found.items() if kernel.spilled} == {}
