"""Samples of the operator database are made large, fit each other, and leave the database as it was."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.operators.database import _GOAL, _MOST, _Bounded, _repetitions, _samples, _TooLarge, entries, repeated
from benchmarks.operators.programs import MATRIX
from conformance.cases import Case, Sample, samples
from conformance.compare import tensors_of


@pytest.mark.parametrize("name", ["add", "index_select", "sum", "matmul", "nn.functional.avg_pool2d", "sin"])
def test_an_operator_has_a_large_call_that_eager_takes(name: str) -> None:
    call = entries()[name].make(torch.float32)
    elements = [tensor.numel() for tensor in tensors_of((call.args, call.kwargs))]
    assert _GOAL / 8 <= max(elements) <= _MOST
    call.function(*call.args, **call.kwargs)


def test_an_operator_without_a_dtype_or_a_large_sample_says_so() -> None:
    with pytest.raises(LookupError, match="no bfloat16"):
        entries()["linalg.det"].make(torch.bfloat16)
    with pytest.raises(LookupError, match="no large sample"):
        entries()["item"].make(torch.float32)


def test_the_database_is_as_it_was_after_larger_samples() -> None:
    before = [[tuple(t.shape) for t in tensors_of(s.args)] for s in samples(Case("add", "float32"))]
    larger = list(_samples(Case("add", "float32"), 30))
    largest = max(math.prod(shape) for shapes in before for shape in shapes)
    assert max(t.numel() for s in larger for t in tensors_of(s.args)) > 20 * largest
    assert [[tuple(t.shape) for t in tensors_of(s.args)] for s in samples(Case("add", "float32"))] == before


def test_a_tensor_that_is_far_too_large_is_not_made() -> None:
    with _Bounded():
        for make in (
            lambda: torch.testing.make_tensor((_MOST, 2), dtype=torch.float32, device="cpu"),
            lambda: torch.randperm(1 << 40),
            lambda: torch.randint(0, 2, (_MOST + 1,)),
        ):
            with pytest.raises(_TooLarge):
                make()
        assert torch.testing.make_tensor((), dtype=torch.float32, device="cpu").shape == ()
        assert torch.full((2, 3), _MOST + 1).shape == (2, 3)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=5))
def test_repetitions_make_enough_elements_of_any_sizes(shape: list[int]) -> None:
    for times in _repetitions(shape):
        assert math.prod(shape) * math.prod(times) >= _GOAL


def test_tensors_of_the_same_sizes_are_repeated_together_and_others_are_not() -> None:
    x, y, other = torch.arange(6.0).reshape(2, 3).requires_grad_(), torch.ones(2, 3), torch.ones(3)
    first, second = repeated(Sample((x, y, other), {}))
    for sample in (first, second):
        a, b, c = sample.args
        assert a.shape == b.shape
        assert a.numel() >= _GOAL
        assert c is other
        assert a.requires_grad
        assert a.is_leaf
        assert torch.equal(a[:2, :3], x)
    assert second.args[0].shape[1] == 3


def test_a_vector_becomes_a_matrix_of_its_values() -> None:
    (only,) = repeated(Sample((torch.tensor([1.0, 2.0, 3.0]),), {}))
    assert only.args[0].shape == MATRIX
    assert set(only.args[0].unique().tolist()) == {1.0, 2.0, 3.0}
