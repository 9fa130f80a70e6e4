"""Operands across the lanes: transposed in tiles, whole and cut, in all dtypes, under guards, in rows and results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.lowering.against_eager import DTYPES, FLOATS, REDUCTION_SLACK, check, compiled, difference, specimen
from tests.schedule.test_fusion import plan_of
from torchkiln.schedule.kernel import Kernel
from torchkiln.schedule.plan import Launch
from torchkiln.schedule.tiles import tiled_accesses

Function = Callable[..., Any]

# Below, at and above multiples of a tile, of a block of bytes and of the lanes.
SIZES = st.sampled_from([1, 3, 15, 16, 17, 24, 31, 32, 33, 47, 48, 63, 64, 65, 80, 97])

MOVES: dict[str, Function] = {
    "copy": lambda x, y: x.t().contiguous(),
    "two copies": lambda x, y: (x.t().contiguous(), x.t() == y),
    "cat of rows": lambda x, y: torch.cat([x.t(), y], 0),
    "cat of columns": lambda x, y: torch.cat([y[:, 1:], x.t(), x.t()[:, :1]], 1),
    "stack": lambda x, y: torch.stack([x.t(), y], 0),
    "stack inside": lambda x, y: torch.stack([x.t(), y], -1),
    "pad": lambda x, y: F.pad(x.t(), (1, 2, 3, 4), value=0),
    "cut and padded": lambda x, y: F.pad(x.t(), (-1, 17, 18, -1)) if min(x.shape) > 2 else x,
    "roll": lambda x, y: x.t().roll((3, 5), (0, 1)),
    "where": lambda x, y: torch.where(y == 0, x.t(), y),
    "both ways": lambda x, y: (x == y.t(), x.t() != y),
    "triangle": lambda x, y: x.t().tril(),
    "repeated": lambda x, y: (x.t().repeat_interleave(2, 0), x.t().repeat_interleave(2, 1)),
    "flipped": lambda x, y: x.flip(0).t().contiguous(),
}


@settings(deadline=None, max_examples=5)
@given(SIZES, SIZES, st.sampled_from(DTYPES))
def test_moved_elements_are_those_of_eager(rows: int, columns: int, dtype: torch.dtype) -> None:
    x, y = specimen(dtype, (rows, columns)), specimen(dtype, (columns, rows), 1)
    check(MOVES, [x, y], exact=True)


ROWS: dict[str, Function] = {
    "softmax": lambda x, y: x.t().softmax(-1),
    "log-softmax": lambda x, y: x.t().log_softmax(-1),
    "softmax of a sum": lambda x, y: (x.t() + y).softmax(-1),
    "layer norm": lambda x, y: F.layer_norm(x.t(), (x.shape[0],)),
    "sum and result": lambda x, y: (x.t().sum(-1), x.t() * x.t().amax(-1, keepdim=True)),
    "argmax": lambda x, y: (x.t().argmax(-1), (x.t() - y).amin(-1)),
    "padded": lambda x, y: F.pad(x.t(), (1, 2)).softmax(-1),
    "transposed result": lambda x, y: ((y.softmax(-1)).t().contiguous(), y.sum(-1)),
}


@settings(deadline=None, max_examples=6)
@given(SIZES, SIZES, st.sampled_from(FLOATS))
def test_rows_across_memory_give_the_values_of_eager(rows: int, columns: int, dtype: torch.dtype) -> None:
    x, y = specimen(dtype, (rows, columns), tame=True), specimen(dtype, (columns, rows), 1, tame=True)
    check(ROWS, [x, y], slack=2 * REDUCTION_SLACK)


@settings(deadline=None, max_examples=5)
@given(
    st.tuples(st.integers(1, 3), st.integers(14, 40), st.integers(14, 40), st.integers(1, 20)),
    st.permutations(range(4)),
    st.permutations(range(4)),
    st.sampled_from([torch.float32, torch.bfloat16, torch.uint8]),
)
@example((2, 21, 14, 7), [2, 0, 3, 1], [3, 2, 1, 0], torch.float32)  # these ended the process in LLVM's passes
@example((3, 31, 15, 5), [0, 3, 2, 1], [1, 3, 2, 0], torch.float32)
def test_operands_along_different_variables_give_the_values_of_eager(
    shape: tuple[int, ...], order: list[int], other: list[int], dtype: torch.dtype
) -> None:
    def in_order(value: torch.Tensor, dims: list[int]) -> torch.Tensor:
        back = [dims.index(k) for k in range(4)]
        return value.permute(dims).contiguous().permute(back)

    x, y, z = (specimen(dtype, shape, seed, tame=True) for seed in range(3))
    x, y = in_order(x, order), in_order(y, other)
    functions = {
        "all": lambda x, y, z: (x == y, (x != z).contiguous(), x.contiguous(), y.contiguous()),
        "joined": lambda x, y, z: torch.cat([x, y, z], 2),
    }
    check(functions, [x, y, z], exact=True)
    if dtype == torch.float32:
        norms = {
            "instance norm": lambda x, y, z: (x.mean((2, 3)), F.instance_norm(x * 2) if x[0, 0].numel() > 1 else x),
            "sums of both": lambda x, y, z: (x + y).sum((1, 3)),
        }
        check(norms, [x, y, z], slack=32)


SYMBOLIC: dict[str, Function] = {
    "copy": lambda x, y: x.t().contiguous(),
    "sum": lambda x, y: (x.t() + y, (x.t() * y).t().contiguous()),
    "cat": lambda x, y: torch.cat([x.t(), y], 0),
    "pad": lambda x, y: F.pad(x.t(), (1, 2, 3, 4)),
    "softmax": lambda x, y: x.t().softmax(-1),
    "layer norm": lambda x, y: F.layer_norm(x.t() + y, (x.shape[0],)),
}


@pytest.mark.parametrize("name", SYMBOLIC)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_tiles_of_symbolic_sizes(name: str, dtype: torch.dtype) -> None:
    torch._dynamo.reset()
    run = torch.compile(SYMBOLIC[name], backend="kiln", dynamic=True, options={"fallback": False})
    for shape in ((64, 48), (65, 33), (5, 97), (128, 3), (16, 16)):
        x, y = specimen(dtype, shape, tame=True), specimen(dtype, shape[::-1], 1, tame=True)
        got, wanted = run(x, y), SYMBOLIC[name](x, y)
        pairs = zip(got, wanted, strict=True) if isinstance(wanted, tuple) else [(got, wanted)]
        for here, there in pairs:
            assert difference(here, there, slack=2 * REDUCTION_SLACK) is None


def _kernel(function: Function, *inputs: torch.Tensor) -> Kernel:
    (kernel,) = [step.kernel for step in plan_of(function, *inputs).steps if isinstance(step, Launch)]
    return kernel


@pytest.mark.parametrize(
    ("function", "loads", "stores"),
    [
        (lambda x, y: (torch.cat([x.t(), y], 0),), 1, 0),
        (lambda x, y: (F.pad(x.t(), (1, 2, 3, 4)),), 1, 0),
        (lambda x, y: (torch.cat([x.t()[:, :48] * y[:, :48], x.t()[:, 48:] * y[:, :48]], 1),), 1, 0),
        (lambda x, y: (x.t().softmax(-1),), 1, 0),
        (lambda x, y: (x.t() * 2, y + x.t()), 1, 1),
    ],
    ids=["cat", "pad", "two guards", "rows", "two results"],
)
def test_what_crosses_the_lanes_goes_through_tiles(function: Function, loads: int, stores: int) -> None:
    kernel = _kernel(function, torch.zeros(96, 128), torch.zeros(128, 96))
    assert kernel.mapping.tile is not None
    accesses = tiled_accesses(kernel.nest, kernel.mapping.tile)
    assert (len(accesses.loads), len(accesses.stores)) == (loads, stores)


def test_rows_too_long_for_a_buffer_are_not_kept() -> None:
    plan = plan_of(lambda x: (x.t().softmax(-1),), torch.zeros(1 << 13, 64))
    kernels = [step.kernel for step in plan.steps if isinstance(step, Launch)]
    assert not any(kernel.mapping.tile for kernel in kernels if kernel.nest.columns)


def test_nothing_beside_a_transposed_result_is_written() -> None:
    """Results in both layouts inside of larger memory, whole tiles and cut ones."""
    for rows, columns in ((16, 16), (17, 33), (40, 24), (5, 70)):
        memory = torch.full((columns + 40, rows + 40), -7.0)
        inside = memory[20 : 20 + columns, 20 : 20 + rows]
        run = compiled(lambda x, y: (x.copy_(y.t() * 2), y + 1), [inside, torch.zeros(rows, columns)])
        run(inside, torch.ones(rows, columns))
        assert int((memory == 2).sum()) == rows * columns
        assert int((memory == -7).sum()) == memory.numel() - rows * columns


def test_memory_that_a_guard_hides_is_not_read() -> None:
    """The hidden part of the operand lies beyond its memory: reading it would be seen as a fault or as NaN."""
    for length in (16, 24, 40):
        memory = torch.full((64, 64), float("nan"))
        memory[:length, :length] = 1
        x = memory[:length, :length]
        check({"pad": lambda x: F.pad(x.t(), (9, 9, 9, 9))}, [x], exact=True)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(
    "function",
    [
        lambda x, w: torch.where(x > 0, w[(x.sum((1, 2)) > 0).long()].transpose(1, 2), x),
        lambda x, w: w[x.flatten(1).argmax(1) % 2].mT + x,
        lambda x, w: ((w[(x.sum((1, 2)) > 0).long()].mT + x).flatten(1)).softmax(1),
    ],
)
def test_an_index_that_the_kernel_computes_is_read_when_it_is_there(function: Function, dynamic: bool) -> None:
    torch._dynamo.reset()
    run = torch.compile(function, backend="kiln", dynamic=dynamic, options={"fallback": False, "adaptive": False})
    for batch in (9, 5):
        x, w = torch.randn(batch, 40, 33), torch.randn(2, 33, 40)
        torch.testing.assert_close(run(x, w), function(x, w))
