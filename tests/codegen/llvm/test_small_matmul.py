"""bfloat16 matmuls of symbolic shapes: every size and layout gives the exact result, rounded once."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import torchkiln
from torchkiln.codegen.llvm import small_matmul
from torchkiln.codegen.llvm.small_matmul import emit_small_matmul, may_be_small
from torchkiln.codegen.llvm.support.small_matmul import NUMBERS, SMALL_MATMUL
from torchkiln.config import Settings
from torchkiln.ir import index as ix
from torchkiln.ir.index import Extent, Size
from torchkiln.ir.program import Buffer, ExternCall, StridedView
from torchkiln.native.blas import BF16_GEMM, callable_routines
from torchkiln.native.symbols import address_of
from torchkiln.runtime import support
from torchkiln.target import capture_target

aten = torch.ops.aten
TARGET = capture_target(Settings())

pytestmark = pytest.mark.skipif(BF16_GEMM not in callable_routines(), reason="this torch has no such BLAS")

LAYOUTS: dict[str, Callable[..., Tensor]] = {
    "rows": lambda *s: torch.randn(*s).bfloat16(),
    "columns": lambda *s: torch.randn(*s[:-2], s[-1], s[-2]).bfloat16().mT,
    "part of rows": lambda *s: torch.randn(*s[:-1], s[-1] + 3).bfloat16()[..., 2 : 2 + s[-1]],
    "every other element": lambda *s: torch.randn(*s[:-1], 2 * s[-1]).bfloat16()[..., ::2],
    "one row again and again": lambda *s: torch.randn(*s[:-2], 1, s[-1]).bfloat16().expand(*s),
}


def _same(mine: Tensor, exact: Tensor, *, roundings: int = 1) -> None:
    """Rounded to the nearest of eight bits, which is wrong by half of the last one at most; a little more for sums."""
    assert mine.dtype == torch.bfloat16
    torch.testing.assert_close(mine.double(), exact, rtol=roundings * 2**-8 * 1.01, atol=2**-12, equal_nan=True)


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    torch._dynamo.reset()
    torchkiln.reset_stats()
    options = {"fallback": False, "adaptive": False}
    return torch.compile(function, backend="kiln", dynamic=True, options=options)


# -- the native function -------------------------------------------------------------------------------------------


def _native(
    left: Tensor,
    right: Tensor,
    out: Tensor,
    addend: Tensor | None = None,
    most: int = 2**25,
    most_of_one: int = 2**25,
    **other: float,
) -> int:
    """What the native function answers: 0 where it has multiplied."""
    prototype = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 5, ctypes.c_int64)
    address = support.address(SMALL_MATMUL)
    assert address is not None
    function = prototype(address)
    numbers: dict[str, int] = dict.fromkeys(NUMBERS, 0) | {"most_work": most, "most_work_of_one": most_of_one}
    batched = left.dim() == 3
    numbers |= {"batch": len(left) if batched else 1, "rows": left.size(-2), "terms": left.size(-1)}
    numbers |= {"columns": right.size(-1), "out_row": out.stride(-2), "out_batch": out.stride(0) if batched else 0}
    for side, matrix in (("left", left), ("right", right)):
        by_rows = matrix.stride(-1) == 1
        numbers |= {f"{side}_by_rows": by_rows, f"{side}_step": matrix.stride(-2 if by_rows else -1)}
        numbers[f"{side}_batch"] = matrix.stride(0) if batched else 0
    if addend is not None:
        expanded = addend.expand(out.shape)
        numbers |= {"addend_row": expanded.stride(-2), "addend_column": expanded.stride(-1)}
        numbers["addend_batch"] = expanded.stride(0) if batched else 0
    for name in ("alpha", "beta"):
        numbers[name] = int.from_bytes(struct.pack("<f", other.get(name, 1.0)), "little")
    given = (ctypes.c_int64 * len(NUMBERS))(*(numbers[name] for name in NUMBERS))
    pointers = [t.data_ptr() if t is not None else None for t in (left, right, out, addend)]
    return int(function(*pointers, ctypes.addressof(given), 0))


SMALL = [(1, 1, 1), (1, 17, 64), (32, 64, 10), (300, 5, 17), (65, 3, 600), (1, 3, 40000), (40000, 3, 1), (2000, 9, 31)]


@pytest.mark.parametrize("sizes", SMALL)
@pytest.mark.parametrize("left", ["rows", "columns", "part of rows"])
@pytest.mark.parametrize("right", ["rows", "columns", "part of rows"])
def test_blocks_of_every_form(sizes: tuple[int, int, int], left: str, right: str) -> None:
    m, k, n = sizes
    x, y, out = LAYOUTS[left](m, k), LAYOUTS[right](k, n), torch.full((m, n + 2), 7.0).bfloat16()
    assert _native(x, y, out[:, :n]) == 0
    _same(out[:, :n], x.double() @ y.double())
    assert bool((out[:, n:] == 7).all())  # beyond the row


@pytest.mark.parametrize("shape", [(45,), (33, 45), (33, 1), (1, 45), (1,), (3, 1, 1), (3, 33, 45), (3, 1, 45)])
def test_addends_of_a_batch(shape: tuple[int, ...]) -> None:
    x, y, added = LAYOUTS["rows"](3, 33, 8), LAYOUTS["columns"](3, 8, 45), torch.randn(shape).bfloat16()
    out = torch.empty(3, 33, 45, dtype=torch.bfloat16)
    assert _native(x, y, out, added, alpha=2.0, beta=-0.5) == 0
    _same(out, 2 * (x.double() @ y.double()) - 0.5 * added.double())


@pytest.mark.parametrize(
    ("shape", "terms"),
    [
        ((0, 4), 3),
        ((4, 0), 3),
        ((4, 4), 0),
        ((0, 4, 4), 4),
        ((512, 256), 8),  # its rounding is what takes time
        ((64, 64), 2**14),
        ((100, 2, 2), 2),  # oneDNN makes its kernel ready once
        ((8, 128, 128), 2),
    ],
)
def test_sizes_that_the_operator_is_for(shape: tuple[int, ...], terms: int) -> None:
    *batch, m, n = shape
    out = torch.full(shape, 7.0).bfloat16()
    assert _native(LAYOUTS["rows"](*batch, m, terms), LAYOUTS["rows"](*batch, terms, n), out) != 0
    assert bool((out == 7).all())


@pytest.mark.parametrize(
    ("rows", "columns", "most", "most_of_one", "left_to_operator"),
    [(4, 8, 4 * 8 * 16, 0, 0), (4, 8, 4 * 8 * 16 - 1, 2**25, 1), (1, 8, 0, 8 * 16, 0), (4, 1, 2**25, 4 * 16 - 1, 1)],
)
def test_the_target_says_how_many_multiplications_are_few(
    rows: int, columns: int, most: int, most_of_one: int, left_to_operator: int
) -> None:
    left, right = torch.randn(rows, 16).bfloat16(), torch.randn(16, columns).bfloat16()
    out = torch.full((rows, columns), float("nan"), dtype=torch.bfloat16)
    assert _native(left, right, out, most=most, most_of_one=most_of_one) == left_to_operator
    if left_to_operator:
        assert out.isnan().all()
    else:
        _same(out, left.double() @ right.double())


def test_rows_that_share_memory_are_for_the_operator() -> None:
    assert _native(LAYOUTS["one row again and again"](4, 5), LAYOUTS["rows"](5, 3), torch.zeros(4, 3).bfloat16()) != 0


def test_rounds_to_nearest_even_and_keeps_what_is_no_number() -> None:
    one = torch.ones(1, 1).bfloat16()
    largest = torch.finfo(torch.bfloat16).max
    values = [1.0, -1.0, 1 + 2**-7, -1 - 2**-7, 1.0, 1 + 2**-7, largest, float("nan"), float("inf"), -float("inf"), 0.0]
    steps = [2**-8, -(2**-8), 2**-8, -(2**-8), 2**-8 + 2**-12, 2**-8 - 2**-12, 2.0**119, 1.0, 1.0, 1.0, 2**-140]
    given, added = torch.tensor([values]).bfloat16(), torch.tensor([steps]).bfloat16()
    values, out = given, torch.empty_like(given)
    assert _native(one, values, out, added) == 0
    torch.testing.assert_close(out, (values.float() + added.float()).bfloat16(), rtol=0, atol=0, equal_nan=True)


def test_the_library_has_as_many_threads_afterwards_as_before() -> None:
    address = address_of("MKL_Get_Max_Threads")
    assert address is not None
    threads = ctypes.CFUNCTYPE(ctypes.c_int)(address)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        expected = threads()
        x, y = LAYOUTS["rows"](256, 256), LAYOUTS["rows"](256, 200)  # enough for two threads
        out = torch.empty(256, 200, dtype=torch.bfloat16)
        assert _native(x, y, out) == 0
        assert threads() == expected
        _same(out, x.double() @ y.double())
    finally:
        torch.set_num_threads(before)


# -- which calls are made so ---------------------------------------------------------------------------------------

N, K = (ix.of(Size(name, 0, 2**31, hint)) for name, hint in (("n", 32), ("k", 64)))


def _view(shape: tuple[Extent, ...], strides: tuple[Extent, ...], dtype: torch.dtype = torch.bfloat16) -> StridedView:
    return StridedView("x", dtype, shape, strides)


@pytest.mark.parametrize(
    ("left", "right", "taken"),
    [
        (_view((N, 64), (64, 1)), _view((64, 10), (1, 64)), True),
        (_view((N, K), (K, 1)), _view((K, 10), (10, 1)), True),
        (_view((N, 64), (ix.product((K, 64)), 1)), _view((64, 10), (10, 1)), True),  # looked at when it is known
        (_view((32, 64), (64, 1)), _view((64, 10), (10, 1)), False),  # lowering has decided
        (_view((N, 64), (128, 2)), _view((64, 10), (10, 1)), False),
        (_view((N, 64), (64, 1)), _view((64, 2**17), (2**17, 1)), False),  # large whatever n is
        (_view((N, 64), (64, 1), torch.half), _view((64, 10), (10, 1), torch.half), False),
        (_view((N, 64), (64, 1)), _view((65, 10), (10, 1)), False),
    ],
)
def test_which_are_looked_at_when_sizes_are_known(left: StridedView, right: StridedView, taken: bool) -> None:
    columns = right.shape[1]
    result = Buffer("z", left.dtype, (left.shape[0], columns), (columns, 1))
    assert may_be_small(ExternCall(aten.mm.default, (left, right), ("z",)), result, TARGET) == taken
    across = Buffer("z", left.dtype, (left.shape[0], columns), (1, left.shape[0]))
    assert not may_be_small(ExternCall(aten.mm.default, (left, right), ("z",)), across, TARGET)
    assert not may_be_small(ExternCall(aten.mm.default, (left, right), (None,)), None, TARGET)


@pytest.mark.parametrize(
    ("shape", "strides", "taken"),
    [
        ((10,), (1,), True),
        ((N, 10), (10, 1), True),
        ((N, 1), (1, 1), True),
        ((1,), (1,), True),
        ((), (), True),
        ((N, 10), (1, N), False),
        ((K, 10), (10, 1), False),
    ],
)
def test_addends(shape: tuple[Extent, ...], strides: tuple[Extent, ...], taken: bool) -> None:
    left, right, result = (
        _view((N, 64), (64, 1)),
        _view((64, 10), (10, 1)),
        Buffer("z", torch.bfloat16, (N, 10), (10, 1)),
    )
    arguments = (_view(shape, strides), left, right)
    assert may_be_small(ExternCall(aten.addmm.default, (*arguments, 1, 1), ("z",)), result, TARGET) == taken
    assert may_be_small(ExternCall(aten.addmm.default, (*arguments, 0, 1), ("z",)), result, TARGET)  # it is not read
    assert not may_be_small(ExternCall(aten.addmm.default, (*arguments, 1e300, 1), ("z",)), result, TARGET)
    unread = ExternCall(aten.addmm.default, (*arguments, 1, 0), ("z",))  # BLAS would not read the factors
    assert not may_be_small(unread, result, TARGET)


# -- compiled ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("left", "right"), [("rows", "part of rows"), *((layout, "columns") for layout in LAYOUTS)])
def test_one_graph_for_small_and_large_sizes(left: str, right: str) -> None:
    """The first rows are left out, so that none and one are among the sizes of one graph."""

    def function(b: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return torch.relu(torch.addmm(b, x[1:], y, beta=0.5, alpha=2)), x[1:] @ y

    compiled = _compiled(function)
    for m, k, n in ((9, 16, 10), (2, 16, 10), (3, 5, 2), (700, 200, 300), (60, 2, 1000), (9, 16, 10)):
        b, x, y = torch.randn(n).bfloat16(), LAYOUTS[left](m, k), LAYOUTS[right](k, n)
        added, plain = compiled(b, x, y)
        exact = x[1:].double() @ y.double()
        _same(plain, exact)
        _same(added, torch.relu(0.5 * b.double() + 2 * exact))
    assert "aten.addmm.default" in torchkiln.stats().extern_calls


def test_small_ones_call_no_operator_and_large_ones_do(capfd: pytest.CaptureFixture[str]) -> None:
    """oneDNN, which torch's operator calls, says what it does when asked to."""
    compiled = _compiled(lambda b, x, y: torch.addmm(b, x[1:], y, alpha=2))
    for m, called in ((9, False), (5000, True), (30, False)):
        b, x, y = torch.randn(30).bfloat16(), LAYOUTS["part of rows"](m, 16), LAYOUTS["columns"](16, 30)
        compiled(b, x, y)
        capfd.readouterr()
        with torch.backends.mkldnn.verbose(torch.backends.mkldnn.VERBOSE_ON):
            mine = compiled(b, x, y)
        assert ("matmul" in capfd.readouterr().out) == called
        _same(mine, b.double() + 2 * (x[1:].double() @ y.double()))


