"""Tensor handles: giving them back, comparing a tensor with what was compiled for, taking results over.

A *descriptor* is an array of i64: dtype code, number of dimensions, sizes, strides. A *slot* is a place that holds an
owned tensor handle or null.
"""

from __future__ import annotations

from torchkiln.artifact.status import TORCH_ERROR, WRONG_RESULT
from torchkiln.codegen.llvm.support.part import Part
from torchkiln.native.symbols import shim_constant
from torchkiln.native.tensor_keys import plain_keys

_DECLARATIONS = """
declare i32 @aoti_torch_get_data_ptr(ptr, ptr)
declare i32 @aoti_torch_delete_tensor_object(ptr)
declare i32 @aoti_torch_is_defined(ptr, ptr)
declare i32 @aoti_torch_get_dim(ptr, ptr)
declare i32 @aoti_torch_get_sizes(ptr, ptr)
declare i32 @aoti_torch_get_strides(ptr, ptr)
declare i32 @aoti_torch_get_dtype(ptr, ptr)
declare i32 @aoti_torch_get_storage_offset(ptr, ptr)
declare i32 @aoti_torch_get_storage_numel(ptr, ptr)
declare i32 @aoti_torch_get_device_type(ptr, ptr)
declare i32 @aoti_torch_get_layout(ptr, ptr)
declare i32 @aoti_torch__reinterpret_tensor(ptr, i64, ptr, ptr, i64, ptr)
declare i32 @aoti_torch__alloc_from_pool(ptr, i64, i32, i64, ptr, ptr, ptr)
declare i32 @aoti_torch_empty_strided(i64, ptr, ptr, i32, i32, i32, ptr)
declare i32 @aoti_torch_copy_(ptr, ptr, i32)
declare i32 @aoti_torch_new_uninitialized_tensor(ptr)
declare zeroext i1 @aoti_torch_grad_mode_is_enabled()
declare void @aoti_torch_grad_mode_set_enabled(i1 zeroext)
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

; 0 as described, {TORCH_ERROR} torch error, {WRONG_RESULT} another dtype or size (or undefined, or without memory for
; its elements, or one that only operators of torch can read), 3 other strides only, 4 as described and to be copied,
; for its memory does not hold its values.
define i32 @kiln_compare(ptr %handle, ptr %descriptor) {{
entry:
  %defined = alloca i8
  %dim_at = alloca i64
  %dtype_at = alloca i32
  %sizes_at = alloca ptr
  %strides_at = alloca ptr
  %offset_at = alloca i64
  %held_at = alloca i64
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
  %e12 = or i32 %e1, %e2
  %e = or i32 %e12, %e3
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
  %want_sizes = getelementptr i64, ptr %descriptor, i64 2
  %want_strides = getelementptr i64, ptr %want_sizes, i64 %want_dim
  br i1 %same, label %memory, label %mismatch
memory:
  store ptr %want_strides, ptr %strides_at
  %plain = call i1 @kiln_is_plain(ptr %handle)
  br i1 %plain, label %read_strides, label %other_kind
other_kind:
  %marked = call i1 @kiln_is_marked(ptr %handle)
  br i1 %marked, label %first, label %mismatch
read_strides:
  %e4 = call i32 @aoti_torch_get_strides(ptr %handle, ptr %strides_at)
  %f4 = icmp ne i32 %e4, 0
  br i1 %f4, label %failed, label %first
first:
  %strides = load ptr, ptr %strides_at
  br label %head
head:
  %k = phi i64 [ 0, %first ], [ %next, %body ]
  %other = phi i1 [ false, %first ], [ %other_next, %body ]
  %empty = phi i1 [ false, %first ], [ %empty_next, %body ]
  %last = phi i64 [ 0, %first ], [ %last_next, %body ]
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
  %steps = sub i64 %size_value, 1
  %moved = mul i64 %steps, %stride
  %last_next = add i64 %last, %moved
  %next = add i64 %k, 1
  br label %head
done:
  br i1 %plain, label %strided, label %to_copy
strided:
  br i1 %empty, label %good, label %storage
storage:
  %e5 = call i32 @aoti_torch_get_storage_offset(ptr %handle, ptr %offset_at)
  %e6 = call i32 @aoti_torch_get_storage_numel(ptr %handle, ptr %held_at)
  %e56 = or i32 %e5, %e6
  %f56 = icmp ne i32 %e56, 0
  br i1 %f56, label %failed, label %fits
fits:
  %offset = load i64, ptr %offset_at
  %held = load i64, ptr %held_at
  %last_at = add i64 %offset, %last
  %inside = icmp slt i64 %last_at, %held
  %result = select i1 %other, i32 3, i32 0
  br i1 %inside, label %told, label %mismatch
told:
  ret i32 %result
good:
  ret i32 0
to_copy:
  ret i32 4
failed:
  ret i32 {TORCH_ERROR}
mismatch:
  ret i32 {WRONG_RESULT}
}}

; An operator that leaves a result out gives an undefined tensor, or None, where fake tensors show an empty one.
; 0 and an undefined tensor in the slot where that is so.
define internal i32 @adopt_nothing(ptr %slot, ptr %descriptor) {{
entry:
  %defined = alloca i8
  store i8 0, ptr %defined
  %dim_at = getelementptr i64, ptr %descriptor, i64 1
  %dim = load i64, ptr %dim_at
  %handle = load ptr, ptr %slot
  %absent = icmp eq ptr %handle, null
  br i1 %absent, label %head, label %given
given:
  %e0 = call i32 @aoti_torch_is_defined(ptr %handle, ptr %defined)
  %something = load i8, ptr %defined
  %nothing = icmp eq i8 %something, 0
  br i1 %nothing, label %head, label %wrong
head:
  %k = phi i64 [ 0, %entry ], [ 0, %given ], [ %next, %body ]
  %more = icmp slt i64 %k, %dim
  br i1 %more, label %body, label %wrong
body:
  %at = add i64 %k, 2
  %size_at = getelementptr i64, ptr %descriptor, i64 %at
  %size = load i64, ptr %size_at
  %next = add i64 %k, 1
  %empty = icmp eq i64 %size, 0
  br i1 %empty, label %good, label %head
good:
  br i1 %absent, label %make, label %done
make:
  %e1 = call i32 @aoti_torch_new_uninitialized_tensor(ptr %slot)
  br label %done
done:
  ret i32 0
wrong:
  ret i32 {WRONG_RESULT}
}}

; Put a copy of a tensor that is laid out as described in an empty slot. No gradient is recorded.
define internal i32 @kiln_copy(ptr %handle, ptr %descriptor, ptr %slot) {{
entry:
  %dtype64 = load i64, ptr %descriptor
  %dtype = trunc i64 %dtype64 to i32
  %dim_at = getelementptr i64, ptr %descriptor, i64 1
  %dim = load i64, ptr %dim_at
  %sizes = getelementptr i64, ptr %descriptor, i64 2
  %strides = getelementptr i64, ptr %sizes, i64 %dim
  %e1 = call i32 @aoti_torch_empty_strided(i64 %dim, ptr %sizes, ptr %strides, i32 %dtype, i32 CPU, i32 0, ptr %slot)
  %f1 = icmp ne i32 %e1, 0
  br i1 %f1, label %failed, label %fill
fill:
  %new = load ptr, ptr %slot
  %grad = call zeroext i1 @aoti_torch_grad_mode_is_enabled()
  call void @aoti_torch_grad_mode_set_enabled(i1 zeroext false)
  %e2 = call i32 @aoti_torch_copy_(ptr %new, ptr %handle, i32 0)
  call void @aoti_torch_grad_mode_set_enabled(i1 zeroext %grad)
  %f2 = icmp ne i32 %e2, 0
  br i1 %f2, label %failed_fill, label %good
failed_fill:
  %e3 = call i32 @aoti_torch_delete_tensor_object(ptr %new)
  br label %failed
failed:
  store ptr null, ptr %slot
  ret i32 {TORCH_ERROR}
good:
  ret i32 0
}}

; Make the tensor in a slot the one described: a copy where kiln_compare asks for one or it lies in [low, high).
define i32 @kiln_adopt(ptr %slot, ptr %descriptor, ptr %low, ptr %high) {{
entry:
  %data_at = alloca ptr
  %new_at = alloca ptr
  %handle = load ptr, ptr %slot
  %status = call i32 @kiln_compare(ptr %handle, ptr %descriptor)
  switch i32 %status, label %give_up [
    i32 0, label %where
    i32 3, label %copy
    i32 4, label %copy
    i32 {WRONG_RESULT}, label %left_out
  ]
left_out:
  %undefined = call i32 @adopt_nothing(ptr %slot, ptr %descriptor)
  ret i32 %undefined
where:
  %e0 = call i32 @aoti_torch_get_data_ptr(ptr %handle, ptr %data_at)
  %data = load ptr, ptr %data_at
  %above = icmp uge ptr %data, %low
  %below = icmp ult ptr %data, %high
  %inside = and i1 %above, %below
  br i1 %inside, label %copy, label %good
copy:
  %e1 = call i32 @kiln_copy(ptr %handle, ptr %descriptor, ptr %new_at)
  %f1 = icmp ne i32 %e1, 0
  br i1 %f1, label %failed, label %swap
swap:
  %new = load ptr, ptr %new_at
  store ptr %new, ptr %slot
  %e3 = call i32 @aoti_torch_delete_tensor_object(ptr %handle)
  br label %good
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
    i32 4, label %copy
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


def _keys() -> str:
    """Whether a tensor is plain, and whether it is but for marks. Without its keys, as far as torch's C ABI tells."""
    known = plain_keys()
    if known.offset is None:
        return f"""
define i1 @kiln_is_plain(ptr %handle) {{
  %device_at = alloca i32
  %layout_at = alloca i32
  store i32 -1, ptr %device_at
  store i32 -1, ptr %layout_at
  %e0 = call i32 @aoti_torch_get_device_type(ptr %handle, ptr %device_at)
  %e1 = call i32 @aoti_torch_get_layout(ptr %handle, ptr %layout_at)
  %device = load i32, ptr %device_at
  %layout = load i32, ptr %layout_at
  %on_cpu = icmp eq i32 %device, {shim_constant("aoti_torch_device_type_cpu")}
  %strided = icmp eq i32 %layout, {shim_constant("aoti_torch_layout_strided")}
  %plain = and i1 %on_cpu, %strided
  ret i1 %plain
}}

define internal i1 @kiln_is_marked(ptr %handle) {{
  ret i1 false
}}
"""

    def function(name: str, relevant: int) -> str:
        return f"""
define i1 @{name}(ptr %handle) alwaysinline {{
  %tensor = load ptr, ptr %handle
  %keys_at = getelementptr i8, ptr %tensor, i64 {known.offset}
  %keys = load i64, ptr %keys_at
  %relevant = and i64 %keys, {relevant}
  %plain = icmp eq i64 %relevant, {known.expected}
  ret i1 %plain
}}
"""

    return function("kiln_is_plain", known.relevant) + function("kiln_is_marked", known.relevant & ~known.marks)


def part() -> Part:
    return Part(
        (),
        (),
        _DECLARATIONS,
        _keys() + _CODE.replace("i32 CPU", f"i32 {shim_constant('aoti_torch_device_type_cpu')}"),
        (
            "kiln_delete",
            "kiln_delete_all",
            "kiln_compare",
            "kiln_adopt",
            "kiln_store_result",
            "kiln_retype",
        ),
    )
