"""A program that the test of hit counts runs twice: prints what each kind of graph asked the cache for, as JSON."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import torchkiln
from tests.cache_use import CacheUse


def network(x: Tensor, w: Tensor) -> Tensor:
    return F.gelu(x @ w).softmax(-1)


def inputs(train: bool = False, rows: int = 4) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(rows, 8).requires_grad_(train), torch.randn(8, 16).requires_grad_(train)]


@torch.library.custom_op("tests::tripled", mutates_args=())
def tripled(x: Tensor) -> Tensor:
    return x * 3


@tripled.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def compiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    settings = {"fallback": False, "adaptive": False}
    return torch.compile(function, backend="kiln", options=settings, **options)


def train(function: Callable[..., Any], rows: int = 4) -> None:
    given = inputs(train=True, rows=rows)
    found = torch.autograd.grad(function(*given).square().sum(), given)
    torch.testing.assert_close(found, torch.autograd.grad(network(*given).square().sum(), given))


def serve_sizes() -> None:
    run = compiled(network, dynamic=True)
    for rows in (3, 5, 9):
        torch.testing.assert_close(run(*inputs(rows=rows)), network(*inputs(rows=rows)))


def train_sizes() -> None:
    run = compiled(network, dynamic=True)
    for rows in (3, 5, 9):
        train(run, rows)


def run_with_a_pass() -> None:
    @torchkiln.graph_pass(name="a pass of the user", stage="post_grad")
    def nothing(graph_module: torch.fx.GraphModule) -> bool:
        return False

    try:
        compiled(network)(*inputs())
    finally:
        torchkiln.remove_graph_pass("a pass of the user")


def break_the_graph() -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        y = network(x, w)
        torch._dynamo.graph_break()
        return y.exp()

    compiled(function)(*inputs())


def name_a_wrong_class() -> None:
    """The message of the error is Python's, by an operator that only torchkiln has."""

    def function(x: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(x.sin(), target)

    run, x, target = compiled(function), inputs(train=True)[0], torch.tensor([1, 7, 3, 0])
    torch.testing.assert_close(run(x, target), function(x, target))
    run(x, target).backward()
    with pytest.raises(IndexError, match="Target 8 is out of bounds"):
        run(x, target + 1)


KINDS: dict[str, Callable[[], Any]] = {
    "inference": lambda: compiled(network)(*inputs()),
    "training": lambda: train(compiled(network)),
    "dynamic": serve_sizes,
    "dynamic training": train_sizes,
    "a pass of the user": run_with_a_pass,
    "a graph break": break_the_graph,
    "a check that names a number": name_a_wrong_class,
    "an operator of the user": lambda: compiled(lambda x, w: tripled(network(x, w)))(*inputs()),
    "a backward that never runs": lambda: compiled(lambda x, w: network(x, w).sum())(*inputs(train=True)),
}


if __name__ == "__main__":
    found = {}
    for name, run in KINDS.items():
        torch._dynamo.reset()
        use = CacheUse()
        with use.counted(Path(os.environ["KILN_CACHE_DIR"])):
            run()
        found[name] = {f"{kind} {what}": n for (kind, what), n in sorted(use.counts.items())}
    print(json.dumps(found))