def test_no_rows_and_one_row_of_a_graph_for_any_number() -> None:
    layer = torch.nn.Linear(24, 10).bfloat16()
    compiled = _compiled(lambda x: torch.tanh(layer(x[x[:, 0] > 0])))
    for kept in (5, 0, 1, 3000):
        x = torch.randn(3000, 24).abs().neg().bfloat16()
        x[:kept, 0] = 1
        with torch.no_grad():
            mine = compiled(x)
        assert mine.shape == (kept, 10)
        exact = x[:kept].double() @ layer.weight.double().t() + layer.bias.double()
        _same(mine, torch.tanh(exact), roundings=2)


def test_batches() -> None:
    compiled = _compiled(lambda b, x, y: (torch.bmm(x, y), torch.baddbmm(b, x, y, alpha=0.25)))
    for count, m, k, n in ((5, 6, 4, 9), (40, 6, 4, 9), (3, 200, 7, 300), (2, 3, 500, 2)):
        b, x, y = torch.randn(count, 1, n).bfloat16(), LAYOUTS["rows"](count, m, k), LAYOUTS["columns"](count, k, n)
        plain, added = compiled(b, x, y)
        _same(plain, x.double() @ y.double())
        _same(added, b.double() + 0.25 * (x.double() @ y.double()))


