"""A backend that runs captured graphs by torch itself and lays results out as torch's fake tensors foresee.

Every stage of a compiler goes by what the fake tensors say of sizes and strides. Where that is not what eager does,
the difference is the capture's and not the compiler's; this backend shows it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.fx
from torch._dynamo.backends.common import aot_autograd
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols


class UnforeseenSizes(Exception):
    """An operator gave other sizes or dtypes than torch's fake tensors foresee."""


class _Checked(torch.fx.Interpreter):
    def run_node(self, n: torch.fx.Node) -> Any:
        result = super().run_node(n)
        fake = n.meta.get("val")
        # Of several results, those that are read are nodes of their own.
        if not isinstance(result, torch.Tensor) or not isinstance(fake, torch.Tensor):
            return result
        if result.dtype != fake.dtype or not _may_be(result.shape, fake.shape):
            raise UnforeseenSizes(
                f"{n.target} gives {result.dtype}{list(result.shape)}, foreseen {fake.dtype}{list(fake.shape)}"
            )
        return result


def _may_be(sizes: Sequence[int], foreseen: Sequence[Any]) -> bool:
    """Whether a tensor of ``sizes`` is one that was ``foreseen``; sizes that depend on data may be any."""
    return len(sizes) == len(foreseen) and all(
        free_unbacked_symbols(known) or size == _example(known) for size, known in zip(sizes, foreseen, strict=True)
    )


def _example(size: Any) -> Any:
    """A size, or what it is in the example where it is symbolic: graphs run on the example alone."""
    return size.node.hint if isinstance(size, torch.SymInt) else size


def foreseen_layouts(gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
    """For ``torch.compile(backend=...)``; no decompositions."""
    compiled: Callable[..., Any] = aot_autograd(fw_compiler=_run, bw_compiler=_run)(gm, example_inputs)
    return compiled


def _run(gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
    returned = gm.graph.output_node().args[0]
    assert isinstance(returned, (tuple, list))
    foreseen = [node.meta.get("val") if isinstance(node, torch.fx.Node) else None for node in returned]

    def run(arguments: list[Any]) -> list[Any]:
        results = _Checked(gm).run(*arguments)
        arguments.clear()
        return [_laid_out(result, like) for result, like in zip(results, foreseen, strict=True)]

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def _laid_out(result: Any, like: Any) -> Any:
    if not isinstance(result, torch.Tensor) or not isinstance(like, torch.Tensor) or result.layout != torch.strided:
        return result
    if free_unbacked_symbols(like):
        return result.contiguous()  # results whose sizes depend on data are foreseen so
    strides = tuple(map(_example, like.stride()))
    if result.stride() == strides:
        return result
    return torch.empty_strided(result.shape, strides, dtype=result.dtype).copy_(result)
