"""The native functions every compiled graph calls: handles, checks, Python objects and the arena pool.

They are LLVM IR compiled once in each process, on the first load of a graph. Graph code names them, never their
addresses. A *descriptor* is an array of i64: dtype code, number of dimensions, sizes, strides. A *slot* is a
place that holds an owned tensor handle or null.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping

from torchkiln.codegen.llvm.jit import LoadedObject, compile_module, load_object
from torchkiln.runtime.status import (
    INDEX_ERROR,
    NO_MEMORY,
    NOT_READ,
    NUMBER,
    PYTHON_ERROR,
    TORCH_ERROR,
    VALUE_ERROR,
    WRONG_INPUT,
    WRONG_RESULT,
)
from torchkiln.runtime.symbols import WRAP_TENSOR, address_of, shim_constant

POOL_SLOTS = 8
_HEADER_BYTES = 64

# Offset of the at::Tensor in a Python tensor object; runtime.layout verifies it before code that uses it runs.
TENSOR_OFFSET = 16

_DECLARATIONS = """
declare i32 @aoti_torch_get_data_ptr(ptr, ptr)
declare i32 @aoti_torch_delete_tensor_object(ptr)
declare i32 @aoti_torch_new_tensor_handle(ptr, ptr)
declare i32 @aoti_torch_is_defined(ptr, ptr)
declare i32 @aoti_torch_get_dim(ptr, ptr)
declare i32 @aoti_torch_get_sizes(ptr, ptr)
declare i32 @aoti_torch_get_strides(ptr, ptr)
declare i32 @aoti_torch_get_dtype(ptr, ptr)
declare i32 @aoti_torch_get_storage_offset(ptr, ptr)
declare i32 @aoti_torch__reinterpret_tensor(ptr, i64, ptr, ptr, i64, ptr)
declare i32 @aoti_torch__alloc_from_pool(ptr, i64, i32, i64, ptr, ptr, ptr)
declare i32 @aoti_torch_empty_strided(i64, ptr, ptr, i32, i32, i32, ptr)
declare i32 @aoti_torch_copy_(ptr, ptr, i32)
declare i32 @torch_new_list_reserve_size(i64, ptr)
declare i32 @torch_list_push_back(ptr, i64)
declare i32 @torch_list_size(ptr, ptr)
declare i32 @torch_list_get_item(ptr, i64, ptr)
declare i32 @torch_delete_list(ptr)
declare i32 @posix_memalign(ptr, i64, i64)
declare void @free(ptr)
declare i32 @PyGILState_Ensure()
declare void @PyGILState_Release(i32)
declare void @Py_IncRef(ptr)
declare void @Py_DecRef(ptr)
declare i64 @PyList_Size(ptr)
declare i64 @PyLong_AsLongLong(ptr)
declare ptr @PyLong_FromLongLong(i64)
declare ptr @PyBool_FromLong(i64)
declare ptr @PyList_New(i64)
declare ptr @PyList_GetItem(ptr, i64)
declare i32 @PyList_SetItem(ptr, i64, ptr)
declare ptr @PyTuple_GetItem(ptr, i64)
declare ptr @PyCapsule_New(ptr, ptr, ptr)
declare ptr @PyCapsule_GetPointer(ptr, ptr)
declare ptr @PyObject_CallFunctionObjArgs(ptr, ...)
declare i32 @PyType_IsSubtype(ptr, ptr)
declare ptr @PyErr_Format(ptr, ptr, ...)
declare ptr @PyErr_Occurred()
declare void @PyErr_Clear()
declare void @PyErr_Fetch(ptr, ptr, ptr)
declare void @PyErr_NormalizeException(ptr, ptr, ptr)
declare void @PyErr_Restore(ptr, ptr, ptr)
declare ptr @PyUnicode_FromFormat(ptr, ...)
declare ptr @PyUnicode_FromString(ptr)
declare ptr @PyObject_CallMethodObjArgs(ptr, ptr, ...)
@PyExc_RuntimeError = external global ptr
@PyExc_IndexError = external global ptr
@PyExc_TypeError = external global ptr
@_Py_NoneStruct = external global i8
"""

_MESSAGES = {
    "torch": "%s (in %s)",
    "torch_unsaid": "%s failed and did not say why",
    "note": "(in %s)",
    "result": "%s returned a tensor of another type or size than it was compiled for",
    "refused": "%s",
    "memory": "can't allocate memory for the intermediate values of a compiled graph",
    "input": "input %zd is not a tensor of the type, sizes and strides this graph was compiled for",
    "not_tensor": "input %zd is not a tensor",
    "count": "this graph takes a list of %zd inputs, got %zd",
}


def _message_constants() -> str:
    return "\n".join(
        f'@message_{name} = private constant [{len(text) + 1} x i8] c"{text}\\00"' for name, text in _MESSAGES.items()
    )


_HANDLES = f"""
define void @kiln_delete(ptr %slot) {{
  %handle = load ptr, ptr %slot
  %none = icmp eq ptr %handle, null
  br i1 %none, label %done, label %drop
drop:
  store ptr null, ptr %slot
  %e = call i32 @aoti_torch_delete_tensor_object(ptr %handle)
  br label %done
done:
  ret void
}}

