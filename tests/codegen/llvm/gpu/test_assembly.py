"""Kernels of a GPU become machine code of real cards, with few registers and none spilled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.codegen.llvm.gpu.assembler import Assembled, assemble, assembler
from tests.codegen.llvm.gpu.on_threads import HOPPER, kernels_of, module_of, plan_for
from torchkiln.native.jit import assembly_of
from torchkiln.schedule.kernel import GpuMapping
from torchkiln.target import gpu_target

pytestmark = pytest.mark.skipif(assembler() is None, reason="nvJitLink is for Linux on x86-64: nvidia-nvjitlink-cu12")


def assembled(function: Callable[..., Any], *inputs: torch.Tensor, capability: tuple[int, int] = (9, 0)) -> Assembled:
    """What becomes of the only kernel of a function."""
    target = gpu_target(capability)
    kernels = kernels_of(plan_for(function, inputs, target))
    assert len(kernels) == 1
    return assemble(assembly_of(module_of(kernels, target), target.processor), target.cpu)["kernel0"]


def _half(*sizes: int) -> torch.Tensor:
    return torch.empty(sizes, dtype=torch.bfloat16)


# Of 65,536 registers of a processor, 64 for each thread keep half of its threads at work.
@pytest.mark.parametrize(
    ("name", "function", "inputs", "registers", "shared"),
    [
        ("softmax of a block", lambda x: x.softmax(-1), [(4096, 4096)], 48, 96),
        ("softmax of a warp", lambda x: x.softmax(-1), [(4096, 512)], 48, 0),
        (
            "layer norm and gelu",
            lambda x, w, b: F.gelu(F.layer_norm(x, (4096,), w, b)),
            [(4096, 4096), (4096,), (4096,)],
            48,
            64,
        ),
        ("rows of odd length", lambda x: x.log_softmax(-1), [(64, 50257)], 64, 3 * 128),
        (
            "layer norm backward",
            lambda g, x, w: g * w - (g * w).mean(-1, keepdim=True) - x * (g * w * x).mean(-1, keepdim=True),
            [(8192, 1024), (8192, 1024), (1024,)],
            96,
            0,
        ),
        ("sums over columns", lambda x: x.float().sum(0), [(64, 2048)], 40, 4 * 512),
        ("softmax over columns", lambda x: x.softmax(0), [(256, 2048)], 40, 8 * 512),
        ("a pointwise chain", lambda x, b: F.gelu(x + b) * 0.5 + x, [(64, 1 << 20), (64, 1 << 20)], 40, 0),
        ("remainders", lambda x: x.float().remainder(0.3), [(64, 1 << 20)], 96, 0),
        ("transposition", lambda x: x.t().contiguous(), [(4096, 4096)], 32, 2 * 64 * 65),
        ("a transposed operand", lambda x, y: F.gelu(x + y.t()), [(4096, 1024), (1024, 4096)], 56, 2 * 64 * 65),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_registers_and_shared_memory(
    name: str, function: Callable[..., Any], inputs: list[tuple[int, ...]], registers: int, shared: int
) -> None:
    found = assembled(function, *(_half(*sizes) for sizes in inputs))
    assert found.spilled == 0
    assert found.registers <= registers
    assert found.shared == shared


@pytest.mark.parametrize("length", [1024, 4096, 8192, 16384, 32768])
def test_rows_that_several_operands_have_spill_nothing(length: int) -> None:
    x = _half(64, length)
    assert assembled(lambda g, x, w: (y := g * w) - y.mean(-1, keepdim=True) - x * (y * x).sum(-1, keepdim=True),
                     x, x, _half(length)).spilled == 0  # fmt: skip


@pytest.mark.parametrize("wide", [torch.Tensor.long, torch.Tensor.double], ids=["int64", "float64"])
def test_what_a_block_exchanges_fits_its_shared_memory(wide: Callable[[torch.Tensor], torch.Tensor]) -> None:
    found = assembled(lambda x: (wide(x) * 3).argmax(0), torch.empty(1000, 65536, dtype=torch.uint8))
    assert found.spilled == 0
    assert found.shared <= 48 << 10


def test_reads_of_a_loop_are_under_way_together() -> None:
    (kernel,) = (kernels := kernels_of(plan_for(lambda x: x.sum(-1), [_half(64, 50257)]))).values()
    assert isinstance(kernel.mapping, GpuMapping)
    text = assembly_of(module_of(kernels), HOPPER.processor)
    assert text.count("ld.global.nc.b16") == kernel.mapping.steps + 1 == 9


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 9), (9, 0)])
def test_cards_from_ampere_on_are_assembled_for(capability: tuple[int, int]) -> None:
    x = _half(64, 768)
    assert assembled(lambda x: F.layer_norm(x, (768,)).argmax(-1), x, capability=capability).spilled == 0


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.int8, torch.int64, torch.bool], ids=str)
def test_every_dtype_is_assembled(dtype: torch.dtype) -> None:
    x = torch.zeros(64, 1000, dtype=dtype)
    assembled(lambda x: ((x + x).amax(-1), (x > 0).sum(-1)), x)


def test_refused_code_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"syntax error|Parsing error|fatal"):
        assemble(".version 8.0\n.target sm_90\n.address_size 64\n.entry k() { nonsense; }", "sm_90")
