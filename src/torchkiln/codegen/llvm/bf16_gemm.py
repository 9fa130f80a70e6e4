"""Matmuls of bfloat16 matrices, or batches of them, with a float32 result, as calls of the BLAS in torch's library.

Their targets, ``mm.dtype`` and ``bmm.dtype``, torch has for other devices only. Lowering makes them where they pay and
sizes are known (``lowering/matmul.py``). A batch may have any number of dimensions.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from functools import partial

import torch

from torchkiln.codegen.llvm.blas import float_bits, form_of
from torchkiln.codegen.llvm.frame import Frame
from torchkiln.codegen.llvm.functions import Function, Register, native
from torchkiln.ir.program import ExternCall, StridedView
from torchkiln.native.blas import ALONE, BF16_GEMM, SET_THREADS, SHARE


def emit_bf16_gemm(frame: Frame, call: ExternCall) -> None:
    left, right, _ = call.arguments
    assert isinstance(left, StridedView)
    assert isinstance(right, StridedView)
    assert call.results[0] is not None
    result = frame.buffer(call.results[0]).whole
    matrices = (right, left, result)
    *batch, rows, columns = _numbers(result.shape)
    terms = _numbers(left.shape)[-1]
    layouts = repr([(matrix.dtype, matrix.shape, matrix.strides) for matrix in matrices])
    symbol = f"kiln_products_{hashlib.sha256(layouts.encode()).hexdigest()[:12]}"
    native(f"void {symbol}(i64, i64, ptr*)")(partial(_gemms, matrices)).define(frame.module)
    frame.fill("context", (f"ptr {frame.address(matrix)}" for matrix in matrices))
    count, grain = math.prod(batch), -(-SHARE // (rows * columns * terms))
    frame.run_loop(symbol, count, frame.parallel_grain(count, grain))


def _gemms(matrices: Sequence[StridedView], f: Function, begin: Register, end: Register, context: Register) -> None:
    """The matmuls from ``begin`` to ``end`` of a batch of matrices (right, left, result) at addresses in ``context``.

    BLAS is column-major, so the transposed matmul is asked for: right times left.
    """
    *batch, rows, columns = _numbers(matrices[-1].shape)
    terms = _numbers(matrices[0].shape)[-2]
    bases = [context[k].cast("i8*") for k in range(len(matrices))]
    forms = [form_of(matrix) for matrix in matrices]
    assert forms[-1][0]
    kept = ["N" if has_rows else "T" for has_rows, _ in forms[:2]]
    right_step, left_step, result_step = (tuple(_numbers((step,))) for _, step in forms)
    alone = rows * columns * terms <= ALONE
    threads = f.call(SET_THREADS, 1) if alone else None
    with f.loop(end, begin) as i:
        places = [i.udiv(math.prod(batch[d + 1 :])).urem(size) for d, size in enumerate(batch)]
        addresses = []
        for base, matrix in zip(bases, matrices, strict=True):
            for place, stride in zip(places, _numbers(matrix.strides[:-2]), strict=True):
                base = base.at(place * (stride * matrix.dtype.itemsize))
            addresses.append(base)
        right, left, result = addresses
        sizes = ((columns,), (rows,), (terms,))
        # The last two numbers are the lengths of the texts, as Fortran hands them over.
        factors = (right, right_step, left, left_step)
        f.call(BF16_GEMM, *kept, *sizes, (float_bits(1.0, torch.float32),), *factors, (0,), result, result_step, 1, 1)
    if threads is not None:
        f.call(SET_THREADS, threads)


def _numbers(extents: Sequence[object]) -> list[int]:
    numbers = [extent for extent in extents if isinstance(extent, int)]
    assert len(numbers) == len(extents)
    return numbers