define void @kiln_delete_all(ptr %slots, i64 %n) {{
entry:
  br label %head
head:
  %k = phi i64 [ 0, %entry ], [ %next, %body ]
  %more = icmp slt i64 %k, %n
  br i1 %more, label %body, label %done
body:
  %slot = getelementptr ptr, ptr %slots, i64 %k
  call void @kiln_delete(ptr %slot)
  %next = add i64 %k, 1
  br label %head
done:
  ret void
}}

; 0 as described, {TORCH_ERROR} torch error, {WRONG_RESULT} another dtype or size (or undefined), 3 other strides only.
define i32 @kiln_compare(ptr %handle, ptr %descriptor) {{
entry:
  %defined = alloca i8
  %dim_at = alloca i64
  %dtype_at = alloca i32
  %sizes_at = alloca ptr
  %strides_at = alloca ptr
  %absent = icmp eq ptr %handle, null
  br i1 %absent, label %mismatch, label %given
given:
  %e0 = call i32 @aoti_torch_is_defined(ptr %handle, ptr %defined)
  %f0 = icmp ne i32 %e0, 0
  br i1 %f0, label %failed, label %was_read
was_read:
  %defined_value = load i8, ptr %defined
  %undefined = icmp eq i8 %defined_value, 0
  br i1 %undefined, label %mismatch, label %typed
typed:
  %e1 = call i32 @aoti_torch_get_dtype(ptr %handle, ptr %dtype_at)
  %e2 = call i32 @aoti_torch_get_dim(ptr %handle, ptr %dim_at)
  %e3 = call i32 @aoti_torch_get_sizes(ptr %handle, ptr %sizes_at)
  %e4 = call i32 @aoti_torch_get_strides(ptr %handle, ptr %strides_at)
  %e12 = or i32 %e1, %e2
  %e34 = or i32 %e3, %e4
  %e = or i32 %e12, %e34
  %f = icmp ne i32 %e, 0
  br i1 %f, label %failed, label %compare
compare:
  %dtype32 = load i32, ptr %dtype_at
  %dtype = sext i32 %dtype32 to i64
  %want_dtype = load i64, ptr %descriptor
  %same_dtype = icmp eq i64 %dtype, %want_dtype
  %dim = load i64, ptr %dim_at
  %want_dim_at = getelementptr i64, ptr %descriptor, i64 1
  %want_dim = load i64, ptr %want_dim_at
  %same_dim = icmp eq i64 %dim, %want_dim
  %same = and i1 %same_dtype, %same_dim
  %sizes = load ptr, ptr %sizes_at
  %strides = load ptr, ptr %strides_at
  %want_sizes = getelementptr i64, ptr %descriptor, i64 2
  %want_strides = getelementptr i64, ptr %want_sizes, i64 %want_dim
  br i1 %same, label %head, label %mismatch
head:
  %k = phi i64 [ 0, %compare ], [ %next, %body ]
  %other = phi i1 [ false, %compare ], [ %other_next, %body ]
  %empty = phi i1 [ false, %compare ], [ %empty_next, %body ]
  %more = icmp slt i64 %k, %want_dim
  br i1 %more, label %size, label %done
size:
  %size_at = getelementptr i64, ptr %sizes, i64 %k
  %want_size_at = getelementptr i64, ptr %want_sizes, i64 %k
  %size_value = load i64, ptr %size_at
  %want_size = load i64, ptr %want_size_at
  %same_size = icmp eq i64 %size_value, %want_size
  br i1 %same_size, label %body, label %mismatch
body:
  %stride_at = getelementptr i64, ptr %strides, i64 %k
  %want_stride_at = getelementptr i64, ptr %want_strides, i64 %k
  %stride = load i64, ptr %stride_at
  %want_stride = load i64, ptr %want_stride_at
  %other_stride = icmp ne i64 %stride, %want_stride
  %matters = icmp ne i64 %size_value, 1
  %differs = and i1 %other_stride, %matters
  %other_next = or i1 %other, %differs
  %zero = icmp eq i64 %size_value, 0
  %empty_next = or i1 %empty, %zero
  %next = add i64 %k, 1
  br label %head
done:
  %full = xor i1 %empty, true
  %restride = and i1 %other, %full
  %result = select i1 %restride, i32 3, i32 0
  ret i32 %result
failed:
  ret i32 {TORCH_ERROR}
mismatch:
  ret i32 {WRONG_RESULT}
}}

