"""Joining, padding, stores into slices, and indexing by tensors, against eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from tests.lowering.against_eager import DTYPES, check, compiled, layouts, specimen
from tests.lowering.test_pointwise import name_of

Function = Callable[..., Any]

JOINS: dict[str, Function] = {
    "cat": lambda x, y: torch.cat([x, y]),
    "cat last": lambda x, y: torch.cat([x, y, x], -1),
    "cat middle": lambda x, y: torch.cat([x[:, :1], y, x[:, 1:]], 1),
    "cat computed": lambda x, y: torch.cat([x * 2, (y + 1)[:2]], 0),
    "cat nothing": lambda x, y: torch.cat([x, y[:0]]),
    "cat old empty": lambda x, y: torch.cat([x.new_zeros(0), y]),
    "cat of one": lambda x, y: torch.cat([x]),
    "cat ones": lambda x, y: torch.cat([x[:1], y[:1], x[1:2]]),
    "stack": lambda x, y: torch.stack([x, y], 1),
    "hstack": lambda x, y: torch.hstack([x, y]),
    "many": lambda x, y: torch.cat([x[:, k : k + 1] for k in range(5)] + [y], 1),
}
PADS: dict[str, Function] = {
    "pad": lambda x, y: F.pad(x, (1, 2)),
    "pad value": lambda x, y: F.pad(x, (3, 0), value=2),
    "pad two": lambda x, y: F.pad(x, (1, 1, 2, 0), value=1),
    "pad all": lambda x, y: F.pad(x, (1, 0, 0, 1, 2, 2)),
    "pad negative": lambda x, y: F.pad(x, (-1, 2)),
    "pad cut": lambda x, y: F.pad(x, (-2, -1, -1, 0)),
    "pad cut and value": lambda x, y: F.pad(x, (2, -3, 0, 0, -1, 3), value=1),
    "pad nothing": lambda x, y: F.pad(x, (0, 0)),
    "pad computed": lambda x, y: F.pad(x * 2, (1, 1)) + F.pad(y, (1, 1), value=1),
}
ROLLS: dict[str, Function] = {
    "roll last": lambda x, y: x.roll(1, -1),
    "roll back": lambda x, y: x.roll(-2, 2),
    "roll first": lambda x, y: x.roll(3, 0) + y,
    "roll several": lambda x, y: x.roll((1, -2, 4), (0, 1, 2)),
    "roll one dimension twice": lambda x, y: x.roll((3, 4), (2, 2)),
    "roll around": lambda x, y: x.roll(22, 1),
    "roll nothing": lambda x, y: x.roll(9, 2),
    "roll flat": lambda x, y: x.roll(7),
    "roll computed": lambda x, y: x.abs().roll(1, 1).roll(1, 2) + y.roll(-1, 2),
    "roll an empty one": lambda x, y: x[:, :0].roll(1, 1),
    "roll turned": lambda x, y: x.transpose(0, 2).roll((1, 2), (0, 2)),
}
STORES: dict[str, Function] = {
    "slice_scatter": lambda x, y: torch.slice_scatter(x, y[:, :2], 1, 1, 3),
    "slice_scatter step": lambda x, y: torch.slice_scatter(x, y[..., :3], 2, 1, 7, 2),
    "slice_scatter step 3": lambda x, y: torch.slice_scatter(x, y[..., :2], 2, 2, 8, 3),
    "slice_scatter negative": lambda x, y: torch.slice_scatter(x, y[:, -2:], 1, -2),
    "slice_scatter whole": lambda x, y: torch.slice_scatter(x, y),
    "slice_scatter nothing": lambda x, y: torch.slice_scatter(x, y[:, :0], 1, 2, 2),
    "select_scatter": lambda x, y: torch.select_scatter(x, y[0], 0, 1),
    "select_scatter negative": lambda x, y: torch.select_scatter(x, y[..., 3], 2, -1),
    "diagonal_scatter": lambda x, y: torch.diagonal_scatter(x[0], y[0].diagonal()),
    "diagonal_scatter above": lambda x, y: torch.diagonal_scatter(x, y.diagonal(2, 0, 2), 2, 0, 2),
    "diagonal_scatter below": lambda x, y: torch.diagonal_scatter(x, y.diagonal(-3, 2, 0), -3, 2, 0),
    "diagonal_scatter outside": lambda x, y: torch.diagonal_scatter(x[0], y[0].diagonal(9), 9),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_joins_pads_and_stores(dtype: torch.dtype) -> None:
    inputs = [specimen(dtype, (4, 5, 9)), specimen(dtype, (4, 5, 9), 1)]
    check({**JOINS, **PADS, **ROLLS, **STORES}, inputs, exact=True)


@pytest.mark.parametrize("layout", ["transposed", "sliced", "expanded", "offset"])
def test_joins_of_every_layout(layout: str) -> None:
    x, y = specimen(torch.float32, (4, 5, 9)), layouts(specimen(torch.float32, (4, 5, 9), 1))[layout]
    for inputs in ([x, y], [y, x], [y, y]):
        check({**JOINS, **STORES}, inputs, exact=True)
    check(PADS, [y, x], exact=True)


def test_joining_hundreds_of_tensors() -> None:
    x = specimen(torch.float32, (6, 400), tame=True)
    functions = {
        "stack": lambda x: torch.stack([row * 2 for row in x.unbind(1)]),
        "mostly zeros": lambda x: torch.stack([torch.zeros(6)] * 300 + [x[:, 0]] + [torch.zeros(6)] * 300),
        "two constants": lambda x: torch.cat([torch.zeros(2), torch.ones(3), torch.ones(4), torch.zeros(1)]),
    }
    check(functions, [x], exact=True, extern=("aten.cat.default",))
    check({"mostly zeros": functions["mostly zeros"]}, [x], exact=True)


def test_cat_promotes() -> None:
    inputs = [specimen(torch.int32, (3, 4), tame=True), specimen(torch.float16, (2, 4), tame=True)]
    check({"cat": lambda x, y: torch.cat([x, y]), "half": lambda x, y: torch.cat([y, x])}, inputs, exact=True)


def test_padding_reads_nothing_outside_its_input() -> None:
    """The memory around the input holds NaN: none of it may show."""
    memory = torch.full((40,), float("nan"))
    memory[10:30] = torch.arange(20.0)
    x = memory[10:30].view(4, 5)
    check({"pad": lambda x: F.pad(x, (3, 3, 3, 3)), "sum": lambda x: F.pad(x, (3, 3)).sum(1)}, [x], exact=True)


# -- by tensors -------------------------------------------------------------------------------------------------

# x: (5, 6, 7); i, j: (4,) in range of 5 and 6; k: (3, 1) in range of 7.
INDEX: dict[str, Function] = {
    "first": lambda x, i, j, k: x[i],
    "second": lambda x, i, j, k: x[:, j],
    "last": lambda x, i, j, k: x[..., k],
    "two": lambda x, i, j, k: x[i, j],
    "gap": lambda x, i, j, k: x[i, :, i],
    "gap broadcast": lambda x, i, j, k: x[k.clamp(max=4), :, i],
    "two last": lambda x, i, j, k: x[:, j, k],
    "three": lambda x, i, j, k: x[i, j, k],
    "with int": lambda x, i, j, k: x[i, 2],
    "with slice": lambda x, i, j, k: x[1:4, j, ::2],
    "with none": lambda x, i, j, k: x[i, None, :, None],
    "0-dim": lambda x, i, j, k: torch.ops.aten.index(x, [i[0], None, j[1]]),
    "negative": lambda x, i, j, k: x[i - 5],
    "negative two": lambda x, i, j, k: x[i - 5, j - 6, k - 7],
    "int32": lambda x, i, j, k: x[i.int()],
    "computed": lambda x, i, j, k: (x * 2)[(i * 3) % 5] + 1,
    "of index": lambda x, i, j, k: x[i[i.clamp(max=3)]],
    "then reduce": lambda x, i, j, k: x[i].amax(0),
    "index_select": lambda x, i, j, k: x.index_select(0, i),
    "index_select last": lambda x, i, j, k: x.index_select(-1, i),
    "take rows": lambda x, i, j, k: torch.index_select(x * 2, 1, j),
    "gather": lambda x, i, j, k: x.gather(2, (x[..., :4] > 0).long() + 3),
    "gather first": lambda x, i, j, k: x.gather(0, (x[:2] > 0).long() * 4),
    "gather small": lambda x, i, j, k: x.gather(1, k.expand(3, 2)[None].clamp(max=5)),
    "take_along_dim": lambda x, i, j, k: torch.take_along_dim(x, x.argmax(1, keepdim=True), 1),
    "embedding": lambda x, i, j, k: F.embedding(i, x[:, :, 0]),
    "embedding two": lambda x, i, j, k: F.embedding(k.clamp(max=4), x[:, 0]),
    "one_hot": lambda x, i, j, k: F.one_hot(i, 5),
    "scatter a number": lambda x, i, j, k: x.scatter(2, (x[..., :1] > 0).long() * 6, 1),
    "scatter a tensor": lambda x, i, j, k: x.scatter(0, (x[:1] > 0).long() + 3, x[1:2] + 1),
    "scatter into zeros": lambda x, i, j, k: torch.zeros_like(x).scatter(-2, (x[:, :1] > 0).long() * 2, x[:, 2:3]),
    "bucket": lambda x, i, j, k: x[i] == x[i - 5],
    "take": lambda x, i, j, k: torch.take(x, k * 30 + i),
    "take from the end": lambda x, i, j, k: torch.take(x.transpose(0, 2), i - 210),
    "take one": lambda x, i, j, k: torch.take(x, i[0]),
}
_INDEX_EXTERN = ("aten.embedding_dense_backward.default",)


def _index_inputs(dtype: torch.dtype) -> list[torch.Tensor]:
    x = specimen(dtype, (5, 6, 7), tame=True)
    return [x, torch.tensor([4, 0, 2, 2]), torch.tensor([5, 0, 3, 3]), torch.tensor([[6], [0], [2]])]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int8, torch.int64], ids=name_of)
def test_indexing_by_tensors(dtype: torch.dtype) -> None:
    check(INDEX, _index_inputs(dtype), exact=True, extern=_INDEX_EXTERN)


@pytest.mark.parametrize("layout", ["transposed", "sliced", "offset"])
def test_indexing_tensors_of_every_layout(layout: str) -> None:
    x, *places = _index_inputs(torch.float32)
    # Fake tensors do not foresee the layout eager gives these results, so only values are compared.
    functions = {name: (lambda *a, f=f: f(*a).contiguous()) for name, f in INDEX.items()}
    check(functions, [layouts(x)[layout], *places], exact=True, extern=_INDEX_EXTERN)


def test_indexing_with_nothing_gives_nothing() -> None:
    x, none = specimen(torch.float32, (5, 6)), torch.zeros(0, dtype=torch.int64)
    functions = {
        "index": lambda x, i: x[i],
        "second": lambda x, i: x[:, i],
        "select": lambda x, i: x.index_select(1, i),
        "embedding": lambda x, i: F.embedding(i, x),
    }
    check(functions, [x, none], exact=True)


@given(st.lists(st.integers(1, 70), min_size=1, max_size=2), st.data())
@hypothesis_settings(deadline=None, max_examples=15)
def test_rolls_of_any_size_by_any_amount(sizes: list[int], data: st.DataObject) -> None:
    dims = data.draw(st.lists(st.integers(-len(sizes), len(sizes) - 1), max_size=3))
    amounts = data.draw(st.lists(st.integers(-200, 200), min_size=max(len(dims), 1), max_size=max(len(dims), 1)))
    check({"roll": lambda x: x.roll(amounts, dims)}, [torch.randn(sizes)], exact=True)


@pytest.mark.parametrize("shift", [1, -3])
def test_a_roll_along_sizes_known_at_run_time(shift: int) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return x.roll(shift, 0) + x.roll(shift, 1)

    run = torch.compile(function, backend="kiln", dynamic=True, fullgraph=True, options={"fallback": False})
    for shape in ((5, 9), (7, 4), (2, 65), (33, 2)):
        x = torch.randn(shape)
        assert torch.equal(run(x), function(x))


SEVERAL_POSITIONS: dict[str, Function] = {
    "two in each row": lambda x, i: x.scatter(1, i[:2].expand(5, 2), 1.0),
    "not in every row": lambda x, i: x.scatter(1, i[:3, None], 1.0),
    "one of a vector": lambda x, i: x[0].scatter(0, i[:2], x[1]),
}


def test_a_scatter_to_other_than_one_position_in_each_row_is_torchs() -> None:
    inputs = [specimen(torch.float32, (5, 6), tame=True), torch.tensor([4, 0, 2, 2])]
    with pytest.raises(AssertionError, match="extern call"):
        check(SEVERAL_POSITIONS, inputs, exact=True)
    check(SEVERAL_POSITIONS, inputs, exact=True, extern=("aten.scatter.value", "aten.scatter.src"))


@given(st.lists(st.integers(1, 5), min_size=1, max_size=3), st.data())
@hypothesis_settings(deadline=None, max_examples=20)
def test_one_position_in_each_row_of_any_tensor(sizes: list[int], data: st.DataObject) -> None:
    dim = data.draw(st.integers(-len(sizes), len(sizes) - 1))
    rows = [1 if k == dim % len(sizes) else size for k, size in enumerate(sizes)]
    base, source = torch.randn(sizes), torch.randn(rows)
    positions = torch.randint(sizes[dim], rows)
    functions = {
        "number": lambda x, i, s: x.scatter(dim, i, 2),
        "tensor": lambda x, i, s: x.scatter(dim, i, s),
        "one hot": lambda x, i, s: (torch.zeros_like(x).scatter(dim, i, 1) * x).sum(dim),
    }
    check(functions, [base, positions, source], exact=True)


OUT_OF_RANGE: dict[str, Function] = {
    "index": lambda x, i: x[i],
    "index second": lambda x, i: x[:, i],
    "index_select": lambda x, i: x.index_select(0, i),
    "gather": lambda x, i: x.gather(0, i[:, None]),
    "scatter": lambda x, i: x[:3].scatter(1, i[:, None], 1.0),
    "embedding": lambda x, i: F.embedding(i, x),
    "in a sum": lambda x, i: x[i].sum() + 1,
}


@pytest.mark.parametrize("name", OUT_OF_RANGE)
@pytest.mark.parametrize("bad", [6, -7, 2**40, -(2**62)])
def test_an_index_out_of_range_is_eagers_error_and_the_next_call_works(name: str, bad: int) -> None:
    function = OUT_OF_RANGE[name]
    x, good = specimen(torch.float32, (6, 6), tame=True), torch.tensor([0, 5, 3])
    run = compiled(lambda x, i: (function(x, i),), [x, good])
    wrong = torch.tensor([0, bad, 1])
    with pytest.raises((IndexError, RuntimeError)) as eager:
        function(x, wrong)
    with pytest.raises(eager.type):
        run(x, wrong)
    torch.testing.assert_close(run(x, good)[0], function(x, good))


def test_positions_are_checked_after_they_were_clamped() -> None:
    x, i = torch.arange(5.0), torch.tensor([0, 1, 99, 2])

    def function(x: torch.Tensor, i: torch.Tensor) -> tuple[torch.Tensor]:
        return (torch.where(i < 5, x[i.clamp(max=4)], -1.0),)

    assert torch.equal(compiled(function, [x, i])(x, i)[0], torch.tensor([0.0, 1.0, -1.0, 2.0]))


def test_a_large_gather_in_parallel_reports_its_error() -> None:
    x, i = torch.randn(1000, 64), torch.arange(1000)
    run = compiled(lambda x, i: (x[i] * 2,), [x, i])
    assert torch.equal(run(x, i)[0], x * 2)
    i[777] = 1000
    with pytest.raises(IndexError):
        run(x, i)


def test_gathering_nothing_by_positions_of_another_rank(compile_strictly: Callable[..., Any]) -> None:
    x, nothing = torch.arange(5.0), torch.zeros((2, 0), dtype=torch.int64)
    found = compile_strictly(lambda x, i: torch.gather(x, 0, i))(x, nothing)
    assert found.shape == torch.gather(x, 0, nothing).shape
