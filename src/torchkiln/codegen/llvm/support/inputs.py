"""What comes in: handles of the tensors in a Python list or tuple, their numbers, checks, and data pointers."""

from __future__ import annotations

from torchkiln.artifact.status import NOT_READ, NUMBER, OPAQUE, TORCH_ERROR
from torchkiln.codegen.llvm.support.part import Part, message
from torchkiln.native.symbols import ANY_MODE_ON, address_of
from torchkiln.native.tensor_layout import TENSOR_OFFSET

_DECLARATIONS = """
declare i32 @aoti_torch_get_data_ptr(ptr, ptr)
declare i32 @aoti_torch_new_tensor_handle(ptr, ptr)
declare void @Py_IncRef(ptr)
declare i64 @PyList_Size(ptr)
declare i64 @PyLong_AsLongLong(ptr)
declare ptr @PyList_GetItem(ptr, i64)
declare i32 @PyList_SetItem(ptr, i64, ptr)
declare ptr @PyTuple_GetItem(ptr, i64)
declare i32 @PyType_IsSubtype(ptr, ptr)
declare void @Py_DecRef(ptr)
declare ptr @PyObject_CallFunctionObjArgs(ptr, ...)
declare ptr @PyErr_Format(ptr, ptr, ...)
declare ptr @PyErr_Occurred()
@PyExc_TypeError = external global ptr
@PyLong_Type = external global i8
@_Py_NoneStruct = external global i8
"""

_MESSAGES = (
    message("not_tensor", "input %zd is not a tensor"),
    message("not_plain", "an input is not a strided CPU tensor that holds its values in memory"),
    message("count", "this graph takes a list of %zd inputs, got %zd"),
)

