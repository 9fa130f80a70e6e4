"""What goes out: the list of results, as Python objects."""

from __future__ import annotations

from torchkiln.codegen.llvm.support.part import Part
from torchkiln.native.symbols import WRAP_TENSOR, address_of

_DECLARATIONS = """
declare i32 @aoti_torch_delete_tensor_object(ptr)
declare void @Py_IncRef(ptr)
declare ptr @PyLong_FromLongLong(i64)
declare ptr @PyBool_FromLong(i64)
declare ptr @PyList_New(i64)
declare ptr @PyList_GetItem(ptr, i64)
declare i32 @PyList_SetItem(ptr, i64, ptr)
declare ptr @PyTuple_GetItem(ptr, i64)
"""

_CODE = """
; The list of outputs. Each has two i64 in the table: 0 and the number of an owned handle (taken), 1 and the position
; of an input, 2 and the position of an object in the tuple, 3 and the number of an integer among the handles, 4 and
; that of one that is a bool.
define ptr @kiln_wrap_outputs(i64 %n, ptr %table, ptr %handles, ptr %inputs, ptr %tuple) {
entry:
  %list = call ptr @PyList_New(i64 %n)
  %no_list = icmp eq ptr %list, null
  br i1 %no_list, label %failed, label %head
head:
  %k = phi i64 [ 0, %entry ], [ %next, %put ]
  %more = icmp slt i64 %k, %n
  br i1 %more, label %body, label %done
body:
  %twice = mul i64 %k, 2
  %kind_at = getelementptr i64, ptr %table, i64 %twice
  %number_at = getelementptr i64, ptr %kind_at, i64 1
  %kind = load i64, ptr %kind_at
  %number = load i64, ptr %number_at
  switch i64 %kind, label %object [
    i64 0, label %tensor
    i64 1, label %input
    i64 3, label %integer
    i64 4, label %truth
  ]
integer:
  %integer_at = getelementptr i64, ptr %handles, i64 %number
  %bits = load i64, ptr %integer_at
  %boxed = call ptr @PyLong_FromLongLong(i64 %bits)
  br label %put
truth:
  %truth_at = getelementptr i64, ptr %handles, i64 %number
  %truth_bits = load i64, ptr %truth_at
  %boxed_truth = call ptr @PyBool_FromLong(i64 %truth_bits)
  br label %put
tensor:
  %handle_at = getelementptr ptr, ptr %handles, i64 %number
  %handle = load ptr, ptr %handle_at
  %wrapped = call ptr @WRAP(ptr %handle)
  %e = call i32 @aoti_torch_delete_tensor_object(ptr %handle)
  br label %put
input:
  %same = call ptr @PyList_GetItem(ptr %inputs, i64 %number)
  call void @Py_IncRef(ptr %same)
  br label %put
object:
  %known = call ptr @PyTuple_GetItem(ptr %tuple, i64 %number)
  call void @Py_IncRef(ptr %known)
  br label %put
put:
  %value = phi ptr [ %wrapped, %tensor ], [ %same, %input ], [ %known, %object ], [ %boxed, %integer ],
    [ %boxed_truth, %truth ]
  %i = call i32 @PyList_SetItem(ptr %list, i64 %k, ptr %value)
  %next = add i64 %k, 1
  br label %head
done:
  ret ptr %list
failed:
  ret ptr null
}
"""


def _wrap() -> str:
    if address_of(WRAP_TENSOR) is not None:
        return f"declare ptr @{WRAP_TENSOR}(ptr)\n"
    # Never called: without the function graphs run in handle mode, which does not wrap.
    return f"define internal ptr @{WRAP_TENSOR}(ptr %handle) {{\n  ret ptr null\n}}\n"


def part() -> Part:
    return Part(
        (),
        (),
        _DECLARATIONS,
        _wrap() + _CODE.replace("@WRAP(", f"@{WRAP_TENSOR}("),
        ("kiln_wrap_outputs",),
    )
