"""Tensor handles: releasing them, comparing a tensor with what was compiled for, adopting results.

A *descriptor* is an array of i64: dtype code and place, number of dimensions, sizes, strides. A *slot* holds an owned
tensor handle or null.
"""

from __future__ import annotations

from dataclasses import dataclass

from torchkiln.codegen.llvm.functions import Function, Operand, Register, native
from torchkiln.codegen.llvm.status import ALIGNED, NUMBER_SHIFT, ON_CARD, TORCH_ERROR, WRONG_RESULT
from torchkiln.native.symbols import shim_constant
from torchkiln.native.tensor_keys import plain_keys

# Answers of ``compare`` besides 0, TORCH_ERROR and WRONG_RESULT.
OTHER_STRIDES, NOT_IN_MEMORY, NOT_ALIGNED = 3, 4, 5

# The most dimensions that torch's operators take.
_MOST_DIMENSIONS = 64


@dataclass(frozen=True)
class Descriptor:
    """The parts of a descriptor; ``place`` holds ``ALIGNED``, ``ON_CARD`` and the number of the card."""

    dtype: Register
    place: Register
    dim: Register
    sizes: Register
    strides: Register

    @classmethod
    def read(cls, place: Register) -> Descriptor:
        first, dim, sizes = place[0], place[1], place.at(2)
        return cls(first & (ALIGNED - 1), first, dim, sizes, sizes.at(dim))


def fail_unless_zero(f: Function, *statuses: Register) -> None:
    """Return TORCH_ERROR where a function of torch's C ABI failed."""
    status = statuses[0]
    for other in statuses[1:]:
        status = status | other
    with f.if_(status.ne(0)):
        f.ret(TORCH_ERROR)


@native("void kiln_delete(ptr*)", exported=True)
def delete(f: Function, slot: Register) -> None:
    """Empty a slot."""
    handle = slot[0]
    with f.if_(handle.ne(None)):
        slot[0] = None
        f.call("aoti_torch_delete_tensor_object", handle)


@native("void kiln_delete_all(ptr*, i64)", exported=True)
def _delete_all(f: Function, slots: Register, count: Register) -> None:
    with f.loop(count) as k:
        f.call(delete, slots.at(k))


@native("i1 is_plain(i8**)", attributes="alwaysinline")
def is_plain(f: Function, handle: Register) -> None:
    """Whether the memory of a tensor holds its values. Without its keys, as far as torch's C ABI tells."""
    known = plain_keys()
    if known.offset is not None:
        f.ret((handle[0].at(known.offset).cast("i64*")[0] & known.relevant).eq(known.expected))
        return
    device, layout = f.variable("i32", -1), f.variable("i32", -1)
    f.call("aoti_torch_get_device_type", handle, device)
    f.call("aoti_torch_get_layout", handle, layout)
    on_cpu = device[0].eq(shim_constant("aoti_torch_device_type_cpu"))
    f.ret(on_cpu & layout[0].eq(shim_constant("aoti_torch_layout_strided")))


@native("i1 is_plain_at(i8**, i64)", attributes="alwaysinline")
def is_plain_at(f: Function, handle: Register, place: Register) -> None:
    """Whether a tensor is plain on the device that ``place``, of a descriptor, asks for: on any where it is a mark."""
    with f.if_(place < 0):
        f.ret(f.call(_is_plain_anywhere, handle))
    with f.if_((place & ON_CARD).eq(0)):
        f.ret(f.call(is_plain, handle))
    f.ret(f.call(_is_plain_on_card, handle, place.binary("lshr", NUMBER_SHIFT)))


@native("i1 is_plain_anywhere(i8**)")
def _is_plain_anywhere(f: Function, handle: Register) -> None:
    known = plain_keys()
    if known.offset is None:
        f.ret(f.call(is_plain, handle))
        return
    keys = handle[0].at(known.offset).cast("i64*")[0]
    f.ret((keys & (known.relevant & ~known.devices)).eq(known.expected & ~known.devices))


