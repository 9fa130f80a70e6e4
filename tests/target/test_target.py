"""The target: one value that says what code is compiled for."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import torchkiln
from torchkiln.config import Settings
from torchkiln.errors import ArtifactError
from torchkiln.graph.manager import PassManager
from torchkiln.native.blas import BF16_GEMM, GEMM_ROUTINES
from torchkiln.target import Card, capture_target, emulated_card, place_of, read_target, target_on, write_target


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


@pytest.fixture
def double_by_default() -> Iterator[Callable[[], None]]:
    yield lambda: torch.set_default_dtype(torch.float64)
    torch.set_default_dtype(torch.float32)


def test_what_numbers_are_by_default_is_part_of_the_target(double_by_default: Callable[[], None]) -> None:
    before = capture_target(Settings())
    double_by_default()
    assert before.default_float is torch.float32
    assert capture_target(Settings()).default_float is torch.float64


@pytest.mark.parametrize(
    "function",
    [
        lambda x, n: (x * (n * 1.5)).cos(),
        lambda x, n: (x * (n / 3)).cos(),
        lambda x, n: (x * torch.sin(n)).cos(),
        lambda x, n: (x * torch.where(n > 2.5, 1.5, 2.5)).cos(),
    ],
)
def test_a_backward_computes_in_the_dtypes_of_its_forward(
    function: Callable[..., Tensor], double_by_default: Callable[[], None]
) -> None:
    """It is compiled when it first runs, and recomputes what is made of integers."""
    x, n = torch.randn(8, requires_grad=True), torch.arange(8)
    compiled: Any = torch.compile(function, backend="kiln", options={"fallback": False})
    (expected,) = torch.autograd.grad(function(x, n).sum(), x)
    result = compiled(x, n).sum()
    double_by_default()
    (gradient,) = torch.autograd.grad(result, x)
    torch.testing.assert_close(gradient, expected)


STAGES = ("canonicalize", "codegen", "ir", "lowering", "partition", "passes", "patterns", "schedule")
# What users set, what the machine is, and what the settings are now: a stage is given these.
ASKED = {
    *("os.environ", "os.getenv", "os.cpu_count", "resolve", "capture_target", "host_processor", "identify_processor"),
    *("torch.get_default_dtype", "torch.get_num_threads", "torch.get_float32_matmul_precision"),
    *("torch.are_deterministic_algorithms_enabled", "torch.is_autocast_enabled", "torch.get_autocast_dtype"),
    *("callable_routines", "carried_functions", "packed_dtypes", "check_layout"),
}
# A measurement says how it was made; the number of threads is no part of a target.
MEASURE = {
    ("passes/joint/matmul_timing.py", "torch.get_num_threads"),
    ("partition/rates.py", "torch.get_num_threads"),
}


def _asks(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            name = ast.unparse(node)
            if name in ASKED or name.startswith(("torch.backends.", "platform.")):
                yield name
        elif isinstance(node, ast.ImportFrom):
            yield from (alias.name for alias in node.names if alias.name in ASKED)


def test_no_stage_asks_the_process() -> None:
    sources = Path(torchkiln.__file__).parent
    found = {
        (str(path.relative_to(sources)), name)
        for stage in STAGES
        for path in (sources / stage).rglob("*.py")
        for name in _asks(ast.parse(path.read_text(encoding="utf-8")))
    }
    assert found == MEASURE


def test_a_card_is_part_of_a_target_and_of_its_text() -> None:
    machine = replace(capture_target(Settings()), card=Card(9, 0, 132, 227 << 10, 4_800_000_000_000))
    assert read_target(write_target(machine)) == machine
    assert machine.field_texts() != replace(machine, card=None).field_texts()
    card = target_on(machine, "cuda")
    assert (card.triple, card.cpu, card.device) == ("nvptx64-nvidia-cuda", "sm_90", "cuda")
    assert target_on(machine, "cpu") is machine


def test_a_card_with_other_fields_is_no_target() -> None:
    text = write_target(replace(capture_target(Settings()), card=Card(9, 0, 132, 1, 1)))
    for damaged in (text.replace('"major":9', '"major":"9"'), text.replace('"major"', '"minor"')):
        with pytest.raises(ArtifactError, match="description of a target is damaged"):
            read_target(damaged)


def test_an_emulated_card_takes_the_tensors_of_the_cpu() -> None:
    with emulated_card(Card(9, 0, 132, 1, 1, emulated=True, takes_all=True)):
        machine = capture_target(Settings())
    assert place_of(machine, torch.device("cpu")) == "cuda"
    assert place_of(capture_target(Settings()), torch.device("cpu")) == "cpu"
    assert capture_target(Settings()).card is None
