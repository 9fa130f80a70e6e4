"""The target: one value that says what code is compiled for."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from torchkiln.config import Settings
from torchkiln.graph.manager import PassManager
from torchkiln.native.blas import BF16_GEMM, GEMM_ROUTINES
from torchkiln.target import capture_target


@pytest.fixture
def medium_precision() -> Iterator[Callable[[], None]]:
    before = torch.get_float32_matmul_precision()
    yield lambda: torch.set_float32_matmul_precision("medium")
    torch.set_float32_matmul_precision(before)


def test_a_machine_that_stays_as_it_is_gives_equal_targets() -> None:
    assert capture_target(Settings()) == capture_target(Settings())
    assert hash(capture_target(Settings())) == hash(capture_target(Settings()))


def test_registers_of_another_width_are_another_target() -> None:
    assert capture_target(Settings(vector_bits=128)).vector_bits == 128
    assert capture_target(Settings(vector_bits=128)) != capture_target(Settings(vector_bits=256))


def test_less_precise_matmuls_are_left_to_torch(medium_precision: Callable[[], None]) -> None:
    full = capture_target(Settings())
    medium_precision()
    less = capture_target(Settings())
    assert less != full
    assert less.gemm(torch.float32) is None
    for dtype in (torch.float32, torch.float64):
        assert full.gemm(dtype) == (GEMM_ROUTINES[dtype] if GEMM_ROUTINES[dtype] in full.blas else None)
    assert less.gemm(torch.float64) == full.gemm(torch.float64)
    assert less.gemm(torch.bfloat16, torch.float32) == (BF16_GEMM if BF16_GEMM in full.blas else None)
    assert full.gemm(torch.float16) is None


def test_a_compilation_keeps_the_target_it_started_with(medium_precision: Callable[[], None]) -> None:
    manager = PassManager(Settings())
    before = manager.target
    medium_precision()
    assert manager.target == before


def test_a_target_prints_a_line_for_each_fact() -> None:
    target = capture_target(Settings(vector_bits=256))
    lines = dict(line.split(": ", 1) for line in str(target).splitlines())
    assert lines["cpu"] == target.cpu
    assert lines["vector_bits"] == "256"
    assert set(lines["blas"].split()) == target.blas
