"""Code for other machines than this one: right where it runs here, and of no instruction that the target lacks."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import llvmlite.binding as llvm
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from torchkiln import compile_fx_inner
from torchkiln.codegen import llvm as codegen
from torchkiln.codegen.llvm import Generated, generate, support
from torchkiln.config import Settings
from torchkiln.errors import ArtifactError
from torchkiln.graph.manager import PassManager
from torchkiln.lowering import lower
from torchkiln.native import jit
from torchkiln.native.elf import AARCH64, X86_64, read_object
from torchkiln.native.host import Processor
from torchkiln.runtime.executable import load
from torchkiln.schedule import schedule
from torchkiln.target import TARGETS, runs_here, target_for

SETTINGS = Settings(fallback=False)


def _functions(x: Tensor) -> Tensor:
    """Vector functions of our own, of SLEEF and of the C library."""
    small, positive = x.tanh(), x.abs() + 1
    return (
        torch.sin(x) + torch.exp(x) + torch.log(positive) + torch.erf(x) + positive.pow(1.5) + torch.lgamma(positive)
    ) * (torch.asin(small) + torch.expm1(x) + torch.fmod(x, 0.7) + torch.erfinv(small / 2))


PROGRAMS: dict[str, tuple[Callable[..., Any], tuple[tuple[int, ...], ...], torch.dtype]] = {
    "functions": (_functions, ((31, 37),), torch.float32),
    "functions of float64": (_functions, ((31, 37),), torch.float64),
    "layer norm": (lambda x, w, b: F.layer_norm(x, (37,), w, b), ((8, 37), (37,), (37,)), torch.float32),
    "attention": (lambda q, k, v: torch.softmax(q @ k.mT, -1) @ v, ((4, 17, 8),) * 3, torch.float32),
    "bfloat16": (lambda x, w: F.gelu(x @ w), ((9, 40), (40, 24)), torch.bfloat16),
    "float16": (lambda x: torch.softmax(x, -1) * 2, ((9, 40),), torch.float16),
    "sort": (lambda x: torch.sort(x, -1), ((5, 40),), torch.float32),
    "transpose": (lambda x: x.t().contiguous() + x.sum(0, keepdim=True).t(), ((40, 24),), torch.float32),
}


def _inputs(name: str) -> list[Tensor]:
    _, shapes, dtype = PROGRAMS[name]
    torch.manual_seed(0)
    return [torch.randn(*shape).to(dtype) for shape in shapes]


def _traced(name: str) -> torch.fx.GraphModule:
    function = PROGRAMS[name][0]
    return make_fx(lambda *inputs: _as_tuple(function(*inputs)), tracing_mode="fake")(*_inputs(name))


def _as_tuple(results: Any) -> tuple[Any, ...]:
    return tuple(results) if isinstance(results, (tuple, list)) else (results,)


@contextmanager
def _assembly() -> Iterator[list[str]]:
    """What is compiled meanwhile as assembly text."""
    found: list[str] = []

    def with_text(compile_text: Callable[[str, Processor], bytes], level: int) -> Callable[[str, Processor], bytes]:
        def compile_and_keep(text: str, processor: Processor) -> bytes:
            code = compile_text(text, processor)
            machine = jit._target_machine(processor, level)
            found.append(machine.emit_assembly(llvm.parse_assembly(text)))
            return code

        return compile_and_keep

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(codegen, "compile_module", with_text(jit.compile_module, 3))
        patch.setattr(codegen, "compile_steps", with_text(jit.compile_steps, 0))
        patch.setattr(support, "compile_module", with_text(jit.compile_module, 3))
        yield found


def _generated(name: str, target: str) -> Generated:
    machine = target_for(target, SETTINGS)
    program = lower(_traced(name), SETTINGS, machine)
    return generate(schedule(program, SETTINGS, machine), SETTINGS, machine)


@pytest.mark.parametrize("level", [name for name in TARGETS if runs_here(target_for(name, SETTINGS))])
@pytest.mark.parametrize("name", PROGRAMS)
def test_code_for_a_level_that_runs_here_gives_eagers_results_in_float64(name: str, level: str) -> None:
    manager = PassManager(SETTINGS, target_for(level, SETTINGS))
    compiled = compile_fx_inner(_traced(name), _inputs(name), is_inference=True, pass_manager=manager)
    exact = _as_tuple(PROGRAMS[name][0](*[x.double() for x in _inputs(name)]))
    for result, expected in zip(compiled(_inputs(name)), exact, strict=True):
        torch.testing.assert_close(result, expected.to(result.dtype))


def test_code_for_avx2_has_no_register_of_avx512() -> None:
    for level, has_wide in (("x86-64-v3", False), ("x86-64-v4", True)):
        with _assembly() as texts:
            for name in PROGRAMS:
                _generated(name, level)
            support.compile_support(target_for(level, SETTINGS))
        assert "ymm" in "".join(texts)
        assert any("zmm" in text for text in texts) is has_wide
        assert any("%k1" in text for text in texts) is has_wide


def test_code_for_aarch64_is_vectorized_and_refused_elsewhere() -> None:
    with _assembly() as texts:
        artifacts = [_generated(name, "aarch64").artifact for name in PROGRAMS]
        code = support.compile_support(target_for("aarch64", SETTINGS))
    objects = [a.step_code for a in artifacts] + [a.kernel_code for a in artifacts if a.kernel_code]
    objects += [module.code for module in code.modules]
    assert {read_object(data).machine for data in objects} == {AARCH64}
    assert any("fmla\tv" in text and ".4s" in text for text in texts)
    needed = {name for data in objects for name in read_object(data).undefined}
    assert not [name for name in needed if name.startswith("Sleef_") or name in ("sgemm_", "dgemm_")]
    if platform.machine() == "x86_64":
        with pytest.raises(ArtifactError, match="not for x86_64 processors"):
            load(artifacts[0])


def test_code_for_x86_64_is_what_its_elf_header_says() -> None:
    assert read_object(_generated("layer norm", "x86-64-v3").artifact.kernel_code).machine == X86_64
