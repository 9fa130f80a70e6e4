"""The support functions in this process: each module is loaded when a graph first names one of its functions.

Their code is what :func:`provide` was given. Without any it is compiled, for which codegen and LLVM are imported:
0.3 s, and 0.1 s to compile what every graph calls.
"""

from __future__ import annotations

import threading

from torchkiln.artifact.codec import decode_support, encode
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
    """Load support functions from what a cache has for ``target``, or compile all of them and store that.

    ``source`` is a digest of the code of this package.
    """
    if _provided is not None:
        return
    key = support_key(target, source)
    code = _usable(entries.get(key))
    if code is None:
        code = _compile_all(target)
        entries.put(key, encode(code))
    provide(code)


def _usable(stored: bytes | None) -> SupportCode | None:
    if stored is None:
        return None
    try:
        code = decode_support(stored)
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
    if _provided is not None:
        return _provided.module_with(name)
    from torchkiln.codegen.llvm.support import compile_module_with
    from torchkiln.config import Settings

    return compile_module_with(name, capture_target(Settings()))


def _compile_all(target: Target) -> SupportCode:
    from torchkiln.codegen.llvm.support import compile_support

    return compile_support(target)
