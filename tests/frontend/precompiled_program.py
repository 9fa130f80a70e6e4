"""A program that the tests of precompiled functions run in several processes: ``HOW STEP FOLDER``.

HOW is "file" (``aot_compile``) or "folder" (``TORCH_CACHING_PRECOMPILE=1``), STEP is "save" or "load". It compares
results and gradients with eager and prints what ran, as JSON.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.utils import counters
from torch.autograd import forward_ad

import torchkiln
from torchkiln.errors import ArtifactError, KilnError


def network(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.layer_norm(F.gelu(x @ w + b), (16,)).softmax(-1)


def with_views(x: Tensor) -> tuple[Tensor, Tensor]:
    """A result in the memory of an input needs AOTAutograd's wrapper, so this is traced in every process."""
    return x.exp(), x.view(-1)


def inputs(requires_grad: bool) -> list[Tensor]:
    torch.manual_seed(0)
    return [t.requires_grad_(requires_grad) for t in (torch.randn(4, 8), torch.randn(8, 16), torch.randn(16))]


def compare(run: Callable[..., Any], *, train: bool) -> None:
    for _ in range(2):
        given = inputs(train)
        result, expected = run(*given), network(*given)
        torch.testing.assert_close(result, expected)
        if train:
            found = torch.autograd.grad(result.square().sum(), given)
            torch.testing.assert_close(found, torch.autograd.grad(expected.square().sum(), given))


def refusal(run: Callable[..., Any], *given: Any) -> str:
    try:
        run(*given)
    except KilnError as error:
        return f"{type(error).__name__}: {error}"
    return "none"


def compiled(function: Callable[..., Any], **options: Any) -> Any:
    return torch.compile(function, backend="kiln", options={"fallback": False}, **options)


def saved_to_file(path: Path, function: Callable[..., Any], given: list[Tensor]) -> Any:
    run = compiled(function, fullgraph=True).aot_compile((tuple(given), {}))
    run.save_compiled_function(str(path))
    return run


def loaded_from_file(path: Path) -> Any:
    with path.open("rb") as file:
        return torch.compiler.load_compiled_function(file)


def run_files(step: str, folder: Path) -> dict[str, Any]:
    found = {}
    for train in (False, True):
        path = folder / f"network-{train}"
        run = saved_to_file(path, network, inputs(train)) if step == "save" else loaded_from_file(path)
        compare(run, train=train)
    if step == "save":
        try:
            saved_to_file(folder / "views", with_views, [torch.ones(2, 3)])
        except ArtifactError as error:
            found["not saved"] = str(error)
    else:
        run = loaded_from_file(folder / "network-False")
        run.disable_guard_check()
        x, w, b = inputs(False)
        found["sparse"] = refusal(run, x.to_sparse(), w, b)
        with forward_ad.dual_level():
            found["dual"] = refusal(run, forward_ad.make_dual(x, torch.ones_like(x)), w, b)
    return found


def run_folder(step: str) -> dict[str, Any]:
    run, views = compiled(network), compiled(with_views)
    for train in (False, True):
        compare(run, train=train)
    found = {"traced for the network": counters["frames"]["total"]}
    x = torch.randn(2, 3)
    torch.testing.assert_close(views(x), with_views(x))
    found["traced"] = counters["frames"]["total"]
    if step == "save":
        torch.compiler.save_cache_artifacts()
    return found


if __name__ == "__main__":
    _, how, step, folder = sys.argv
    found = run_files(step, Path(folder)) if how == "file" else run_folder(step)
    print(json.dumps({**found, "stages": list(torchkiln.stats().seconds)}))
