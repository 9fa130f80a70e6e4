"""Digests of code: what a cache must ask for before it serves work that passes and rewrites did.

Code of this package is one thing: a pass uses helpers of many files, so the digest of a built-in pass is that of the
whole package. A function of the user's is followed into what it reads by name, itself or through its modules: code,
numbers, containers, the attributes of objects, and variables of the environment whose names stand in it. Installed
libraries are there by name only, and files that it reads are not seen.
"""

from __future__ import annotations

import hashlib
import inspect
import linecache
import os
import sys
from collections.abc import Callable, Iterator
from functools import cache, partial
from importlib.resources import files
from importlib.resources.abc import Traversable
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch
import torch.fx

_PACKAGE = __name__.partition(".")[0]
_FOLDERS_OF_LIBRARIES = ("/site-packages/", "/dist-packages/")
# Source, patterns, tables of measurements and code for C. Other files are pages for a reader.
SHAPE_RESULTS = (".py", ".txt", ".csv", ".c")
_READS_ENVIRONMENT = frozenset({"environ", "getenv"})
# A pass may keep them in a list or an attribute of its own; what it makes of a graph does not depend on those before.
_PARTS_OF_GRAPHS = (torch.fx.Graph, torch.fx.GraphModule, torch.fx.Node)


@cache
def package_digest() -> str:
    """Changes when any file of this package does that results may depend on."""
    return _digest_of_files(files(_PACKAGE))


def _digest_of_files(folder: Traversable) -> str:
    digest = hashlib.sha256()
    for entry in sorted(folder.iterdir(), key=lambda entry: entry.name):
        if entry.is_dir():
            content = b"" if entry.name == "__pycache__" else _digest_of_files(entry).encode()
        else:
            content = entry.read_bytes() if entry.name.endswith(SHAPE_RESULTS) else b""
        if content:
            digest.update(entry.name.encode() + b"\0" + hashlib.sha256(content).digest())
    return digest.hexdigest()


def is_of_this_package(function: Callable[..., Any]) -> bool:
    """Whether ``function`` is covered by :func:`package_digest`."""
    return _owner(function) == _PACKAGE


def function_digest(function: Callable[..., Any]) -> str:
    """Changes when the byte code of ``function``, its defaults, what it captures or the state it is bound to change.

    Or those of functions, classes and values that it reads by name outside of installed libraries, and so on. Not
    followed from functions of this package, which :func:`package_digest` covers.
    """
    digest = hashlib.sha256()
    _add_function(digest, function, set())
    return digest.hexdigest()


def _add_function(digest: Any, function: Any, seen: set[int]) -> None:
    if isinstance(function, partial):
        for value in (*function.args, *sorted(function.keywords), *(v for _, v in sorted(function.keywords.items()))):
            _add_value(digest, value, seen)
        function = function.func
    inner = inspect.unwrap(function)
    if inspect.ismethod(inner):
        _add_value(digest, inner.__self__, seen)
        inner = inner.__func__
    digest.update(getattr(inner, "__qualname__", repr(type(inner))).encode())
    if id(inner) in seen:
        return
    seen.add(id(inner))
    code = getattr(inner, "__code__", None)
    if not isinstance(code, CodeType):
        digest.update(repr(_plain(inner)).encode())  # an operator says its name
        if inspect.isclass(inner):
            _add_class(digest, inner, seen)
        else:
            _add_object(digest, inner, seen)
        return
    _add_code(digest, code)
    for value in (inner.__defaults__, inner.__kwdefaults__):
        _add_value(digest, value, seen)
    for cell in inner.__closure__ or ():
        try:
            content = cell.cell_contents
        except ValueError:  # a name that has no value yet
            continue
        _add_value(digest, content, seen)
    if not is_of_this_package(inner):
        for name, value in _referred_to(inner, code):
            digest.update(name.encode())
            if not callable(value) or _is_followed(value, inner):
                _add_value(digest, value, seen)
            else:
                digest.update(f"{_owner(value)} {getattr(value, '__qualname__', _plain(value))}".encode())


