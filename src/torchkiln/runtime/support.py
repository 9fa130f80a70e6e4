"""The support functions in this process: each module is loaded when a graph first names one of its functions.

Their code is what :func:`provide` or :func:`provide_from` gave. What is not there is compiled, for which codegen and
LLVM are imported: 0.3 s, and 0.1 s to compile what every graph calls.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace

from torchkiln.artifact.codec import decode_as, encode
from torchkiln.artifact.support import SupportCode, SupportModule
from torchkiln.cache.entries import Entries
from torchkiln.cache.key import CacheKey
from torchkiln.errors import ArtifactError
from torchkiln.native.binary_interface import binary_interface
from torchkiln.native.host import llvmlite_version
from torchkiln.native.loader import LoadedObject, load_object
from torchkiln.native.symbols import address_of
from torchkiln.target import Target, capture_target

_PREFIX = "kiln_"

_lock = threading.Lock()
_provided: SupportCode | None = None
_store: Callable[[SupportCode], object] | None = None  # keeps what is added to it
_loaded: dict[str, LoadedObject] = {}  # by the names of what they export, for the life of the process


def provide(code: SupportCode) -> None:
    """Load support functions from ``code`` from now on; those that are loaded stay, and so does what came first.

    :class:`ArtifactError` where the code is not for this process.
    """
    global _provided
    code.reject_other_process()
    with _lock:
        if _provided is None:
            _provided = code


def provide_from(entries: Entries, target: Target, source: str) -> None:
    """Load support functions from what a cache has for ``target``, and add to it what is compiled.

    ``source`` is a digest of the code of this package.
    """
    global _provided, _store
    with _lock:
        if _provided is None:
            key = support_key(target, source)
            none = SupportCode(tuple(binary_interface().items()), target.triple, target.cpu, target.features, ())
            _provided = _usable(entries.get(key)) or none
            _store = lambda code: entries.put(key, encode(code))  # noqa: E731


def _usable(stored: bytes | None) -> SupportCode | None:
    if stored is None:
        return None
    try:
        code = decode_as(stored, SupportCode)
        code.reject_other_process()
    except ArtifactError:
        return None
    return code


def support_key(target: Target, source: str) -> CacheKey:
    """All that the code of the support functions depends on."""
    fields = {
        **binary_interface(),
        "triple": target.triple,
        "cpu": target.cpu,
        "features": target.features,
        "vector_bits": str(target.vector_bits),
        "llvmlite": llvmlite_version(),
        "source": source,
    }
    return CacheKey("support", fields)


def address(name: str) -> int | None:
    """The address of a support function or variable; None for any other name."""
    if not name.startswith(_PREFIX):
        return None
    with _lock:
        if name not in _loaded:
            module = _module_with(name)
            if module is None:
                return None
            _loaded.update(dict.fromkeys(module.exports, load_object(module.code, module.exports, address_of)))
        return _loaded[name][name]


def existing(name: str) -> int:
    """The address of a support function or variable that there is in every version."""
    found = address(name)
    assert found is not None, name
    return found


def resolve(name: str) -> int | None:
    """The address of anything generated code may call: the support functions, torch, Python, libraries of mathematical
    functions. None where this process does not have it."""
    return address(name) or address_of(name)


def _module_with(name: str) -> SupportModule | None:
    global _provided
    module = None if _provided is None else _provided.module_with(name)
    if module is None:
        from torchkiln.codegen.llvm.support import compile_module_with
        from torchkiln.config import Settings

        module = compile_module_with(name, capture_target(Settings()))
        if module is not None and _provided is not None and _store is not None:
            _provided = replace(_provided, modules=(*_provided.modules, module))
            _store(_provided)
    return module