@native("i1 is_plain_on_card(i8**, i64)")
def _is_plain_on_card(f: Function, handle: Register, number: Register) -> None:
    known = plain_keys()
    if known.offset is not None:
        relevant = known.relevant & ~known.devices
        same = (handle[0].at(known.offset).cast("i64*")[0] & relevant).eq(known.expected & ~known.devices)
        with f.if_(~same):
            f.ret(0)
    device, index, layout = f.variable("i32", -1), f.variable("i32", -1), f.variable("i32", -1)
    f.call("aoti_torch_get_device_type", handle, device)
    f.call("aoti_torch_get_device_index", handle, index)
    f.call("aoti_torch_get_layout", handle, layout)
    here = device[0].eq(shim_constant("aoti_torch_device_type_cuda")) & index[0].convert("zext", "i64").eq(number)
    f.ret(here & layout[0].eq(shim_constant("aoti_torch_layout_strided")))


@native("i1 is_marked(i8**)", attributes="alwaysinline")
def _is_marked(f: Function, handle: Register) -> None:
    """Whether a tensor of any device is plain but for marks: its values are not those in its memory."""
    known = plain_keys()
    if known.offset is None:
        f.ret(0)
        return
    keys = handle[0].at(known.offset).cast("i64*")[0]
    f.ret((keys & (known.relevant & ~(known.marks | known.devices))).eq(known.expected & ~known.devices))


@native("i32 kiln_compare(ptr, i64*)", exported=True)
def compare(f: Function, handle: Register, descriptor: Register) -> None:
    """0 for a tensor that is as described, else what is wrong with it.

    TORCH_ERROR: torch failed. WRONG_RESULT: another dtype or size, undefined, without memory for its elements, on
    another device, or readable by operators of torch only. OTHER_STRIDES: nothing else. NOT_ALIGNED: nothing at all but
    where its memory begins. NOT_IN_MEMORY: its memory does not hold its values.
    """
    wanted, sizes = _compare_metadata(f, handle, descriptor)
    strides = f.variable("i64*", wanted.strides)
    plain = f.call(is_plain_at, handle, wanted.place)
    with f.if_(plain):
        fail_unless_zero(f, f.call("aoti_torch_get_strides", handle, strides))
    with f.if_(~plain):
        _mismatch_where(f, ~f.call(_is_marked, handle))
    other_strides, empty, last = f.variable("i1", 0), f.variable("i1", 0), f.variable("i64", 0)
    with f.loop(wanted.dim) as k:
        size, stride = sizes[0][k], strides[0][k]
        _mismatch_where(f, size.ne(wanted.sizes[k]))
        other_strides[0] |= stride.ne(wanted.strides[k]) & size.ne(1)
        empty[0] |= size.eq(0)
        last[0] += (size - 1) * stride
    with f.if_(~plain):
        f.ret(NOT_IN_MEMORY)
    with f.if_(empty[0]):
        f.ret(0)
    offset, held = f.alloca("i64"), f.alloca("i64")
    fail_unless_zero(
        f,
        f.call("aoti_torch_get_storage_offset", handle, offset),
        f.call("aoti_torch_get_storage_numel", handle, held),
    )
    _mismatch_where(f, offset[0] + last[0] >= held[0])
    with f.if_(other_strides[0]):
        f.ret(OTHER_STRIDES)
    with f.if_((wanted.place & ALIGNED).ne(0)):
        data = f.variable("i64", 0)
        fail_unless_zero(f, f.call("aoti_torch_get_data_ptr", handle, data))
        with f.if_((data[0] & 15).ne(0)):
            f.ret(NOT_ALIGNED)
    f.ret(0)


def _mismatch_where(f: Function, condition: Register) -> None:
    with f.if_(condition):
        f.ret(WRONG_RESULT)


