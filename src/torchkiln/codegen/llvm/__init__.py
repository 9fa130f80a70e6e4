"""LLVM code generation: a plan to object code, a module of kernels and one of the steps that call them per graph."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torchkiln.artifact import Artifact
from torchkiln.artifact.calls import Body
from torchkiln.codegen.llvm.entry import emit_entry
from torchkiln.codegen.llvm.gpu import emit_gpu_kernel
from torchkiln.codegen.llvm.kernel import emit_kernel
from torchkiln.codegen.llvm.module import ModuleBuilder
from torchkiln.codegen.llvm.texts import TextTable
from torchkiln.config import Settings
from torchkiln.ir.higher_order import HigherOrder, OncePerBody
from torchkiln.ir.index import Extent
from torchkiln.ir.program import EMULATED, ExternCall
from torchkiln.logs import code_log, is_shown
from torchkiln.native.card_assembler import assemble
from torchkiln.native.jit import assembly_of, compile_module, compile_steps
from torchkiln.schedule.kernel import GpuMapping, Kernel
from torchkiln.schedule.plan import Launch, Plan, Step
from torchkiln.target import Target, target_on

_kernel_code = code_log(__name__, "kernel_code")
_output_code = code_log(__name__, "output_code")


@dataclass(frozen=True)
class Generated:
    """What code generation made: the artifact, and the text of its modules for people."""

    artifact: Artifact
    text: str
    kernels: str = ""
    """The part of ``text`` that is the module of kernels."""

    def __str__(self) -> str:
        return self.text


def generate(plan: Plan, settings: Settings, target: Target) -> Generated:
    """Native code of a whole plan for ``target``. Kernels that are equal are generated once."""
    code_of = OncePerBody(lambda body: _body_code(body, settings, target))
    plan = replace(plan, steps=tuple(_with_body_code(step, code_of) for step in plan.steps))
    kernels, steps = ModuleBuilder(target), ModuleBuilder(target)
    card = None if plan.program.card is None else ModuleBuilder(target_on(target, "cuda"))
    symbols: dict[Kernel, str] = {}
    for step in plan.steps:
        if isinstance(step, Launch) and step.kernel not in symbols:
            symbol = f"kernel{len(symbols)}"
            symbols[step.kernel] = symbol
            if isinstance(step.kernel.mapping, GpuMapping):
                assert card is not None
                emit_gpu_kernel(card, step.kernel, symbol)
                continue
            emit_kernel(kernels, step.kernel, symbol)
            steps.declare(f"declare void @{symbol}(i64, i64, ptr)")
    table = TextTable()
    entry = emit_entry(steps, plan, symbols, table, threads=settings.threads, profile=settings.profile)
    kernel_text, step_text = kernels.text(), steps.text()
    card_text = "" if card is None or entry.card is None or not entry.card.kernels else card.text()
    if is_shown(_kernel_code):
        for kernel, symbol in symbols.items():
            _kernel_code.debug("%s: %s", symbol, kernel)
    if is_shown(_output_code):
        _output_code.debug("%s\n%s\n%s", kernel_text, card_text, step_text)
    kernel_code = compile_module(kernel_text, target.processor) if entry.kernels else b""
    card_code = card_object = b""
    if card is not None and card_text:
        emulated = plan.program.card == EMULATED
        ptx = card_text if emulated else assembly_of(card_text, card.target.processor)
        card_code, card_object = ptx.encode(), b"" if emulated else assemble(ptx, card.target.cpu)
    step_code = compile_steps(step_text, target.processor)
    constants = tuple(tensor for _, tensor in plan.program.constants)
    compiled = step_code, kernel_code, entry, constants, table.texts, table.sources
    artifact = Artifact(*compiled, card_code=card_code, card_object=card_object)
    texts = [text for text in (kernel_text, card_text, step_text) if text]
    return Generated(artifact, "\n".join(texts), kernel_text if entry.kernels else "")


def _body_code(body: Plan, settings: Settings, target: Target) -> Body:
    program = body.program
    strides = tuple(None if i.buffer is None else _numbers(program.buffers[i.buffer].strides) for i in program.inputs)
    # The time of a body is that of the call which runs it.
    return Body(generate(body, replace(settings, profile=False), target).artifact, strides)


def _numbers(strides: Sequence[Extent]) -> tuple[int, ...]:
    """Bodies are compiled for each combination of sizes."""
    return tuple(stride for stride in strides if isinstance(stride, int))


def _with_body_code(step: Step, code_of: OncePerBody) -> Step:
    if isinstance(step, ExternCall) and isinstance(step.target, HigherOrder):
        return replace(step, target=step.target.with_bodies(code_of))
    return step


__all__ = ["Generated", "generate"]
