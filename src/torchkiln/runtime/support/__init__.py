"""The native functions every compiled graph calls: handles, inputs and outputs, calls, errors and the arena pool.

They are LLVM IR, one module of a part for each subject, compiled once in each process on the first load of a graph.
Graph code names them, never their addresses.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping

from torchkiln.codegen.llvm.jit import compile_module
from torchkiln.codegen.llvm.loader import LoadedObject, load_object
from torchkiln.runtime.support import arena, calls, errors, handles, inputs, outputs, products, sorting
from torchkiln.runtime.support.part import Part
from torchkiln.runtime.symbols import address_of


def parts() -> tuple[Part, ...]:
    """The module by subject, for this torch."""
    return tuple(subject.part() for subject in (handles, inputs, outputs, calls, errors, arena, sorting, products))


def module_text(given: tuple[Part, ...]) -> str:
    """The parts as one module, in which a function is declared once."""
    declarations = dict.fromkeys(line for part in given for line in part.declarations.strip().splitlines())
    return "\n".join((*declarations, *(part.code for part in given)))


_lock = threading.Lock()
_loaded: LoadedObject | None = None


def addresses() -> Mapping[str, int]:
    """Addresses of the support functions, compiled on first use and kept for the life of the process."""
    global _loaded
    with _lock:
        if _loaded is None:
            given = parts()
            exports = tuple(name for part in given for name in part.exports)
            _loaded = load_object(compile_module(module_text(given)), exports, address_of)
        return _loaded.addresses
