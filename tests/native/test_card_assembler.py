"""PTX becomes machine code in process where nvJitLink is installed, and stays PTX where it is not."""

from __future__ import annotations

import pytest
import torch

from tests.codegen.llvm.gpu.on_threads import HOPPER, kernels_of, module_of, plan_for
from torchkiln.native import card_assembler
from torchkiln.native.jit import assembly_of

installed = pytest.mark.skipif(card_assembler._library() is None, reason="nvJitLink is not installed")


def _ptx() -> str:
    kernels = kernels_of(plan_for(lambda x: torch.softmax(x, -1), [torch.empty(8, 256)]))
    return assembly_of(module_of(kernels), HOPPER.processor)


@installed
def test_machine_code_is_an_object_that_has_the_kernels() -> None:
    code = card_assembler.assemble(_ptx(), "sm_90")
    assert code.startswith(b"\x7fELF")
    assert b"kernel0" in code


@installed
def test_what_the_assembler_refuses_is_left_to_the_driver(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger=card_assembler.__name__):
        assert card_assembler.assemble(".version 8.0\n.target sm_90\n.entry k() { nonsense; }", "sm_90") == b""
    assert "the driver is left to assemble them" in caplog.text


def test_without_the_library_nothing_is_assembled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(card_assembler, "_library", lambda: None)
    assert card_assembler.assemble(_ptx(), "sm_90") == b""
