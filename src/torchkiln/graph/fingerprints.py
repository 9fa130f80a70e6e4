"""Digests of code: what a cache must ask for before it serves work that passes and rewrites did.

Code of this package is one thing: a pass uses helpers of many files, so the digest of a built-in pass is that of the
whole package. A function of the user's is followed into what it calls by name, as far as that is code of the same
package or script; what it reads from libraries and from files is not seen.
"""

from __future__ import annotations

import hashlib
import inspect
import linecache
from collections.abc import Callable, Iterator
from functools import cache, partial
from importlib.resources import files
from importlib.resources.abc import Traversable
from types import CodeType, FunctionType, ModuleType
from typing import Any

_PACKAGE = __name__.partition(".")[0]
_IMMUTABLE = (bool, int, float, complex, str, bytes, tuple, frozenset)


@cache
def package_digest() -> str:
    """Changes when any file of this package does that results may depend on: its source and its stored patterns."""
    return _digest_of_files(files(_PACKAGE))


def _digest_of_files(folder: Traversable) -> str:
    digest = hashlib.sha256()
    for entry in sorted(folder.iterdir(), key=lambda entry: entry.name):
        if entry.is_dir():
            content = b"" if entry.name == "__pycache__" else _digest_of_files(entry).encode()
        else:
            content = entry.read_bytes() if entry.name.endswith((".py", ".txt")) else b""
        if content:
            digest.update(entry.name.encode() + b"\0" + hashlib.sha256(content).digest())
    return digest.hexdigest()


def is_of_this_package(function: Callable[..., Any]) -> bool:
    """Whether ``function`` is covered by :func:`package_digest`."""
    return _owner(function) == _PACKAGE


def function_digest(function: Callable[..., Any]) -> str:
    """Changes when the byte code, the defaults or the captured constants of ``function`` change.

    Or those of functions, methods and constants that it refers to by name in its own package or script, and so on. Not
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
    inner = getattr(inner, "__func__", inner)  # a bound method stands for its function
    digest.update(getattr(inner, "__qualname__", repr(type(inner))).encode())
    if id(inner) in seen:
        return
    seen.add(id(inner))
    code = getattr(inner, "__code__", None)
    if not isinstance(code, CodeType):
        digest.update(repr(_plain(inner)).encode())  # an operator says its name
        _add_class(digest, inner if inspect.isclass(inner) else type(inner), seen)
        return
    _add_code(digest, code)
    digest.update(repr((_plain(inner.__defaults__), _plain(inner.__kwdefaults__))).encode())
    for cell in inner.__closure__ or ():
        try:
            content = cell.cell_contents
        except ValueError:  # a name that has no value yet
            continue
        _add_value(digest, content, seen)
    if not is_of_this_package(inner):
        for name, value in _referred_to(inner, code):
            digest.update(name.encode())
            if not callable(value):
                digest.update(repr(_plain(value)).encode())
            elif _owner(value) == _owner(inner):
                _add_function(digest, value, seen)
            else:
                digest.update(f"{_owner(value)} {getattr(value, '__qualname__', _plain(value))}".encode())


def _add_value(digest: Any, value: Any, seen: set[int]) -> None:
    if callable(value):
        _add_function(digest, value, seen)
    else:
        digest.update(repr(_plain(value)).encode())


def _add_class(digest: Any, cls: type, seen: set[int]) -> None:
    if _owner(cls) in ("builtins", "torch"):
        return
    try:
        linecache.checkcache()
        digest.update(inspect.getsource(cls).encode())
    except (OSError, TypeError):  # defined where no source is kept
        digest.update(repr(cls).encode())
    for value in vars(cls).values() if _owner(cls) != _PACKAGE else ():
        if isinstance(value, (FunctionType, staticmethod, classmethod)):
            _add_function(digest, value, seen)


def _referred_to(function: Any, code: CodeType) -> Iterator[tuple[str, Any]]:
    """The functions, classes and constants that ``function`` may read by name, itself or through its own modules."""
    owner, scope = _owner(function), function.__globals__
    names = sorted(set(_names_in(code)))
    modules = [scope[name] for name in names if isinstance(scope.get(name), ModuleType)]
    for space in (scope, *(vars(module) for module in modules if module.__name__.partition(".")[0] == owner)):
        for name in names:
            value = space.get(name)
            # What can be changed in place is state of the program and not its source.
            if callable(value) or isinstance(value, _IMMUTABLE):
                yield name, value


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
