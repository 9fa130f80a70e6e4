"""What comes in: handles of the tensors in a Python list or tuple, their numbers, checks, and data pointers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torchkiln.codegen.llvm.functions import Function, Register, native
from torchkiln.codegen.llvm.status import COPY_ALIGNED, COPY_STRIDED, NUMBER, OPAQUE, TORCH_ERROR, UNUSED
from torchkiln.codegen.llvm.support.errors import raise_error
from torchkiln.codegen.llvm.support.handles import (
    NOT_ALIGNED,
    OTHER_STRIDES,
    align,
    compare,
    copy_as_described,
    is_plain_at,
)
from torchkiln.native.symbols import ANY_MODE_ON, address_of
from torchkiln.native.tensor_layout import TENSOR_OFFSET

# The type in the head of every Python object.
_TYPE_OFFSET = 8

# What ``read_list`` answers for a tensor that is not plain, or a number without a value yet.
_NOT_PLAIN = 2


@contextmanager
def _descriptors(f: Function, count: Register, table: Register) -> Iterator[tuple[Register, Register]]:
    """A loop over descriptors, which follow each other in ``table``: their positions and themselves."""
    following = f.variable("i64*", table)
    with f.loop(count) as k:
        descriptor = following[0]
        following[0] = descriptor.at(descriptor[1] * 2 + 2)
        yield k, descriptor


@native("i64 kiln_check_inputs(ptr*, i64, i64*)", exported=True)
def _check_inputs(f: Function, handles: Register, count: Register, table: Register) -> None:
    """The first tensor that is not as its descriptor says, or -1; a dtype below 0 is not compared."""
    with _descriptors(f, count, table) as (k, descriptor):
        with f.if_(descriptor[0] < 0):
            f.continue_()
        with f.if_(f.call(compare, handles[k], descriptor).ne(0)):
            f.ret(k)
    f.ret(-1)


@native("i64 kiln_copy_inputs(ptr*, i64, i64*, i64*, ptr*)", exported=True)
def _copy_inputs(
    f: Function, handles: Register, count: Register, table: Register, mask: Register, copies: Register
) -> None:
    """Make copies that the caller owns, where the mask allows it: they replace tensors with other strides.

    Tensors that are not aligned stay, and the caller reads and writes the copies beside them. The result is the first
    tensor that is not as its descriptor says, and has no copy, or -1.
    """
    with _descriptors(f, count, table) as (k, descriptor):
        with f.if_(descriptor[0] < 0):
            f.continue_()
        status = f.call(compare, handles[k], descriptor)
        with f.if_(status.eq(0)):
            f.continue_()
        with f.if_(status.eq(NOT_ALIGNED) & (mask[k] & COPY_ALIGNED).ne(0)):
            with f.if_(f.call(align, handles[k], descriptor, copies.at(k)).ne(0)):
                f.ret(k)
            f.continue_()
        with f.if_(status.ne(OTHER_STRIDES) | (mask[k] & COPY_STRIDED).eq(0)):
            f.ret(k)
        with f.if_(f.call(copy_as_described, handles[k], descriptor, copies.at(k)).ne(0)):
            f.ret(k)
        handles[k] = copies[k]
    f.ret(-1)


@native("i32 kiln_data_pointers(ptr*, i64, i64*, ptr*)", exported=True)
def _data_pointers(f: Function, handles: Register, count: Register, mask: Register, data: Register) -> None:
    """Data pointers of the tensors whose entry in the mask is not 0. One without elements may have none."""
    with f.loop(count) as k:
        with f.if_(mask[k].eq(0)):
            f.continue_()
        with f.if_(f.call("aoti_torch_get_data_ptr", handles[k], data.at(k)).ne(0)):
            f.ret(TORCH_ERROR)
    f.ret(0)


@native("i32 kiln_read_list(ptr, i64, i64*, ptr, i64, ptr*)", exported=True)
def _read_inputs(
    f: Function,
    list_: Register,
    count: Register,
    table: Register,
    objects: Register,
    which: Register,
    handles: Register,
) -> None:
    """Handles of the tensors in a Python list, read in place, and its integers where the table asks for them.

    Sets a Python error and returns 1 where one is not. Object ``which`` of the tuple is the class of tensors; the next
    one is a function that replaces tensors that are not plain. It raises where it cannot, or in a fake tensor mode.
    """
    tensor_type = f.call("PyTuple_GetItem", objects, which)
    # Where torch cannot say whether a mode is on, graphs are called through handles.
    mode_on = f.call(ANY_MODE_ON, 0) if address_of(ANY_MODE_ON) is not None else f.literal("i1", 1)
    with f.if_(~mode_on):
        status = f.call(_read_list, list_, count, table, tensor_type, handles)
        with f.if_(status.ne(_NOT_PLAIN)):
            f.ret(status)
    replace = f.call("PyTuple_GetItem", objects, which + 1)
    answer = f.call("PyObject_CallFunctionObjArgs", replace, list_, None)
    with f.if_(answer.eq(None)):
        f.ret(1)
    f.call("Py_DecRef", answer)
    status = f.call(_read_list, list_, count, table, tensor_type, handles)
    with f.if_(status.eq(_NOT_PLAIN)):
        raise_error(f, "TypeError", "an input is not a strided tensor that holds its values in memory of its device")
        f.ret(1)
    f.ret(status)


@native("i32 read_list(ptr, i64, i64*, ptr, ptr*)")
def _read_list(
    f: Function, list_: Register, count: Register, table: Register, tensor_type: Register, handles: Register
) -> None:
    """One reading, which sets no error where it answers _NOT_PLAIN."""
    size = f.call("PyList_Size", list_)
    with f.if_(size < 0):
        f.ret(1)
    with f.if_(size.ne(count)):
        raise_error(f, "TypeError", "this graph takes a list of %zd inputs, got %zd", count, size)
        f.ret(1)
    with _descriptors(f, count, table) as (k, descriptor):
        handles[k] = None
        dtype = descriptor[0]
        with f.if_(dtype.eq(UNUSED)):
            f.continue_()
        given = f.call("PyList_GetItem", list_, k).cast("i8*")
        with f.if_(dtype.eq(NUMBER)):
            with f.if_(~_is_instance(f, given, f.address("PyLong_Type"))):
                f.ret(_NOT_PLAIN)
            number = f.call("PyLong_AsLongLong", given)
            handles.cast("i64*")[k] = number
            with f.if_(number.eq(-1)), f.if_(f.call("PyErr_Occurred").ne(None)):
                f.ret(1)
            f.continue_()
        with f.if_(~_is_instance(f, given, tensor_type)):
            raise_error(f, "TypeError", "input %zd is not a tensor", k)
            f.ret(1)
        handle = given.at(TENSOR_OFFSET)
        handles[k] = handle
        with f.if_(dtype.ne(OPAQUE)), f.if_(~f.call(is_plain_at, handle, dtype)):
            f.ret(_NOT_PLAIN)
    f.ret(0)


def _is_instance(f: Function, given: Register, class_: Register) -> Register:
    return f.call("PyType_IsSubtype", given.at(_TYPE_OFFSET).cast("ptr*")[0], class_).ne(0)


@native("void kiln_take_inputs(ptr, i64, i64*, ptr*, ptr*)", exported=True)
def _take_inputs(
    f: Function, list_: Register, count: Register, mask: Register, handles: Register, owned: Register
) -> None:
    """Own the tensors that only this list holds, where the mask is not 0; None takes their place in the list.

    Owners in Python show in the reference count. Owners in C++ need not: then nothing is freed early.
    """
    with f.loop(count) as k:
        owned[k] = None
        with f.if_(mask[k].eq(0)):
            f.continue_()
        references = f.call("PyList_GetItem", list_, k).cast("i32*")[0]
        with f.if_(references.ne(1)):
            f.continue_()
        with f.if_(f.call("aoti_torch_new_tensor_handle", handles[k], owned.at(k)).eq(0)):
            handles[k] = owned[k]
            none = f.address("_Py_NoneStruct")
            f.call("Py_IncRef", none)
            f.call("PyList_SetItem", list_, k, none)


@native("void kiln_read_tuple(ptr, i64, ptr*)", exported=True)
def _read_tuple(f: Function, objects: Register, count: Register, handles: Register) -> None:
    """Handles of the first objects of a tuple, all of them tensors."""
    with f.loop(count) as k:
        handles[k] = f.call("PyTuple_GetItem", objects, k).cast("i8*").at(TENSOR_OFFSET)


EXPORTS = (_check_inputs, _copy_inputs, _data_pointers, _read_inputs, _take_inputs, _read_tuple)
