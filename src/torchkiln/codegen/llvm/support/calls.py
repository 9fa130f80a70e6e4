"""Calls back into torch and Python: lists and optional values of the stable ABI, and functions called by handles."""

from __future__ import annotations

from torchkiln.codegen.llvm.functions import Function, Register, native
from torchkiln.codegen.llvm.status import PYTHON_ERROR, WRONG_RESULT
from torchkiln.codegen.llvm.support.handles import delete
from torchkiln.native.symbols import address_of


@native("ptr kiln_box(i64)", exported=True)
def _box(f: Function, value: Register) -> None:
    """A present optional value: eight bytes that torch frees. It allocates them itself since 2.13; before, C++ does."""
    if address_of("torch_new_stable_ivalue") is not None:
        place = f.alloca("i64*")
        f.call("torch_new_stable_ivalue", place)
        box = place[0]
    else:
        box = f.call("_Znwm", 8).cast("i64*")
    box[0] = value
    f.ret(box)


@native("ptr kiln_list(i64*, i64)", exported=True)
def _list(f: Function, values: Register, count: Register) -> None:
    """A list of the stable ABI holding these values."""
    list_ = f.alloca("ptr")
    f.call("torch_new_list_reserve_size", count, list_)
    with f.loop(count) as k:
        f.call("torch_list_push_back", list_[0], values[k])
    f.ret(list_[0])


@native("i32 kiln_take_list(ptr, i64, ptr*)", exported=True)
def _take_list(f: Function, list_: Register, count: Register, handles: Register) -> None:
    """The tensor handles of a returned list, which is freed; they are too where there are not ``count`` of them."""
    size, item = f.variable("i64", 0), f.alloca("ptr")
    f.call("torch_list_size", list_, size)
    as_expected = size[0].eq(count)
    with f.loop(size[0]) as k:
        item[0] = None
        f.call("torch_list_get_item", list_, k, item)
        with f.if_(as_expected):
            handles[k] = item[0]
            f.continue_()
        f.call(delete, item)
    f.call("torch_delete_list", list_)
    f.ret(as_expected.select(f.literal("i32", 0), WRONG_RESULT))


@native("i32 kiln_python_call(ptr, i64, ptr*, i64, i64*, i64, ptr*, i64)", exported=True)
def _python_call(
    f: Function,
    objects: Register,
    which: Register,
    handles: Register,
    handle_count: Register,
    numbers: Register,
    number_count: Register,
    results: Register,
    result_count: Register,
) -> None:
    """Call object ``which`` of the tuple with tensors (owned handles, taken) and numbers; handles come back."""
    gil = f.call("PyGILState_Ensure")
    function = f.call("PyTuple_GetItem", objects, which)
    list_ = f.call("PyList_New", handle_count + number_count)
    with f.loop(handle_count) as k:
        f.call("PyList_SetItem", list_, k, f.call("PyCapsule_New", handles[k], None, None))
    with f.loop(number_count) as k:
        f.call("PyList_SetItem", list_, handle_count + k, f.call("PyLong_FromLongLong", numbers[k]))
    answer = f.call("PyObject_CallFunctionObjArgs", function, list_, None)
    f.call("Py_DecRef", list_)
    answered = answer.ne(None)
    with f.if_(answered):
        with f.loop(result_count) as k:
            item = f.call("PyList_GetItem", answer, k)
            results[k] = None
            with f.if_(item.ne(f.address("_Py_NoneStruct"))):
                results[k] = f.call("PyCapsule_GetPointer", item, None)
        f.call("Py_DecRef", answer)
    f.call("PyGILState_Release", gil)
    f.ret(answered.select(f.literal("i32", 0), PYTHON_ERROR))


EXPORTS = (_box, _list, _take_list, _python_call)
