"""Tensor handles: giving them back, comparing a tensor with what was compiled for, taking results over.

A *descriptor* is an array of i64: dtype code, number of dimensions, sizes, strides. A *slot* is a place that holds an
owned tensor handle or null.
"""

from __future__ import annotations

from torchkiln.runtime.status import TORCH_ERROR, WRONG_RESULT
from torchkiln.runtime.support.part import Part
from torchkiln.runtime.symbols import shim_constant

_DECLARATIONS = """
declare i32 @aoti_torch_get_data_ptr(ptr, ptr)
declare i32 @aoti_torch_delete_tensor_object(ptr)
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
"""

_CODE = f"""
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


def part() -> Part:
    return Part(
        _DECLARATIONS,
        _CODE.replace("i32 CPU", f"i32 {shim_constant('aoti_torch_device_type_cpu')}"),
        (
            "kiln_delete",
            "kiln_delete_all",
            "kiln_compare",
            "kiln_adopt",
            "kiln_store_result",
            "kiln_retype",
        ),
    )
