"""The products of the BLAS in torch's own library, where it has one that can be called.

Fortran's routines are no part of torch's interface, so each is tried once in each process, on a product with a known
result. Whole numbers are handed over in eight bytes, which reads the same for a library of 32-bit and of 64-bit ones.
Only MKL's is called: with another library torch may have a better way to multiply than its BLAS. So it has where the
user allows for products of less precision (``torch.set_float32_matmul_precision``).
"""

from __future__ import annotations

import ctypes
from functools import cache

import torch

from torchkiln.runtime.symbols import address_of

ROUTINES = {torch.float32: "sgemm_", torch.float64: "dgemm_"}


def has_blas(dtype: torch.dtype) -> bool:
    """Whether generated code may call ``ROUTINES[dtype]``, by what the user allows at present."""
    return _is_usable(dtype) and (dtype != torch.float32 or _precision() in ("none", "ieee"))


def _precision() -> str:
    return str(torch.backends.mkldnn.matmul.fp32_precision)  # type: ignore[attr-defined]


@cache
def _is_usable(dtype: torch.dtype) -> bool:
    if dtype not in ROUTINES or not torch.backends.mkl.is_available():
        return False
    address = address_of(ROUTINES[dtype])
    return address is not None and _multiplies(address, ctypes.c_double if dtype == torch.float64 else ctypes.c_float)


def _multiplies(address: int, number: type[ctypes.c_float] | type[ctypes.c_double]) -> bool:
    """Multiply the columns (1 2) (3 4) (5 6) by the rows (1 10) (100 1000) (10000 100000), given transposed."""
    kept, turned = ctypes.c_char(b"N"), ctypes.c_char(b"T")
    two, three = ctypes.c_int64(2), ctypes.c_int64(3)
    one, nothing = number(1.0), number(0.0)
    left, right = (number * 6)(1, 2, 3, 4, 5, 6), (number * 6)(1, 10, 100, 1000, 10000, 100000)
    result = (number * 4)(*[float("nan")] * 4)
    pointers = (kept, turned, two, two, three, one, left, two, right, two, nothing, result, two)
    routine = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * len(pointers), ctypes.c_int64, ctypes.c_int64)(address)
    routine(*(ctypes.addressof(p) for p in pointers), 1, 1)
    return list(result) == [50301.0, 60402.0, 503010.0, 604020.0]