_CODE = f"""
; The first tensor that is not as its descriptor says, or -1. Descriptors follow each other; a dtype below 0 stands for
; something else than a tensor, or an opaque one.
define i64 @kiln_check_inputs(ptr %handles, i64 %n, ptr %table) {{
entry:
  br label %head
head:
  %k = phi i64 [ 0, %entry ], [ %next, %advance ]
  %descriptor = phi ptr [ %table, %entry ], [ %following, %advance ]
  %more = icmp slt i64 %k, %n
  br i1 %more, label %body, label %done
body:
  %dtype = load i64, ptr %descriptor
  %dim_at = getelementptr i64, ptr %descriptor, i64 1
  %dim = load i64, ptr %dim_at
  %plain = icmp slt i64 %dtype, 0
  br i1 %plain, label %advance, label %tensor
tensor:
  %handle_at = getelementptr ptr, ptr %handles, i64 %k
  %handle = load ptr, ptr %handle_at
  %status = call i32 @kiln_compare(ptr %handle, ptr %descriptor)
  %good = icmp eq i32 %status, 0
  br i1 %good, label %advance, label %bad
advance:
  %next = add i64 %k, 1
  %twice = mul i64 %dim, 2
  %length = add i64 %twice, 2
  %following = getelementptr i64, ptr %descriptor, i64 %length
  br label %head
bad:
  ret i64 %k
done:
  ret i64 -1
}}

; Copies with the right strides in place of the tensors that have others and whose entry in the mask is not 0; who calls
; this owns them. The first tensor that still is not as its descriptor says, or -1.
define i64 @kiln_copy_inputs(ptr %handles, i64 %n, ptr %table, ptr %mask, ptr %copies) {{
entry:
  br label %head
head:
  %k = phi i64 [ 0, %entry ], [ %next, %advance ]
  %descriptor = phi ptr [ %table, %entry ], [ %following, %advance ]
  %more = icmp slt i64 %k, %n
  br i1 %more, label %body, label %done
body:
  %dtype = load i64, ptr %descriptor
  %dim_at = getelementptr i64, ptr %descriptor, i64 1
  %dim = load i64, ptr %dim_at
  %other = icmp slt i64 %dtype, 0
  br i1 %other, label %advance, label %tensor
tensor:
  %handle_at = getelementptr ptr, ptr %handles, i64 %k
  %handle = load ptr, ptr %handle_at
  %mask_at = getelementptr i64, ptr %mask, i64 %k
  %allowed = load i64, ptr %mask_at
  %status = call i32 @kiln_compare(ptr %handle, ptr %descriptor)
  %good = icmp eq i32 %status, 0
  br i1 %good, label %advance, label %look
look:
  %strides = icmp eq i32 %status, 3
  %may = icmp ne i64 %allowed, 0
  %copies_it = and i1 %strides, %may
  br i1 %copies_it, label %copy, label %bad
copy:
  %copy_at = getelementptr ptr, ptr %copies, i64 %k
  %failed = call i32 @kiln_copy(ptr %handle, ptr %descriptor, ptr %copy_at)
  %copied = icmp eq i32 %failed, 0
  br i1 %copied, label %replace, label %bad
replace:
  %new = load ptr, ptr %copy_at
  store ptr %new, ptr %handle_at
  br label %advance
advance:
  %next = add i64 %k, 1
  %twice = mul i64 %dim, 2
  %length = add i64 %twice, 2
  %following = getelementptr i64, ptr %descriptor, i64 %length
  br label %head
bad:
  ret i64 %k
done:
  ret i64 -1
}}

; Data pointers of the tensors whose entry in the mask is not 0. One without elements may have none.
define i32 @kiln_data_pointers(ptr %handles, i64 %n, ptr %mask, ptr %data) {{
entry:
  br label %head
head:
  %k = phi i64 [ 0, %entry ], [ %next, %advance ]
  %more = icmp slt i64 %k, %n
  br i1 %more, label %body, label %done
body:
  %mask_at = getelementptr i64, ptr %mask, i64 %k
  %wanted = load i64, ptr %mask_at
  %skip = icmp eq i64 %wanted, 0
  br i1 %skip, label %advance, label %read
read:
  %handle_at = getelementptr ptr, ptr %handles, i64 %k
  %handle = load ptr, ptr %handle_at
  %data_at = getelementptr ptr, ptr %data, i64 %k
  %e = call i32 @aoti_torch_get_data_ptr(ptr %handle, ptr %data_at)
  %good = icmp eq i32 %e, 0
  br i1 %good, label %advance, label %failed
advance:
  %next = add i64 %k, 1
  br label %head
failed:
  ret i32 {TORCH_ERROR}
done:
  ret i32 0
}}

; Handles of the tensors in a Python list, read in place, and its integers where the table asks for them; sets a Python
; error and returns 1 where one is not. Object `which` of the tuple is the class of tensors; the next one is a function
; that replaces tensors that are not plain, and raises where it cannot, or where a mode answers fake tensors.
define i32 @kiln_read_list(ptr %list, i64 %n, ptr %table, ptr %tuple, i64 %which, ptr %handles) {{
entry:
  %tensor_type = call ptr @PyTuple_GetItem(ptr %tuple, i64 %which)
  %mode = call zeroext i1 @{ANY_MODE_ON}(i1 zeroext false)
  br i1 %mode, label %replace, label %read
read:
  %first = call i32 @read_list(ptr %list, i64 %n, ptr %table, ptr %tensor_type, ptr %handles)
  %usual = icmp ne i32 %first, 2
  br i1 %usual, label %done, label %replace
replace:
  %after = add i64 %which, 1
  %function = call ptr @PyTuple_GetItem(ptr %tuple, i64 %after)
  %answer = call ptr (ptr, ...) @PyObject_CallFunctionObjArgs(ptr %function, ptr %list, ptr null)
  %refused = icmp eq ptr %answer, null
  br i1 %refused, label %raised, label %again
again:
  call void @Py_DecRef(ptr %answer)
  %second = call i32 @read_list(ptr %list, i64 %n, ptr %table, ptr %tensor_type, ptr %handles)
  %not_replaced = icmp eq i32 %second, 2
  br i1 %not_replaced, label %wrong, label %done
wrong:
  %type_error = load ptr, ptr @PyExc_TypeError
  %r = call ptr (ptr, ptr, ...) @PyErr_Format(ptr %type_error, ptr @message_not_plain)
  br label %raised
raised:
  ret i32 1
done:
  %status = phi i32 [ %first, %read ], [ %second, %again ]
  ret i32 %status
}}

; One reading: 2 for a tensor that is not plain or a number without a value yet, which set no error.
define internal i32 @read_list(ptr %list, i64 %n, ptr %table, ptr %tensor_type, ptr %handles) {{
entry:
  %size = call i64 @PyList_Size(ptr %list)
  %negative = icmp slt i64 %size, 0
  br i1 %negative, label %raised, label %count
count:
  %same = icmp eq i64 %size, %n
  br i1 %same, label %head, label %wrong_count
head:
  %k = phi i64 [ 0, %count ], [ %next, %advance ]
  %descriptor = phi ptr [ %table, %count ], [ %following, %advance ]
  %more = icmp slt i64 %k, %n
  br i1 %more, label %body, label %done
body:
  %handle_at = getelementptr ptr, ptr %handles, i64 %k
  store ptr null, ptr %handle_at
  %dtype = load i64, ptr %descriptor
  %dim_at = getelementptr i64, ptr %descriptor, i64 1
  %dim = load i64, ptr %dim_at
  switch i64 %dtype, label %tensor [
    i64 {NOT_READ}, label %advance
    i64 {NUMBER}, label %integer
    i64 {OPAQUE}, label %opaque
  ]
integer:
  %given = call ptr @PyList_GetItem(ptr %list, i64 %k)
  %given_type_at = getelementptr i8, ptr %given, i64 8
  %given_type = load ptr, ptr %given_type_at
  %is_integer = call i32 @PyType_IsSubtype(ptr %given_type, ptr @PyLong_Type)
  %has_value = icmp ne i32 %is_integer, 0
  br i1 %has_value, label %whole, label %not_plain
whole:
  %value = call i64 @PyLong_AsLongLong(ptr %given)
  %as_pointer = inttoptr i64 %value to ptr
  store ptr %as_pointer, ptr %handle_at
  %maybe = icmp eq i64 %value, -1
  br i1 %maybe, label %doubt, label %advance
doubt:
  %error = call ptr @PyErr_Occurred()
  %no_error = icmp eq ptr %error, null
  br i1 %no_error, label %advance, label %raised
tensor:
  %object = call ptr @PyList_GetItem(ptr %list, i64 %k)
  %type_at = getelementptr i8, ptr %object, i64 8
  %type = load ptr, ptr %type_at
  %is_tensor = call i32 @PyType_IsSubtype(ptr %type, ptr %tensor_type)
  %good = icmp ne i32 %is_tensor, 0
  br i1 %good, label %store, label %not_tensor
store:
  %handle = getelementptr i8, ptr %object, i64 {TENSOR_OFFSET}
  store ptr %handle, ptr %handle_at
  %plain = call i1 @kiln_is_plain(ptr %handle)
  br i1 %plain, label %advance, label %not_plain
not_plain:
  ret i32 2
opaque:
  %opaque_object = call ptr @PyList_GetItem(ptr %list, i64 %k)
  %opaque_type_at = getelementptr i8, ptr %opaque_object, i64 8
  %opaque_type = load ptr, ptr %opaque_type_at
  %is_opaque_tensor = call i32 @PyType_IsSubtype(ptr %opaque_type, ptr %tensor_type)
  %opaque_good = icmp ne i32 %is_opaque_tensor, 0
  br i1 %opaque_good, label %store_opaque, label %not_tensor
store_opaque:
  %opaque_handle = getelementptr i8, ptr %opaque_object, i64 {TENSOR_OFFSET}
  store ptr %opaque_handle, ptr %handle_at
  br label %advance
advance:
  %next = add i64 %k, 1
  %twice = mul i64 %dim, 2
  %length = add i64 %twice, 2
  %following = getelementptr i64, ptr %descriptor, i64 %length
  br label %head
wrong_count:
  %type_error = load ptr, ptr @PyExc_TypeError
  %r0 = call ptr (ptr, ptr, ...) @PyErr_Format(ptr %type_error, ptr @message_count, i64 %n, i64 %size)
  br label %raised
not_tensor:
  %type_error1 = load ptr, ptr @PyExc_TypeError
  %r1 = call ptr (ptr, ptr, ...) @PyErr_Format(ptr %type_error1, ptr @message_not_tensor, i64 %k)
  br label %raised
raised:
  ret i32 1
done:
  ret i32 0
}}

; Own the tensors that only this list holds and whose entry in the mask is not 0: None takes their place in the list.
; Any other owner in Python shows in the object's count of references. One in C++ need not: then nothing is freed early.
define void @kiln_take_inputs(ptr %list, i64 %n, ptr %mask, ptr %handles, ptr %owned) {{
entry:
  br label %head
head:
  %k = phi i64 [ 0, %entry ], [ %next, %advance ]
  %more = icmp slt i64 %k, %n
  br i1 %more, label %body, label %done
body:
  %owned_at = getelementptr ptr, ptr %owned, i64 %k
  store ptr null, ptr %owned_at
  %mask_at = getelementptr i64, ptr %mask, i64 %k
  %wanted = load i64, ptr %mask_at
  %skip = icmp eq i64 %wanted, 0
  br i1 %skip, label %advance, label %look
look:
  %object = call ptr @PyList_GetItem(ptr %list, i64 %k)
  %references = load i32, ptr %object
  %alone = icmp eq i32 %references, 1
  br i1 %alone, label %take, label %advance
take:
  %handle_at = getelementptr ptr, ptr %handles, i64 %k
  %handle = load ptr, ptr %handle_at
  %e = call i32 @aoti_torch_new_tensor_handle(ptr %handle, ptr %owned_at)
  %good = icmp eq i32 %e, 0
  br i1 %good, label %replace, label %advance
replace:
  %new = load ptr, ptr %owned_at
  store ptr %new, ptr %handle_at
  call void @Py_IncRef(ptr @_Py_NoneStruct)
  %i = call i32 @PyList_SetItem(ptr %list, i64 %k, ptr @_Py_NoneStruct)
  br label %advance
advance:
  %next = add i64 %k, 1
  br label %head
done:
  ret void
}}

; Handles of the first n objects of a tuple, all of them tensors.
define void @kiln_read_tuple(ptr %tuple, i64 %n, ptr %handles) {{
entry:
  br label %head
head:
  %k = phi i64 [ 0, %entry ], [ %next, %body ]
  %more = icmp slt i64 %k, %n
  br i1 %more, label %body, label %done
body:
  %object = call ptr @PyTuple_GetItem(ptr %tuple, i64 %k)
  %handle = getelementptr i8, ptr %object, i64 {TENSOR_OFFSET}
  %handle_at = getelementptr ptr, ptr %handles, i64 %k
  store ptr %handle, ptr %handle_at
  %next = add i64 %k, 1
  br label %head
done:
  ret void
}}
"""


def _any_mode_on() -> str:
    """Where torch does not have it, graphs are called in another way and this is never asked."""
    if address_of(ANY_MODE_ON) is None:
        return f"define internal zeroext i1 @{ANY_MODE_ON}(i1 zeroext %skip) {{\n  ret i1 true\n}}"
    return f"declare zeroext i1 @{ANY_MODE_ON}(i1 zeroext)"


def part() -> Part:
    return Part(
        (),
        (),
        _DECLARATIONS,
        "\n".join((*_MESSAGES, _any_mode_on(), _CODE)),
        (
            "kiln_check_inputs",
            "kiln_copy_inputs",
            "kiln_data_pointers",
            "kiln_read_list",
            "kiln_take_inputs",
            "kiln_read_tuple",
        ),
    )