; Make the tensor in a slot the one described: a copy where its strides differ or it lies in [low, high).
define i32 @kiln_adopt(ptr %slot, ptr %descriptor, ptr %low, ptr %high) {{
entry:
  %data_at = alloca ptr
  %new_at = alloca ptr
  %handle = load ptr, ptr %slot
  %status = call i32 @kiln_compare(ptr %handle, ptr %descriptor)
  switch i32 %status, label %give_up [
    i32 0, label %where
    i32 3, label %copy
  ]
where:
  %e0 = call i32 @aoti_torch_get_data_ptr(ptr %handle, ptr %data_at)
  %data = load ptr, ptr %data_at
  %above = icmp uge ptr %data, %low
  %below = icmp ult ptr %data, %high
  %inside = and i1 %above, %below
  br i1 %inside, label %copy, label %good
copy:
  %dtype64 = load i64, ptr %descriptor
  %dtype = trunc i64 %dtype64 to i32
  %dim_at = getelementptr i64, ptr %descriptor, i64 1
  %dim = load i64, ptr %dim_at
  %sizes = getelementptr i64, ptr %descriptor, i64 2
  %strides = getelementptr i64, ptr %sizes, i64 %dim
  %e1 = call i32 @aoti_torch_empty_strided(i64 %dim, ptr %sizes, ptr %strides, i32 %dtype, i32 CPU, i32 0, ptr %new_at)
  %f1 = icmp ne i32 %e1, 0
  br i1 %f1, label %failed, label %fill
fill:
  %new = load ptr, ptr %new_at
  %e2 = call i32 @aoti_torch_copy_(ptr %new, ptr %handle, i32 0)
  %f2 = icmp ne i32 %e2, 0
  br i1 %f2, label %failed_fill, label %swap
swap:
  store ptr %new, ptr %slot
  %e3 = call i32 @aoti_torch_delete_tensor_object(ptr %handle)
  br label %good
failed_fill:
  %e4 = call i32 @aoti_torch_delete_tensor_object(ptr %new)
  br label %failed
good:
  ret i32 0
failed:
  ret i32 {TORCH_ERROR}
give_up:
  ret i32 %status
}}