def _compare_metadata(f: Function, handle: Register, descriptor: Register) -> tuple[Descriptor, Register]:
    """What is described, and a cell of the sizes; returns from the function unless dtype and rank are as described."""
    _mismatch_where(f, handle.eq(None))
    defined, dtype, dim, sizes = f.alloca("i8"), f.alloca("i32"), f.alloca("i64"), f.alloca("i64*")
    fail_unless_zero(f, f.call("aoti_torch_is_defined", handle, defined))
    _mismatch_where(f, defined[0].eq(0))
    fail_unless_zero(
        f,
        f.call("aoti_torch_get_dtype", handle, dtype),
        f.call("aoti_torch_get_dim", handle, dim),
        f.call("aoti_torch_get_sizes", handle, sizes),
    )
    wanted = Descriptor.read(descriptor)
    _mismatch_where(f, dtype[0].convert("sext", "i64").ne(wanted.dtype) | dim[0].ne(wanted.dim))
    return wanted, sizes


@native("i32 empty_as_described(i64*, ptr*)")
def _empty_as_described(f: Function, descriptor: Register, slot: Register) -> None:
    """Put a new tensor in an empty slot, which stays empty where torch fails."""
    wanted = Descriptor.read(descriptor)
    on_card = (wanted.place & ON_CARD).ne(0)
    kinds = [f.literal("i32", shim_constant(f"aoti_torch_device_type_{kind}")) for kind in ("cuda", "cpu")]
    device = on_card.select(*kinds), wanted.place.binary("lshr", NUMBER_SHIFT).convert("trunc", "i32")
    dtype = wanted.dtype.convert("trunc", "i32")
    status = f.call("aoti_torch_empty_strided", wanted.dim, wanted.sizes, wanted.strides, dtype, *device, slot)
    with f.if_(status.ne(0)):
        slot[0] = None
    f.ret(status)


@native("i32 copy_elements(ptr, ptr, i64*)")
def copy_elements(f: Function, target: Register, source: Register, descriptor: Register) -> None:
    """Copy between two tensors that are both as described, past autograd; expanded elements once."""
    wanted, sizes = Descriptor.read(descriptor), f.alloca("i64", _MOST_DIMENSIONS)
    with f.if_(wanted.dim > _MOST_DIMENSIONS):
        f.ret(TORCH_ERROR)
    with f.loop(wanted.dim) as k:
        repeated = wanted.strides[k].eq(0) & (wanted.sizes[k] > 1)
        sizes[k] = repeated.select(f.literal("i64", 1), wanted.sizes[k])
    views = f.variable("ptr", None), f.variable("ptr", None)
    status = f.variable("i32", 0)
    for handle, view in zip((target, source), views, strict=True):
        with f.if_(status[0].eq(0)):
            status[0] = f.call("aoti_torch__reinterpret_tensor", handle, wanted.dim, sizes, wanted.strides, 0, view)
    with f.if_(status[0].eq(0)):
        status[0] = f.call("aoti_torch_copy_", views[0][0], views[1][0], 0)
    for view in views:
        f.call(delete, view)
    f.ret(status[0])


@native("i32 align(ptr, i64*, ptr*)")
def align(f: Function, handle: Register, descriptor: Register, slot: Register) -> None:
    """Put an aligned copy of a tensor that is as described but for that in an empty slot."""
    fail_unless_zero(f, f.call(_empty_as_described, descriptor, slot))
    status = f.call(copy_elements, slot[0], handle, descriptor)
    with f.if_(status.ne(0)):
        f.call(delete, slot)
    f.ret(status)


