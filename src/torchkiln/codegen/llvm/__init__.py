"""LLVM code generation: a plan to object code, one module and one native entry per graph."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from torchkiln.codegen.llvm.entry import EntryInfo, emit_entry
from torchkiln.codegen.llvm.jit import compile_module
from torchkiln.codegen.llvm.kernel import emit_kernel
from torchkiln.codegen.llvm.machine import vector_bits
from torchkiln.codegen.llvm.module import ModuleBuilder
from torchkiln.config import Settings
from torchkiln.ir.higher_order import HigherOrder, OncePerBody
from torchkiln.ir.index import Extent
from torchkiln.ir.program import ExternCall
from torchkiln.schedule.kernel import Kernel
from torchkiln.schedule.plan import Launch, Plan, Step


@dataclass(frozen=True)
class Generated:
    """What code generation made: the module's text, its object code, and what a loader must know."""

    text: str
    object_code: bytes
    entry: EntryInfo
    kernels: int


@dataclass(frozen=True, eq=False)
class BodyCode:
    """The body of a higher-order operator: its code and the constants it is to be loaded with.

    ``strides`` are those of its inputs, None for one that is not a tensor.
    """

    generated: Generated
    constants: tuple[torch.Tensor, ...]
    strides: tuple[tuple[Extent, ...] | None, ...]


def generate(plan: Plan, settings: Settings) -> Generated:
    """Native code for a whole plan. Kernels that are equal are generated once."""
    code_of = OncePerBody(lambda body: _body_code(body, settings))
    plan = replace(plan, steps=tuple(_with_body_code(step, code_of) for step in plan.steps))
    bits = settings.vector_bits or vector_bits()
    module = ModuleBuilder(bits)
    symbols: dict[Kernel, str] = {}
    for step in plan.steps:
        if isinstance(step, Launch) and step.kernel not in symbols:
            symbol = f"kernel{len(symbols)}"
            symbols[step.kernel] = symbol
            emit_kernel(module, step.kernel, symbol)
    entry = emit_entry(module, plan, symbols, threads=settings.threads, profile=settings.profile)
    text = module.text()
    return Generated(text, compile_module(text), entry, len(symbols))


def _body_code(body: Plan, settings: Settings) -> BodyCode:
    program = body.program
    strides = tuple(None if i.buffer is None else program.buffers[i.buffer].strides for i in program.inputs)
    # The time of a body is that of the call which runs it.
    generated = generate(body, replace(settings, profile=False))
    return BodyCode(generated, tuple(tensor for _, tensor in program.constants), strides)


def _with_body_code(step: Step, code_of: OncePerBody) -> Step:
    if isinstance(step, ExternCall) and isinstance(step.target, HigherOrder):
        return replace(step, target=step.target.with_bodies(code_of))
    return step


__all__ = ["BodyCode", "Generated", "generate"]