; Copy a result to the memory planned for it.
define i32 @kiln_store_result(ptr %target, ptr %handle, ptr %descriptor) {{
entry:
  %status = call i32 @kiln_compare(ptr %handle, ptr %descriptor)
  switch i32 %status, label %give_up [
    i32 0, label %copy
    i32 3, label %copy
  ]
copy:
  %e = call i32 @aoti_torch_copy_(ptr %target, ptr %handle, i32 0)
  ret i32 %e
give_up:
  ret i32 %status
}}

; A view of another dtype: bytes from the first element of the tensor, in its storage, whatever its offset there.
define i32 @kiln_retype(
  ptr %handle, i64 %bytes, i64 %itemsize, i32 %dtype, i64 %dim, ptr %sizes, ptr %strides, ptr %slot
) {{
entry:
  %offset_at = alloca i64
  %base_at = alloca ptr
  %one = alloca i64
  store i64 1, ptr %one
  %e0 = call i32 @aoti_torch_get_storage_offset(ptr %handle, ptr %offset_at)
  %f0 = icmp ne i32 %e0, 0
  br i1 %f0, label %failed, label %rebase
rebase:
  %offset = load i64, ptr %offset_at
  %back = sub i64 0, %offset
  %e1 = call i32 @aoti_torch__reinterpret_tensor(ptr %handle, i64 1, ptr %one, ptr %one, i64 %back, ptr %base_at)
  %f1 = icmp ne i32 %e1, 0
  br i1 %f1, label %failed, label %view
view:
  %base = load ptr, ptr %base_at
  %skipped = mul i64 %offset, %itemsize
  %at = add i64 %skipped, %bytes
  %e2 = call i32 @aoti_torch__alloc_from_pool(
    ptr %base, i64 %at, i32 %dtype, i64 %dim, ptr %sizes, ptr %strides, ptr %slot
  )
  %e3 = call i32 @aoti_torch_delete_tensor_object(ptr %base)
  ret i32 %e2
failed:
  ret i32 {TORCH_ERROR}
}}
"""

_INPUTS = f"""
; The first tensor that is not as its descriptor says, or -1. Descriptors follow each other; a dtype below 0 stands for
; something else than a tensor.
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

