"""Functions and variables of torch, Python, the BLAS and the C library that generated code names."""

from __future__ import annotations

from torchkiln.native.blas import BF16_GEMM, SET_THREADS
from torchkiln.native.symbols import ANY_MODE_ON, WRAP_TENSOR

_FUNCTIONS = f"""
i32 aoti_torch_get_data_ptr(ptr, ptr)
i32 aoti_torch_delete_tensor_object(ptr)
i32 aoti_torch_is_defined(ptr, ptr)
i32 aoti_torch_get_dim(ptr, ptr)
i32 aoti_torch_get_sizes(ptr, ptr)
i32 aoti_torch_get_strides(ptr, ptr)
i32 aoti_torch_get_dtype(ptr, ptr)
i32 aoti_torch_get_storage_offset(ptr, ptr)
i32 aoti_torch_get_storage_numel(ptr, ptr)
i32 aoti_torch_get_device_type(ptr, ptr)
i32 aoti_torch_get_device_index(ptr, ptr)
i32 aoti_torch_get_layout(ptr, ptr)
i32 aoti_torch__reinterpret_tensor(ptr, i64, ptr, ptr, i64, ptr)
i32 aoti_torch__alloc_from_pool(ptr, i64, i32, i64, ptr, ptr, ptr)
i32 aoti_torch_empty_strided(i64, ptr, ptr, i32, i32, i32, ptr)
i32 aoti_torch_create_tensor_from_blob(ptr, i64, ptr, ptr, i64, i32, i32, i32, ptr)
i32 aoti_torch_copy_(ptr, ptr, i32)
i32 aoti_torch_new_uninitialized_tensor(ptr)
i32 aoti_torch_new_tensor_handle(ptr, ptr)
zeroext i1 aoti_torch_grad_mode_is_enabled()
void aoti_torch_grad_mode_set_enabled(i1 zeroext)
ptr torch_exception_get_what_without_backtrace()
i32 torch_new_list_reserve_size(i64, ptr)
i32 torch_list_push_back(ptr, i64)
i32 torch_list_size(ptr, ptr)
i32 torch_list_get_item(ptr, i64, ptr)
i32 torch_delete_list(ptr)
i32 torch_new_stable_ivalue(ptr)
i32 torch_parallel_for(i64, i64, i64, ptr, ptr)
zeroext i1 {ANY_MODE_ON}(i1 zeroext)
ptr {WRAP_TENSOR}(ptr)
i32 PyGILState_Ensure()
void PyGILState_Release(i32)
ptr PyEval_SaveThread()
void PyEval_RestoreThread(ptr)
void Py_IncRef(ptr)
void Py_DecRef(ptr)
ptr PyLong_FromLongLong(i64)
i64 PyLong_AsLongLong(ptr)
ptr PyBool_FromLong(i64)
ptr PyList_New(i64)
i64 PyList_Size(ptr)
ptr PyList_GetItem(ptr, i64)
i32 PyList_SetItem(ptr, i64, ptr)
ptr PyTuple_GetItem(ptr, i64)
i32 PyType_IsSubtype(ptr, ptr)
ptr PyCapsule_New(ptr, ptr, ptr)
ptr PyCapsule_GetPointer(ptr, ptr)
ptr PyObject_CallFunctionObjArgs(ptr, ...)
ptr PyObject_CallMethodObjArgs(ptr, ptr, ...)
ptr PyErr_Format(ptr, ptr, ...)
ptr PyImport_ImportModule(ptr)
ptr PyObject_GetAttrString(ptr, ptr)
ptr PyErr_Occurred()
void PyErr_Clear()
void PyErr_Fetch(ptr, ptr, ptr)
void PyErr_NormalizeException(ptr, ptr, ptr)
void PyErr_Restore(ptr, ptr, ptr)
ptr PyUnicode_FromFormat(ptr, ...)
ptr PyUnicode_FromString(ptr)
i32 {SET_THREADS}(i32)
void {BF16_GEMM}({", ".join(["ptr"] * 13)}, i64, i64)
ptr _Znwm(i64)
i32 posix_memalign(ptr, i64, i64)
void free(ptr)
i32 clock_gettime(i32, ptr)
void llvm.memset.p0.i64(ptr, i8, i64, i1)
"""

FUNCTIONS = {line.split("(")[0].split()[-1]: line for line in _FUNCTIONS.strip().splitlines()}
"""Prototypes by name."""

VARIABLES = {
    "PyExc_RuntimeError": "ptr",
    "PyExc_IndexError": "ptr",
    "PyExc_ZeroDivisionError": "ptr",
    "PyExc_OverflowError": "ptr",
    "PyExc_ValueError": "ptr",
    "PyExc_TypeError": "ptr",
    "PyLong_Type": "i8",
    "_Py_NoneStruct": "i8",
}
"""Types by name."""
