"""What goes out: the list of results, as Python objects."""

from __future__ import annotations

from torchkiln.codegen.llvm.functions import Function, Register, native
from torchkiln.native.symbols import WRAP_TENSOR, address_of

KINDS = {"tensor": 0, "input": 1, "value": 2, "number": 3, "boolean": 4}
"""What an output is, as the table says it."""


@native("ptr kiln_wrap_outputs(i64, i64*, ptr*, ptr, ptr)", exported=True)
def _wrap_outputs(
    f: Function, count: Register, table: Register, handles: Register, inputs: Register, objects: Register
) -> None:
    """The list of outputs.

    Each has two i64 in the table: its kind, and an index among the handles (taken; numbers are among them), the inputs
    or the objects.
    """
    if address_of(WRAP_TENSOR) is None:
        f.ret(None)  # never called: without the function graphs run in handle mode, which does not wrap
        return
    list_ = f.call("PyList_New", count)
    with f.if_(list_.eq(None)):
        f.ret(None)
    with f.loop(count) as k:
        kind, number = table[k * 2], table[k * 2 + 1]
        with f.if_(kind.eq(KINDS["tensor"])):
            handle = handles[number]
            f.call("PyList_SetItem", list_, k, f.call(WRAP_TENSOR, handle))
            f.call("aoti_torch_delete_tensor_object", handle)
        for borrowed, function, source in (("input", "PyList_GetItem", inputs), ("value", "PyTuple_GetItem", objects)):
            with f.if_(kind.eq(KINDS[borrowed])):
                value = f.call(function, source, number)
                f.call("Py_IncRef", value)
                f.call("PyList_SetItem", list_, k, value)
        for boxed, function in (("number", "PyLong_FromLongLong"), ("boolean", "PyBool_FromLong")):
            with f.if_(kind.eq(KINDS[boxed])):
                f.call("PyList_SetItem", list_, k, f.call(function, handles.cast("i64*")[number]))
    f.ret(list_)


EXPORTS = (_wrap_outputs,)
