"""``rng="fused"``: seeds, ranges, distributions, masks in backward, and what stays eager's."""

from __future__ import annotations

import math
import multiprocessing
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import torchkiln
from tests.interpreted import InterpretingCompiler, targets
from torchkiln.compiler import compile_fx
from torchkiln.config import Settings

Compile = Callable[..., Any]
aten = torch.ops.aten


def test_a_seed_reproduces_and_calls_differ(compile_strictly: Compile) -> None:
    run = compile_strictly(lambda: torch.rand(100))
    torch.manual_seed(3)
    first, second = run(), run()
    torch.manual_seed(3)
    assert torch.equal(first, run())
    assert torch.equal(second, run())
    assert not torch.equal(first, second)


def test_operators_of_one_graph_draw_different_numbers(compile_strictly: Compile) -> None:
    a, b, c = compile_strictly(lambda: (torch.rand(50), torch.rand(50), torch.rand(50, dtype=torch.float64)))()
    assert not torch.equal(a, b)
    assert not torch.equal(a.double(), c)
    assert abs(torch.corrcoef(torch.stack([a, b]))[0, 1].item()) < 0.6


def test_compiling_draws_nothing(compile_strictly: Compile) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return F.dropout(x, 0.5) + torch.rand(3)

    run = compile_strictly(function)
    x = torch.ones(3, requires_grad=True)
    states, results = [], []
    for _ in range(2):
        torch.manual_seed(11)
        y = run(x)
        y.sum().backward()
        results.append(y.detach())
        states.append(torch.get_rng_state())
    assert torch.equal(*states)
    assert torch.equal(*results)


def test_no_operator_but_the_seed_draws_from_torch(compile_strictly: Compile) -> None:
    torchkiln.reset_stats()
    x = torch.ones(4, 6)

    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (
            F.dropout(x, 0.5),
            torch.rand_like(x),
            torch.randn(3),
            torch.randint(0, 9, (5,)),
            torch.empty_like(x).uniform_(1, 2),
            torch.empty_like(x).normal_(1, 2),
            torch.empty_like(x).exponential_(),
            x.bernoulli(0.3),
            torch.normal(x, 2.0),
            torch.randint_like(x, 7),
        )

    compile_strictly(function)(x)
    assert dict(torchkiln.stats().extern_calls) == {"aten.randint.low": 1}


# Statistics. Seeds are fixed, so that a test fails always or never; bounds are four to five standard errors.
N = 200_000


def _assert_uniform(u: torch.Tensor) -> None:
    u = u.double()
    n = u.numel()
    assert abs(u.mean().item() - 0.5) < 5 * math.sqrt(1 / 12 / n)
    assert abs(u.var().item() - 1 / 12) < 5 * math.sqrt(1 / 180 / n)
    counts = torch.histc(u, 64, 0, 1)
    chi_square = ((counts - n / 64) ** 2 / (n / 64)).sum().item()
    assert 63 - 4.5 * math.sqrt(126) < chi_square < 63 + 4.5 * math.sqrt(126)
    centred = u - 0.5
    for lag in (1, 2, 3, 4, 7):
        assert abs((centred[lag:] * centred[:-lag]).mean().item() * 12) < 5 / math.sqrt(n)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16], ids=str)
