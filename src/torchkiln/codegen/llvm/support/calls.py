"""Calls back into torch and Python: lists and optional values of the stable ABI, and functions called by handles."""

from __future__ import annotations

from torchkiln.artifact.status import PYTHON_ERROR, WRONG_RESULT
from torchkiln.codegen.llvm.support.part import Part
from torchkiln.native.symbols import address_of

_DECLARATIONS = """
declare i32 @torch_new_list_reserve_size(i64, ptr)
declare i32 @torch_list_push_back(ptr, i64)
declare i32 @torch_list_size(ptr, ptr)
declare i32 @torch_list_get_item(ptr, i64, ptr)
declare i32 @torch_delete_list(ptr)
declare i32 @PyGILState_Ensure()
declare void @PyGILState_Release(i32)
declare void @Py_DecRef(ptr)
declare ptr @PyLong_FromLongLong(i64)
declare ptr @PyList_New(i64)
declare ptr @PyList_GetItem(ptr, i64)
declare i32 @PyList_SetItem(ptr, i64, ptr)
declare ptr @PyTuple_GetItem(ptr, i64)
declare ptr @PyCapsule_New(ptr, ptr, ptr)
declare ptr @PyCapsule_GetPointer(ptr, ptr)
declare ptr @PyObject_CallFunctionObjArgs(ptr, ...)
@_Py_NoneStruct = external global i8
"""

_CODE = f"""
; A list of the stable ABI holding these values.
define ptr @kiln_list(ptr %values, i64 %n) {{
entry:
  %list_at = alloca ptr
  %e = call i32 @torch_new_list_reserve_size(i64 %n, ptr %list_at)
  %list = load ptr, ptr %list_at
  br label %head
head:
  %k = phi i64 [ 0, %entry ], [ %next, %body ]
  %more = icmp slt i64 %k, %n
  br i1 %more, label %body, label %done
body:
  %value_at = getelementptr i64, ptr %values, i64 %k
  %value = load i64, ptr %value_at
  %e1 = call i32 @torch_list_push_back(ptr %list, i64 %value)
  %next = add i64 %k, 1
  br label %head
done:
  ret ptr %list
}}

; The n tensor handles of a list an operator returned; the list is gone afterwards, and so are they where it does not
; hold exactly n.
define i32 @kiln_take_list(ptr %list, i64 %n, ptr %handles) {{
entry:
  %size_at = alloca i64
  %item_at = alloca ptr
  store i64 0, ptr %size_at
  %e = call i32 @torch_list_size(ptr %list, ptr %size_at)
  %size = load i64, ptr %size_at
  %same = icmp eq i64 %size, %n
  br label %head
head:
  %k = phi i64 [ 0, %entry ], [ %next, %advance ]
  %more = icmp slt i64 %k, %size
  br i1 %more, label %body, label %done
body:
  store ptr null, ptr %item_at
  %e1 = call i32 @torch_list_get_item(ptr %list, i64 %k, ptr %item_at)
  br i1 %same, label %keep, label %drop
keep:
  %handle = load ptr, ptr %item_at
  %handle_at = getelementptr ptr, ptr %handles, i64 %k
  store ptr %handle, ptr %handle_at
  br label %advance
drop:
  call void @kiln_delete(ptr %item_at)
  br label %advance
advance:
  %next = add i64 %k, 1
  br label %head
done:
  %e2 = call i32 @torch_delete_list(ptr %list)
  %status = select i1 %same, i32 0, i32 {WRONG_RESULT}
  ret i32 %status
}}

; Call object `which` of the tuple with a list of n tensors (owned handles, taken) and c numbers; m handles come back,
; null for None.
define i32 @kiln_python_call(
    ptr %tuple, i64 %which, ptr %handles, i64 %n, ptr %numbers, i64 %c, ptr %results, i64 %m) {{
entry:
  %gil = call i32 @PyGILState_Ensure()
  %function = call ptr @PyTuple_GetItem(ptr %tuple, i64 %which)
  %all = add i64 %n, %c
  %list = call ptr @PyList_New(i64 %all)
  br label %head
head:
  %k = phi i64 [ 0, %entry ], [ %next, %body ]
  %more = icmp slt i64 %k, %n
  br i1 %more, label %body, label %count
body:
  %handle_at = getelementptr ptr, ptr %handles, i64 %k
  %handle = load ptr, ptr %handle_at
  %capsule = call ptr @PyCapsule_New(ptr %handle, ptr null, ptr null)
  %i = call i32 @PyList_SetItem(ptr %list, i64 %k, ptr %capsule)
  %next = add i64 %k, 1
  br label %head
count:
  %l = phi i64 [ 0, %head ], [ %next_l, %integer ]
  %more_l = icmp slt i64 %l, %c
  br i1 %more_l, label %integer, label %call
integer:
  %number_at = getelementptr i64, ptr %numbers, i64 %l
  %number = load i64, ptr %number_at
  %boxed = call ptr @PyLong_FromLongLong(i64 %number)
  %at = add i64 %n, %l
  %i_l = call i32 @PyList_SetItem(ptr %list, i64 %at, ptr %boxed)
  %next_l = add i64 %l, 1
  br label %count
call:
  %answer = call ptr (ptr, ...) @PyObject_CallFunctionObjArgs(ptr %function, ptr %list, ptr null)
  call void @Py_DecRef(ptr %list)
  %failed = icmp eq ptr %answer, null
  br i1 %failed, label %done, label %take
take:
  %j = phi i64 [ 0, %call ], [ %next_j, %taken ]
  %more_j = icmp slt i64 %j, %m
  br i1 %more_j, label %item, label %drop
item:
  %result_at = getelementptr ptr, ptr %results, i64 %j
  %object = call ptr @PyList_GetItem(ptr %answer, i64 %j)
  %is_none = icmp eq ptr %object, @_Py_NoneStruct
  br i1 %is_none, label %none, label %some
none:
  store ptr null, ptr %result_at
  br label %taken
some:
  %pointer = call ptr @PyCapsule_GetPointer(ptr %object, ptr null)
  store ptr %pointer, ptr %result_at
  br label %taken
taken:
  %next_j = add i64 %j, 1
  br label %take
drop:
  call void @Py_DecRef(ptr %answer)
  br label %done
done:
  %status = phi i32 [ {PYTHON_ERROR}, %call ], [ 0, %drop ]
  call void @PyGILState_Release(i32 %gil)
  ret i32 %status
}}
"""


def _box() -> str:
    """A present optional value is a pointer to eight bytes that torch frees: by its own pair of functions since
    2.13, by the C++ operators before."""
    if address_of("torch_new_stable_ivalue") is not None:
        return """
declare i32 @torch_new_stable_ivalue(ptr)
define ptr @kiln_box(i64 %value) {
  %box_at = alloca ptr
  %e = call i32 @torch_new_stable_ivalue(ptr %box_at)
  %box = load ptr, ptr %box_at
  store i64 %value, ptr %box
  ret ptr %box
}
"""
    return """
declare ptr @_Znwm(i64)
define ptr @kiln_box(i64 %value) {
  %box = call ptr @_Znwm(i64 8)
  store i64 %value, ptr %box
  ret ptr %box
}
"""


def part() -> Part:
    return Part(
        (),
        (),
        _DECLARATIONS,
        _box() + _CODE,
        ("kiln_list", "kiln_take_list", "kiln_python_call", "kiln_box"),
    )
