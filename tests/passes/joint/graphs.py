"""Functional graphs for tests of passes: traced with fixed or symbolic sizes, as text, and run against the function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import torchkiln
from torchkiln.graph.dead_code import eliminate_dead_code
from torchkiln.graph.effects import has_effect
from torchkiln.graph.fake import update_fake_values


def trace(function: Callable[..., Any], *inputs: torch.Tensor) -> torch.fx.GraphModule:
    mode = FakeTensorMode()
    values = [mode.from_tensor(value) for value in inputs]
    with mode:
        return make_fx(function)(*values)


def trace_symbolic(function: Callable[..., Any], *inputs: torch.Tensor) -> torch.fx.GraphModule:
    return make_fx(function, tracing_mode="symbolic")(*inputs)


def text(gm: torch.fx.GraphModule) -> list[str]:
    """One line a call, as ``name = operator(arguments)``, without what nobody reads."""
    eliminate_dead_code(gm.graph, has_effect)
    return [
        f"{node.name} = {node.target}({', '.join([*map(_shown, node.args), *_named(node)])})"
        for node in gm.graph.nodes
        if node.op == "call_function"
    ]


def _named(node: torch.fx.Node) -> list[str]:
    return [f"{key}={_shown(value)}" for key, value in node.kwargs.items() if value is not None]


def _shown(value: object) -> str:
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_shown, value))}]"
    return str(value)


def check_same(gm: torch.fx.GraphModule, function: Callable[..., Any], *inputs: torch.Tensor) -> None:
    """The graph is well formed, its fake values are those its operators give, and so are its numbers, to the bit."""
    gm.graph.lint()
    changed = update_fake_values(gm, everything=True)
    assert not changed, [f"{node}: {before} is {node.meta['val']}" for node, before in changed.items()]
    gm.recompile()
    expected = function(*(value.clone() for value in inputs))
    found = gm(*(value.clone() for value in inputs))
    found, expected = (value if isinstance(value, (tuple, list)) else (value,) for value in (found, expected))
    for left, right in zip(found, expected, strict=True):
        assert left.dtype == right.dtype
        assert left.shape == right.shape
        assert left.stride() == right.stride()
        torch.testing.assert_close(left, right, rtol=0, atol=0, equal_nan=True)
        if left.dtype.is_floating_point:
            assert torch.equal(left.isnan() | left.signbit(), right.isnan() | right.signbit())


def compile_and_compare(
    function: Callable[..., Any],
    *inputs: torch.Tensor,
    expects: str,
    dynamic: bool = False,
    rtol: float = 1e-6,
    **options: object,
) -> None:
    """Compile with checks on and without fallback, run forward and, where an input asks for it, backward; the pass
    ``expects`` names must have changed a graph, and values and gradients must be those of eager.
    """
    torchkiln.reset_stats()
    settings = {"fallback": False, "checks": True, "record_passes": True, **options}
    run = torch.compile(function, backend="kiln", fullgraph=True, dynamic=dynamic, options=settings)
    mine = [value.clone().detach().requires_grad_(value.requires_grad) for value in inputs]
    theirs = [value.clone().detach().requires_grad_(value.requires_grad) for value in inputs]
    state = torch.get_rng_state()
    found = run(*mine)
    torch.set_rng_state(state)
    expected = function(*theirs)
    torch.testing.assert_close(found, expected, rtol=rtol, atol=rtol, equal_nan=True)
    if any(value.requires_grad for value in inputs):
        _scalar(found).backward()
        _scalar(expected).backward()
        for left, right in zip(mine, theirs, strict=True):
            torch.testing.assert_close(left.grad, right.grad, rtol=rtol, atol=rtol, equal_nan=True)
    assert any(p.changed for p in torchkiln.stats().passes if f"{p.stage}/{p.name}" == f"joint/{expects}")


def _scalar(values: Any) -> torch.Tensor:
    together = values if isinstance(values, (tuple, list)) else (values,)
    return sum((value * value).sum() for value in together if value.requires_grad)