def _add_value(digest: Any, value: Any, seen: set[int]) -> None:
    if isinstance(value, (*_PARTS_OF_GRAPHS, ModuleType)):
        return
    digest.update(b"\0")
    if callable(value):
        _add_function(digest, value, seen)
    elif isinstance(value, torch.Tensor):
        digest.update(f"{value.dtype} {tuple(value.shape)} {_content_of(value)}".encode())
    elif isinstance(value, (list, tuple, dict)):
        if id(value) not in seen:
            seen.add(id(value))
            items = value if not isinstance(value, dict) else (part for item in value.items() for part in item)
            for item in items:
                _add_value(digest, item, seen)
    elif hasattr(value, "__dict__") and not _is_library(_owner(type(value))):
        _add_object(digest, value, seen)
    else:
        digest.update(repr(_plain(value)).encode())


def _add_object(digest: Any, value: Any, seen: set[int]) -> None:
    """The class of an object and, for one of the user's, its attributes."""
    _add_class(digest, type(value), seen)
    if not _is_library(_owner(type(value))):
        _add_value(digest, getattr(value, "__dict__", None), seen)


def _content_of(tensor: torch.Tensor) -> str:
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
        return str(tensor.device)
    plain = tensor.detach().resolve_conj().resolve_neg().reshape(-1)
    return hashlib.sha256(plain.view(torch.uint8).numpy().tobytes() if plain.numel() else b"").hexdigest()


def _add_class(digest: Any, cls: type, seen: set[int]) -> None:
    if _owner(cls) in ("builtins", "torch"):
        return
    try:
        linecache.checkcache()
        digest.update(inspect.getsource(cls).encode())
    except (OSError, TypeError):  # defined where no source is kept
        digest.update(repr(cls).encode())
    for name, value in vars(cls).items() if _owner(cls) != _PACKAGE else ():
        if isinstance(value, (FunctionType, staticmethod, classmethod)):
            _add_function(digest, value, seen)
        elif not name.startswith("__") and not inspect.isdatadescriptor(value):
            _add_value(digest, value, seen)


def _referred_to(function: Any, code: CodeType) -> Iterator[tuple[str, Any]]:
    """What ``function`` may read by name, itself or through modules that are no library."""
    names = sorted(set(_names_in(code)))
    spaces = [function.__globals__]
    for space in spaces:  # which grows
        for name in names:
            value = space.get(name)
            if not isinstance(value, ModuleType):
                yield name, value
            elif _is_followed(value, function) and all(vars(value) is not known for known in spaces):
                spaces.append(vars(value))


def _is_followed(value: Any, function: Any) -> bool:
    """Whether the code of ``value``, which ``function`` reads, is code of the user's or of the same package."""
    owner = value.__name__.partition(".")[0] if isinstance(value, ModuleType) else _owner(value)
    return owner == _owner(function) or not _is_library(owner)


def _is_library(owner: str) -> bool:
    """Whether a package is this one, part of Python, or installed."""
    if owner == _PACKAGE or owner in sys.stdlib_module_names or owner in sys.builtin_module_names:
        return True
    path = str(getattr(sys.modules.get(owner), "__file__", None) or "")
    return any(folder in path.replace("\\", "/") for folder in _FOLDERS_OF_LIBRARIES)


def _names_in(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)


def _owner(function: Any) -> str:
    """The package or script that ``function`` belongs to; that of its class for another object that is called."""
    module = getattr(function, "__module__", None) or type(function).__module__
    return str(module).partition(".")[0]


def _add_code(digest: Any, code: CodeType) -> None:
    digest.update(code.co_code)
    digest.update(repr((code.co_names, code.co_varnames, code.co_freevars)).encode())
    if not _READS_ENVIRONMENT.isdisjoint(code.co_names):
        digest.update(repr([os.environ.get(name) for name in code.co_consts if isinstance(name, str)]).encode())
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            _add_code(digest, constant)
        else:
            digest.update(repr(_plain(constant)).encode())


def _plain(value: Any) -> Any:
    """``value`` where its text says what it is, and only its type where the text holds an address."""
    if isinstance(value, (bool, int, float, complex, str, bytes, type(None))):
        return value
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    if isinstance(value, (set, frozenset)):  # in no order that another process would have
        return sorted(repr(_plain(item)) for item in value)
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    text = repr(value)
    return type(value).__qualname__ if " at 0x" in text else text
