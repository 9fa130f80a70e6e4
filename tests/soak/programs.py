"""Functions that the soak compiles: one for each kind of thing compiled code does, small enough to run often."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.conftest import BACKEND


class Wrong(AssertionError):
    """A compiled function answered something else than eager."""


@dataclass(frozen=True)
class Program:
    """``function`` of the tensors that ``inputs`` makes for a size; gradients are asked for where it ``trains``.

    It may write to its inputs, which are then compared too. ``in_eager`` computes the same without a compiler, for a
    function that compiles something even in eager.
    """

    name: str
    function: Callable[..., Any]
    inputs: Callable[[int], tuple[Tensor, ...]]
    trains: bool = False
    in_eager: Callable[..., Any] | None = None


def _network(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.layer_norm(F.gelu(x @ w + b), (16,)).softmax(-1) @ w.t()


def _attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


def _rows(table: Tensor, index: Tensor) -> Tensor:
    return torch.tanh(table[index]).cumsum(0).sum(-1)


def _cache(cache: Tensor, row: Tensor) -> Tensor:
    cache[1] = row * 2
    cache[2:].mul_(0.5)
    return cache.sum(0)


def _loss(x: Tensor, w: Tensor) -> Tensor:
    logits = torch.relu(x) @ w
    return F.cross_entropy(logits, logits.detach().argmax(-1)) + logits.square().mean()


def _sorted(x: Tensor) -> tuple[Tensor, Tensor]:
    values, order = torch.sort(x, dim=-1, stable=True)
    return values.flip(-1), order


def _chosen(x: Tensor) -> Tensor:
    return torch.cond(x.sum() > 0, lambda t: torch.exp(-t) * 2, lambda t: t.abs() + 1, (x,))


def _chosen_in_eager(x: Tensor) -> Tensor:
    """Without ``torch.cond``, which in eager calls Dynamo and keeps FX's note of tracing over that, without a lock: the
    note of another thread that compiles is left for ever, and every compiled function is refused. With any backend."""
    return torch.exp(-x) * 2 if x.sum() > 0 else x.abs() + 1


PROGRAMS = (
    Program("network", _network, lambda n: (torch.randn(n, 8), torch.randn(8, 16), torch.randn(16)), trains=True),
    Program("attention", _attention, lambda n: tuple(torch.randn(1, 2, n, 8) for _ in range(3)), trains=True),
    Program("rows", _rows, lambda n: (torch.randn(n + 2, 6), torch.randint(n + 2, (n,)))),
    Program("cache", _cache, lambda n: (torch.randn(n + 3, 5), torch.randn(5))),
    Program("loss", _loss, lambda n: (torch.randn(n, 12), torch.randn(12, 7)), trains=True),
    Program("sorted", _sorted, lambda n: (torch.randn(n, 33),)),
    Program("chosen", _chosen, lambda n: (torch.randn(n, 4),), in_eager=_chosen_in_eager),
)


def compiled(function: Callable[..., Any], *, dynamic: bool | None = False) -> Callable[..., Any]:
    if BACKEND != "kiln":
        return torch.compile(function, backend=BACKEND, dynamic=dynamic)
    return torch.compile(function, backend="kiln", dynamic=dynamic, options={"fallback": False})


def check(program: Program, run: Callable[..., Any], inputs: tuple[Tensor, ...], *, gradients: bool = False) -> None:
    """Compare ``run`` with eager: results, gradients where asked for, and what was written to the inputs."""
    functions = program.in_eager or program.function, run
    wanted, found = (_outcome(function, inputs, gradients=gradients) for function in functions)
    for position, (one, other) in enumerate(zip(found, wanted, strict=True)):
        try:
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5, equal_nan=True)
        except AssertionError as error:
            raise Wrong(f"{program.name}, value {position} for {[tuple(x.shape) for x in inputs]}: {error}") from None


def _outcome(run: Callable[..., Any], inputs: tuple[Tensor, ...], *, gradients: bool) -> list[Tensor]:
    given = [x.clone().requires_grad_(gradients and x.is_floating_point()) for x in inputs]
    with torch.set_grad_enabled(gradients):
        answer = run(*given)
    results = list(answer) if isinstance(answer, tuple) else [answer]
    found = []
    if gradients:
        wanted = [x for x in given if x.requires_grad]
        found = list(torch.autograd.grad([r.sum() for r in results], wanted))
    return [*(r.detach() for r in results), *found, *(x.detach() for x in given)]


_STEPS: tuple[Callable[[Tensor, float], Tensor], ...] = (
    lambda x, number: torch.sin(x * number),
    lambda x, number: x.softmax(-1) + number,
    lambda x, number: (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True) + number),
    lambda x, number: torch.where(x > 0, x, x * number),
    lambda x, number: torch.tanh(x @ x.t() * number) @ x,
)


def one_off(random: Random) -> Program:
    """A function nobody has compiled before: a chain of operators with numbers of its own.

    In float64, so that a chain that makes small differences large stays comparable. The numbers stand beside the
    operators: as default arguments of theirs, torch 2.11 takes them for those of another chain (with ``eager`` too).
    """
    steps = [(random.choice(_STEPS), random.uniform(0.5, 2)) for _ in range(random.randint(2, 5))]

    def function(x: Tensor) -> Tensor:
        for step, number in steps:
            x = step(x, number)
        return x

    return Program("one-off", function, lambda n: (torch.randn(n, 9, dtype=torch.float64),), trains=True)