@native("i32 copy_as_described(ptr, i64*, ptr*)")
def copy_as_described(f: Function, handle: Register, descriptor: Register, slot: Register) -> None:
    """Put a copy of a tensor that is laid out as described in an empty slot. No gradient is recorded."""
    fail_unless_zero(f, f.call(_empty_as_described, descriptor, slot))
    grad = f.call("aoti_torch_grad_mode_is_enabled")
    f.call("aoti_torch_grad_mode_set_enabled", 0)
    status = f.call("aoti_torch_copy_", slot[0], handle, 0)
    f.call("aoti_torch_grad_mode_set_enabled", grad)
    with f.if_(status.ne(0)):
        f.call(delete, slot)
        f.ret(TORCH_ERROR)
    f.ret(0)


@native("i32 kiln_adopt(ptr*, i64*, ptr, ptr)", exported=True)
def _adopt(f: Function, slot: Register, descriptor: Register, low: Register, high: Register) -> None:
    """Make the tensor in a slot the one described: a copy where it has to be one or lies in [low, high)."""
    handle = slot[0]
    status = f.call(compare, handle, descriptor)
    with f.if_(status.eq(WRONG_RESULT)):
        f.ret(f.call(_adopt_nothing, slot, descriptor))
    with f.if_(status.eq(0)):
        data = f.alloca("ptr")
        f.call("aoti_torch_get_data_ptr", handle, data)
        with f.if_(data[0].compare("ult", low) | data[0].compare("uge", high)):
            f.ret(0)
    with f.if_(status.eq(TORCH_ERROR)):
        f.ret(status)
    copy = f.alloca("ptr")
    fail_unless_zero(f, f.call(copy_as_described, handle, descriptor, copy))
    slot[0] = copy[0]
    f.call("aoti_torch_delete_tensor_object", handle)
    f.ret(0)


@native("i32 adopt_nothing(ptr*, i64*)")
def _adopt_nothing(f: Function, slot: Register, descriptor: Register) -> None:
    """0, and an undefined tensor in the slot, where an operator left out an empty result."""
    wanted, handle, defined = Descriptor.read(descriptor), slot[0], f.variable("i8", 0)
    absent = handle.eq(None)
    with f.if_(~absent):
        f.call("aoti_torch_is_defined", handle, defined)
        with f.if_(defined[0].ne(0)):
            f.ret(WRONG_RESULT)
    with f.loop(wanted.dim) as k, f.if_(wanted.sizes[k].eq(0)):
        with f.if_(absent):
            f.call("aoti_torch_new_uninitialized_tensor", slot)
        f.ret(0)
    f.ret(WRONG_RESULT)


@native("i32 kiln_store_result(ptr, ptr, i64*)", exported=True)
def _store_result(f: Function, target: Register, handle: Register, descriptor: Register) -> None:
    """Copy a result to the memory planned for it."""
    status = f.call(compare, handle, descriptor)
    with f.if_(status.eq(TORCH_ERROR) | status.eq(WRONG_RESULT)):
        f.ret(status)
    f.ret(f.call("aoti_torch_copy_", target, handle, 0))


@native("i32 kiln_retype(ptr, i64, i64, i32, i64, i64*, i64*, ptr*)", exported=True)
def _retype(f: Function, handle: Register, skipped: Register, itemsize: Register, *view: Operand) -> None:
    """A view of another dtype, ``skipped`` bytes after the first element of the tensor in its storage.

    ``view`` is its dtype, dimensions, sizes and strides, and the slot it goes into.
    """
    offset, base, one = f.alloca("i64"), f.alloca("ptr"), f.variable("i64", 1)
    fail_unless_zero(f, f.call("aoti_torch_get_storage_offset", handle, offset))
    back = f.literal("i64", 0) - offset[0]
    fail_unless_zero(f, f.call("aoti_torch__reinterpret_tensor", handle, 1, one, one, back, base))
    status = f.call("aoti_torch__alloc_from_pool", base[0], offset[0] * itemsize + skipped, *view)
    f.call("aoti_torch_delete_tensor_object", base[0])
    f.ret(status)


EXPORTS = (delete, _delete_all, compare, _adopt, _store_result, _retype)
