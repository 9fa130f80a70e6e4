"""Digests of functions: what a cache must ask for before it serves work that a function did."""

from __future__ import annotations

import hashlib
import inspect
import linecache
from collections.abc import Callable
from types import CodeType
from typing import Any


def function_digest(function: Callable[..., Any]) -> str:
    """Changes when the source, the byte code, the defaults or the captured constants of ``function`` change."""
    inner = inspect.unwrap(getattr(function, "func", function))  # a partial stands for what it calls
    digest = hashlib.sha256(getattr(inner, "__qualname__", repr(type(inner))).encode())
    code = getattr(inner, "__code__", None)
    if isinstance(code, CodeType):
        _add_code(digest, code)
        digest.update(repr((_plain(inner.__defaults__), _plain(inner.__kwdefaults__))).encode())
        for cell in inner.__closure__ or ():
            content = cell.cell_contents
            digest.update((function_digest(content) if callable(content) else repr(_plain(content))).encode())
    else:
        try:
            linecache.checkcache()
            digest.update(inspect.getsource(type(inner) if not inspect.isclass(inner) else inner).encode())
        except (OSError, TypeError):
            digest.update(repr(type(inner)).encode())
    return digest.hexdigest()


def _add_code(digest: Any, code: CodeType) -> None:
    digest.update(code.co_code)
    digest.update(repr((code.co_names, code.co_varnames, code.co_freevars)).encode())
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            _add_code(digest, constant)
        else:
            digest.update(repr(constant).encode())


def _plain(value: Any) -> Any:
    """``value`` where its text says what it is, and only its type where the text holds an address."""
    if isinstance(value, (bool, int, float, complex, str, bytes, type(None))):
        return value
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    text = repr(value)
    return type(value).__qualname__ if " at 0x" in text else text
