"""The support functions in this process: compiled on the first load of a graph, or of one that names a seldom one."""

from __future__ import annotations

import threading
from collections.abc import Mapping

from torchkiln.codegen.llvm.support import module_text, parts, seldom_called
from torchkiln.codegen.llvm.support.part import Part
from torchkiln.config import Settings
from torchkiln.native.jit import compile_module
from torchkiln.native.loader import LoadedObject, load_object
from torchkiln.native.symbols import address_of
from torchkiln.target import capture_target

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


def resolve(name: str) -> int | None:
    """The address of anything generated code may call: the support functions, torch, Python, libraries of mathematical
    functions. None where this process does not have it."""
    return address(name) or address_of(name)


def _load(given: tuple[Part, ...]) -> LoadedObject:
    exports = tuple(name for part in given for name in part.exports)
    target = capture_target(Settings())
    return load_object(compile_module(module_text(given, target), target.processor), exports, address_of)
