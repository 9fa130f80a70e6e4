"""Matmuls of bfloat16 matrices of symbolic shapes: small ones go to BLAS, others to torch's operator.

Chosen per call from the actual sizes: a graph compiled for short sequences still has torch's operator for long ones.
Where sizes are known, lowering decides, and the kernel that reads the result rounds it (``lowering/matmul.py``). Here
the result must be what the operator gives, so it is rounded in a pass of its own, over memory in the cache.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from torchkiln.codegen.llvm.blas import float_bits
from torchkiln.codegen.llvm.frame import Frame
from torchkiln.codegen.llvm.support import declarations
from torchkiln.codegen.llvm.support.small_matmul import MOST_ELEMENTS, NUMBERS, SMALL_MATMUL
from torchkiln.ir.index import Extent
from torchkiln.ir.program import Buffer, ExternCall, StridedView
from torchkiln.target import Target
from torchkiln.target.bf16_matmuls import few_multiplications

_aten = torch.ops.aten
_PLAIN = (_aten.mm.default, _aten.bmm.default)
_ADDED = (_aten.addmm.default, _aten.baddbmm.default)

# Float32 has no larger ones.
_MOST_FACTOR = torch.finfo(torch.float32).max


def may_be_small(call: ExternCall, result: Buffer | None, target: Target) -> bool:
    """Whether ``call``, whose result is in the memory of ``result``, is a matmul that BLAS may take at run time."""
    if target.gemm(torch.bfloat16, torch.float32) is None:
        return False
    return result is not None and result.device == "cpu" and _numbers(call, result, target) is not None


def emit_small_matmul(frame: Frame, call: ExternCall, otherwise: Callable[[], None]) -> None:
    """Write a call that :func:`may_be_small`; ``otherwise`` writes the call of the operator."""
    assert call.results[0] is not None
    result = frame.buffer(call.results[0])
    numbers = _numbers(call, result, frame.module.target)
    assert numbers is not None
    addend, left, right, _, beta = _operands(call)
    frame.module.declare(declarations()[SMALL_MATMUL])
    pointers = [frame.address(view) for view in (left, right, result.whole)]
    pointers.append("null" if addend is None or beta == 0 else frame.address(addend))
    # Layers of one size share this array.
    pointers.append(frame.integers(numbers))
    status = frame.fresh(
        f"call i32 @{SMALL_MATMUL}({', '.join(f'ptr {p}' for p in pointers)}, i64 {frame.threads or 0})"
    )
    operator, done = frame.new_label(), frame.new_label()
    frame.emit(f"br i1 {frame.fresh(f'icmp eq i32 {status}, 0')}, label %{done}, label %{operator}")
    frame.start_block(operator)
    with frame.side_branch():
        otherwise()
    frame.branch(done)
    frame.start_block(done)


def _operands(call: ExternCall) -> tuple[StridedView | None, StridedView, StridedView, float, float]:
    """Addend, left, right, alpha and beta."""
    if call.target in _PLAIN:
        left, right = call.arguments
        return None, left, right, 1.0, 0.0
    addend, left, right, beta, alpha = call.arguments
    return addend, left, right, alpha, beta


def _is_candidate(call: ExternCall, result: Buffer, most: int) -> bool:
    """Whether dtypes, shapes and factors are those of a matmul that BLAS may take, and its size is open."""
    if call.target not in _PLAIN and call.target not in _ADDED:
        return False
    addend, left, right, alpha, beta = _operands(call)
    if any(view.dtype != torch.bfloat16 for view in (left, right, result, addend) if view is not None):
        return False
    if not all(isinstance(factor, (int, float)) and abs(factor) <= _MOST_FACTOR for factor in (alpha, beta)):
        return False
    if alpha == 0:  # BLAS does not read factors then, nor sees what is no number in them
        return False
    *batch, rows, columns = result.shape
    terms = left.shape[-1]
    if left.shape != (*batch, rows, terms) or right.shape != (*batch, terms, columns):
        return False  # torch says what is wrong
    return _is_open(result.shape, terms, most) and (columns == 1 or result.strides[-1] == 1)


def _numbers(call: ExternCall, result: Buffer, target: Target) -> tuple[Extent, ...] | None:
    """What the native function is given, in the order of ``NUMBERS``; None for a matmul it is not for."""
    few = few_multiplications(target)
    if not _is_candidate(call, result, few.work):
        return None
    addend, left, right, alpha, beta = _operands(call)
    forms = _form(left), _form(right)
    added = _strides_of_addend(addend, result) if addend is not None and beta != 0 else (0, 0, 0)
    if forms[0] is None or forms[1] is None or added is None:
        return None
    numbers: dict[str, Extent] = {
        "batch": result.shape[0] if len(result.shape) == 3 else 1,
        "rows": result.shape[-2],
        "columns": result.shape[-1],
        "terms": left.shape[-1],
        "left_by_rows": int(forms[0][0]),
        "left_step": forms[0][1],
        "left_batch": _of_batch(left.strides),
        "right_by_rows": int(forms[1][0]),
        "right_step": forms[1][1],
        "right_batch": _of_batch(right.strides),
        "out_row": result.strides[-2],
        "out_batch": _of_batch(result.strides),
        "addend_row": added[1],
        "addend_column": added[2],
        "addend_batch": added[0],
        "alpha": float_bits(alpha, torch.float32),
        "beta": float_bits(beta, torch.float32),
        "most_work": few.work,
        "most_work_of_one": few.work_of_one,
    }
    return tuple(numbers[name] for name in NUMBERS)


def _is_open(shape: Sequence[Extent], terms: Extent, most: int) -> bool:
    """Whether sizes known only at run time say whether a matmul is small."""
    known = [size for size in shape if isinstance(size, int)]
    work = math.prod(known) * (terms if isinstance(terms, int) else 1)
    decided = len(known) == len(shape) and isinstance(terms, int)
    return not decided and math.prod(known) <= MOST_ELEMENTS and work <= most


def _form(matrix: StridedView) -> tuple[bool, Extent] | None:
    """Whether rows (else columns) are contiguous, and how far apart they begin, which is looked at when it is known."""
    (rows, columns), (down, right) = matrix.shape[-2:], matrix.strides[-2:]
    if right == 1 or columns == 1:
        return True, down
    if down == 1 or rows == 1:
        return False, right
    return None


def _strides_of_addend(addend: StridedView, result: Buffer) -> tuple[Extent, Extent, Extent] | None:
    """Of batch, rows and columns, 0 along what is added again and again; None for one that BLAS is not for."""
    rank = len(result.shape)
    if len(addend.shape) > rank:
        return None
    strides: list[Extent] = [0] * (rank - len(addend.shape))
    for size, stride, wanted in zip(addend.shape, addend.strides, result.shape[len(strides) :], strict=True):
        if size not in (1, wanted):
            return None
        strides.append(0 if size == 1 else stride)
    return (_of_batch(strides), strides[-2], strides[-1]) if strides[-1] in (0, 1) else None


def _of_batch(strides: Sequence[Extent]) -> Extent:
    return strides[-3] if len(strides) == 3 else 0
