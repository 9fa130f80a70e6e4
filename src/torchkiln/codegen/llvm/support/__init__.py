"""The native functions every compiled graph calls: handles, inputs and outputs, calls, errors and the arena pool.

They are written with the builder of ``functions.py``, a part for each subject. Graph code names them, never their
addresses.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from torchkiln.codegen.llvm.functions import Prototype
from torchkiln.codegen.llvm.module import ModuleBuilder
from torchkiln.codegen.llvm.prototypes import FUNCTIONS
from torchkiln.codegen.llvm.support import arena, calls, errors, handles, inputs, outputs, small_matmul, sorting
from torchkiln.codegen.llvm.support.part import Part
from torchkiln.target import Target


def parts() -> tuple[Part, ...]:
    """What every graph calls, by subject, for this torch: one module."""
    return tuple(subject.part() for subject in (handles, inputs, outputs, errors, arena))


def seldom_called() -> tuple[Part, ...]:
    """What some graphs call, for this torch: a module for each, compiled when a graph first names one of its functions.

    Milliseconds of compilation on a busy machine: sorting 36, products 20, calls 12, what every graph calls 66.
    """
    return tuple(subject.part() for subject in (sorting, small_matmul, calls))


def module_text(given: tuple[Part, ...], target: Target) -> str:
    """The parts as one module, with the functions that these call."""
    module = ModuleBuilder(target)
    for function in (function for part in given for function in part.functions):
        function.define(module)
    return module.text()


@cache
def declarations() -> Mapping[str, str]:
    """Declarations of these functions and of those of torch and Python, by name."""
    own = (function.prototype for part in (*parts(), *seldom_called()) for function in part.functions)
    return {p.name: p.declaration for p in (*own, *map(Prototype.parse, FUNCTIONS.values()))}
