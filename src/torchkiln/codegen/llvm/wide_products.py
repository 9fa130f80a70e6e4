"""Products of bfloat16 matrices with a float32 result, one or a batch of them, as calls of the BLAS in torch's library.

The target of such a call is ``mm.dtype`` or ``bmm.dtype``, which torch has for other devices only; lowering makes them
where they pay, of sizes that are known (``lowering/products.py``). A batch may have any number of dimensions.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

from torchkiln.codegen.llvm.blas import form_of
from torchkiln.codegen.llvm.frame import Frame
from torchkiln.codegen.llvm.module import ModuleBuilder
from torchkiln.ir.program import ExternCall, StridedView
from torchkiln.native.blas import ALONE, SET_THREADS, SHARE, WIDE_ROUTINE

_ONE = 0x3F800000  # the memory of 1.0


def emit_wide_product(frame: Frame, call: ExternCall) -> None:
    left, right, _ = call.arguments
    assert isinstance(left, StridedView)
    assert isinstance(right, StridedView)
    assert call.results[0] is not None
    result = frame.whole_view(call.results[0])
    matrices = (right, left, result)
    *batch, rows, columns = _numbers(result.shape)
    terms = _numbers(left.shape)[-1]
    symbol = _define(frame.module, matrices, batch, terms)
    frame.context_size = max(frame.context_size, len(matrices))
    for k, matrix in enumerate(matrices):
        frame.line(f"store ptr {frame.address(matrix)}, ptr {frame.element('%context', k)}")
    count, grain = math.prod(batch), -(-SHARE // (rows * columns * terms))
    frame.run_in_parallel(symbol, count, grain)


def _define(module: ModuleBuilder, matrices: Sequence[StridedView], batch: Sequence[int], terms: int) -> str:
    """A function of the products from ``%begin`` to ``%end``, of matrices whose addresses are in ``%context``."""
    lines: list[str] = []
    for k in range(len(matrices)):
        lines.append(f"  %place{k} = getelementptr ptr, ptr %context, i64 {k}")
        lines.append(f"  %base{k} = load ptr, ptr %place{k}")
    *_, rows, columns = _numbers(matrices[-1].shape)
    alone = rows * columns * terms <= ALONE
    if alone:
        module.declare(f"declare i32 @{SET_THREADS}(i32)")
        lines.append(f"  %threads = call i32 @{SET_THREADS}(i32 1)")
    lines += ["  br label %head", "head:", "  %i = phi i64 [ %begin, %start ], [ %next, %body ]"]
    lines += ["  %more = icmp slt i64 %i, %end", "  br i1 %more, label %body, label %done", "body:"]
    for d, size in enumerate(batch):
        lines.append(f"  %quotient{d} = sdiv i64 %i, {math.prod(batch[d + 1 :])}")
        lines.append(f"  %position{d} = srem i64 %quotient{d}, {size}")
    addresses = []
    for k, matrix in enumerate(matrices):
        at = f"%base{k}"
        for d, stride in enumerate(_numbers(matrix.strides[:-2])):
            lines.append(f"  %move{k}.{d} = mul i64 %position{d}, {stride * matrix.dtype.itemsize}")
            lines.append(f"  %at{k}.{d} = getelementptr i8, ptr {at}, i64 %move{k}.{d}")
            at = f"%at{k}.{d}"
        addresses.append(at)
    lines.append(f"  {_call(module, matrices, addresses, terms)}")
    lines += ["  %next = add i64 %i, 1", "  br label %head", "done:"]
    if alone:
        lines.append(f"  %alone = call i32 @{SET_THREADS}(i32 %threads)")
    lines.append("  ret void")
    body = "\n".join(lines)
    symbol = f"kiln_products_{hashlib.sha256(body.encode()).hexdigest()[:12]}"
    module.define(
        symbol, f"define internal void @{symbol}(i64 %begin, i64 %end, ptr %context) #0 {{\nstart:\n{body}\n}}"
    )
    return symbol


def _call(module: ModuleBuilder, matrices: Sequence[StridedView], addresses: Sequence[str], terms: int) -> str:
    """BLAS goes down columns, so that the transposed product is asked for: right times left."""
    rows, columns = matrices[-1].shape[-1], matrices[-1].shape[-2]
    forms = [form_of(matrix) for matrix in matrices]
    assert forms[-1][0]
    kept = [module.string("N" if has_rows else "T") for has_rows, _ in forms[:2]]
    sizes = [module.integers(_numbers((n,))) for n in (rows, columns, terms)]
    steps = [module.integers(_numbers((step,))) for _, step in forms]
    one, nothing = module.integers((_ONE,)), module.integers((0,))
    a, b, c = addresses
    pointers = (*kept, *sizes, one, a, steps[0], b, steps[1], nothing, c, steps[2])
    module.declare(f"declare void @{WIDE_ROUTINE}({', '.join(['ptr'] * len(pointers))}, i64, i64)")
    # The two numbers after the pointers are the lengths of the texts, as Fortran hands them over.
    return f"call void @{WIDE_ROUTINE}({', '.join(f'ptr {p}' for p in pointers)}, i64 1, i64 1)"


def _numbers(extents: Sequence[object]) -> list[int]:
    numbers = [extent for extent in extents if isinstance(extent, int)]
    assert len(numbers) == len(extents)
    return numbers
