"""Weights that were marked are told from weights that changed, in native code and without it."""

from __future__ import annotations

import gc

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses import FakeTensorMode

from torchkiln.runtime import weight_marks
from torchkiln.runtime.weight_marks import WeightMarks


def _weights() -> list[torch.Tensor]:
    return [
        *(torch.nn.Parameter(torch.randn(16, 8)), torch.randn(33), torch.randn(4, 6).bfloat16(), torch.tensor(1.5)),
        torch.randn(3, 8)[0],  # a view: others of the same memory may take its place
    ]


@pytest.fixture(params=["native", "python"])
def marked(request, monkeypatch):
    """Tensors in a list of inputs among others, and the comparison with them."""
    if request.param == "python":
        monkeypatch.setattr(weight_marks, "tensor_fields", lambda: None)
    tensors = _weights()
    inputs = [None, tensors[0], 7, tensors[1], tensors[2], torch.randn(2), tensors[3], tensors[4]]
    marks = WeightMarks(tensors, [1, 3, 4, 6, 7])
    native = type(marks.hold) is type(len)
    assert native == (request.param == "native")
    return inputs, marks


def test_untouched_weights_hold(marked):
    inputs, marks = marked
    assert marks.hold(inputs)
    inputs[0], inputs[5] = torch.randn(3), torch.randn(4)  # no weights
    gc.collect()
    assert marks.hold(inputs)


def _add_in_place(inputs):
    with torch.no_grad():
        inputs[1].add_(1)


def _write_one_element(inputs):
    inputs[3][5] = 2.0


def _write_a_view(inputs):
    inputs[4].view(-1)[3:4].zero_()


def _assign_data(inputs):
    inputs[1].data = inputs[1].data.clone()


def _step_through_data(inputs):
    inputs[1].data.mul_(1.5)


def _write_through_numpy(inputs):
    inputs[3].numpy()[:] += 1


def _write_a_number_through_data(inputs):
    inputs[6].data.mul_(2)


def _write_the_last_element_in_numpy(inputs):
    inputs[3].numpy()[-1] += 1


def _assign_data_elsewhere_in_its_storage(inputs):
    inputs[7].data = inputs[7].as_strided([8], [1], 16)


def _swap_with_another_view(inputs):
    torch.utils.swap_tensors(inputs[7], inputs[7]._base[1])


def _other_object(inputs):
    inputs[3] = inputs[3].clone()


def _same_memory_in_another_tensor(inputs):
    inputs[3] = inputs[3].detach()


def _resize_storage(inputs):
    storage = inputs[3].untyped_storage()
    size = storage.nbytes()
    storage.resize_(0)
    inputs[0] = torch.empty(size, dtype=torch.uint8)  # takes the place that was given up
    storage.resize_(size)


def _set_other_storage(inputs):
    inputs[3].set_(torch.randn(33))


def _no_tensor(inputs):
    inputs[6] = 1.5


def _fewer_inputs(inputs):
    del inputs[4:]


@pytest.mark.parametrize(
    "change",
    [
        *(_add_in_place, _write_one_element, _write_a_view, _assign_data, _step_through_data, _write_through_numpy),
        *(_write_a_number_through_data, _write_the_last_element_in_numpy, _assign_data_elsewhere_in_its_storage),
        *(_swap_with_another_view, _other_object),
        *(_same_memory_in_another_tensor, _resize_storage, _set_other_storage, _no_tensor, _fewer_inputs),
    ],
    ids=lambda change: change.__name__.strip("_").replace("_", " "),
)
def test_a_change_is_seen(marked, change):
    inputs, marks = marked
    change(inputs)
    assert not marks.hold(inputs)


def test_memory_that_was_given_up_is_not_taken_for_what_comes_to_lie_there(marked):
    inputs, marks = marked
    for _ in range(20):  # an allocator hands out the same address again
        inputs[1].data = torch.zeros(1)
        inputs[1].data = torch.randn(16, 8)
        assert not marks.hold(inputs)


def test_weights_of_inference_mode_never_hold():
    with torch.inference_mode():
        weight = torch.randn(8)
    assert not WeightMarks([weight], [0]).hold([weight])


def _freed():
    tensor = torch.randn(8)
    tensor.untyped_storage().resize_(0)
    return tensor


_WITHOUT_MEMORY = {
    "a fake tensor": lambda: FakeTensorMode().from_tensor(torch.randn(8)),
    "a meta tensor": lambda: torch.empty(8, device="meta"),
    "zeros without memory": lambda: torch._efficientzerotensor(8),
    "a sparse tensor": lambda: torch.eye(3).to_sparse(),
    "a tensor whose memory was freed": _freed,
    "a number": lambda: 3,
}


@pytest.mark.parametrize("name", _WITHOUT_MEMORY)
def test_what_has_no_memory_is_not_read_and_never_holds(name):
    value = _WITHOUT_MEMORY[name]()
    assert not WeightMarks([value], [0]).hold([value])


@given(
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.int8]),
    start=st.integers(0, 40),
    length=st.integers(1, 40),
    last=st.booleans(),
)
def test_uncounted_writes_to_either_end_are_seen_and_those_beside_a_weight_are_not(dtype, start, length, last):
    memory = torch.zeros(96, dtype=dtype)
    weight = memory.detach()[start : start + length]
    marks = WeightMarks([weight], [0])
    outside = memory.data
    outside[:start] = 1
    outside[start + length :] = 1
    assert marks.hold([weight])
    outside[start + (length - 1 if last else 0)] = 2
    assert not marks.hold([weight])


def test_weights_without_elements_hold():
    weight = torch.empty(0, 4)
    assert WeightMarks([weight], [0]).hold([weight])
