"""Native functions as functions of Python's: a pointer and what it gets as ``self``."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, ClassVar

METH_O = 0x0008
METH_FASTCALL = 0x0080


class PyMethodDef(ctypes.Structure):
    _fields_: ClassVar = [
        ("ml_name", ctypes.c_char_p),
        ("ml_meth", ctypes.c_void_p),
        ("ml_flags", ctypes.c_int),
        ("ml_doc", ctypes.c_char_p),
    ]


# Python does not own the definition of a builtin function: these live as long as the process.
_definitions: dict[tuple[str, int, int], PyMethodDef] = {}


def builtin_function(name: str, address: int, convention: int, first: object) -> Callable[..., Any]:
    """The native function at ``address``, which stays loaded, with ``first`` as its first argument."""
    key = (name, address, convention)
    return defined_by(_definitions.setdefault(key, PyMethodDef(name.encode(), address, convention, None)), first)


def defined_by(definition: PyMethodDef, first: object) -> Callable[..., Any]:
    """A function that ``first`` is to keep the definition and the code of."""
    make = ctypes.pythonapi.PyCFunction_NewEx
    make.restype = ctypes.py_object
    make.argtypes = [ctypes.c_void_p, ctypes.py_object, ctypes.c_void_p]
    function: Callable[..., Any] = make(ctypes.addressof(definition), first, None)
    return function
