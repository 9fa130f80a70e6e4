"""Where the functions that generated code calls are found in this process."""

from __future__ import annotations

import ctypes
import ctypes.util
import sys
from functools import cache
from pathlib import Path

import torch

# C++ of libtorch_python: a Python tensor for a C++ one. Private, so code that needs it checks that it is there.
WRAP_TENSOR = "_Z16THPVariable_WrapRKN2at10TensorBaseE"
# C++ of libc10: whether a dispatch mode is on in this thread, of torch's own ones too where its argument is false.
# Private as well. Through Python that takes 75 ns.
ANY_MODE_ON = "_ZN3c104impl20TorchDispatchModeTLS13any_modes_setEb"


@cache
def _libraries() -> tuple[ctypes.CDLL, ...]:
    directory = Path(torch.__file__).parent / "lib"
    suffix = "dylib" if sys.platform == "darwin" else "so"
    found = [ctypes.CDLL(str(directory / f"lib{name}.{suffix}")) for name in ("torch_cpu", "torch_python")]
    card = directory / "libtorch_cuda.so"
    if card.exists():
        found.append(ctypes.CDLL(str(card)))
    found.append(ctypes.pythonapi)
    found.append(ctypes.CDLL(None))
    math = ctypes.util.find_library("m") if sys.platform == "darwin" else "libm.so.6"
    if math is not None:
        found.append(ctypes.CDLL(math))
    return tuple(found)


@cache
def address_of(name: str) -> int | None:
    """The address of a function or variable of torch, Python or the C library; None where there is none."""
    for library in _libraries():
        try:
            function = getattr(library, name)
        except AttributeError:
            continue
        return ctypes.cast(function, ctypes.c_void_p).value
    return None


@cache
def shim_constant(name: str) -> int:
    """The value of a constant that torch's C ABI gives through a function (a dtype code, a device type)."""
    address = address_of(name)
    if address is None:
        raise RuntimeError(f"this torch ({torch.__version__}) has no {name} in its C ABI")
    return int(ctypes.CFUNCTYPE(ctypes.c_int32)(address)())


def dtype_code(dtype: torch.dtype) -> int:
    """The number torch's C ABI uses for a dtype."""
    symbol = _dtype_symbol(dtype)
    if symbol is None:
        raise ValueError(f"torch's C ABI has no code for {dtype}")
    return shim_constant(symbol)


def has_dtype_code(dtype: torch.dtype) -> bool:
    """Whether torch's C ABI knows a dtype: not the quantized ones."""
    return _dtype_symbol(dtype) is not None


def _dtype_symbol(dtype: torch.dtype) -> str | None:
    name = str(dtype).removeprefix("torch.")
    return next((p + name for p in ("aoti_torch_dtype_", "torch_dtype_") if address_of(p + name) is not None), None)
