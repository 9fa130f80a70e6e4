"""Calls of running sums and products in the support module."""

from __future__ import annotations

from torchkiln.codegen.llvm.frame import Frame
from torchkiln.codegen.llvm.support import declarations
from torchkiln.codegen.llvm.support.scans import BLOCK, scan_function
from torchkiln.ir import index as ix
from torchkiln.ir.program import ExternCall, StridedView

# Elements that are worth a thread of their own.
_GRAIN = 2**15


def emit_scan(frame: Frame, call: ExternCall) -> None:
    view, reducer, backward = call.arguments
    (result,) = call.results
    assert isinstance(view, StridedView)
    assert result is not None
    outer, length, inner = view.shape
    pointers = [frame.address(view), frame.data_pointer(result)]
    numbers = [frame.number(length), frame.number(inner), str(int(backward)), *map(frame.number, view.strides[:2])]
    frame.fill("context", [*(f"ptr {p}" for p in pointers), *(f"i64 {n}" for n in numbers)])
    across = inner != 1
    name = scan_function(reducer, view.dtype, across=across)
    frame.module.declare(declarations()[name])
    count = ix.product((outer, ix.ceil_divide(inner, BLOCK)) if across else (outer,))
    work = max(1, ix.hint_of(length) * min(BLOCK, ix.hint_of(inner)))
    frame.run_loop(name, count, frame.parallel_grain(count, max(1, _GRAIN // work)))
