"""Casts are spelled one way, whatever they repeat of their argument."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import make_fx

import torchkiln
from torchkiln.canonicalize.casts import shorten_casts

_CAST = torch.ops.aten._to_copy.default


def _graph(**options: Any) -> torch.fx.GraphModule:
    return make_fx(lambda x: _CAST(x, **options) + 1)(torch.randn(3, 4))


def _options(graph_module: torch.fx.GraphModule) -> dict[str, Any]:
    (node,) = graph_module.graph.find_nodes(op="call_function", target=_CAST)
    return dict(node.kwargs)


def test_what_stays_as_it_is_is_left_out() -> None:
    graph_module = _graph(dtype=torch.bfloat16, layout=torch.strided, device=torch.device("cpu"))
    assert len(_options(graph_module)) == 3
    assert shorten_casts(graph_module)
    assert _options(graph_module) == {"dtype": torch.bfloat16}
    x = torch.randn(3, 4)
    torch.testing.assert_close(graph_module(x), x.bfloat16() + 1, rtol=0, atol=0)


def test_what_changes_is_kept() -> None:
    graph_module = _graph(dtype=torch.float64, memory_format=torch.contiguous_format)
    assert not shorten_casts(graph_module)
    assert _options(graph_module) == {"dtype": torch.float64, "memory_format": torch.contiguous_format}


def test_compiled_softmax_in_another_type_computes_what_eager_does(compile_strictly: Callable[..., Any]) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return x.softmax(-1, dtype=torch.float32).to(x.dtype)

    x = torch.randn(5, 7, dtype=torch.bfloat16)
    result = compile_strictly(function, record_passes=True)(x)
    torch.testing.assert_close(result, function(x))
    assert any(record.name == "casts" and record.changed for record in torchkiln.stats().passes)
