"""A function compiled with no fallback, against itself run eagerly: results, gradients, and its inputs afterwards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

import torchkiln
from tests.conftest import BACKEND


def compiled(function: Callable[..., Any], **options: object) -> Any:
    if BACKEND != "kiln":
        return torch.compile(function, backend=BACKEND, fullgraph=True, dynamic=False)
    return torch.compile(
        function, backend="kiln", fullgraph=True, dynamic=False, options={"fallback": False, **options}
    )


def check(
    function: Callable[..., Any],
    *inputs: Any,
    tolerance: dict[str, float] | None = None,
    again: bool = False,
    **options: object,
) -> Any:
    """Compare one call, and where inputs require gradients one backward; answers the compiled function's results.

    Both sides start from copies of ``inputs`` and the same random seed. With ``again``, the function may have been
    compiled before.
    """
    if not again:
        torch._dynamo.reset()
    candidate = compiled(function, **options)
    sides = []
    graphs = torchkiln.stats().graphs
    for run in (function, candidate):
        copies = pytree.tree_map_only(
            torch.Tensor, lambda t: t.detach().clone().requires_grad_(t.requires_grad), list(inputs)
        )
        torch.manual_seed(0)
        results = run(*copies)
        leaves = [t for t in pytree.tree_leaves(copies) if isinstance(t, torch.Tensor) and t.requires_grad]
        sides.append((results, _gradients(results, leaves), copies))
    torch.testing.assert_close(sides[1], sides[0], **(tolerance or {}))
    assert again or BACKEND != "kiln" or torchkiln.stats().graphs > graphs
    return sides[1][0]


def _gradients(results: Any, leaves: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
    outputs = [t for t in pytree.tree_leaves(results) if isinstance(t, torch.Tensor) and t.requires_grad]
    if not leaves:
        return []
    assert outputs, "no result requires a gradient"
    # Not all ones: the gradient of a sum of squares and the like would hide mistakes of scale.
    total = sum((output.float() * output.float().detach().cos()).sum() for output in outputs)
    return list(torch.autograd.grad(total, leaves, allow_unused=True))
