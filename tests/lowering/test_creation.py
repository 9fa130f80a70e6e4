"""Tensors made from nothing against eager."""

from __future__ import annotations

import pytest
import torch

from tests.lowering.against_eager import DTYPES, check, specimen
from tests.lowering.test_pointwise import name_of


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_constants(dtype: torch.dtype) -> None:
    functions = {
        "full": lambda x: torch.full((3, 5), 1, dtype=dtype),
        "full 0-dim": lambda x: torch.full((), 1, dtype=dtype),
        "full empty": lambda x: torch.full((0, 2), 1, dtype=dtype),
        "full_like": lambda x: torch.full_like(x, 1),
        "zeros": lambda x: torch.zeros(4, dtype=dtype),
        "ones": lambda x: torch.ones(2, 3, dtype=dtype),
        "zeros_like": lambda x: torch.zeros_like(x),
        "ones_like": lambda x: torch.ones_like(x),
        "new_zeros": lambda x: x.new_zeros(3, 2),
        "new_ones": lambda x: x.new_ones((7,)),
        "new_full": lambda x: x.new_full((2, 2), 1),
        "fill": lambda x: torch.fill(x, 1),
        "fill tensor": lambda x: torch.fill(x, x.select(0, 0).select(0, 0)),
        "scalar_tensor": lambda x: torch.ops.aten.scalar_tensor(1, dtype=dtype),
        "used": lambda x: x * torch.ones(7, dtype=dtype),
        "other dtype": lambda x: torch.zeros_like(x, dtype=torch.float64) + x,
    }
    check(functions, [specimen(dtype, (4, 7))], exact=True)
    check({"like": functions["ones_like"]}, [specimen(dtype, (4, 7)).t()], exact=True)


def test_awkward_constants() -> None:
    inf, nan = float("inf"), float("nan")
    functions = {
        "nan": lambda: torch.full((3,), nan),
        "inf": lambda: torch.full((3,), -inf, dtype=torch.bfloat16),
        "negative zero": lambda: torch.full((3,), -0.0),
        "third": lambda: torch.full((3,), 1 / 3, dtype=torch.float64),
        "half third": lambda: torch.full((3,), 1 / 3, dtype=torch.float16),
        "denormal": lambda: torch.full((3,), 1e-40),
        "largest": lambda: torch.full((3,), torch.iinfo(torch.int64).max),
        "smallest": lambda: torch.full((3,), torch.iinfo(torch.int64).min),
        "bool as float": lambda: torch.full((3,), True, dtype=torch.float32),
        "bool": lambda: torch.full((3,), True),
        "default": lambda: torch.full((3,), 2),
    }
    check({k: (lambda x, f=f: f()) for k, f in functions.items()}, [torch.zeros(1)], exact=True)


def test_empty_has_the_dtype_shape_and_strides_of_eager() -> None:
    def shapes(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(
            torch.zeros_like(e)
            for e in (
                torch.empty(3, 4),
                torch.empty_like(x),
                x.new_empty(5, dtype=torch.int32),
                torch.empty_like(x.t()),
                torch.empty_strided((3, 4), (1, 3)),
                x.new_empty_strided((2, 3), (1, 2), dtype=torch.bool),
            )
        )

    check({"empty": shapes}, [specimen(torch.float32, (2, 3, 4)).permute(2, 0, 1)[0]], exact=True)


def test_ranges() -> None:
    ranges = {
        "arange": lambda: torch.arange(10),
        "from": lambda: torch.arange(3, 40),
        "step": lambda: torch.arange(1, 50, 7),
        "down": lambda: torch.arange(9, -9, -4),
        "none": lambda: torch.arange(5, 5),
        "int32": lambda: torch.arange(0, 20, 3, dtype=torch.int32),
        "as float": lambda: torch.arange(20, dtype=torch.float32),
        "as bfloat16": lambda: torch.arange(20, dtype=torch.bfloat16),
        "wide": lambda: torch.arange(2**33, 2**33 + 30),
        "used twice": lambda: torch.arange(20)[:, None] * torch.arange(7),
        "mask": lambda: torch.arange(9)[:, None] >= torch.arange(11),
    }
    check({k: (lambda x, f=f: f()) for k, f in ranges.items()}, [torch.zeros(1)], exact=True)


def test_ranges_of_floats_are_close() -> None:
    ranges = {
        "halves": lambda: torch.arange(0.0, 10.0, 0.5),
        "tenths": lambda: torch.arange(0, 3, 0.1),
        "down": lambda: torch.arange(1.0, -1.0, -0.25),
        "double": lambda: torch.arange(0, 1, 0.05, dtype=torch.float64),
        "linspace": lambda: torch.linspace(-1, 1, 33),
    }
    check({k: (lambda x, f=f: f()) for k, f in ranges.items()}, [torch.zeros(1)], slack=2)


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_triangles(dtype: torch.dtype) -> None:
    functions = {}
    for diagonal in (-2, 0, 1, 50):
        functions[f"tril {diagonal}"] = lambda x, d=diagonal: x.tril(d)
        functions[f"triu {diagonal}"] = lambda x, d=diagonal: x.triu(d)
    check(functions, [specimen(dtype, (2, 5, 7))], exact=True)
