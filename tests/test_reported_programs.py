"""Programs that once gave a wrong result, an error or a crash, each kept as the smallest form it was found in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx

import torchkiln

CompileStrictly = Callable[..., Any]


def _same(got: Any, wanted: Any) -> None:
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6, equal_nan=True)


def test_a_scalar_under_a_guard_is_not_read_for_dead_lanes(compile_strictly: CompileStrictly) -> None:
    x, y = torch.randn(20, 7), torch.randn(7)
    _same(compile_strictly(torch.diagonal_scatter)(x, y), torch.diagonal_scatter(x, y))


@pytest.mark.parametrize("transposed", [False, True])
def test_divisions_of_positions_beyond_32_bits(compile_strictly: CompileStrictly, transposed: bool) -> None:
    rows, columns, step = 1_500_000, 3001, 1_048_583
    x = torch.arange(float(columns))

    def every_so_often(x: torch.Tensor) -> torch.Tensor:  # 4.5e9 elements, of which no more than these are computed
        wide = x.unsqueeze(1).expand(columns, rows) if transposed else x.expand(rows, columns)
        return wide.reshape(-1)[::step] * 2

    positions = torch.arange(0, rows * columns, step)
    expected = x[positions // rows if transposed else positions % columns] * 2
    assert torch.equal(compile_strictly(every_so_often)(x), expected)


def test_an_input_with_a_pending_negation_does_not_compile_wrongly() -> None:
    x = torch.randn(4, dtype=torch.complex64).conj().imag
    _same(torch.compile(lambda x: x + 1, backend="kiln")(x), x + 1)


def test_a_write_into_an_input_with_a_pending_negation_runs_eagerly_with_the_reason() -> None:
    values = torch.randn(4)
    x, y = torch._neg_view(values.clone()), torch._neg_view(values.clone())
    with pytest.warns(torchkiln.errors.FallbackWarning, match="negation"):
        got = torch.compile(lambda x: x.add_(1) * 2, backend="kiln")(x)
    _same(got, y.add_(1) * 2)
    _same(x, y)


def test_tensors_on_other_devices_are_left_to_torch(everything_compiled: None) -> None:
    x = torch.empty(8, 8, device="meta")[:, :4]
    got = torch.compile(lambda x: (x.t() + 1, x.reshape(-1).sin()), backend="kiln")(x)
    assert [tuple(g.shape) for g in got] == [(4, 8), (32,)]
    assert all(g.device.type == "meta" for g in got)


def test_a_value_computed_before_its_source_is_overwritten_keeps_the_old_source() -> None:
    def program(x: torch.Tensor) -> list[torch.Tensor]:
        doubled = x * 2
        torch.ops.aten.copy_.default(x, x + 1)
        return [doubled - doubled.sum(-1, keepdim=True)]

    x = torch.randn(4, 33)
    expected = program(x.clone())
    graph = make_fx(program, tracing_mode="fake")(x)
    run = torchkiln.compile_fx_inner(graph, [x], settings=torchkiln.Settings(fallback=False))
    _same(run([x.clone()])[0], expected[0])


@pytest.mark.parametrize("length", [330, 2000])
def test_chains_deeper_than_the_stack_compile_to_kernels(compile_strictly: CompileStrictly, length: int) -> None:
    def chain(x: torch.Tensor) -> torch.Tensor:
        for k in range(length):
            x = x * 0.999 + 0.001 if k % 2 else x.sin()
        return x

    x = torch.randn(100)
    got = compile_strictly(chain)(x)
    torch.testing.assert_close(got, chain(x), rtol=1e-4, atol=1e-5)


def test_control_flow_on_symbolic_sizes_is_compiled_for_each_of_them() -> None:
    def branch(x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda x: x + 1, lambda x: x - 1, (x,))

    torchkiln.reset_stats()
    compiled = torch.compile(branch, backend="kiln", dynamic=True, options={"fallback": False})
    for size in (3, 5, 3):
        x = torch.ones(size)
        _same(compiled(x), branch(x))
        _same(compiled(-x), branch(-x))
    assert torchkiln.stats().graphs == 2
    assert len(torchkiln.stats().per_size) == 1


def test_as_strided_of_an_offset_input_with_symbolic_sizes() -> None:
    x = torch.arange(10.0)[2:]

    def window(x: torch.Tensor) -> torch.Tensor:
        return torch.as_strided(x, (2,), (1,), 3) + 1

    compiled = torch.compile(window, backend="kiln", dynamic=True, options={"fallback": False})
    _same(compiled(x), window(x))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_values_compare_with_a_number_in_their_own_precision(
    compile_strictly: CompileStrictly, dtype: torch.dtype
) -> None:
    x = torch.tensor([0.1, 0.2, 0.3]).to(dtype)

    def compare(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x == 0.1, x <= 0.1, x > 0.3

    for got, wanted in zip(compile_strictly(compare)(x), compare(x), strict=True):
        assert torch.equal(got, wanted)


def test_a_half_value_with_two_readers_has_one_value(compile_strictly: CompileStrictly) -> None:
    def program(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = x * 3.1
        return (y == y.amax()).sum(), (y - y.amax()).amax()

    x = torch.randn(1000).bfloat16()
    for got, wanted in zip(compile_strictly(program)(x), program(x), strict=True):
        assert torch.equal(got, wanted)


@pytest.mark.parametrize(
    "read",
    [
        lambda x, i: F.embedding(i, x),
        lambda x, i: x.index_select(0, i),
        lambda x, i: x.gather(0, i[:, None].expand(-1, 3)),
    ],
    ids=["embedding", "index_select", "gather"],
)
def test_negative_positions_are_an_error_where_eager_says_so(
    compile_strictly: CompileStrictly, read: Callable[..., torch.Tensor]
) -> None:
    x, i = torch.randn(5, 3), torch.tensor([0, -1])
    with pytest.raises((IndexError, RuntimeError)) as eager:
        read(x, i)
    compiled = compile_strictly(read)
    with pytest.raises(eager.type):
        compiled(x, i)
    _same(compiled(x, i.abs()), read(x, i.abs()))


@pytest.mark.parametrize(
    "fill",
    [
        lambda x: x.masked_fill(x > 0, 300),
        lambda x: torch.where(x > 0, x, 1000),
        lambda x: torch.full_like(x, 300),
    ],
    ids=["masked_fill", "where", "full_like"],
)
def test_numbers_that_do_not_fit_the_dtype_do_what_eager_does(fill: Callable[..., torch.Tensor]) -> None:
    x = torch.tensor([1, -1, 3], dtype=torch.int8)
    try:
        wanted = fill(x)
    except RuntimeError:
        with pytest.raises(Exception, match=r"overflow|convert"):
            torch.compile(fill, backend="kiln")(x)
    else:
        assert torch.equal(torch.compile(fill, backend="kiln")(x), wanted)


@pytest.mark.parametrize("columns", [97, 120, 127])
def test_column_sums_whose_width_is_just_below_two_blocks(compile_strictly: CompileStrictly, columns: int) -> None:
    x = torch.randn(3000, columns)
    torch.testing.assert_close(compile_strictly(lambda x: x.sum(0))(x), x.sum(0), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "function",
    [
        lambda a: a.conj() * a,
        lambda a: a.mH @ a,
        lambda a: torch.view_as_real(a * 2),
        lambda a: torch.complex(a.real + 1, a.imag) * 2,
        lambda a: torch.fft.fft(a).real,
    ],
    ids=["conj", "mH", "view_as_real", "complex", "fft"],
)
def test_complex_numbers_and_their_lazy_conjugation(
    compile_strictly: CompileStrictly, function: Callable[..., torch.Tensor]
) -> None:
    a = torch.randn(3, 4, dtype=torch.complex64, requires_grad=True)
    wanted = function(a)
    got = compile_strictly(function)(a)
    _same(got.resolve_conj(), wanted.resolve_conj())
    seed = torch.randn_like(wanted)
    for value, other in zip(torch.autograd.grad(got, a, seed), torch.autograd.grad(wanted, a, seed), strict=True):
        torch.testing.assert_close(value.resolve_conj(), other.resolve_conj(), rtol=1e-4, atol=1e-5)


def test_a_failing_assertion_after_one_that_held_raises(compile_strictly: CompileStrictly) -> None:
    def within(x: torch.Tensor) -> torch.Tensor:
        torch._assert_async((x >= 0).all(), "below")
        torch._assert_async((x < 3).all(), "above")
        return x + 1

    compiled = compile_strictly(within)
    for _ in range(3):
        with pytest.raises(RuntimeError):
            compiled(torch.tensor([1, 5]))
        assert torch.equal(compiled(torch.tensor([1, 2])), torch.tensor([2, 3]))


def test_a_graph_that_returns_one_tensor_compiles() -> None:
    x = torch.randn(3)
    graph = make_fx(lambda x: x.relu(), tracing_mode="fake")(x)
    run = torchkiln.compile_fx_inner(graph, [x], settings=torchkiln.Settings(fallback=False))
    assert torch.equal(run([x])[0], x.relu())


def test_a_comparison_of_sizes_is_returned_as_a_truth_value() -> None:
    def program(x: torch.Tensor) -> tuple[torch.Tensor, bool, float]:
        return x + 1, x.shape[0] > 3, x.shape[0] / 4

    compiled = torch.compile(program, backend="kiln", dynamic=True, options={"fallback": False})
    for rows in (5, 2, 3):
        _, more, quarter = compiled(torch.randn(rows))
        assert more is (rows > 3)
        assert quarter == rows / 4


def test_a_float_read_from_a_tensor_reaches_backward() -> None:
    def program(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (x * y.sum().item()).sin()

    x, y = torch.randn(5, requires_grad=True), torch.randn(3)
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        got = torch.compile(program, backend="kiln", fullgraph=True, options={"fallback": False})(x, y)
    _same(torch.autograd.grad(got.sum(), x), torch.autograd.grad(program(x, y).sum(), x))


def test_equal_results_that_leave_the_graph_have_memory_of_their_own(compile_strictly: CompileStrictly) -> None:
    def fn(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        first, second, third = x.exp() * 2, x.exp() * 2, x.exp() * 2
        return first.neg(), second, third

    _, second, third = compile_strictly(fn)(torch.randn(4))
    second.zero_()
    assert bool((third > 0).all())


def test_the_mean_of_nothing_is_not_a_number(compile_strictly: CompileStrictly) -> None:
    x = torch.empty(0, dtype=torch.bfloat16)
    found = compile_strictly(lambda x: torch.var_mean(x, (0,), correction=0)[1])(x)
    assert bool(found.isnan())


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_write_into_a_copy_of_overlapping_memory_shows_where_it_shows_in_eager(dynamic: bool) -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return torch.select_scatter(x, x.select(0, 0), 0, -1)

    x = torch.arange(24).view(3, 2, 2, 2).unfold(0, 2, 1)
    compiled = torch.compile(fn, backend="kiln", dynamic=dynamic, options={"fallback": False})
    _same(compiled(x), fn(x))
