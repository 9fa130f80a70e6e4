"""Handles of tensors, as torch's C ABI takes them, made of Python's tensors and made into them."""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from torchkiln.native.symbols import address_of


def _capsule_functions() -> tuple[Any, Any]:
    get = ctypes.pythonapi.PyCapsule_GetPointer
    get.restype, get.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    new = ctypes.pythonapi.PyCapsule_New
    new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    return get, new


_capsule_pointer, _new_capsule = _capsule_functions()


def handles_of(tensors: list[torch.Tensor]) -> list[int]:
    """Owned handles of Python tensors."""
    capsules = torch._C._aoti.unsafe_alloc_void_ptrs_from_tensors(tensors)
    return [_capsule_pointer(capsule, None) for capsule in capsules]


def steal(handles: list[int]) -> list[torch.Tensor]:
    """Python tensors of owned handles, which are gone afterwards."""
    capsules = [_new_capsule(handle, None, None) for handle in handles]
    tensors: list[torch.Tensor] = torch._C._aoti.alloc_tensors_by_stealing_from_void_ptrs(capsules)
    return tensors


def delete_handles(handles: list[int]) -> None:
    address = address_of("aoti_torch_delete_tensor_object")
    assert address is not None
    delete = ctypes.PYFUNCTYPE(ctypes.c_int32, ctypes.c_void_p)(address)
    for handle in handles:
        delete(handle)