@pytest.mark.usefixtures("no_cache")  # a stage is watched
def test_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[str] = []

    def counted(frame: Any, call: ExternCall, otherwise: Callable[[], None]) -> None:
        written.append(str(call.target))
        emit_small_matmul(frame, call, otherwise)

    monkeypatch.setattr(small_matmul, "emit_small_matmul", counted)
    network = torch.nn.Sequential(torch.nn.Linear(48, 20), torch.nn.Tanh(), torch.nn.Linear(20, 5)).bfloat16()
    exact = torch.nn.Sequential(torch.nn.Linear(48, 20), torch.nn.Tanh(), torch.nn.Linear(20, 5)).double()
    exact.load_state_dict(network.state_dict())
    compiled = _compiled(network)
    for rows in (7, 2, 5000):
        x = torch.randn(rows, 48).bfloat16()
        network.zero_grad()
        exact.zero_grad()
        compiled(x).float().sin().sum().backward()
        exact(x.double()).sin().sum().backward()
        for mine, other in zip(network.parameters(), exact.parameters(), strict=True):
            assert mine.grad is not None
            assert other.grad is not None
            assert (mine.grad.double() - other.grad).norm() < 0.02 * other.grad.norm()
    # Two layers, the gradients of their weights, and of what is between them.
    assert sorted(written) == ["aten.addmm.default"] * 2 + ["aten.mm.default"] * 3
