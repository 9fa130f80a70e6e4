"""Products of two matrices as calls of the BLAS that torch itself calls, past torch's operator.

The operator looks at its tensors, makes views of them and asks which library to call; here all of that is known while
compiling. Microseconds of ``mm`` through torch's C ABI and so, one thread, float32 (the second matrix transposed):

| M x K x N | operator | here |
|---|---|---|
| 1 x 17 x 64 | 2.4 | 0.4 |
| 32 x 64 x 10 | 3.7 | 1.1 |
| 32 x 64 x 64 | 3.9 | 3.0 |
| 256 x 64 x 64 | 17 | 14 |
"""

from __future__ import annotations

import struct

import torch

from torchkiln.codegen.llvm.frame import Frame
from torchkiln.ir.program import Buffer, ExternCall, StridedView
from torchkiln.runtime.blas import ROUTINES, has_blas

_MOST = 2**31 - 1


def is_direct(call: ExternCall, result: Buffer | None) -> bool:
    """Whether ``call``, whose result is in the memory of ``result``, is a product of matrices as BLAS takes them."""
    if call.target is not torch.ops.aten.mm.default or result is None or result.dtype not in ROUTINES:
        return False
    left, right = call.arguments
    assert isinstance(left, StridedView)
    assert isinstance(right, StridedView)
    if left.dtype != result.dtype or right.dtype != result.dtype:
        return False
    if left.shape[1:] != right.shape[:1] or left.shape[:1] + right.shape[1:] != result.shape:
        return False  # torch says what is wrong
    matrices = [_leading(m.shape, m.strides) for m in (result, left, right)]
    return all(m is not None for m in matrices) and has_blas(result.dtype)


def emit_product(frame: Frame, call: ExternCall) -> None:
    """Write a call that :func:`is_direct`.

    BLAS goes down columns. Memory with contiguous rows is the transposed matrix there, so the transposed product is
    asked for: right times left. Where the result has contiguous columns, left times right is what is wanted.
    """
    assert call.results[0] is not None
    result = frame.whole_view(call.results[0])
    first, second = call.arguments[1], call.arguments[0]
    rows, columns = result.shape[1], result.shape[0]
    by_rows, step = _form(result)
    if not by_rows:
        first, second, rows, columns = second, first, columns, rows
    assert isinstance(first, StridedView)
    assert isinstance(second, StridedView)
    terms = second.shape[1] if by_rows else second.shape[0]
    operands = []
    for matrix in (first, second):
        has_rows, leading = _form(matrix)
        kept = frame.module.string("N" if has_rows == by_rows else "T")
        operands.append((kept, _address(frame, matrix), frame.integers((leading,))))
    (kept_a, a, lda), (kept_b, b, ldb) = operands
    sizes = [frame.integers((size,)) for size in (rows, columns, terms)]
    one, nothing = (frame.integers((_bits(value, result.dtype),)) for value in (1.0, 0.0))
    routine = ROUTINES[result.dtype]
    pointers = (kept_a, kept_b, *sizes, one, a, lda, b, ldb, nothing, _address(frame, result), frame.integers((step,)))
    frame.module.declare(f"declare void @{routine}({', '.join(['ptr'] * len(pointers))}, i64, i64)")
    # The two numbers after the pointers are the lengths of the texts, as Fortran hands them over.
    frame.line(f"call void @{routine}({', '.join(f'ptr {p}' for p in pointers)}, i64 1, i64 1)")


def _leading(shape: tuple[object, ...], strides: tuple[object, ...]) -> tuple[bool, int] | None:
    """Whether rows (else columns) of a matrix are contiguous, and how far apart they begin; None for any other form."""
    if len(shape) != 2 or not all(isinstance(n, int) and n <= _MOST for n in (*shape, *strides)):
        return None
    rows, columns, down, right = (int(n) for n in (*shape, *strides))  # type: ignore[call-overload]
    if rows < 1 or columns < 1:
        return None
    step = columns if rows == 1 else down
    if (columns == 1 or right == 1) and step >= columns:
        return True, step
    step = rows if columns == 1 else right
    if (rows == 1 or down == 1) and step >= rows:
        return False, step
    return None


def _form(matrix: StridedView) -> tuple[bool, int]:
    form = _leading(matrix.shape, matrix.strides)
    assert form is not None
    return form


def _address(frame: Frame, view: StridedView) -> str:
    start = frame.data_pointer(view.buffer)
    if view.offset == 0:
        return start
    return frame.value(f"getelementptr i8, ptr {start}, i64 {frame.number(view.offset * view.dtype.itemsize)}")


def _bits(value: float, dtype: torch.dtype) -> int:
    """The memory of a float as a whole number that is stored in eight bytes."""
    packed = struct.pack("<d" if dtype == torch.float64 else "<fxxxx", value)
    return int.from_bytes(packed, "little", signed=True)
