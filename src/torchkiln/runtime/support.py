"""The support functions in this process: compiled on the first load of a graph, or of one that names a seldom one."""

from __future__ import annotations

import threading
from collections.abc import Mapping

from torchkiln.codegen.llvm.support import FOR_EVERY_GRAPH, SELDOM_CALLED, Exports, module_text
from torchkiln.config import Settings
from torchkiln.native.jit import compile_module
from torchkiln.native.loader import LoadedObject, load_object
from torchkiln.native.symbols import address_of
from torchkiln.target import capture_target

_lock = threading.Lock()
_loaded: LoadedObject | None = None
_seldom: dict[str, LoadedObject] = {}


def addresses() -> Mapping[str, int]:
    """Addresses of what is in :data:`FOR_EVERY_GRAPH`, compiled on first use and kept for the life of the process."""
    global _loaded
    with _lock:
        if _loaded is None:
            _loaded = _load(FOR_EVERY_GRAPH)
        return _loaded.addresses


def address(name: str) -> int | None:
    """The address of a support function; None for any other name."""
    found = addresses().get(name)
    if found is not None or not name.startswith("kiln_"):
        return found
    with _lock:
        if name not in _seldom:
            exports = next((e for e in SELDOM_CALLED if name in (export.name for export in e)), None)
            if exports is None:
                return None
            _seldom.update(dict.fromkeys((export.name for export in exports), _load(exports)))
        return _seldom[name].addresses[name]


def resolve(name: str) -> int | None:
    """The address of anything generated code may call: the support functions, torch, Python, libraries of mathematical
    functions. None where this process does not have it."""
    return address(name) or address_of(name)


def _load(exports: Exports) -> LoadedObject:
    target = capture_target(Settings())
    code = compile_module(module_text(exports, target), target.processor)
    return load_object(code, [export.name for export in exports], address_of)
