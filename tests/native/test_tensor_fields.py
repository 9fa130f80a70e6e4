"""Offsets of private fields are right for tensors of all kinds, or are not claimed."""

from __future__ import annotations

import ctypes
from random import Random
from typing import Any

import pytest
import torch

from torchkiln.native.tensor_fields import TensorFields, tensor_fields

_TENSORS = {
    "a parameter": lambda: torch.nn.Parameter(torch.randn(3, 4)),
    "a view": lambda: torch.randn(6, 8)[1::2, 3:],
    "an empty tensor": lambda: torch.empty(0, 3),
    "a number": lambda: torch.tensor(2.5),
    "bfloat16": lambda: torch.randn(5).bfloat16(),
    "memory of NumPy's": lambda: torch.from_numpy(torch.randn(4).numpy().copy()),
}


def _word(address: int) -> int:
    return ctypes.c_uint64.from_address(address).value


@pytest.fixture
def fields() -> TensorFields:
    found = tensor_fields()
    assert found is not None
    return found


@pytest.mark.parametrize("name", _TENSORS)
def test_the_fields_of_a_tensor_are_where_they_were_found(fields, name):
    tensor = _TENSORS[name]()
    storage = _word(tensor._cdata + fields.storage)
    assert storage == tensor.untyped_storage()._cdata
    assert _word(tensor._cdata + fields.offset) == tensor.storage_offset()
    assert _word(storage + fields.memory) == tensor.untyped_storage().data_ptr()
    for _ in range(3):
        counter = _word(tensor._cdata + fields.counter)
        assert ctypes.c_uint32.from_address(counter + fields.version).value == tensor._version
        with torch.no_grad():
            tensor.zero_()


def test_a_tensor_that_is_given_other_memory_shows_it(fields):
    tensor = torch.zeros(3)
    before = _word(tensor._cdata + fields.storage)
    tensor.data = torch.ones(3)
    assert _word(tensor._cdata + fields.storage) == tensor.untyped_storage()._cdata != before


def test_fields_are_found_in_any_memory() -> None:
    """What tensors that are gone left in memory looks like a field by chance."""
    random, kept = Random(0), []
    expected = tensor_fields()
    for _ in range(5000):
        kept.append(torch.randn(random.randrange(1, 300))[:].detach())
        if random.random() < 0.5:
            kept.pop(random.randrange(len(kept)))
        assert tensor_fields.__wrapped__() == expected


@pytest.mark.parametrize("transform", [torch.vmap, torch.func.grad, torch.func.functionalize])
def test_fields_are_found_inside_transforms(transform: Any) -> None:
    found: list[TensorFields | None] = []

    def noting(x: torch.Tensor) -> torch.Tensor:
        found.append(tensor_fields.__wrapped__())
        return x.sum()

    transform(noting)(torch.ones(3))
    assert found == [tensor_fields()]
    assert found != [None]
