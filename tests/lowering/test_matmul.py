"""Small bfloat16 products through BLAS: numbers are those of the float32 product, rounded once, in every layout."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import torchkiln
from torchkiln.config import Settings
from torchkiln.lowering.matmul import is_small
from torchkiln.native.blas import BF16_GEMM, callable_routines
from torchkiln.native.symbols import address_of
from torchkiln.target import Target, capture_target

LAYOUTS: dict[str, Callable[..., Tensor]] = {
    "rows": lambda *s: torch.randn(*s),
    "columns": lambda *s: torch.randn(*s[:-2], s[-1], s[-2]).mT,
    "part of rows": lambda *s: torch.randn(*s[:-1], s[-1] + 3)[..., 2 : 2 + s[-1]],
    "every other element": lambda *s: torch.randn(*s[:-1], 2 * s[-1])[..., ::2],
    "one row again and again": lambda *s: torch.randn(*s[:-2], 1, s[-1]).expand(*s),
}

pytestmark = pytest.mark.skipif(BF16_GEMM not in callable_routines(), reason="this torch has no such BLAS")


def _bfloat16(layout: str, *sizes: int) -> Tensor:
    """The layout survives the conversion only where it is made of the memory itself."""
    made = LAYOUTS[layout](*sizes)
    memory = torch.empty(made.untyped_storage().nbytes() // 4, dtype=torch.bfloat16).normal_()
    return memory.as_strided(made.shape, made.stride(), made.storage_offset())


def _run(function: Callable[..., Any], *given: Tensor, **options: Any) -> tuple[Any, set[str]]:
    """The result of compiled code, and the operators that it calls."""
    torch._dynamo.reset()
    torchkiln.reset_stats()
    result = torch.compile(function, backend="kiln", options={"fallback": False, "adaptive": False}, **options)(*given)
    return result, {name.removeprefix("aten.") for name in torchkiln.stats().extern_calls}


def _same(mine: Tensor, exact: Tensor) -> None:
    """Eight bits of precision, of which the last may be rounded either way after a sum in another order."""
    torch.testing.assert_close(mine.double(), exact, rtol=2**-7, atol=2**-8, equal_nan=True)


@pytest.mark.parametrize("left", LAYOUTS)
@pytest.mark.parametrize("right", LAYOUTS)
def test_every_layout_of_a_product(left: str, right: str) -> None:
    for m, k, n in ((6, 4, 9), (1, 5, 1), (3, 1, 4), (32, 64, 10)):
        x, y = _bfloat16(left, m, k), _bfloat16(right, k, n)
        mine, called = _run(lambda x, y: x @ y, x, y)
        assert called == {"mm.dtype"}
        assert mine.dtype == torch.bfloat16
        _same(mine, x.double() @ y.double())


@pytest.mark.parametrize("left", LAYOUTS)
@pytest.mark.parametrize("right", LAYOUTS)
def test_every_layout_of_a_batch(left: str, right: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Where the operator has instructions of its own, the last of them is left to it.
    monkeypatch.setattr(Target, "packs_weights_of", lambda target, dtype: False)
    for count, m, k, n in ((5, 6, 4, 9), (1, 3, 2, 4), (40, 64, 32, 64)):
        x, y = _bfloat16(left, count, m, k), _bfloat16(right, count, k, n)
        mine, called = _run(torch.bmm, x, y)
        assert called == {"bmm.dtype"}
        _same(mine, x.double() @ y.double())


@pytest.mark.parametrize(("beta", "alpha"), [(1, 1), (0.5, 2), (0, 1), (1, -3)])
def test_what_is_added_is_added_before_the_rounding(beta: float, alpha: float) -> None:
    x, y, row = _bfloat16("rows", 12, 33), _bfloat16("columns", 33, 20), torch.randn(20).bfloat16()
    mine, called = _run(lambda b, x, y: torch.relu(torch.addmm(b, x, y, beta=beta, alpha=alpha)), row, x, y)
    assert called == {"mm.dtype"}
    _same(mine, torch.relu(beta * row.double() + alpha * (x.double() @ y.double())))
    x, y, added = _bfloat16("rows", 3, 12, 33), _bfloat16("columns", 3, 33, 20), torch.randn(3, 1, 20).bfloat16()
    mine, called = _run(lambda b, x, y: torch.baddbmm(b, x, y, beta=beta, alpha=alpha), added, x, y)
    assert called == {"bmm.dtype"}
    _same(mine, beta * added.double() + alpha * (x.double() @ y.double()))


def test_an_addend_times_nothing_is_not_read() -> None:
    x, y = torch.ones(4, 4).bfloat16(), torch.ones(4, 4).bfloat16()
    missing = torch.full((4,), float("nan")).bfloat16()
    mine, _ = _run(lambda b, x, y: torch.addmm(b, x, y, beta=0), missing, x, y)
    assert torch.equal(mine, torch.full((4, 4), 4.0).bfloat16())


def test_sums_are_in_float32() -> None:
    """In bfloat16 a sum of ones ends at 256."""
    mine, called = _run(lambda x, y: x @ y, torch.ones(2, 1000).bfloat16(), torch.ones(1000, 3).bfloat16())
    assert called == {"mm.dtype"}
    assert torch.equal(mine, torch.full((2, 3), 1000.0).bfloat16())


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_that_are_none_spread_as_they_do_in_eager(value: float) -> None:
    x, y = torch.randn(5, 8).bfloat16(), torch.randn(8, 6).bfloat16()
    x[2, 3] = value
    _same(_run(lambda x, y: x @ y, x, y)[0], x.double() @ y.double())


def test_gradients() -> None:
    layer = torch.nn.Linear(48, 20).bfloat16()
    x = torch.randn(3, 7, 48).bfloat16()

    def gradients(layer: Callable[[Tensor], Tensor], given: Tensor, like: torch.nn.Linear) -> list[Tensor]:
        given = given.detach().requires_grad_()
        layer(given).sin().sum().backward()
        found = [given.grad, like.weight.grad, like.bias.grad]
        like.zero_grad()
        assert all(isinstance(g, Tensor) for g in found)
        return [g for g in found if g is not None]

    torch._dynamo.reset()
    mine = gradients(torch.compile(layer, backend="kiln", options={"fallback": False}), x, layer)
    layer.double()
    for one, exact in zip(mine, gradients(layer, x.double(), layer), strict=True):
        assert (one.double() - exact).norm() < 0.01 * exact.norm()


def test_large_products_other_dtypes_and_sizes_known_only_at_run_time_are_left_to_the_operator() -> None:
    x = torch.randn(512, 512).bfloat16()
    assert _run(lambda x: x @ x, x)[1] == {"mm.default"}
    assert _run(lambda x: x @ x, x[:16, :16].half())[1] == {"mm.default"}
    small = x[:9, :16]
    mine, called = _run(lambda x: x @ x.t(), small, dynamic=True)
    assert called == {"mm.default"}  # or to BLAS, by what they are in a call: tests/codegen/llvm/test_small_matmul.py
    _same(mine, small.double() @ small.double().t())
    nothing = x[:0, :16]
    assert _run(lambda x, y: x @ y, nothing, x[:16, :4])[0].shape == (0, 4)


def test_the_library_has_as_many_threads_afterwards_as_before() -> None:
    address = address_of("MKL_Get_Max_Threads")
    assert address is not None
    threads = ctypes.CFUNCTYPE(ctypes.c_int)(address)
    x, y = torch.randn(8, 8).bfloat16(), torch.randn(3, 8, 8).bfloat16()
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        expected = threads()
        _run(lambda x, y: (x @ x, y @ y), x, y)
        assert threads() == expected
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("sizes", "amd", "amx", "others"),
    [
        ((1, 64, 64), True, True, True),
        ((1, 2048, 2048), False, True, True),
        ((2048, 2048, 1), False, True, True),
        ((4, 256, 256), True, True, True),
        ((96, 1, 64, 128), False, True, True),
        ((512, 1, 8, 8), False, True, True),
        ((8, 16, 64, 16), True, True, True),
        ((32, 16, 64, 16), False, True, True),
        ((512, 16, 64, 16), False, False, True),
        ((512, 4, 8, 4), False, False, True),
        ((4, 128, 64, 128), False, True, True),
        ((12, 128, 64, 128), False, False, True),
        ((128, 256, 256), False, True, True),
        ((512, 256, 256), False, False, True),
        ((1024, 768, 768), False, False, False),
    ],
)
def test_what_is_small_was_measured_for_each_vendor(
    sizes: tuple[int, ...], amd: bool, amx: bool, others: bool
) -> None:
    """The tables of the module are the measurements; without oneDNN's bfloat16 the operator is nowhere faster."""
    here = capture_target(Settings())
    packs = frozenset({"bfloat16"})
    intel, tiles = {"cpu": "sapphirerapids", "features": "+avx512f"}, {"features": "+avx512f,+amx-bf16"}
    assert is_small(replace(here, cpu="znver4", packs=packs), sizes) is amd
    assert is_small(replace(here, cpu="znver4", packs=frozenset()), sizes) is others
    assert is_small(replace(here, **intel | tiles, packs=packs), sizes) is amx
    assert is_small(replace(here, **intel | tiles, packs=frozenset()), sizes) is others
    assert is_small(replace(here, **intel, packs=packs), sizes) is others
