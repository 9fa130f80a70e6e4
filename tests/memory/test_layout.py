"""Data pointers that are not aligned, storage offsets, gaps, odd strides, tensors of no and of one element."""

from __future__ import annotations

from collections.abc import Callable

import numpy
import pytest
import torch
from torch import Tensor

from tests.bitwise import assert_same

_DTYPES = (
    *(torch.float32, torch.float64, torch.bfloat16, torch.float16),
    *(torch.int64, torch.int32, torch.uint8, torch.bool),
)


def _values(count: int, dtype: torch.dtype) -> Tensor:
    return (torch.arange(count) % 7).to(dtype)


def _program(x: Tensor) -> tuple[Tensor, ...]:
    whole = x if x.dtype != torch.bool else x.to(torch.uint8)
    return whole + 1, whole * 2, x.amax(-1), x.t().contiguous(), whole.sum(0), x.flip(-1), torch.cat([x, x], 1)


def _change(x: Tensor) -> tuple[Tensor, ...]:
    before = x.clone()
    x[:, 1:].copy_(x[:, :-1].clone())
    x[0].fill_(1)
    return before, x.t()


@pytest.mark.parametrize("dtype", _DTYPES, ids=str)
@pytest.mark.parametrize("program", [_program, _change])
def test_storage_offsets_that_no_vector_is_aligned_to(
    dtype: torch.dtype, program: Callable[..., tuple[Tensor, ...]]
) -> None:
    assert_same(program, lambda: [_values(3 + 5 * 67, dtype)[3:].view(5, 67)])


@pytest.mark.parametrize("kind", ["float32", "float64", "float16", "int64", "int32"])
@pytest.mark.parametrize("shift", [1, 2])
def test_memory_that_is_not_aligned_to_its_own_elements(kind: str, shift: int) -> None:
    """As numpy gives of a packed record or a file: a float64 at an odd address."""
    item = numpy.dtype(kind).itemsize

    def make() -> list[Tensor]:
        raw = numpy.zeros(5 * 67 * item + 8, dtype=numpy.uint8)
        array = raw[shift : shift + 5 * 67 * item].view(kind).reshape(5, 67)
        array[:] = (numpy.arange(5 * 67) % 7).reshape(5, 67)
        made = torch.from_numpy(array)
        assert made.data_ptr() % item == shift % item
        return [made]

    assert_same(_program, make)
    assert_same(_change, make)


_LAYOUTS: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda x: x[:60].as_strided((3, 5), (20, 3)),
    lambda x: x[:60].as_strided((3, 5), (1, 10), 2),
    lambda x: x[:64].view(8, 8)[1:7:2, 2::3],
    lambda x: x[:64].view(4, 4, 4)[:, 1].t(),
    lambda x: x[:7].unsqueeze(1).expand(7, 5),
    lambda x: x[:1].expand(6, 33),
)


@pytest.mark.parametrize("dtype", _DTYPES, ids=str)
def test_layouts_with_gaps_or_repeats(dtype: torch.dtype) -> None:
    def program(*tensors: Tensor) -> list[Tensor]:
        return [result for x in tensors for result in _program(x)]

    assert_same(program, lambda: [layout(_values(64, dtype)) for layout in _LAYOUTS])


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32, torch.bool], ids=str)
@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0), (1, 1), (1, 5), (5, 1)], ids=str)
def test_no_element_and_one_element(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    def program(x: Tensor) -> tuple[Tensor, ...]:
        whole = x if x.dtype != torch.bool else x.to(torch.uint8)
        return (
            whole + 1, whole.sum(), whole.sum(0), whole.prod(1), x.t().contiguous(), x.any(0), x.all(),
            torch.cat([x, x], 1), x.flip(0), whole.reshape(-1).cumsum(0),
        )  # fmt: skip

    assert_same(program, lambda: [_values(shape[0] * shape[1], dtype).view(shape)])


@pytest.mark.parametrize("reduce", [torch.amax, torch.amin])
def test_the_extremum_of_nothing_is_an_error(reduce: Callable[..., Tensor]) -> None:
    with pytest.raises((IndexError, RuntimeError)):
        torch.compile(lambda x: reduce(x, 0), backend="kiln", options={"fallback": False})(torch.empty(0, 3))


@pytest.mark.parametrize("dtype", _DTYPES, ids=str)
def test_tensors_of_no_dimensions(dtype: torch.dtype) -> None:
    def program(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        whole = x if x.dtype != torch.bool else x.to(torch.uint8)
        chosen = torch.where(x > 0, y, 0)
        return whole + y, whole.sum(), x.view(1), x.expand(3), chosen, whole.unsqueeze(0) * y, x.clone()

    assert_same(program, lambda: [torch.tensor(3).to(dtype), torch.arange(5.0)])
    assert_same(program, lambda: [torch.tensor(3).to(dtype), torch.tensor(2, dtype=torch.uint8)])


@pytest.mark.parametrize("number", [3, -7, True, 2**40, 0.5, -0.0, float("inf"), float("nan"), 1e-40])
@pytest.mark.parametrize("dynamic", [False, True])
def test_python_numbers_as_inputs(number: float, dynamic: bool) -> None:
    def program(value: float, *tensors: Tensor) -> list[Tensor]:
        return [t for x in tensors for t in (x + value, x * value, torch.where(x > 2, x, value))]

    if dynamic and str(number) == "-0.0":
        return  # a number that is a symbol loses the sign of zero before any compiler sees it
    dtypes = (torch.float32, torch.float64, torch.int64, torch.uint8, torch.bfloat16)
    assert_same(program, lambda: [number, *(_values(9, dtype) for dtype in dtypes)], dynamic=dynamic)


def test_one_compiled_function_with_many_numbers() -> None:
    def program(x: Tensor, value: float) -> Tensor:
        return x * value + value

    compiled = torch.compile(program, backend="kiln", options={"fallback": False})
    x = torch.arange(5.0)
    for value in (1, 2, 3.5, True, -0.0, 7, float("nan"), 2**33):
        torch.testing.assert_close(compiled(x, value), program(x, value), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("function", [lambda x: x + 1, lambda x: x.sum(0), lambda x: x.clone(), lambda x: x * x])
@pytest.mark.filterwarnings("ignore::torchkiln.errors.FallbackWarning")
def test_inputs_with_a_pending_conjugation_or_negation(function: Callable[[Tensor], Tensor]) -> None:
    """One function, so that sizes and offsets become symbols at the second call."""
    z = torch.complex(torch.arange(4.0), torch.arange(4.0) + 1)
    for x in (z.conj(), z.conj().imag, z.imag, z[1:].conj().imag):
        got = torch.compile(function, backend="kiln")(x)
        wanted = function(x)
        assert torch.equal(got.resolve_conj().resolve_neg(), wanted.resolve_conj().resolve_neg())