; Data pointers of the tensors whose entry in the mask is not 0.
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
; error and returns 1 where one is not.
define i32 @kiln_read_list(ptr %list, i64 %n, ptr %table, ptr %tensor_type, ptr %handles) {{
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
  ]
integer:
  %given = call ptr @PyList_GetItem(ptr %list, i64 %k)
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

; The list of outputs. Each has two i64 in the table: 0 and the number of an owned handle (taken), 1 and the position
; of an input, 2 and the position of an object in the tuple, 3 and the number of an integer among the handles, 4 and
; that of one that is a bool.
define ptr @kiln_wrap_outputs(i64 %n, ptr %table, ptr %handles, ptr %inputs, ptr %tuple) {{
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
}}
"""

_CALLS = f"""
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

; Whether a Python error is set in this thread.
define i1 @kiln_error_set() {{
  %gil = call i32 @PyGILState_Ensure()
  %error = call ptr @PyErr_Occurred()
  call void @PyGILState_Release(i32 %gil)
  %is_set = icmp ne ptr %error, null
  ret i1 %is_set
}}

@add_note_name = private constant [9 x i8] c"add_note\\00"

; Note on the Python error that is set where it came from.
define internal void @add_note(ptr %where) {{
entry:
  %type_at = alloca ptr
  %value_at = alloca ptr
  %trace_at = alloca ptr
  call void @PyErr_Fetch(ptr %type_at, ptr %value_at, ptr %trace_at)
  call void @PyErr_NormalizeException(ptr %type_at, ptr %value_at, ptr %trace_at)
  %value = load ptr, ptr %value_at
  %name = call ptr @PyUnicode_FromString(ptr @add_note_name)
  %note = call ptr (ptr, ...) @PyUnicode_FromFormat(ptr @message_note, ptr %where)
  %r = call ptr (ptr, ptr, ...) @PyObject_CallMethodObjArgs(ptr %value, ptr %name, ptr %note, ptr null)
  call void @Py_DecRef(ptr %name)
  call void @Py_DecRef(ptr %note)
  call void @Py_DecRef(ptr %r)
  call void @PyErr_Clear()
  %type = load ptr, ptr %type_at
  %trace = load ptr, ptr %trace_at
  call void @PyErr_Restore(ptr %type, ptr %value, ptr %trace)
  ret void
}}

; Set the Python error for a failed step; needs the interpreter.
define void @kiln_raise(i32 %kind, ptr %where, i64 %number) {{
entry:
  switch i32 %kind, label %done [
    i32 {TORCH_ERROR}, label %torch
    i32 {WRONG_RESULT}, label %result
    i32 {INDEX_ERROR}, label %index
    i32 {VALUE_ERROR}, label %value
    i32 {NO_MEMORY}, label %memory
    i32 {WRONG_INPUT}, label %input
  ]
torch:
  %raised = call ptr @PyErr_Occurred()
  %from_python = icmp ne ptr %raised, null
  br i1 %from_python, label %python, label %say
python:
  ; A dispatch mode or a kernel in Python raised inside torch: the error is there already, class and all.
  call void @add_note(ptr %where)
  br label %done
say:
  %text = call ptr @kiln_error_text()
  %runtime_error = load ptr, ptr @PyExc_RuntimeError
  %first = load i8, ptr %text
  %unsaid = icmp eq i8 %first, 0
  br i1 %unsaid, label %torch_unsaid, label %torch_said
torch_said:
  %r0 = call ptr (ptr, ptr, ...) @PyErr_Format(ptr %runtime_error, ptr @message_torch, ptr %text, ptr %where)
  br label %done
torch_unsaid:
  %r5 = call ptr (ptr, ptr, ...) @PyErr_Format(ptr %runtime_error, ptr @message_torch_unsaid, ptr %where)
  br label %done
result:
  %runtime_error1 = load ptr, ptr @PyExc_RuntimeError
  %r1 = call ptr (ptr, ptr, ...) @PyErr_Format(ptr %runtime_error1, ptr @message_result, ptr %where)
  br label %done
index:
  %index_error = load ptr, ptr @PyExc_IndexError
  %r2 = call ptr (ptr, ptr, ...) @PyErr_Format(ptr %index_error, ptr @message_refused, ptr %where)
  br label %done
value:
  %runtime_error3 = load ptr, ptr @PyExc_RuntimeError
  %r6 = call ptr (ptr, ptr, ...) @PyErr_Format(ptr %runtime_error3, ptr @message_refused, ptr %where)
  br label %done
memory:
  %runtime_error4 = load ptr, ptr @PyExc_RuntimeError
  %r3 = call ptr (ptr, ptr, ...) @PyErr_Format(ptr %runtime_error4, ptr @message_memory)
  br label %done
input:
  %runtime_error2 = load ptr, ptr @PyExc_RuntimeError
  %r4 = call ptr (ptr, ptr, ...) @PyErr_Format(ptr %runtime_error2, ptr @message_input, i64 %number)
  br label %done
done:
  ret void
}}
"""

# A block is one header (its whole size) and the memory after it. A slot is only ever exchanged whole, so a block is
# owned by its slot or by one thread, and no header is read by a thread that does not own its block.
_ARENA = f"""
@kiln_arena_slots = global [{POOL_SLOTS} x ptr] zeroinitializer
@kiln_arena_bytes = global i64 0
@kiln_arena_blocks = global i64 0

define internal void @free_block(ptr %block) {{
  %size = load i64, ptr %block
  %b = atomicrmw sub ptr @kiln_arena_bytes, i64 %size monotonic
  %c = atomicrmw sub ptr @kiln_arena_blocks, i64 1 monotonic
  call void @free(ptr %block)
  ret void
}}

; Memory of at least this many bytes, or null. A cached block that is too small makes way for the new one, so the
; number of blocks is the number of calls that ever ran at the same time, not the number of graphs.
define ptr @kiln_arena_acquire(i64 %bytes) {{
entry:
  %new_at = alloca ptr
  %needed = add i64 %bytes, {_HEADER_BYTES}
  br label %head
head:
  %k = phi i64 [ 0, %entry ], [ %next, %advance ]
  %small = phi ptr [ null, %entry ], [ %small_next, %advance ]
  %more = icmp slt i64 %k, {POOL_SLOTS}
  br i1 %more, label %body, label %miss
body:
  %slot = getelementptr ptr, ptr @kiln_arena_slots, i64 %k
  %taken = atomicrmw xchg ptr %slot, ptr null acq_rel
  %empty = icmp eq ptr %taken, null
  br i1 %empty, label %advance, label %look
look:
  %size = load i64, ptr %taken
  %enough = icmp uge i64 %size, %needed
  br i1 %enough, label %hit, label %keep
keep:
  %have_small = icmp ne ptr %small, null
  br i1 %have_small, label %put_back, label %advance
put_back:
  call void @return_block(ptr %small)
  br label %advance
advance:
  %small_next = phi ptr [ %small, %body ], [ %taken, %keep ], [ %taken, %put_back ]
  %next = add i64 %k, 1
  br label %head
hit:
  %had_small = icmp ne ptr %small, null
  br i1 %had_small, label %return_small, label %found
return_small:
  call void @return_block(ptr %small)
  br label %found
found:
  %memory = getelementptr i8, ptr %taken, i64 {_HEADER_BYTES}
  ret ptr %memory
miss:
  %stale = icmp ne ptr %small, null
  br i1 %stale, label %drop, label %allocate
drop:
  call void @free_block(ptr %small)
  br label %allocate
allocate:
  %e = call i32 @posix_memalign(ptr %new_at, i64 64, i64 %needed)
  %failed = icmp ne i32 %e, 0
  br i1 %failed, label %no_memory, label %fresh
fresh:
  %block = load ptr, ptr %new_at
  store i64 %needed, ptr %block
  %b = atomicrmw add ptr @kiln_arena_bytes, i64 %needed monotonic
  %c = atomicrmw add ptr @kiln_arena_blocks, i64 1 monotonic
  %new = getelementptr i8, ptr %block, i64 {_HEADER_BYTES}
  ret ptr %new
no_memory:
  ret ptr null
}}

; Put a block in an empty slot; with none, free the biggest.
define internal void @return_block(ptr %block) {{
entry:
  br label %head
head:
  %k = phi i64 [ 0, %entry ], [ %next, %body ]
  %more = icmp slt i64 %k, {POOL_SLOTS}
  br i1 %more, label %body, label %full
body:
  %slot = getelementptr ptr, ptr @kiln_arena_slots, i64 %k
  %pair = cmpxchg ptr %slot, ptr null, ptr %block acq_rel monotonic
  %stored = extractvalue {{ ptr, i1 }} %pair, 1
  %next = add i64 %k, 1
  br i1 %stored, label %done, label %head
full:
  %j = phi i64 [ 0, %head ], [ %next_j, %step ]
  %held = phi ptr [ %block, %head ], [ %held_next, %step ]
  %more_j = icmp slt i64 %j, {POOL_SLOTS}
  br i1 %more_j, label %swap, label %drop
swap:
  %slot_j = getelementptr ptr, ptr @kiln_arena_slots, i64 %j
  %other = atomicrmw xchg ptr %slot_j, ptr null acq_rel
  %gone = icmp eq ptr %other, null
  br i1 %gone, label %weigh_none, label %weigh
weigh_none:
  %small_none = call i1 @offer(ptr %slot_j, ptr %held)
  br i1 %small_none, label %done, label %step
weigh:
  %held_size = load i64, ptr %held
  %other_size = load i64, ptr %other
  %bigger = icmp ugt i64 %other_size, %held_size
  %stay = select i1 %bigger, ptr %held, ptr %other
  %leave = select i1 %bigger, ptr %other, ptr %held
  %back = call i1 @offer(ptr %slot_j, ptr %stay)
  br i1 %back, label %step, label %lost
lost:
  call void @free_block(ptr %stay)
  br label %step
step:
  %held_next = phi ptr [ %held, %weigh_none ], [ %leave, %weigh ], [ %leave, %lost ]
  %next_j = add i64 %j, 1
  br label %full
drop:
  call void @free_block(ptr %held)
  br label %done
done:
  ret void
}}

define internal i1 @offer(ptr %slot, ptr %block) {{
  %pair = cmpxchg ptr %slot, ptr null, ptr %block acq_rel monotonic
  %stored = extractvalue {{ ptr, i1 }} %pair, 1
  ret i1 %stored
}}

define void @kiln_arena_release(ptr %memory) {{
  %block = getelementptr i8, ptr %memory, i64 -{_HEADER_BYTES}
  call void @return_block(ptr %block)
  ret void
}}

; Free every block no call is using.
define void @kiln_arena_clear() {{
entry:
  br label %head
head:
  %k = phi i64 [ 0, %entry ], [ %next, %advance ]
  %more = icmp slt i64 %k, {POOL_SLOTS}
  br i1 %more, label %body, label %done
body:
  %slot = getelementptr ptr, ptr @kiln_arena_slots, i64 %k
  %taken = atomicrmw xchg ptr %slot, ptr null acq_rel
  %empty = icmp eq ptr %taken, null
  br i1 %empty, label %advance, label %drop
drop:
  call void @free_block(ptr %taken)
  br label %advance
advance:
  %next = add i64 %k, 1
  br label %head
done:
  ret void
}}
"""

EXPORTS = (
    "kiln_delete",
    "kiln_delete_all",
    "kiln_compare",
    "kiln_adopt",
    "kiln_store_result",
    "kiln_retype",
    "kiln_check_inputs",
    "kiln_data_pointers",
    "kiln_read_list",
    "kiln_read_tuple",
    "kiln_take_inputs",
    "kiln_wrap_outputs",
    "kiln_list",
    "kiln_take_list",
    "kiln_box",
    "kiln_python_call",
    "kiln_error_set",
    "kiln_raise",
    "kiln_arena_acquire",
    "kiln_arena_release",
    "kiln_arena_clear",
    "kiln_arena_bytes",
    "kiln_arena_blocks",
)


def _error_text() -> str:
    """The text of the last C++ error. torch gives it since 2.13; before, torch itself prints it on stderr."""
    name = "torch_exception_get_what_without_backtrace"
    if address_of(name) is not None:
        return f"""
declare ptr @{name}()
define internal ptr @kiln_error_text() {{
  %text = call ptr @{name}()
  ret ptr %text
}}
"""
    text = "a torch operator failed; this version of torch writes its message to stderr"
    return f"""
@no_text = private constant [{len(text) + 1} x i8] c"{text}\\00"
define internal ptr @kiln_error_text() {{
  ret ptr @no_text
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


def _wrap() -> str:
    if address_of(WRAP_TENSOR) is not None:
        return f"declare ptr @{WRAP_TENSOR}(ptr)\n"
    # Never called: without the function graphs run in handle mode, which does not wrap.
    return f"define internal ptr @{WRAP_TENSOR}(ptr %handle) {{\n  ret ptr null\n}}\n"


def module_text() -> str:
    """The whole support module for this torch."""
    parts = (
        _DECLARATIONS,
        _message_constants(),
        _wrap(),
        _error_text(),
        _box(),
        _HANDLES.replace("i32 CPU", f"i32 {shim_constant('aoti_torch_device_type_cpu')}"),
        _INPUTS.replace("@WRAP(", f"@{WRAP_TENSOR}("),
        _CALLS,
        _ARENA,
    )
    return "\n".join(parts)


_lock = threading.Lock()
_loaded: LoadedObject | None = None


def addresses() -> Mapping[str, int]:
    """Addresses of the support functions, compiled on first use and kept for the life of the process."""
    global _loaded
    with _lock:
        if _loaded is None:
            _loaded = load_object(compile_module(module_text()), EXPORTS, address_of)
        return _loaded.addresses
