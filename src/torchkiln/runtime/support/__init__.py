"""The native functions every compiled graph calls: handles, inputs and outputs, calls, errors and the arena pool.

They are LLVM IR, a part for each subject, compiled once in each process: on the first load of a graph what every graph
calls, as one module, and what few do when one of those is loaded.
Graph code names them, never their addresses.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping

from torchkiln.native.jit import compile_module
from torchkiln.native.loader import LoadedObject, load_object
from torchkiln.native.symbols import address_of
from torchkiln.runtime.support import arena, calls, errors, handles, inputs, outputs, products, sorting
from torchkiln.runtime.support.part import Part


def parts() -> tuple[Part, ...]:
    """What every graph calls, by subject, for this torch: one module."""
    return tuple(subject.part() for subject in (handles, inputs, outputs, calls, errors, arena))


def seldom_called() -> tuple[Part, ...]:
    """What few graphs call, for this torch: a module for each, compiled when a graph first names one of its functions.

    Milliseconds of compilation on a busy machine: sorting 48, products 24, what every graph calls 69.
    """
    return sorting.part(), products.part()


def module_text(given: tuple[Part, ...]) -> str:
    """The parts as one module, in which a function is declared once."""
    declarations = dict.fromkeys(line for part in given for line in part.declarations.strip().splitlines())
    return "\n".join((*declarations, *(part.code for part in given)))


_lock = threading.Lock()
_loaded: LoadedObject | None = None
_seldom: dict[str, LoadedObject] = {}


def addresses() -> Mapping[str, int]:
    """Addresses of the functions of :func:`parts`, compiled on first use and kept for the life of the process."""
    global _loaded
    with _lock:
        if _loaded is None:
            _loaded = _load(parts())
        return _loaded.addresses


def address(name: str) -> int | None:
    """The address of a support function; None for any other name."""
    found = addresses().get(name)
    if found is not None or not name.startswith("kiln_"):
        return found
    with _lock:
        if name not in _seldom:
            given = next((part for part in seldom_called() if name in part.exports), None)
            if given is None:
                return None
            _seldom.update(dict.fromkeys(given.exports, _load((given,))))
        return _seldom[name].addresses[name]


def _load(given: tuple[Part, ...]) -> LoadedObject:
    exports = tuple(name for part in given for name in part.exports)
    return load_object(compile_module(module_text(given)), exports, address_of)
