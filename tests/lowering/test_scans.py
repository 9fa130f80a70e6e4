"""Running sums and products, and the gradients that are made of them, against eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

import torchkiln
from tests.lowering.against_eager import DTYPES, check, layouts, specimen

NATIVE = (torch.float32, torch.float64, torch.bfloat16, torch.int64)
LIBRARY = ("aten.cumsum.default", "aten.cumprod.default")


def scans(dim: int) -> dict[str, Callable[[torch.Tensor], torch.Tensor]]:
    return {
        "cumsum": lambda x: x.cumsum(dim),
        "cumprod": lambda x: x.cumprod(dim),
        "computed": lambda x: (x + 1).cumsum(dim) * 2,
        "from the end": lambda x: x.flip(dim).cumsum(dim).flip(dim),
        "from the end, read twice": lambda x: (x * 2).flip(dim).cumprod(dim).flip(dim) + x.flip(dim).cumsum(dim),
        "of a view": lambda x: x[1:].cumsum(dim),
        "in another type": lambda x: x.cumsum(dim, dtype=torch.float64),
        "flipped elsewhere": lambda x: x.flip(0).cumsum(dim).flip(0) + x.flip(1).cumsum(dim).flip(1),
    }


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_scans_have_eagers_bits(dtype: torch.dtype) -> None:
    for dim in (0, 1, 2, -1):
        x = specimen(dtype, (5, 7, 19), tame=dtype.is_floating_point)
        check(scans(dim), [x], exact=True, extern=() if dtype in NATIVE else LIBRARY)


@pytest.mark.parametrize("dtype", NATIVE, ids=str)
def test_scans_of_many_long_rows_have_eagers_bits(dtype: torch.dtype) -> None:
    x = specimen(dtype, (53, 71), tame=True)
    names = ("cumsum", "cumprod", "from the end")
    check({name: scans(1)[name] for name in names}, [x], exact=True)


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_scans_of_special_numbers_have_eagers_bits(dim: int) -> None:
    check(scans(dim), [specimen(torch.float32, (6, 5, 33))], exact=True)


@pytest.mark.parametrize("dtype", NATIVE, ids=str)
def test_running_sums_of_one_number_begin_at_zero(dtype: torch.dtype) -> None:
    functions = {name: scans(1)[name] for name in ("cumsum", "cumprod", "computed", "in another type")}
    x = torch.tensor([[-0.0], [1.5], [-3.0]], dtype=torch.float64).to(dtype)
    check(functions, [x], exact=True)


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_scans_of_any_layout_have_eagers_bits_and_strides(dim: int) -> None:
    for x in layouts(specimen(torch.float32, (4, 6, 21), tame=True)).values():
        check(scans(dim), [x], exact=True)


PARTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "columns": lambda x: x[:, 2:-3],
    "every second": lambda x: x[:, ::2],
    "every third, from the second on": lambda x: x[1:, 1::3],
    "far apart": lambda x: x[:, ::9],
    "every second row": lambda x: x[::2],
    "one row again and again": lambda x: x[:1].expand(5, -1),
    "one number again and again": lambda x: x[:, :1].expand(-1, 7),
    "three dimensions of equally far rows": lambda x: x[:, :40].view(2, -1, 40)[..., 3:],
    "three dimensions": lambda x: x.view(2, -1, 19)[:, 1:, 2:],
    "rows in reverse": lambda x: x.flip(0)[:, :-1],
    "transposed": lambda x: x.t(),
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", PARTS)
def test_rows_are_scanned_where_they_lie(name: str, dynamic: bool) -> None:
    x = specimen(torch.float32, (6, 76), tame=True)
    part = PARTS[name](x)

    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x.cumsum(-1), x.cumprod(-1), x.flip(-1).cumsum(-1).flip(-1)

    torch.compiler.reset()
    run = torch.compile(function, backend="kiln", fullgraph=True, dynamic=dynamic, options={"fallback": False})
    for got, wanted in zip(run(part), function(part), strict=True):
        assert torch.equal(got, wanted)
        assert got.stride() == wanted.stride()


@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 0, 2), (4, 1, 3)], ids=str)
def test_scans_of_nothing_and_of_single_numbers_are_eagers(shape: tuple[int, ...]) -> None:
    x = specimen(torch.float32, shape, tame=True)
    last = max(len(shape) - 1, 0)
    check({"cumsum": lambda x: x.cumsum(last), "cumprod": lambda x: x.cumprod(0)}, [x], exact=True, extern=LIBRARY)


@given(data=st.data())
@hypothesis_settings(max_examples=25, deadline=None)
def test_scans_of_any_sizes_have_eagers_bits(data: st.DataObject) -> None:
    sizes = st.one_of(st.integers(1, 9), st.sampled_from([15, 17, 511, 512, 513, 600]))
    shape = data.draw(st.lists(sizes, min_size=1, max_size=3).filter(lambda s: torch.Size(s).numel() < 20000))
    dim = data.draw(st.integers(0, len(shape) - 1))
    dtype = data.draw(st.sampled_from(NATIVE))
    functions = {name: scans(dim)[name] for name in ("cumsum", "cumprod", "from the end")}
    check(functions, [specimen(dtype, shape, tame=True)], exact=True)


def test_long_running_sums_are_no_farther_from_float64_than_eagers() -> None:
    x = torch.rand(3, 100_000)
    check({"cumsum": lambda x: x.cumsum(1), "across": lambda x: x.t().contiguous().cumsum(0)}, [x], exact=True)


def gradients(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, tangent: torch.Tensor) -> torch.Tensor:
    leaf = x.clone().requires_grad_()
    (found,) = torch.autograd.grad(function(leaf), leaf, tangent)
    return found


def compiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    torch._dynamo.reset()
    settings = {"adaptive": False, "fallback": False}
    made: Callable[..., Any] = torch.compile(function, backend="kiln", fullgraph=True, options=settings, **options)
    return made


DIFFERENTIATED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "cumsum": lambda x: x.cumsum(1),
    "cumsum across": lambda x: x.cumsum(0),
    "cumprod": lambda x: x.cumprod(1),
    "cumprod across": lambda x: x.cumprod(0),
    "prod": lambda x: x.prod(1),
    "prod across": lambda x: x.prod(0),
    "prod kept": lambda x: x.prod(-1, keepdim=True),
    "prod of all": lambda x: x.prod(),
}
ZEROS = {"none": [], "one": [(1, 3)], "two in a row": [(1, 3), (1, 5)], "some": [(0, 0), (1, 3), (2, 3), (2, 5)]}


@pytest.mark.parametrize("zeros", ZEROS)
@pytest.mark.parametrize("name", DIFFERENTIATED)
def test_gradients_of_scans_and_products_are_eagers(name: str, zeros: str) -> None:
    function = DIFFERENTIATED[name]
    x = torch.rand(4, 9) + 0.5
    for at in ZEROS[zeros]:
        x[at] = 0
    tangent = torch.randn_like(function(x))
    found = gradients(compiled(function), x, tangent)
    expected = gradients(function, x, tangent)
    assert (found.dtype, found.stride()) == (expected.dtype, expected.stride())
    torch.testing.assert_close(found, expected, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("name", DIFFERENTIATED)
def test_gradients_of_scans_of_symbolic_sizes_are_eagers(name: str) -> None:
    function = DIFFERENTIATED[name]
    made = compiled(function, dynamic=True)
    before = torchkiln.stats().graphs
    for shape in ((4, 9), (6, 5), (3, 17)):
        x = torch.rand(shape) + 0.5
        tangent = torch.randn_like(function(x))
        torch.testing.assert_close(made(x), function(x))
        torch.testing.assert_close(gradients(made, x, tangent), gradients(function, x, tangent))
    if "cumprod" not in name:  # of whose sizes torch's derivative makes numbers
        assert torchkiln.stats().graphs - before == 3  # inference, forward and backward, once each


@given(data=st.data())
@hypothesis_settings(max_examples=30, deadline=None)
def test_gradients_of_products_with_zeros_infinities_and_nan_are_eagers(data: st.DataObject) -> None:
    numbers = st.sampled_from([0.0, 1.5, -2.0, 3.0, float("inf"), float("-inf"), float("nan")])
    row = st.lists(numbers, min_size=5, max_size=5).filter(lambda values: 0.0 in values)
    if data.draw(st.booleans()):  # without a zero anywhere, eager divides: infinities by themselves, which gives NaN
        row = st.lists(st.sampled_from([1.5, -2.0, 3.0]), min_size=5, max_size=5)
    x = torch.tensor(data.draw(st.lists(row, min_size=3, max_size=3)))
    tangent = torch.tensor([1.0, -2.0, 0.5])
    expected = gradients(product, x, tangent)
    torch.testing.assert_close(gradients(compiled_product(), x, tangent), expected, equal_nan=True)


def product(x: torch.Tensor) -> torch.Tensor:
    return x.prod(1)


def compiled_product() -> Callable[..., Any]:
    settings = {"adaptive": False, "fallback": False}
    made: Callable[..., Any] = torch.compile(product, backend="kiln", fullgraph=True, options=settings)
    return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("zeros", [0, 1])
def test_gradients_of_long_products_are_as_near_to_float64_as_eagers(dtype: torch.dtype, zeros: int) -> None:
    x = (1 + 0.01 * torch.randn(3, 5000)).to(dtype)
    x[:, :zeros] = 0
    tangent = torch.ones(3, dtype=dtype)
    exact = gradients(product, x.double(), tangent.double())
    found, expected = (gradients(f, x, tangent).double() for f in (compiled(product), product))
    allowed = (expected - exact).abs().max() + 4 * torch.finfo(dtype).eps * exact.abs().max()
    assert (found - exact).abs().max() <= allowed
