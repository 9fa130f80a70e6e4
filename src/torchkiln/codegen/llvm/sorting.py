"""Calls of the sort of rows in the support module."""

from __future__ import annotations

from torchkiln.codegen.llvm.frame import Frame
from torchkiln.codegen.llvm.support import declarations
from torchkiln.codegen.llvm.support.sorting import row_sort
from torchkiln.ir import index as ix
from torchkiln.ir.program import ExternCall, StridedView

# Elements that are worth a thread of their own.
_GRAIN = 2**14


def emit_sort(frame: Frame, call: ExternCall) -> None:
    view, descending = call.arguments
    assert isinstance(view, StridedView)
    row = view.shape[-1]
    assert isinstance(row, int)
    pointers = [frame.address(view)]
    for result in call.results:
        assert result is not None
        pointers.append(frame.data_pointer(result))
    frame.fill("context", [*(f"ptr {p}" for p in pointers), f"i64 {row}", f"i64 {-int(descending)}"])
    name = row_sort(view.dtype)
    frame.module.declare(declarations()[name])
    rows = ix.product(view.shape[:-1])
    frame.run_loop(name, rows, frame.parallel_grain(rows, max(1, _GRAIN // max(1, row))))