def test_uniform_numbers_are_uniform_and_below_one(dtype: torch.dtype, compile_strictly: Compile) -> None:
    u = compile_strictly(lambda: torch.rand(N, dtype=dtype))()
    assert u.dtype == dtype
    assert u.min().item() >= 0
    assert u.max().item() < 1
    step = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}.get(dtype, 0.0)  # numbers are cut, not rounded
    _assert_uniform(u.double() + (torch.rand(N, dtype=torch.float64) * step if step else 0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_normal_numbers_are_normal_and_finite(dtype: torch.dtype, compile_strictly: Compile) -> None:
    x = compile_strictly(lambda: torch.randn(N, dtype=dtype))().double()
    assert x.isfinite().all()
    for power, moment, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        assert abs((x**power).mean().item() - moment) < 5 * math.sqrt(variance / N)
    _assert_uniform(0.5 * (1 + torch.erf(x / math.sqrt(2))))


def test_words_at_the_ends_of_the_range_give_finite_normals() -> None:
    """The extreme words are too rare to wait for: here they are by themselves."""
    for word in (0, 1, 0xFFFFFFFF):
        radius = torch.tensor(float(word), dtype=torch.float32) * 2.0**-32 + 2.0**-33
        assert 0 < radius.item() <= 1
        assert torch.sqrt(-2 * torch.log(radius)).isfinite()


def test_exponential_numbers_are_positive_and_exponential(compile_strictly: Compile) -> None:
    x = compile_strictly(lambda: torch.empty(N).exponential_(2.0))().double()
    assert x.min().item() > 0
    _assert_uniform(1 - torch.exp(-2 * x))


def test_integers_are_uniform(compile_strictly: Compile) -> None:
    x = compile_strictly(lambda: torch.randint(-3, 61, (N,)))()
    assert (x.min().item(), x.max().item()) == (-3, 60)
    _assert_uniform((x + 3.0 + torch.rand(N)) / 64)


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 1.0])
def test_masks_have_the_probability_asked_for(p: float, compile_strictly: Compile) -> None:
    drawn = compile_strictly(lambda x: x.bernoulli(p))(torch.empty(N))
    if p in (0.0, 1.0):
        assert (drawn == p).all()
    assert set(drawn.unique().tolist()) <= {0.0, 1.0}
    assert abs(drawn.mean().item() - p) <= 5 * math.sqrt(p * (1 - p) / N)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_probabilities_may_be_in_a_tensor(dtype: torch.dtype, compile_strictly: Compile) -> None:
    p = torch.tensor([0.0, 0.25, 0.75, 1.0], dtype=dtype).repeat(N // 4)
    drawn = compile_strictly(lambda p: (torch.bernoulli(p), torch.empty_like(p).bernoulli_(p)))(p)
    for result in drawn:
        assert result.dtype == dtype
        means = result.double().reshape(-1, 4).mean(0)
        assert means[0] == 0
        assert means[3] == 1
        assert (means[1:3] - torch.tensor([0.25, 0.75])).abs().max().item() < 5 * math.sqrt(3 / 16 / (N / 4))
    assert not torch.equal(*drawn)


@pytest.mark.parametrize("p", [0.0, 0.25, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_dropout_drops_and_scales_and_its_gradient_has_the_same_mask(
    p: float, dtype: torch.dtype, compile_strictly: Compile
) -> None:
    x = torch.ones(300, 333, dtype=dtype, requires_grad=True)
    run = compile_strictly(lambda x: F.dropout(x, p))
    y = run(x)
    y.backward(torch.ones_like(y))
    kept = 0.0 if p == 1 else 1 / (1 - p)
    assert set(y.unique().tolist()) <= {0.0, torch.tensor(kept, dtype=dtype).item()}
    assert abs((y != 0).float().mean().item() - (1 - p)) <= 5 * math.sqrt(p * (1 - p) / y.numel())
    assert x.grad is not None
    assert torch.equal(x.grad, y.detach())


def test_of_masks_only_the_seed_is_saved_for_backward() -> None:
    inner = InterpretingCompiler()
    settings = Settings(fallback=False, checks=True)

    def function(x: torch.Tensor) -> torch.Tensor:
        return F.alpha_dropout(F.dropout(x, 0.5) * 2, 0.3, training=True)

    compiled = torch.compile(
        function, fullgraph=True, backend=lambda gm, args: compile_fx(gm, args, inner_compile=inner, settings=settings)
    )
    compiled(torch.ones(4, 6, requires_grad=True)).sum().backward()
    forward, backward = inner.graphs
    saved = [n for n in backward.graph.find_nodes(op="placeholder") if not n.name.startswith("tangents")]
    assert [tuple(n.meta["val"].shape) for n in saved] == [(1,)]
    assert targets(forward).count(aten.randint.low) == 1
    assert aten.randint.low not in targets(backward)
    assert torch.ops.kiln.random.default in targets(backward)


def test_checkpointed_dropout_has_one_mask(compile_strictly: Compile) -> None:
    def block(x: torch.Tensor) -> torch.Tensor:
        return F.dropout(x.sin(), 0.5) * 2

    def function(x: torch.Tensor) -> Any:
        return checkpoint(block, x, use_reentrant=False)

    x = torch.rand(40, 50, requires_grad=True)
    y = compile_strictly(function)(x)
    y.sum().backward()
    assert x.grad is not None
    mask = y.detach() != 0
    torch.testing.assert_close(x.grad, torch.where(mask, 4 * x.detach().cos(), 0.0))


def test_backward_draws_its_own_numbers_each_time(compile_strictly: Compile) -> None:
    class Noisy(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
            return grads[0] + torch.rand_like(grads[0])

    x = torch.ones(30, requires_grad=True)
    y = compile_strictly(lambda x: Noisy.apply(x))(x)
    first = torch.autograd.grad(y.sum(), x, retain_graph=True)[0]
    second = torch.autograd.grad(y.sum(), x)[0]
    assert not torch.equal(first, second)


def test_memory_layout_changes_strides_and_not_numbers(compile_strictly: Compile) -> None:
    x = torch.empty(2, 3, 4, 5)
    run = compile_strictly(lambda x: torch.rand_like(x))
    torch.manual_seed(2)
    plain = run(x)
    torch.manual_seed(2)
    last = run(x.contiguous(memory_format=torch.channels_last))
    assert last.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(plain, last)


def test_a_generator_of_the_users_is_drawn_from_as_eager_does() -> None:
    generator = torch.Generator().manual_seed(4)
    expected = torch.rand(5, generator=generator)
    generator.manual_seed(4)
    run = torch.compile(lambda g: torch.rand(5, generator=g), backend="kiln")
    assert torch.equal(run(generator), expected)


def test_permutations_and_multinomial_are_eagers() -> None:
    weights = torch.rand(3, 8)

    def function(w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.randperm(20), torch.multinomial(w, 4)

    torch.manual_seed(9)
    expected = function(weights)
    run = torch.compile(function, backend="kiln", options={"fallback": False})
    torch.manual_seed(9)
    results = run(weights)
    assert torch.equal(results[0], expected[0])
    assert torch.equal(results[1], expected[1])


def test_impossible_arguments_raise_as_in_eager(compile_strictly: Compile) -> None:
    run = compile_strictly(torch.bernoulli)
    for bad in (1.5, -0.5, float("nan")):
        with pytest.raises(RuntimeError, match="p_in"):
            run(torch.tensor([0.5, bad]))
    assert run(torch.tensor([0.0, 1.0])).tolist() == [0.0, 1.0]


def _draw_in_child(results: Any) -> None:
    run = torch.compile(lambda: torch.rand(4), backend="kiln", options={"fallback": False})
    torch.manual_seed(21)
    results.put(run().tolist())


def test_another_process_draws_the_same_numbers(compile_strictly: Compile) -> None:
    torch.manual_seed(21)
    expected = compile_strictly(lambda: torch.rand(4))().tolist()
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    child = context.Process(target=_draw_in_child, args=(results,))
    child.start()
    assert results.get(timeout=60) == expected
    child.join()


def test_symbolic_sizes_draw_the_same_numbers_as_static_ones() -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.rand_like(x), torch.randn(x.shape[0], 3), F.dropout(x, 0.5)

    results = []
    for dynamic in (False, True):
        torch._dynamo.reset()
        run = torch.compile(function, backend="kiln", dynamic=dynamic, options={"fallback": False})
        torch.manual_seed(8)
        results.append([run(torch.ones(n, 4)) for n in (5, 7)])
    for static, symbolic in zip(*results, strict=True):
        for a, b in zip(static, symbolic, strict=True):
            assert torch.equal(a, b)


def test_numbers_are_drawn_in_graphs_that_are_compiled_for_each_size() -> None:
    def pooled(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.fractional_max_pool2d(x, 2, output_size=3)

    run = torch.compile(pooled, backend="kiln", dynamic=True, options={"fallback": False})
    for size in (9, 12):
        x = torch.randn(2, 3, size, size)
        result = run(x)
        assert result.shape == (2, 3, 3, 3)
        assert torch.isin(result, x).all()
