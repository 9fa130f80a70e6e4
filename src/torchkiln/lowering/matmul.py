"""Matmuls of small bfloat16 matrices: BLAS sums in float32, and a loop adds what is to be added and rounds.

torch's operator has oneDNN make a kernel ready at each call, which takes 20 µs whatever the sizes; the loop is part of
the kernel that reads the result. Where sizes are symbolic, native code decides in each call whether a matmul is small
(``codegen/llvm/small_matmul.py``). Microseconds of ``mm`` and so without the loop, the second matrix
transposed or not:

| M x K x N | operator, one thread | here | operator, two threads | here |
|---|---|---|---|---|
| 1 x 17 x 64 | 1.9 to 3.5 | 0.1 | | |
| 32 x 64 x 64 | 20 to 26 | 1.0 | | |
| 256 x 64 x 64 | 24 | 5.0 | 31 to 43 | 5 |
| 256 x 128 x 512 | 64 to 100 | 48 | 50 to 54 | 30 to 41 |
| 256 x 128 x 1000 | 171 | 107 | 81 | 69 to 76 |
| 512 x 256 x 256 | 73 to 96 | 81 to 90 | 58 to 89 | 83 to 97 |
| 1024 x 768 x 768 | 1100 to 1250 | 1590 | | |

MKL does not use the bfloat16 instructions of AMD's processors, and oneDNN does. Compiled functions on one thread of a
Zen 4, of which 15 are Dynamo's guards:

| batch, M x K x N | operator | here |
|---|---|---|
| 1 x 64 x 64 | 15 | 16 |
| 1 x 256 x 256 | 37 | 53 to 81 |
| 1 x 768 x 768 | 84 | 404 to 613 |
| 1 x 2048 x 2048 | 540 to 900 | 8600 to 80000 |
| 96, 1 x 64 x 128 | 100 | 460 to 920 |
| 4 x 256 x 256 | 35 | 30 |
| 8 x 256 x 256 | 40 | 35 |
| 32 x 64 x 64 | 34 | 16 |
| 256 x 64 x 64 | 41 | 40 |
| 2 x 768 x 768 | 85 | 145 |
| 32 x 256 x 256 | 57 | 67 |
| 128 x 256 x 256 | 110 | 192 |
| 12, 128 x 64 x 128 | 157 | 320 |
| 512 x 256 x 256 | 339 | 695 |

BLAS is called for each matrix of a batch, 0.5 µs each, and the operator once, 12 µs. On one thread of a Zen 5, with 8
of Dynamo's guards:

| batch, M x K x N | operator | here |
|---|---|---|
| 32 x 64 x 64 | 20 | 12 |
| 128 x 64 x 64 | 23 | 22 |
| 256 x 64 x 64 | 26 | 32 |
| 4, 32 x 64 x 32 | 23 | 17 |
| 8, 16 x 64 x 16 | 21 | 17 |
| 16, 16 x 64 x 16 | 24 | 25 |
| 64, 16 x 64 x 16 | 36 | 76 |
| 64, 4 x 8 x 4 | 26 | 43 |
| 512, 4 x 8 x 4 | 62 | 244 |

On one thread of a Xeon with AMX, with 8 of Dynamo's guards. oneDNN's operator for a row or a column is slow there:

| batch, M x K x N | operator | here |
|---|---|---|
| 1 x 768 x 768 | 110 | 44 |
| 1 x 4096 x 4096 | 4450 | 1310 |
| 32 x 256 x 256 | 37 | 26 |
| 128 x 256 x 256 | 57 | 45 |
| 256 x 256 x 256 | 58 | 60 |
| 256 x 128 x 512 | 77 | 96 |
| 512 x 256 x 256 | 100 | 139 |
| 32, 16 x 64 x 16 | 38 | 28 |
| 64, 16 x 64 x 16 | 39 | 39 |
| 512, 16 x 64 x 16 | 193 | 297 |
| 256, 32 x 32 x 32 | 117 | 203 |
| 64, 4 x 8 x 4 | 34 | 35 |
| 4096, 8 x 8 x 8 | 542 | 1355 |
| 8, 64 x 64 x 64 | 37 | 27 |
| 4, 128 x 64 x 128 | 46 | 45 |
| 12, 128 x 64 x 128 | 78 | 132 |
| 96, 1 x 64 x 128 | 120 | 70 |
| 512, 1 x 8 x 8 | 79 | 39 |
| 4096, 1 x 16 x 16 | 509 | 285 |
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from torchkiln.ir import index as ix
from torchkiln.ir.expr import Expr
from torchkiln.ir.matrices import leading
from torchkiln.ir.program import StridedView
from torchkiln.lowering.builder import Builder, NewTensor, Subscripts, TensorValue
from torchkiln.lowering.registry import NotLowered, lowers
from torchkiln.lowering.views import broadcast_to
from torchkiln.target import Target
from torchkiln.target.bf16_matmuls import MOST_WORK, few_multiplications

_aten = torch.ops.aten


def small_bfloat16_matmul(builder: Builder, left: TensorValue, right: TensorValue) -> TensorValue:
    """The matmul in float32 of two bfloat16 matrices, or of a batch of them of equal sizes.

    Raises :class:`NotLowered` for those that torch's operator is for.
    """
    if {left.dtype, right.dtype} != {torch.bfloat16} or builder.computes_on.gemm(torch.bfloat16, torch.float32) is None:
        raise NotLowered("only bfloat16 matmuls have a lowering, where BLAS takes them")
    if len(left.shape) != len(right.shape) or left.shape[:-2] != right.shape[:-2] or left.shape[-1] != right.shape[-2]:
        raise NotLowered("sizes that torch refuses")
    sizes = [size for size in (*left.shape, right.shape[-1]) if isinstance(size, int)]
    if len(sizes) != len(left.shape) + 1 or 0 in sizes or math.prod(sizes[-3:]) > MOST_WORK:
        raise NotLowered("large matrices, empty ones, or of symbolic sizes")
    matrices = (_in_memory(builder, left), _in_memory(builder, right))
    shape = (*left.shape[:-1], right.shape[-1])
    target = _aten.mm.dtype if len(shape) == 2 else _aten.bmm.dtype
    (result,) = builder.extern(target, (*matrices, torch.float32), [NewTensor(shape, torch.float32)])
    assert isinstance(result, TensorValue)
    return result


def _decline_if_operator_is_faster(builder: Builder, left: TensorValue, right: TensorValue) -> None:
    sizes = [size for size in (*left.shape, right.shape[-1]) if isinstance(size, int)]
    known = len(sizes) == len(left.shape) + 1 and left.dtype == torch.bfloat16
    if known and not is_small(builder.target, sizes):
        raise NotLowered("the operator is faster at these sizes")


def is_small(target: Target, sizes: Sequence[int]) -> bool:
    """Whether BLAS is faster than the operator; sizes are those of a batch, if any, rows, terms and columns."""
    few = few_multiplications(target)
    *batch, rows, _, columns = sizes
    one = 1 in (rows, columns)
    work, matrices = (few.work_of_one, few.matrices_of_one) if one else (few.work, few.matrices)
    if few.matrices is None:
        return math.prod(sizes[-3:]) <= work
    calls = math.prod(batch) / matrices if batch and matrices is not None else 0
    return math.prod(sizes) / work + calls <= 1


def _in_memory(builder: Builder, matrix: TensorValue) -> StridedView:
    """Memory of a form that BLAS reads, copied where it is not so."""
    view = builder.strided_view(matrix)
    known = view is not None and all(isinstance(stride, int) for stride in view.strides)
    if known and view is not None and leading(view.shape[-2:], view.strides[-2:]) is not None:
        return view
    return builder.materialize(matrix, ix.contiguous_strides(matrix.shape))


@lowers("mm", "bmm")
def lower_matmul(builder: Builder, left: TensorValue, right: TensorValue) -> TensorValue:
    """Small bfloat16 matmuls. All others are declined, and are extern calls."""
    _decline_if_operator_is_faster(builder, left, right)
    result = small_bfloat16_matmul(builder, left, right)
    return builder.pointwise(result.shape, left.dtype, result.at)


@lowers("addmm", "baddbmm")
def lower_addmm(
    builder: Builder, addend: TensorValue, left: TensorValue, right: TensorValue, *, beta: float = 1, alpha: float = 1
) -> TensorValue:
    _decline_if_operator_is_faster(builder, left, right)
    result = small_bfloat16_matmul(builder, left, right)
    if addend.dtype != left.dtype:
        raise NotLowered("an addend that torch refuses")
    addend = broadcast_to(addend, result.shape)

    def element(i: Subscripts) -> Expr:
        total = result.at(i) if alpha == 1 else result.at(i) * alpha
        if beta == 0:
            return total
        added = builder.load(addend, i, torch.float32)
        return total + (added if beta == 1 else added * beta)

    return builder.pointwise(result.shape, left.dtype, element)
