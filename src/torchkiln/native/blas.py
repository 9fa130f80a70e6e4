"""The GEMM routines of the BLAS in torch's own library, where it has one that can be called.

Fortran's routines are no part of torch's interface, so each is tried once in each process, on a matmul with a known
result. Integers are handed over in eight bytes, which reads the same for a library of 32-bit and of 64-bit ones. Only
MKL's is called: with another library torch may have a better way to multiply than its BLAS.
"""

from __future__ import annotations

import ctypes
import struct
from functools import cache

import torch

from torchkiln.native.symbols import address_of

GEMM_ROUTINES = {torch.float32: "sgemm_", torch.float64: "dgemm_"}
# Of bfloat16 matrices, with a float32 result.
BF16_GEMM = "gemm_bf16bf16f32_"
ROUTINES = frozenset({*GEMM_ROUTINES.values(), BF16_GEMM})
# Sets how many threads the library takes in the calling thread, 0 for its own choice, and answers what it was before.
SET_THREADS = "MKL_Set_Num_Threads_Local"

# Multiplications of bfloat16 numbers up to which a second thread saves nothing, while the library wakes it for any
# matmul. One of 32 x 64 x 64 takes 1.3 µs so and 2.6 with two threads, milliseconds where the other has to wait for
# its core.
ALONE = 2**20
# Those of a thread's share: about two microseconds of them.
SHARE = 2**18

_Number = type[ctypes.c_float] | type[ctypes.c_double]


def gemm_routine(dtype: torch.dtype, result: torch.dtype) -> str | None:
    """The routine for matrices of ``dtype`` that sums in ``result``, whether this process has it or not."""
    if (dtype, result) == (torch.bfloat16, torch.float32):
        return BF16_GEMM
    return GEMM_ROUTINES.get(dtype) if dtype == result else None


@cache
def callable_routines() -> frozenset[str]:
    """The routines of :data:`ROUTINES` that generated code may call in this process.

    ``SET_THREADS`` may be called too where ``BF16_GEMM`` is one.
    """
    if not torch.backends.mkl.is_available():
        return frozenset()
    numbers: dict[torch.dtype, _Number] = {torch.float32: ctypes.c_float, torch.float64: ctypes.c_double}
    found = [name for dtype, name in GEMM_ROUTINES.items() if _multiplies(name, numbers[dtype])]
    if _sets_threads() and _multiplies(BF16_GEMM, ctypes.c_float, bfloat16=True):
        found.append(BF16_GEMM)
    return frozenset(found)


def _sets_threads() -> bool:
    address = address_of(SET_THREADS)
    if address is None:
        return False
    set_threads = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int)(address)
    before = set_threads(1)
    return int(set_threads(before)) == 1


def _multiplies(name: str, number: _Number, *, bfloat16: bool = False) -> bool:
    """Whether the routine is there and multiplies the columns (1 2) (3 4) (5 6) by the rows (1 2) (4 8) (16 32)."""
    address = address_of(name)
    if address is None:
        return False
    kept, transposed = ctypes.c_char(b"N"), ctypes.c_char(b"T")
    two, three = ctypes.c_int64(2), ctypes.c_int64(3)
    one, nothing = number(1.0), number(0.0)
    factors = ((1, 2, 3, 4, 5, 6), (1, 2, 4, 8, 16, 32))
    left, right = (_bfloat16(f) if bfloat16 else (number * 6)(*f) for f in factors)
    result = (number * 4)(*[float("nan")] * 4)
    pointers = (kept, transposed, two, two, three, one, left, two, right, two, nothing, result, two)
    routine = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * len(pointers), ctypes.c_int64, ctypes.c_int64)(address)
    routine(*(ctypes.addressof(p) for p in pointers), 1, 1)
    return list(result) == [93.0, 114.0, 186.0, 228.0]


def _bfloat16(values: tuple[float, ...]) -> ctypes.Array[ctypes.c_uint16]:
    """Numbers of at most eight bits: the upper halves of float32."""
    return (ctypes.c_uint16 * len(values))(*(int.from_bytes(struct.pack("<f", v)[2:], "little") for v in values))
