"""The native functions every compiled graph calls: handles, inputs and outputs, calls, errors and the arena pool.

They are written with the builder of ``functions.py``. Graph code names them, never their addresses.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import cache

from torchkiln.artifact.support import SupportCode, SupportModule
from torchkiln.codegen.llvm.functions import NativeFunction, Prototype, Variable
from torchkiln.codegen.llvm.module import ModuleBuilder
from torchkiln.codegen.llvm.prototypes import FUNCTIONS
from torchkiln.codegen.llvm.support import (
    arena,
    calls,
    card,
    errors,
    handles,
    inputs,
    outputs,
    scans,
    small_matmul,
    sorting,
    weights,
)
from torchkiln.native.binary_interface import binary_interface
from torchkiln.native.jit import compile_module
from torchkiln.target import Target

Exports = tuple[NativeFunction | Variable, ...]
"""What a support module has for graphs and the run time."""

FOR_EVERY_GRAPH: Exports = tuple(
    export for subject in (handles, inputs, outputs, errors, arena) for export in subject.EXPORTS
)
"""What every graph calls: one module."""

SELDOM_CALLED: tuple[Exports, ...] = tuple(
    subject.EXPORTS for subject in (sorting, scans, small_matmul, calls, weights, card)
)
"""What some graphs call: a module for each, compiled when a graph first names one of its functions.

Milliseconds of compilation on a busy machine: sorting 36, matmuls 20, calls 12, what every graph calls 66.
"""


def compile_support(target: Target) -> SupportCode:
    """The code of all support functions for ``target``."""
    modules = tuple(_compile(exports, target) for exports in (FOR_EVERY_GRAPH, *SELDOM_CALLED))
    return SupportCode(tuple(binary_interface().items()), target.triple, target.cpu, target.features, modules)


def compile_joined(names: Collection[str], target: Target) -> SupportModule:
    """One module with all functions and variables ``names``, for a linker: each is defined once."""
    wanted = [exports for exports in (FOR_EVERY_GRAPH, *SELDOM_CALLED) if any(e.name in names for e in exports)]
    return _compile(tuple(export for exports in wanted for export in exports), target)


def compile_module_with(name: str, target: Target) -> SupportModule | None:
    """The one module that has the function or variable ``name``; None where there is none of that name."""
    for exports in (FOR_EVERY_GRAPH, *SELDOM_CALLED):
        if any(export.name == name for export in exports):
            return _compile(exports, target)
    return None


def _compile(exports: Exports, target: Target) -> SupportModule:
    code = compile_module(module_text(exports, target), target.processor)
    return SupportModule(tuple(export.name for export in exports), code)


def module_text(exports: Exports, target: Target) -> str:
    """The module of these functions, and those that they call."""
    module = ModuleBuilder(target)
    for function in functions_of(exports):
        function.define(module)
    return module.text()


def functions_of(exports: Exports) -> list[NativeFunction]:
    return [export for export in exports if isinstance(export, NativeFunction)]


@cache
def declarations() -> Mapping[str, str]:
    """Declarations of these functions and of those of torch and Python, by name."""
    own = (function.prototype for exports in (FOR_EVERY_GRAPH, *SELDOM_CALLED) for function in functions_of(exports))
    return {p.name: p.declaration for p in (*own, *map(Prototype.parse, FUNCTIONS.values()))}
