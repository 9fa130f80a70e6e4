"""Graphs with symbolic sizes: one compilation serves every size in its range, with eager's results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import torchkiln

Function = Callable[..., Any]
# The second and third sizes are the smallest a symbol stands for, prime, and larger than the first by far.
SIZES = ((3, 5), (7, 11), (2, 3), (64, 130), (5, 1000))


def r(*shape: int) -> torch.Tensor:
    return torch.randn(*shape)


def g(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, requires_grad=True)


def _copies(arguments: Sequence[Any]) -> list[Any]:
    return [
        a.detach().clone(memory_format=torch.preserve_format).requires_grad_(a.requires_grad)
        if isinstance(a, torch.Tensor)
        else a
        for a in arguments
    ]


def _listed(result: Any) -> list[Any]:
    return list(result) if isinstance(result, (tuple, list)) else [result]


def check_at_sizes(fn: Function, arguments_for: Callable[[int, int], Sequence[Any]], *, graphs: int | None) -> None:
    """Run ``fn`` compiled and eagerly at every size; ``graphs`` is how many functional graphs that may compile."""
    torchkiln.reset_stats()
    compiled = torch.compile(fn, backend="kiln", dynamic=True, fullgraph=True, options={"fallback": False})
    for rows, columns in SIZES:
        given = list(arguments_for(rows, columns))
        ours = _copies(given)
        expected, actual = _listed(fn(*given)), _listed(compiled(*ours))
        for left, right in zip(actual, expected, strict=True):
            half = isinstance(right, torch.Tensor) and right.dtype == torch.bfloat16
            torch.testing.assert_close(left, right, rtol=1.6e-2 if half else 2e-5, atol=2e-5)
            if isinstance(right, torch.Tensor):
                assert left.stride() == right.stride()
        torch.testing.assert_close(ours, given, rtol=2e-5, atol=2e-5)  # in-place changes of the arguments
        if any(isinstance(a, torch.Tensor) and a.requires_grad for a in given):
            weights = [torch.randn_like(t) for t in expected]
            torch.autograd.backward(expected, weights)
            torch.autograd.backward(actual, weights)
            for left, right in zip(ours, given, strict=True):
                if isinstance(right, torch.Tensor) and right.requires_grad:
                    torch.testing.assert_close(left.grad, right.grad, rtol=2e-4, atol=2e-4)
    stats = torchkiln.stats()
    assert not stats.per_size
    assert not stats.fallbacks
    if graphs is not None:
        assert stats.graphs == graphs


def _written_from(x: torch.Tensor, y: torch.Tensor, start: int) -> torch.Tensor:
    x[:, start : start + y.shape[1]] = y
    return x[:, : start + y.shape[1]].sum(1)


def _causal_softmax(x: torch.Tensor) -> torch.Tensor:
    mask = torch.ones(x.shape[-1], x.shape[-1], dtype=torch.bool).triu(1)
    return x.masked_fill(mask, float("-inf")).softmax(-1)


POINTWISE: dict[str, tuple[Function, Callable[[int, int], Sequence[Any]]]] = {
    "arithmetic": (lambda x, y: (x + y) * 2 + x.sin(), lambda a, b: [g(a, b), g(a, b)]),
    "broadcast": (lambda x, y, z: x * y + z, lambda a, b: [g(a, b), g(b), g(a, 1)]),
    "sizes as numbers": (lambda x: x / x.shape[1] + x.shape[0] ** 2, lambda a, b: [g(a, b)]),
    "root of a size": (lambda x: x / x.shape[1] ** 0.5, lambda a, b: [g(a, b)]),
    "in place": (lambda x: x.add_(1).mul_(2), lambda a, b: [r(a, b)]),
    "a size returned": (lambda x: (x + 1, x.shape[0] * 2 + x.shape[1]), lambda a, b: [r(a, b)]),
    "strided input": (lambda x: x + 1, lambda a, b: [r(a, b * 2)[:, ::2]]),
    "transposed input": (lambda x: x.sin() + 1, lambda a, b: [r(b, a).t()]),
    "half precision": (lambda x: (x * 2).exp(), lambda a, b: [r(a, b).bfloat16()]),
    "integers": (lambda x: x // 3 + x % 5, lambda a, b: [torch.randint(-50, 50, (a, b))]),
}
VIEWS: dict[str, tuple[Function, Callable[[int, int], Sequence[Any]]]] = {
    "flattened": (lambda x: (x + 1).view(-1) * 2, lambda a, b: [g(a, b)]),
    "split and turned": (
        lambda x: (x + 1).view(x.shape[0], -1, 4).transpose(1, 2).contiguous(),
        lambda a, b: [g(a, b * 4)],
    ),
    "turned and flattened": (lambda x: x.t().reshape(-1) + 1, lambda a, b: [g(a, b)]),
    "transposed copy": (lambda x: x.t().contiguous() + 1, lambda a, b: [g(a, b)]),
    "slices": (lambda x: x[:, 1:] * x[:, :-1], lambda a, b: [g(a, b)]),
    "joined": (lambda x, y: torch.cat([x, y, x], 1) * 2, lambda a, b: [g(a, b), g(a, 4)]),
    "split": (lambda x: [t * 2 for t in x.split(4, 0)], lambda a, b: [g(8, b)]),
    "chunks": (lambda x: [t * 2 for t in x.chunk(2, 1)], lambda a, b: [g(a, 2 * b)]),
    "padded": (lambda x: F.pad(x, (1, 2, 3, 0)), lambda a, b: [g(a, b)]),
    "repeated": (lambda x: x.repeat(2, 3), lambda a, b: [g(a, b)]),
    "flipped": (lambda x: x.flip(1), lambda a, b: [g(a, b)]),
    "expanded": (lambda x: x[:, None].expand(-1, 3, -1) + 1, lambda a, b: [g(a, b)]),
    "rolled": (lambda x: torch.roll(x, 1, 0), lambda a, b: [g(a, b)]),
    "triangle": (lambda x: torch.tril(x) + torch.zeros(x.shape[0], x.shape[1]), lambda a, b: [g(a, b)]),
    "a range": (lambda x: torch.arange(x.shape[1]) + x, lambda a, b: [g(a, b)]),
    "gathered": (lambda x, i: x.gather(1, i), lambda a, b: [g(a, b), torch.randint(0, b, (a, b))]),
    "indexed": (lambda x, i: x[i] * 2, lambda a, b: [g(a, b), torch.randint(-a, a, (b,))]),
}
REDUCTIONS: dict[str, tuple[Function, Callable[[int, int], Sequence[Any]]]] = {
    "sum of rows": (lambda x: x.sum(1), lambda a, b: [g(a, b)]),
    "sum of columns": (lambda x: x.sum(0), lambda a, b: [g(a, b)]),
    "sum of all": (lambda x: x.sum() * x.shape[0], lambda a, b: [g(a, b)]),
    "mean": (lambda x: x.mean(1, keepdim=True) + x, lambda a, b: [g(a, b)]),
    "spread": (lambda x: x.var(1) + x.std(1), lambda a, b: [g(a, b)]),
    "extremum": (lambda x: x.max(1), lambda a, b: [r(a, b)]),
    "position": (lambda x: x.argmax(1), lambda a, b: [r(a, b)]),
    "softmax": (lambda x: torch.softmax(x * 2, -1) * x, lambda a, b: [g(a, b)]),
    "softmax down": (lambda x: torch.softmax(x, 0), lambda a, b: [g(a, b)]),
    "causal softmax": (_causal_softmax, lambda a, b: [r(a, b, b)]),
    "layer norm": (lambda x, w: F.layer_norm(x, (16,), w), lambda a, b: [g(a, b, 16), g(16)]),
    "layer norm over a size": (lambda x: F.layer_norm(x, x.shape[1:]), lambda a, b: [g(a, b)]),
    "batch norm": (
        lambda x, m, v: F.batch_norm(x, m, v, training=True),
        lambda a, b: [g(a, 4, b), torch.zeros(4), torch.ones(4)],
    ),
    "smoothed cross entropy": (
        lambda x, y: F.cross_entropy(x, y, label_smoothing=0.1),
        lambda a, b: [g(a, b), torch.randint(0, b, (a,))],
    ),
    "cross entropy": (F.cross_entropy, lambda a, b: [g(a, b), torch.randint(0, b, (a,))]),
}
EXTERNS: dict[str, tuple[Function, Callable[[int, int], Sequence[Any]]]] = {
    "product": (lambda x, y: torch.relu(x @ y), lambda a, b: [g(a, b), g(b, 6)]),
    "linear": (lambda x, w, c: F.gelu(F.linear(x, w, c)), lambda a, b: [g(a, b, 8), g(12, 8), g(12)]),
    "attention": (F.scaled_dot_product_attention, lambda a, b: [g(2, 3, b, 8), g(2, 3, b, 8), g(2, 3, b, 8)]),
    "running sum": (lambda x: x.cumsum(1), lambda a, b: [g(a, b)]),
    "embedding": (lambda w, i: F.embedding(i, w), lambda a, b: [g(50, 8), torch.randint(0, 50, (a, b))]),
    "scatter": (
        lambda x, i: torch.zeros_like(x).scatter_add(1, i, x),
        lambda a, b: [g(a, b), torch.randint(0, b, (a, b))],
    ),
    "sorted": (lambda x: torch.sort(x, -1)[0] + 1, lambda a, b: [g(a, b)]),
}


@pytest.mark.parametrize("name", POINTWISE)
def test_pointwise(name: str) -> None:
    fn, arguments = POINTWISE[name]
    check_at_sizes(fn, arguments, graphs=2 if arguments(3, 5)[0].requires_grad else 1)


@pytest.mark.parametrize("name", VIEWS)
def test_views(name: str) -> None:
    check_at_sizes(*VIEWS[name], graphs=2)


@pytest.mark.parametrize("name", REDUCTIONS)
def test_reductions(name: str) -> None:
    fn, arguments = REDUCTIONS[name]
    check_at_sizes(fn, arguments, graphs=2 if arguments(3, 5)[0].requires_grad else 1)


@pytest.mark.parametrize("name", EXTERNS)
def test_extern_calls(name: str) -> None:
    check_at_sizes(*EXTERNS[name], graphs=2)


def test_torch_decides_when_convolutions_compile_again() -> None:
    # torch itself guards on the sizes a convolution picks its algorithm by; aot_eager compiles as often.
    check_at_sizes(lambda x, w: F.conv1d(x, w, padding=1).relu(), lambda a, b: [g(a, 4, b), g(5, 4, 3)], graphs=None)


def test_compiling_adds_no_guard() -> None:
    """A size of 2 or a square tensor must not need another compilation than the one with other sizes."""
    counted = torch._dynamo.testing.CompileCounterWithBackend("kiln")
    compiled = torch.compile(lambda x: torch.softmax(x, -1).view(-1) + 1, backend=counted, dynamic=True)
    for shape in ((3, 5), (4, 4), (2, 2), (2, 64), (129, 2)):
        compiled(torch.randn(*shape))
    assert counted.frame_count == 1


def test_one_dimension_marked_dynamic() -> None:
    counted = torch._dynamo.testing.CompileCounterWithBackend("kiln")
    compiled = torch.compile(lambda x: (x * 2).sum(0), backend=counted)
    for rows in (8, 2, 3, 1000, 17):
        x = torch.randn(rows, 6)
        torch._dynamo.mark_dynamic(x, 0, min=2, max=1000)
        torch.testing.assert_close(compiled(x), (x * 2).sum(0))
    assert counted.frame_count == 1


def test_a_hint_that_a_dimension_may_be_dynamic() -> None:
    counted = torch._dynamo.testing.CompileCounterWithBackend("kiln")
    compiled = torch.compile(lambda x: x.exp() + x.shape[0], backend=counted)
    for rows in (8, 3, 500):
        x = torch.randn(rows, 6)
        torch._dynamo.maybe_mark_dynamic(x, 0)
        torch.testing.assert_close(compiled(x), x.exp() + rows)
    assert counted.frame_count == 1


def test_sizes_the_program_makes_equal_are_one_size() -> None:
    def fn(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (x.view(-1) + y) * x.shape[0]  # x has as many elements as y

    torchkiln.reset_stats()
    compiled = torch.compile(fn, backend="kiln", dynamic=True, options={"fallback": False})
    for rows, columns in SIZES:
        x, y = torch.randn(rows, columns), torch.randn(rows * columns)
        torch.testing.assert_close(compiled(x, y), fn(x, y))
    assert not torchkiln.stats().per_size


def test_a_dimension_of_one_is_its_own_program() -> None:
    counted = torch._dynamo.testing.CompileCounterWithBackend("kiln")
    compiled = torch.compile(lambda x, y: (x + y).sum(1), backend=counted, dynamic=True)
    for rows in (4, 1, 9, 0, 5):
        x, y = torch.randn(rows, 7), torch.randn(4 if rows == 1 else rows, 7)
        torch.testing.assert_close(compiled(x, y), (x + y).sum(1))
    assert counted.frame_count <= 3


class _Block(torch.nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(width) for _ in range(2))
        self.projection = torch.nn.Linear(width, 3 * width)
        self.out = torch.nn.Linear(width, width)
        self.up, self.down = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.projection(self.norms[0](x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-1, -2) * (width // self.heads) ** -0.5
        mask = torch.ones(length, length, dtype=torch.bool).tril()
        weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
        x = x + self.out((weights @ v).transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


@pytest.mark.parametrize("training", [False, True])
def test_a_transformer_at_twelve_lengths_and_batches_compiles_at_most_twice(training: bool) -> None:
    model = torch.nn.Sequential(torch.nn.Embedding(100, 32), _Block(32, 4), _Block(32, 4), torch.nn.Linear(32, 100))
    model.train(training)
    counted = torch._dynamo.testing.CompileCounterWithBackend("kiln")
    torchkiln.reset_stats()
    compiled = torch.compile(model, backend=counted)
    sizes = ((2, 16), (3, 17), (4, 5), (2, 64), (8, 33), (5, 90), (3, 16), (2, 2), (7, 31), (6, 97), (16, 12), (9, 50))
    for batch, length in sizes:
        tokens = torch.randint(0, 100, (batch, length))
        with torch.set_grad_enabled(training):
            expected, actual = model(tokens), compiled(tokens)
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
        if training:
            target = torch.randint(0, 100, (batch * length,))
            model.zero_grad()
            F.cross_entropy(expected.view(-1, 100), target).backward()
            gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
            model.zero_grad()
            F.cross_entropy(actual.view(-1, 100), target).backward()
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                torch.testing.assert_close(parameter.grad, gradient, rtol=1e-3, atol=1e-4)
    assert counted.frame_count <= 2
    assert not torchkiln.stats().per_size


# Where a bound lies decides some of torch's guards: more than one graph may be captured.
NUMBERS: dict[str, tuple[Function, Callable[[int, int], Sequence[Any]]]] = {
    "halves": (lambda x: (x[: x.shape[0] // 2] * 2, x[x.shape[0] // 2 :].exp()), lambda a, b: [g(a, b)]),
    "up to a number": (
        lambda x, n: (x[:, :n].sin(), x[:, n:].sum(1), x[:, n - 2 :: 2] * 2),
        lambda a, b: [g(a, b), b // 2 + 1],
    ),
    "all but a number": (lambda x, n: (x[:, :-n] * 2, x[:, -n:] * 2), lambda a, b: [g(a, b), b // 2 + 1]),
    "beyond the end": (lambda x, n: (x[:, -n:] * 2, x[:, :n] * 2, x[:, n:] * 2), lambda a, b: [g(a, b), b + 1]),
    "turned at a number": (lambda x, n: torch.cat([x[:, n:], x[:, :n]], 1) * 2, lambda a, b: [g(a, b), b - 1]),
    "written from a number on": (_written_from, lambda a, b: [r(a, b), r(a, 2), b - 2]),
    "triangle at a number": (lambda x, n: x.tril(n) + x.triu(-n), lambda a, b: [g(a, b), b // 2]),
    "power": (lambda x, n: x.abs() ** n, lambda a, b: [r(a, b), min(a, 9)]),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_known_at_run_time(name: str) -> None:
    fn, arguments_for = NUMBERS[name]
    check_at_sizes(fn, arguments_for, graphs=None)


def test_no_elements_along_a_dimension_of_known_size() -> None:
    def program(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x.sum(0), x.sum(1), x.reshape(-1) + 1

    torchkiln.reset_stats()
    compiled = torch.compile(program, backend="kiln", dynamic=True, fullgraph=True, options={"fallback": False})
    for rows in (4, 7):
        x = torch.randn(rows, 0)
        torch.testing.assert_close(compiled(x), program(x))
    assert not torchkiln.stats().per_size


@pytest.mark.parametrize("size", [2**21, 3_000_000])  # 4 bytes times the first to the third power is 0 modulo 2**64
def test_more_memory_than_there_is_raises_and_the_next_call_works(size: int) -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        return (x[:, None, None] * x[:, None] * x).cumsum(0).sum()

    compiled = torch.compile(program, backend="kiln", dynamic=True, fullgraph=True, options={"fallback": False})
    for x in (torch.rand(5), torch.rand(7)):
        torch.testing.assert_close(compiled(x), program(x))
        with pytest.raises(RuntimeError, match="memory"):
            compiled(torch.zeros(size))
