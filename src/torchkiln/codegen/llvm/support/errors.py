"""Python errors for steps that failed."""

from __future__ import annotations

from torchkiln.artifact.status import (
    INDEX_ERROR,
    NO_MEMORY,
    NO_NUMBER,
    OVERFLOW,
    TORCH_ERROR,
    VALUE_ERROR,
    WRONG_INPUT,
    WRONG_RESULT,
    ZERO_DIVISION,
)
from torchkiln.codegen.llvm.support.part import Part, message
from torchkiln.native.symbols import address_of

_DECLARATIONS = """
declare i32 @PyGILState_Ensure()
declare void @PyGILState_Release(i32)
declare void @Py_DecRef(ptr)
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
@PyExc_ZeroDivisionError = external global ptr
@PyExc_OverflowError = external global ptr
@PyExc_ValueError = external global ptr
"""

_MESSAGES = (
    message("torch", "%s (in %s)"),
    message("torch_unsaid", "%s failed and did not say why"),
    message("note", "(in %s)"),
    message("result", "%s returned a tensor of another type, size, device or layout than it was compiled for"),
    message("refused", "%s"),
    message("memory", "can't allocate memory for the intermediate values of a compiled graph"),
    message(
        "input",
        "input %zd is not a tensor of the type, sizes and strides this graph was compiled for,"
        " or its storage was made too small for them",
    ),
)

_CODE = f"""
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
    i32 {ZERO_DIVISION}, label %zero_division
    i32 {OVERFLOW}, label %overflow
    i32 {NO_NUMBER}, label %no_number
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
zero_division:
  %zero_division_error = load ptr, ptr @PyExc_ZeroDivisionError
  %r7 = call ptr (ptr, ptr, ...) @PyErr_Format(ptr %zero_division_error, ptr @message_refused, ptr %where)
  br label %done
overflow:
  %overflow_error = load ptr, ptr @PyExc_OverflowError
  %r8 = call ptr (ptr, ptr, ...) @PyErr_Format(ptr %overflow_error, ptr @message_refused, ptr %where)
  br label %done
no_number:
  %value_error = load ptr, ptr @PyExc_ValueError
  %r9 = call ptr (ptr, ptr, ...) @PyErr_Format(ptr %value_error, ptr @message_refused, ptr %where)
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


def part() -> Part:
    return Part(
        (),
        (),
        _DECLARATIONS,
        "\n".join((*_MESSAGES, _error_text(), _CODE)),
        ("kiln_error_set", "kiln_raise"),
    )
