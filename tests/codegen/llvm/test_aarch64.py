"""Kernels for AArch64 give eager's results, run by qemu: linked with a small C program that calls one after the other.

torch itself is not there, so graphs are those that call none of its operators.
"""

from __future__ import annotations

import math
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from torchkiln.codegen.llvm import generate
from torchkiln.codegen.llvm.support import compile_support
from torchkiln.codegen.llvm.support.sorting import row_sort
from torchkiln.config import Settings
from torchkiln.ir.program import ExternCall, StridedView
from torchkiln.lowering import lower
from torchkiln.schedule import schedule
from torchkiln.schedule.kernel import Kernel
from torchkiln.schedule.plan import InConstant, InInput, Launch, Plan
from torchkiln.target import target_for

COMPILER, EMULATOR = "aarch64-linux-gnu-gcc", "qemu-aarch64"
OLDEST = "cortex-a53"  # ARMv8.0: later instructions are illegal

pytestmark = pytest.mark.skipif(
    shutil.which(COMPILER) is None or shutil.which(EMULATOR) is None,
    reason="needs `apt-get install qemu-user gcc-aarch64-linux-gnu libc6-dev-arm64-cross`",
)

SETTINGS = Settings(fallback=False)
TARGET = target_for("aarch64", SETTINGS)


def _functions(x: Tensor) -> Tensor:
    """Vector functions of our own and of the C library."""
    small, positive = x.tanh(), x.abs() + 1
    return (
        torch.sin(x) + torch.exp(x) + torch.log(positive) + torch.erf(x) + positive.pow(1.5) + torch.lgamma(positive)
    ) * (torch.asin(small) + torch.expm1(x) + torch.fmod(x, 0.7) + torch.erfinv(small / 2))


def _integers(x: Tensor) -> tuple[Tensor, ...]:
    n = (x * 100).to(torch.int64)
    narrow = n.to(torch.int8)
    return n // 7, n % 7, (n ^ 21) * 3, narrow * narrow, n.to(torch.uint8), (x > 0) & (n < 50)


PROGRAMS: dict[str, tuple[Callable[..., Any], tuple[tuple[int, ...], ...], torch.dtype]] = {
    "functions": (_functions, ((31, 37),), torch.float32),
    "functions of float64": (_functions, ((31, 37),), torch.float64),
    "integers": (_integers, ((13, 29),), torch.float32),
    "softmax": (lambda x: torch.softmax(x, -1), ((7, 301),), torch.float32),
    "layer norm": (lambda x, w, b: F.layer_norm(x, (37,), w, b), ((8, 37), (37,), (37,)), torch.float32),
    "bfloat16": (lambda x, y: F.gelu(x) * y.sum(0), ((9, 40), (9, 40)), torch.bfloat16),
    "float16": (lambda x: torch.softmax(x, -1) * 2, ((9, 40),), torch.float16),
    "reductions": (lambda x: (x.amax(0), x.argmin(1), x.var(1), x.prod(0), (x > 0).any(1)), ((23, 41),), torch.float32),
    "a long sum": (lambda x: x.sum(), ((100_003,),), torch.float32),
    "transpose": (lambda x: x.t().contiguous() + x.sum(0, keepdim=True).t(), ((40, 24),), torch.float32),
    "gather": (lambda x, y: x[(y.abs() * 3).long().clamp(max=8)] + y[:, None], ((9, 20), (17,)), torch.float32),
    "sort": (lambda x: tuple(torch.sort(x, -1, descending=True)), ((5, 70),), torch.float32),
    "slices": (lambda x: torch.cat((x[:, 1:] - x[:, :-1], x.flip(1)), 1)[:, ::2], ((9, 45),), torch.float32),
}


def _as_tuple(results: Any) -> tuple[Any, ...]:
    return tuple(results) if isinstance(results, (tuple, list)) else (results,)


def _names(plan: Plan) -> dict[str, str]:
    """The C variable of each buffer; one that lies in an input is that input."""
    places = {InInput: "input", InConstant: "constant"}
    return {
        name: f"{places[type(place)]}{place.position}" if isinstance(place, InInput | InConstant) else f"buffer{k}"
        for k, (name, place) in enumerate(plan.storage.items())
    }


def _bytes(tensors: tuple[Tensor, ...]) -> list[bytes]:
    return [tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes() for tensor in tensors]


@dataclass(frozen=True)
class _Run:
    """One call of a native function for all its iterations, with what the C program hands it."""

    symbol: str
    iterations: int
    context: tuple[str, ...]


