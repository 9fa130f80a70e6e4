"""LLVM code generation: a plan to object code, one module and one native entry per graph."""

from __future__ import annotations

from dataclasses import dataclass

from torchkiln.codegen.llvm.entry import EntryInfo, emit_entry
from torchkiln.codegen.llvm.jit import compile_module
from torchkiln.codegen.llvm.kernel import emit_kernel
from torchkiln.codegen.llvm.machine import vector_bits
from torchkiln.codegen.llvm.module import ModuleBuilder
from torchkiln.config import Settings
from torchkiln.schedule.kernel import Kernel
from torchkiln.schedule.plan import Launch, Plan


@dataclass(frozen=True)
class Generated:
    """What code generation made: the module's text, its object code, and what a loader must know."""

    text: str
    object_code: bytes
    entry: EntryInfo
    kernels: int


def generate(plan: Plan, settings: Settings) -> Generated:
    """Native code for a whole plan. Kernels that are equal are generated once."""
    bits = settings.vector_bits or vector_bits()
    module = ModuleBuilder(bits)
    symbols: dict[Kernel, str] = {}
    for step in plan.steps:
        if isinstance(step, Launch) and step.kernel not in symbols:
            symbol = f"kernel{len(symbols)}"
            symbols[step.kernel] = symbol
            emit_kernel(module, step.kernel, symbol)
    entry = emit_entry(module, plan, symbols, threads=settings.threads)
    text = module.text()
    return Generated(text, compile_module(text), entry, len(symbols))


__all__ = ["Generated", "generate"]
