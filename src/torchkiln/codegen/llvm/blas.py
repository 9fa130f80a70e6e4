"""Matmuls as calls of the BLAS that torch itself calls, past torch's operator.

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
from collections.abc import Callable, Sequence

import torch

from torchkiln.codegen.llvm.frame import Frame
from torchkiln.ir.index import Extent
from torchkiln.ir.matrices import MOST, leading
from torchkiln.ir.program import Buffer, ExternCall, StridedView
from torchkiln.native.blas import GEMM_ROUTINES
from torchkiln.target import Target


def is_direct(call: ExternCall, result: Buffer | None, target: Target) -> bool:
    """Whether ``call``, whose result is in the memory of ``result``, is a matmul of matrices as BLAS takes them."""
    if call.target is not torch.ops.aten.mm.default or result is None or result.dtype not in GEMM_ROUTINES:
        return False
    left, right = call.arguments
    assert isinstance(left, StridedView)
    assert isinstance(right, StridedView)
    if left.dtype != result.dtype or right.dtype != result.dtype:
        return False
    if left.shape[1:] != right.shape[:1] or left.shape[:1] + right.shape[1:] != result.shape:
        return False  # torch says what is wrong
    if target.gemm(result.dtype) is None or result.device != "cpu":
        return False
    return all(leading(m.shape, m.strides) is not None for m in (result, left, right))


def has_known_sizes(call: ExternCall) -> bool:
    """Whether a call that :func:`is_direct` is so whatever sizes turn out to be at run time."""
    views = [view for view in call.arguments if isinstance(view, StridedView)]
    return all(isinstance(n, int) for view in views for n in (*view.shape, *view.strides))


def emit_gemm(frame: Frame, call: ExternCall, otherwise: Callable[[], None]) -> None:
    """Write a call that :func:`is_direct`; ``otherwise`` writes the call of the operator, for sizes BLAS does not take.

    BLAS is column-major. A matrix with contiguous rows is its transpose there, so the transposed matmul is asked for,
    right times left; left times right where the result has contiguous columns.
    """
    assert call.results[0] is not None
    result = frame.buffer(call.results[0]).whole
    first, second = call.arguments[1], call.arguments[0]
    rows, columns = result.shape[1], result.shape[0]
    by_rows, step = form_of(result)
    if not by_rows:
        first, second, rows, columns = second, first, columns, rows
    assert isinstance(first, StridedView)
    assert isinstance(second, StridedView)
    terms = second.shape[1] if by_rows else second.shape[0]
    forms = [form_of(matrix) for matrix in (first, second)]
    numbers = (rows, columns, terms, forms[0][1], forms[1][1], step)
    good = _in_range(frame, [n for n in numbers if not isinstance(n, int)])
    direct, operator, done = frame.new_label(), frame.new_label(), frame.new_label()
    if good is not None:
        frame.emit(f"br i1 {good}, label %{direct}, label %{operator}")
        frame.start_block(operator)
        with frame.side_branch():
            otherwise()
        frame.branch(done)
        frame.start_block(direct)
    with frame.side_branch():
        kept = ["N" if has_rows == by_rows else "T" for has_rows, _ in forms]
        _call_gemm(frame, kept, numbers, first, second, result)
    if good is not None:
        frame.branch(done)
        frame.start_block(done)


def _call_gemm(
    frame: Frame,
    kept: Sequence[str],
    numbers: Sequence[Extent],
    first: StridedView,
    second: StridedView,
    result: StridedView,
) -> None:
    (a, b), c = (frame.address(matrix) for matrix in (first, second)), frame.address(result)
    kept_a, kept_b = map(frame.module.string, kept)
    m, n, k, lda, ldb, ldc = (frame.integers((number,)) for number in numbers)
    one, nothing = (frame.integers((float_bits(value, result.dtype),)) for value in (1.0, 0.0))
    pointers = (kept_a, kept_b, m, n, k, one, a, lda, b, ldb, nothing, c, ldc)
    routine = GEMM_ROUTINES[result.dtype]
    frame.module.declare(f"declare void @{routine}({', '.join(['ptr'] * len(pointers))}, i64, i64)")
    # The two numbers after the pointers are the lengths of the texts, as Fortran hands them over.
    frame.emit(f"call void @{routine}({', '.join(f'ptr {p}' for p in pointers)}, i64 1, i64 1)")


def _in_range(frame: Frame, numbers: Sequence[Extent]) -> str | None:
    """An operand that says whether all numbers are positive and fit into 32 bits; None where there are none."""
    good = None
    for number in dict.fromkeys(numbers):
        value = frame.number(number)
        fits = frame.fresh(f"icmp ult i64 {frame.fresh(f'sub i64 {value}, 1')}, {MOST}")
        good = fits if good is None else frame.fresh(f"and i1 {good}, {fits}")
    return good


def form_of(matrix: StridedView) -> tuple[bool, Extent]:
    """Whether rows are contiguous, and how far apart rows or columns begin, of a matrix or each one of a batch."""
    form = leading(matrix.shape[-2:], matrix.strides[-2:])
    assert form is not None
    return form


def float_bits(value: float, dtype: torch.dtype) -> int:
    """The memory of a float as an integer that is stored in eight bytes."""
    packed = struct.pack("<d" if dtype == torch.float64 else "<fxxxx", value)
    return int.from_bytes(packed, "little", signed=True)