def _runs(plan: Plan) -> Iterator[_Run]:
    """What the steps of a graph call, but for checks of values: those are right here."""
    names, known = _names(plan), dict[Kernel, str]()
    for step in plan.steps:
        if isinstance(step, Launch):
            symbol = known.setdefault(step.kernel, f"kernel{len(known)}")
            iterations = step.kernel.mapping.iterations
            assert isinstance(iterations, int)
            yield _Run(symbol, iterations, (*(names[buffer] for buffer in step.buffers), "&failed"))
        elif isinstance(step, ExternCall):
            if step.target == torch.ops.kiln.check.default:
                continue
            assert step.target == torch.ops.kiln.sort.default, "an operator of torch is called"
            view, descending = step.arguments
            assert isinstance(view, StridedView)
            *rows, row = map(int, view.shape)  # type: ignore[arg-type]
            given = (names[name] for name in (view.buffer, *map(str, step.results)))
            context = (*given, f"(void *){row}L", f"(void *){-int(bool(descending))}L")
            yield _Run(row_sort(view.dtype), math.prod(rows), context)
        else:
            raise AssertionError(f"not known to this test: {step}")


def _driver(plan: Plan, given: dict[str, bytes]) -> Iterator[str]:
    """A program that reads inputs and constants, makes every call in two parts and writes what was computed."""
    names, buffers, runs = _names(plan), plan.program.buffers, list(_runs(plan))
    yield "#include <stdint.h>\n#include <stdio.h>"
    yield from (f"void {symbol}(int64_t, int64_t, void *);" for symbol in {run.symbol for run in runs})
    sizes = {names[name]: buffers[name].nbytes for name in plan.storage} | {name: len(d) for name, d in given.items()}
    yield from (f"static _Alignas(64) unsigned char {name}[{n}];" for name, n in sizes.items())
    yield "int main(void) {\n  int64_t failed = 0;"
    yield from (f"  if (fread({name}, 1, {len(d)}, stdin) != {len(d)}) return 2;" for name, d in given.items())
    for run in runs:
        middle = run.iterations // 3
        yield f"  {{ void *context[] = {{{', '.join(run.context)}}};"
        yield f"    {run.symbol}(0, {middle}, context), {run.symbol}({middle}, {run.iterations}, context); }}"
    yield "  if (failed) return 3;"
    for view in plan.program.outputs:
        assert isinstance(view, StridedView)
        yield f"  fwrite({names[view.buffer]}, 1, {buffers[view.buffer].nbytes}, stdout);"
    yield "  return 0;\n}\n"


def _shown(view: StridedView, memory: bytes) -> Tensor:
    flat = torch.frombuffer(bytearray(memory), dtype=torch.uint8).view(view.dtype)
    return flat.as_strided(view.shape, view.strides, view.offset)  # type: ignore[arg-type]


@cache
def _sort_code() -> bytes:
    module = compile_support(TARGET).module_with(row_sort(torch.float32))
    assert module is not None
    return module.code


def _run(plan: Plan, code: bytes, inputs: tuple[Tensor, ...], folder: Path) -> list[Tensor]:
    constants = tuple(tensor for _, tensor in plan.program.constants)
    given = {f"input{k}": data for k, data in enumerate(_bytes(inputs))}
    given |= {f"constant{k}": data for k, data in enumerate(_bytes(constants))}
    objects = {"kernels.o": code, "sort.o": _sort_code()}
    for name, data in objects.items():
        (folder / name).write_bytes(data)
    (folder / "driver.c").write_text("\n".join(_driver(plan, given)))
    built = [name for name, data in objects.items() if data]
    link = [COMPILER, "-static", "-o", "driver", "driver.c", *built, "-lm"]
    subprocess.run(link, cwd=folder, check=True, timeout=300)
    emulated = [EMULATOR, "-cpu", OLDEST, "./driver"]
    data = b"".join(given.values())
    written = subprocess.run(emulated, cwd=folder, input=data, capture_output=True, check=True, timeout=300).stdout
    results = []
    for view in plan.program.outputs:
        assert isinstance(view, StridedView)
        size = int(plan.program.buffers[view.buffer].nbytes)  # type: ignore[arg-type]
        results.append(_shown(view, written[:size]))
        written = written[size:]
    assert not written
    return results


@pytest.mark.parametrize("name", PROGRAMS)
def test_kernels_for_aarch64_give_eagers_results(name: str, tmp_path: Path) -> None:
    function, shapes, dtype = PROGRAMS[name]
    inputs = tuple(torch.randn(*shape).to(dtype) for shape in shapes)
    traced = make_fx(lambda *given: _as_tuple(function(*given)), tracing_mode="fake")(*inputs)
    plan = schedule(lower(traced, SETTINGS, TARGET), SETTINGS, TARGET)
    results = _run(plan, generate(plan, SETTINGS, TARGET).artifact.kernel_code, inputs, tmp_path)
    for result, expected in zip(results, _as_tuple(function(*inputs)), strict=True):
        torch.testing.assert_close(result, expected)
