"""Python errors for steps that failed."""

from __future__ import annotations

from torchkiln.codegen.llvm.functions import Function, Operand, Register, native
from torchkiln.codegen.llvm.status import (
    EXITS,
    NO_CARD_MEMORY,
    NO_LAUNCH,
    NO_MEMORY,
    REFUSED,
    TORCH_ERROR,
    WRONG_INPUT,
    WRONG_RESULT,
)
from torchkiln.native.symbols import address_of

# The text of the last C++ error. Before torch 2.13, torch itself prints it on stderr.
_LAST_ERROR = "torch_exception_get_what_without_backtrace"


@native("i1 kiln_error_set()", exported=True)
def _error_set(f: Function) -> None:
    """Whether a Python error is set in this thread."""
    gil = f.call("PyGILState_Ensure")
    error = f.call("PyErr_Occurred")
    f.call("PyGILState_Release", gil)
    f.ret(error.ne(None))


@native("void kiln_raise(i32, ptr, i64)", exported=True)
def _raise(f: Function, kind: Register, where: Register, number: Register) -> None:
    """Set the Python error for a failed step; needs the interpreter."""
    refusal = f.literal("ptr*", None)
    for error, block in REFUSED.items():
        refusal = kind.eq(EXITS[block]).select(f.address(f"PyExc_{error}"), refusal)
    with f.if_(refusal.ne(None)):
        f.call("PyErr_Format", refusal[0], "%s", where)
    with f.if_(kind.eq(WRONG_RESULT)):
        text = "%s returned a tensor of another type, size, device or layout than it was compiled for"
        raise_error(f, "RuntimeError", text, where)
    with f.if_(kind.eq(NO_MEMORY)):
        raise_error(f, "RuntimeError", "can't allocate memory for the intermediate values of a compiled graph")
    with f.if_(kind.eq(WRONG_INPUT)):
        text = (
            "input %zd is not a tensor of the type, sizes and strides this graph was compiled for,"
            " or its storage was made too small for them"
        )
        raise_error(f, "RuntimeError", text, number)
    with f.if_(kind.eq(NO_LAUNCH)):
        text = "%s could not be launched: error %zd of CUDA's driver"
        raise_error(f, "RuntimeError", text, where, number)
    with f.if_(kind.eq(NO_CARD_MEMORY)):
        f.call(_raise_out_of_memory, where)
    with f.if_(kind.eq(TORCH_ERROR)):
        f.call(_raise_torch_error, where)


@native("void raise_torch_error(ptr)")
def _raise_torch_error(f: Function, where: Register) -> None:
    with f.if_(f.call("PyErr_Occurred").ne(None)):
        # A dispatch mode or a kernel in Python raised inside torch: the error is there already, class and all.
        f.call(_add_note, where)
        f.ret()
    if address_of(_LAST_ERROR) is None:
        text = f.literal("i8*", "a torch operator failed; this version of torch writes its message to stderr")
    else:
        text = f.call(_LAST_ERROR).cast("i8*")
    with f.if_(text[0].eq(0)):
        raise_error(f, "RuntimeError", "%s failed and did not say why", where)
        f.ret()
    raise_error(f, "RuntimeError", "%s (in %s)", text, where)


@native("void raise_out_of_memory(ptr)")
def _raise_out_of_memory(f: Function, where: Register) -> None:
    """torch's own class of error, which programs catch to go on with less."""
    torch_module = f.call("PyImport_ImportModule", "torch")
    with f.if_(torch_module.eq(None)):
        f.ret()
    class_ = f.call("PyObject_GetAttrString", torch_module, "OutOfMemoryError")
    f.call("Py_DecRef", torch_module)
    with f.if_(class_.eq(None)):
        f.ret()
    if address_of(_LAST_ERROR) is None:
        text = f.literal("i8*", "a card gave no memory; this version of torch writes why to stderr")
    else:
        text = f.call(_LAST_ERROR).cast("i8*")
    f.call("PyErr_Format", class_, "%s (in %s)", text, where)
    f.call("Py_DecRef", class_)


@native("void add_note(ptr)")
def _add_note(f: Function, where: Register) -> None:
    """Note on the Python error that is set where it came from."""
    error = [f.alloca("ptr") for _ in ("type", "value", "traceback")]
    f.call("PyErr_Fetch", *error)
    f.call("PyErr_NormalizeException", *error)
    name = f.call("PyUnicode_FromString", "add_note")
    note = f.call("PyUnicode_FromFormat", "(in %s)", where)
    answer = f.call("PyObject_CallMethodObjArgs", error[1][0], name, note, None)
    for reference in (name, note, answer):
        f.call("Py_DecRef", reference)
    f.call("PyErr_Clear")
    f.call("PyErr_Restore", *(place[0] for place in error))


def raise_error(f: Function, error: str, text: str, *arguments: Operand) -> None:
    """Set a Python error of a built-in class; ``text`` is formatted as ``PyErr_Format`` does."""
    f.call("PyErr_Format", f.address(f"PyExc_{error}")[0], text, *arguments)


EXPORTS = (_error_set, _raise)
