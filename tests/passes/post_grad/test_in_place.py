"""Writes in place: what is written where, what must not be, and that a cache is updated without being copied."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import torchkiln
from tests.higher_order.against_eager import check
from tests.passes.post_grad.functional_graphs import apply, calls, same_numbers, traced
from torchkiln.passes.post_grad.in_place import write_in_place

aten = torch.ops.aten

CACHE = torch.arange(48.0).reshape(2, 6, 4)
ROW = -torch.ones(2, 1, 4)
AT = torch.tensor([3])


def _update_by_position(cache: Tensor, at: Tensor, row: Tensor) -> Tensor:
    new = aten.index_put.default(cache, [None, at], row)
    result = aten.sum.dim_IntList(new, [1])
    aten.copy_.default(cache, new)
    return result


def _update_of_part(cache: Tensor, row: Tensor) -> Tensor:
    part = aten.copy.default(aten.slice.Tensor(cache, 1, 3, 4), row)
    new = aten.slice_scatter.default(cache, part, 1, 3, 4)
    result = aten.mul.Tensor(new, 2)
    aten.copy_.default(cache, new)
    return result


def _update_of_nested_part(cache: Tensor, row: Tensor) -> Tensor:
    outer = aten.slice.Tensor(cache, 1, 2, 5)
    inner = aten.select.int(outer, 2, 1)
    changed = aten.select_scatter.default(outer, aten.mul.Tensor(inner, 3), 2, 1)
    new = aten.slice_scatter.default(cache, changed, 1, 2, 5)
    aten.copy_.default(cache, new)
    return aten.sum.default(row)


def _update_of_flat_view(cache: Tensor, at: Tensor, row: Tensor) -> Tensor:
    flat = aten.view.default(cache, [12, 4])
    changed = aten.index_put.default(flat, [at], aten.select.int(row, 0, 0))
    aten.copy_.default(cache, aten.view.default(changed, [2, 6, 4]))
    return aten.neg.default(row)


def _update_of_transposed(cache: Tensor, row: Tensor) -> Tensor:
    transposed = aten.transpose.int(cache, 0, 1)
    changed = aten.select_scatter.default(transposed, aten.select.int(row, 1, 0), 0, 2)
    aten.copy_.default(cache, aten.transpose.int(changed, 0, 1))
    return aten.neg.default(row)


def _part_of_own_in_memory_anyway(x: Tensor, at: Tensor) -> Tensor:
    result = aten.index_put.default(aten.full.default([3, 4], 0.0), [at], x)
    return aten.select_scatter.default(result, aten.mul.Tensor(x, 2), 0, 1)


def _positions_of_own(x: Tensor, at: Tensor) -> Tensor:
    zeros = aten.full.default([6, 4], 0.0)
    return aten.index_put.default(zeros, [at], x, True)


@pytest.mark.parametrize(
    ("function", "inputs", "expected"),
    [
        (
            _update_by_position,
            (CACHE, AT, ROW),
            [
                "index_put__default = index_put_.default(cache_1, [None, at_1], row_1)",
                "sum_1 = sum.dim_IntList(cache_1, [1])",
            ],
        ),
        (
            _update_of_part,
            (CACHE, ROW),
            [
                "slice_tensor = slice.Tensor(cache_1, 1, 3, 4, 1)",
                "copy__default = copy_.default(slice_tensor, row_1)",
                "mul = mul.Tensor(cache_1, 2)",
            ],
        ),
        (
            _update_of_nested_part,
            (CACHE, ROW),
            [
                "slice_1 = slice.Tensor(cache_1, 1, 2, 5)",
                "select = select.int(slice_1, 2, 1)",
                "mul = mul.Tensor(select, 3)",
                "slice_tensor = slice.Tensor(cache_1, 1, 2, 5, 1)",
                "select_int = select.int(slice_tensor, 2, 1)",
                "copy__default = copy_.default(select_int, mul)",
                "sum_1 = sum.default(row_1)",
            ],
        ),
        (
            _update_of_flat_view,
            (CACHE, AT, ROW),
            [
                "view = view.default(cache_1, [12, 4])",
                "select = select.int(row_1, 0, 0)",
                "index_put__default = index_put_.default(view, [at_1], select)",
                "neg = neg.default(row_1)",
            ],
        ),
        (
            _update_of_transposed,
            (CACHE, ROW),
            [
                "transpose = transpose.int(cache_1, 0, 1)",
                "select = select.int(row_1, 1, 0)",
                "select_int = select.int(transpose, 0, 2)",
                "copy__default = copy_.default(select_int, select)",
                "neg = neg.default(row_1)",
            ],
        ),
        (
            _part_of_own_in_memory_anyway,
            (torch.arange(4.0), torch.tensor([2])),
            [
                "full = full.default([3, 4], 0.0)",
                "index_put__default = index_put_.default(full, [at_1], x_1)",
                "mul = mul.Tensor(x_1, 2)",
                "select_int = select.int(full, 0, 1)",
                "copy__default = copy_.default(select_int, mul)",
            ],
        ),
        (
            _positions_of_own,
            (torch.randn(1, 4), AT),
            [
                "full = full.default([6, 4], 0.0)",
                "index_put__default = index_put_.default(full, [at_1], x_1, True)",
            ],
        ),
    ],
)
def test_written_in_place(function: Callable[..., Any], inputs: tuple[Tensor, ...], expected: list[str]) -> None:
    gm = traced(function, *inputs)
    assert apply(write_in_place, gm)
    assert [line.replace(", cpu, False", "") for line in calls(gm)] == expected
    same_numbers(gm, function, *inputs)


def _old_value_read_later(cache: Tensor, at: Tensor, row: Tensor) -> Tensor:
    new = aten.index_put.default(cache, [None, at], row)
    old = aten.sum.default(cache)
    aten.copy_.default(cache, new)
    return old


def _view_of_old_value_read_later(cache: Tensor, at: Tensor, row: Tensor) -> Tensor:
    part = aten.select.int(cache, 0, 1)
    new = aten.index_put.default(cache, [None, at], row)
    old = aten.sum.default(part)
    aten.copy_.default(cache, new)
    return old


def _not_for_the_caller(cache: Tensor, at: Tensor, row: Tensor) -> Tensor:
    return aten.sum.default(aten.index_put.default(cache, [None, at], row))


def _returned_too(cache: Tensor, at: Tensor, row: Tensor) -> Tensor:
    new = aten.index_put.default(cache, [None, at], row)
    aten.copy_.default(cache, new)
    return new


def _view_returned_too(cache: Tensor, at: Tensor, row: Tensor) -> Tensor:
    new = aten.index_put.default(cache, [None, at], row)
    aten.copy_.default(cache, new)
    return aten.select.int(new, 0, 1)


def _values_from_the_same_memory(cache: Tensor, at: Tensor) -> Tensor:
    values = aten.slice.Tensor(cache, 1, 0, 1)
    new = aten.index_put.default(cache, [None, at], values)
    aten.copy_.default(cache, new)
    return aten.neg.default(at)


def _another_input_gets_it(cache: Tensor, other: Tensor, at: Tensor, row: Tensor) -> Tensor:
    new = aten.index_put.default(cache, [None, at], row)
    aten.copy_.default(other, new)
    return aten.neg.default(at)


def _one_part_of_own(x: Tensor) -> Tensor:
    return aten.mul.Tensor(aten.select_scatter.default(aten.sin.default(x), aten.select.int(x, 0, 1), 0, 0), 2)


def _several_parts_of_own(x: Tensor) -> Tensor:
    result = aten.full.default([3, 6, 4], 0.0)
    for k in range(3):
        result = aten.select_scatter.default(result, aten.select.int(x, 0, k % 2), 0, k)
    return result


def _one_position_in_each_row(at: Tensor) -> Tensor:
    return aten.mul.Tensor(aten.scatter.value(aten.full.default([1, 4], 0.0), 1, aten.unsqueeze.default(at, 0), 1.0), 2)


def _other_layout(cache: Tensor, at: Tensor, row: Tensor) -> Tensor:
    wide = aten.expand.default(aten.slice.Tensor(aten.sin.default(cache), 0, 0, 1), [2, 6, 4])
    return aten.index_put.default(wide, [None, at], row)


@pytest.mark.parametrize(
    ("function", "inputs"),
    [
        (_old_value_read_later, (CACHE, AT, ROW)),
        (_view_of_old_value_read_later, (CACHE, AT, ROW)),
        (_not_for_the_caller, (CACHE, AT, ROW)),
        (_returned_too, (CACHE, AT, ROW)),
        (_view_returned_too, (CACHE, AT, ROW)),
        (_values_from_the_same_memory, (CACHE, AT)),
        (_another_input_gets_it, (CACHE, CACHE + 1, AT, ROW)),
        (_one_part_of_own, (CACHE,)),
        (_several_parts_of_own, (CACHE,)),
        (_one_position_in_each_row, (AT,)),
        (_other_layout, (CACHE, AT, ROW)),
    ],
)
def test_left_as_it_is(function: Callable[..., Any], inputs: tuple[Tensor, ...]) -> None:
    gm = traced(function, *inputs)
    before = calls(gm)
    assert not apply(write_in_place, gm)
    assert calls(gm) == before
    same_numbers(gm, function, *inputs)


def test_a_value_copied_from_memory_that_is_written_in_between_is_read_before() -> None:
    def function(cache: Tensor, other: Tensor, row: Tensor) -> Tensor:
        saved = aten.copy.default(aten.slice.Tensor(cache, 1, 0, 1), aten.slice.Tensor(other, 1, 2, 3))
        new_other = aten.slice_scatter.default(other, row, 1, 2, 3)
        new_cache = aten.slice_scatter.default(cache, saved, 1, 0, 1)
        aten.copy_.default(cache, new_cache)
        aten.copy_.default(other, new_other)
        return aten.neg.default(row)

    gm = traced(function, CACHE, CACHE + 100, ROW)
    assert apply(write_in_place, gm)
    assert not any("slice_scatter" in call for call in calls(gm))
    same_numbers(gm, function, CACHE, CACHE + 100, ROW)


def test_sizes_known_only_at_run_time() -> None:
    gm = traced(_update_of_part, CACHE, ROW, symbolic=True)
    assert apply(write_in_place, gm)
    assert not any("slice_scatter" in call for call in calls(gm))
    same_numbers(gm, _update_of_part, CACHE, ROW)
    larger = (torch.randn(3, 7, 5), torch.randn(3, 1, 5))
    same_numbers(gm, _update_of_part, *larger)


# -- compiled ------------------------------------------------------------------------------------------------------


def _assign_slice(cache: Tensor, k: Tensor) -> Tensor:
    cache[:, :, 5:6] = k
    return cache.sum(-1)


def _assign_by_position(cache: Tensor, at: Tensor, k: Tensor) -> Tensor:
    cache.index_put_((torch.arange(2)[:, None], torch.arange(3)[None], at), k)
    return cache.sum(-1)


def _assign_along(cache: Tensor, at: Tensor, k: Tensor) -> Tensor:
    cache.index_copy_(2, at, k)
    return cache.amax(-1)


def _assign_everywhere(cache: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    cache[1:, :, 5:7][..., 2] = k[0, :, :1, 0]
    cache[:, 0] += 1
    cache.transpose(1, 2)[:, 3] = k[:, :, 0]
    cache.view(-1, 4)[::3] = 7
    cache.diagonal(0, 2, 3).mul_(2)
    return cache, k + cache[:, :, :1]


def _shift(cache: Tensor, k: Tensor) -> Tensor:
    cache[:, :, 1:] = cache[:, :, :-1].clone()
    cache[:, :, :1] = k
    return cache.sum(2)


def _overlapping_shift(cache: Tensor, k: Tensor) -> Tensor:
    cache[:, :, 1:] = cache[:, :, :-1] * 2
    return k + cache[:, :, 1:2]


def _two_caches(keys: Tensor, values: Tensor, k: Tensor) -> Tensor:
    keys[:, :, 2:3] = k
    values[:, :, 2:3] = keys[:, :, 2:3] + 1
    keys[:, :, 3:4] = values[:, :, 1:2]
    return keys @ values.transpose(2, 3)


def _rows_of_own(x: Tensor) -> Tensor:
    out = torch.empty(5, *x.shape)
    h = x
    for step in range(5):
        h = torch.tanh(h + step)
        out[step] = h
    return out


def _scatters(x: Tensor, at: Tensor) -> tuple[Tensor, ...]:
    zeros = torch.zeros(6, 4)
    return (
        zeros.scatter_add(0, at, x),
        torch.ones(6, 4).scatter_(0, at, x),
        torch.zeros(6, 4).index_add_(0, at[:, 0], x, alpha=2),
        torch.zeros(6, 4).masked_scatter_(torch.arange(24).view(6, 4) % 2 == 0, x.repeat(4, 1)),
        zeros,
    )


C = torch.randn(2, 3, 8, 4)
K = torch.randn(2, 3, 1, 4)


@pytest.mark.parametrize(
    ("function", "inputs"),
    [
        (_assign_slice, (C, K)),
        (_assign_by_position, (C, torch.tensor([[1, 2, 3], [4, 5, 6]]), K[:, :, 0])),
        (_assign_along, (C, torch.tensor([3]), K)),
        (_assign_everywhere, (C, K)),
        (_shift, (C, K)),
        (_overlapping_shift, (C, K)),
        (_two_caches, (C, C + 1, K)),
        (_rows_of_own, (torch.randn(3, 4),)),
        (_scatters, (torch.randn(3, 4), torch.tensor([[0, 1, 2, 3], [3, 3, 0, 1], [5, 4, 4, 2]]))),
        (_assign_slice, (C.to(torch.bfloat16), K.to(torch.bfloat16))),
        (_assign_slice, (C, K.double())),
        (_two_caches, (C.transpose(2, 3).contiguous().transpose(2, 3), C.to(torch.float32), K)),
    ],
)
def test_as_eager(function: Callable[..., Any], inputs: tuple[Tensor, ...]) -> None:
    check(function, *inputs, tolerance={"rtol": 1e-5, "atol": 1e-5})


def test_the_returned_cache_is_the_input() -> None:
    def program(cache: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        cache[:, :, 5:6] = k
        return cache, cache[:, 1]

    compiled = torch.compile(program, backend="kiln", fullgraph=True, options={"fallback": False})
    cache = C.clone()
    with torch.no_grad():
        whole, part = compiled(cache, K)
    assert whole is cache
    assert part.data_ptr() == cache[:, 1].data_ptr()
    assert torch.equal(cache[:, :, 5:6], K)


def test_a_position_that_changes_is_compiled_once() -> None:
    def program(cache: Tensor, at: int, k: Tensor) -> Tensor:
        cache[:, :, at : at + 1] = k
        return cache.sum(-1)

    compiled = torch.compile(program, backend="kiln", fullgraph=True, dynamic=True, options={"fallback": False})
    mine, eagers = C.clone(), C.clone()
    graphs, per_size = torchkiln.stats().graphs, torchkiln.stats().per_size
    with torch.no_grad():
        for at in (2, 3, 6):
            torch.testing.assert_close(compiled(mine, at, K), program(eagers, at, K))
            assert torch.equal(mine, eagers)
    assert torchkiln.stats().graphs == graphs + 1
    assert torchkiln.stats().per_size == per_size


@pytest.mark.parametrize("form", ["slice", "position", "along"])
def test_a_large_cache_is_not_copied(form: str) -> None:
    """One row of 64 MiB: the time is that of the row, not that of the cache (copying it takes some 20 ms)."""

    def by_slice(cache: Tensor, at: Tensor, k: Tensor) -> Tensor:
        cache[:, :, 5:6] = k * 2
        return cache[:, :, 5] + 1

    def by_position(cache: Tensor, at: Tensor, k: Tensor) -> Tensor:
        cache[:, :, at] = k * 2
        return cache[:, :, 5] + 1

    def along(cache: Tensor, at: Tensor, k: Tensor) -> Tensor:
        cache.index_copy_(2, at, k * 2)
        return cache[:, :, 5] + 1

    program = {"slice": by_slice, "position": by_position, "along": along}[form]
    compiled = torch.compile(program, backend="kiln", fullgraph=True, options={"fallback": False})
    cache, at, k = torch.zeros(4, 8, 8192, 64), torch.tensor([5]), torch.randn(4, 8, 1, 64)
    with torch.no_grad():
        assert torch.equal(compiled(cache, at, k), program(cache.clone(), at, k))
        assert torch.equal(cache[:, :, 5:6], k * 2)
        updating = min(_seconds(lambda: compiled(cache, at, k)) for _ in range(10))
        copying = min(_seconds(lambda: cache.clone()) for _ in range(5))
    assert updating < copying / 10


def _seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


_UNPROMISED = pytest.param(
    False,
    marks=pytest.mark.skipif(
        torch.__version__.startswith("2.11"), reason="torch 2.11 does not capture a slice that may lie outside"
    ),
)


@torch._dynamo.config.patch(capture_scalar_outputs=True)
@pytest.mark.parametrize("promised", [True, _UNPROMISED])
def test_a_position_that_depends_on_data(promised: bool) -> None:
    """Written in place only where the program promises that it lies in the cache, which is checked at each call."""

    def program(cache: Tensor, at: Tensor, k: Tensor) -> Tensor:
        position = at.max().item()
        if promised:
            torch._check(position >= 0)
            torch._check(position < cache.size(2))
        cache[:, :, position : position + 1] = k
        return cache.sum(-1)

    with torchkiln.settings(record_passes=True), torch.no_grad():
        compiled = torch.compile(program, backend="kiln", fullgraph=True, options={"fallback": False})
        mine, eagers = C.clone(), C.clone()
        before = len(torchkiln.stats().passes)
        for at in (torch.tensor([2, 1]), torch.tensor([3, 6])):
            torch.testing.assert_close(compiled(mine, at, K), program(eagers, at, K))
            assert torch.equal(mine, eagers)
        changed = [record.changed for record in torchkiln.stats().passes[before:] if record.name == "in_place"]
        assert changed == [promised]
        if promised:
            with pytest.raises(RuntimeError):
                compiled(mine, torch.tensor([7, 8]), K)
            assert torch.equal(mine, eagers)
