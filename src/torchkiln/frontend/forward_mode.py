"""Forward-mode differentiation through a compiled function: dual numbers in, dual numbers out.

AOTAutograd traces plain tensors, and what it makes would drop the tangents of dual ones. Where an input has a tangent,
another graph is compiled instead: a function of the inputs and their tangents that returns the results and theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx

from torchkiln.errors import UnsupportedError
from torchkiln.frontend.copies_by_key import CopiesByKey
from torchkiln.graph.aliases import Aliases
from torchkiln.graph.dead_code import eliminate_dead_code
from torchkiln.graph.effects import has_effect

Function = Callable[..., Any]


@dataclass(frozen=True)
class TangentGraph:
    """A function of inputs and tangents, as a graph.

    ``with_tangent`` says for each of the results whether it has a tangent; those follow the results.
    """

    graph_module: torch.fx.GraphModule
    with_tangent: tuple[bool, ...]


class CarriesTangents:
    """``plain``, and for calls with dual numbers what ``compile_tangents`` makes for the inputs at hand.

    ``compile_tangents`` is called with the inputs, the tangents (None for an input that has none) and answers a
    function of both that returns dual numbers.
    """

    def __init__(self, plain: Function, compile_tangents: Callable[[list[Any], list[Any]], Function]) -> None:
        self._plain = plain
        self._compile = compile_tangents
        self._copies = CopiesByKey()

    def __call__(self, *inputs: Any) -> Any:
        if forward_ad._current_level < 0:
            return self._plain(*inputs)
        if any(isinstance(x, torch.Tensor) and torch._C._functorch.is_functorch_wrapped_tensor(x) for x in inputs):
            return self._plain(*inputs)  # a transform of torch.func, whose tensors only torch computes with
        pairs = [forward_ad.unpack_dual(x) if isinstance(x, torch.Tensor) else (x, None) for x in inputs]
        primals, tangents = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        if all(tangent is None for tangent in tangents):
            return self._plain(*inputs)
        key = tuple(_key(value) for value in (*primals, *tangents))
        return self._copies.get(key, lambda: self._compile(primals, tangents))(primals, tangents)


def _key(value: Any) -> Hashable:
    if not isinstance(value, torch.Tensor):
        return type(value), repr(value)
    return value.dtype, tuple(value.shape), value.stride(), value.requires_grad


def trace_tangents(graph_module: torch.fx.GraphModule, primals: Sequence[Any], tangents: Sequence[Any]) -> TangentGraph:
    """The graph of ``graph_module`` on dual numbers; call it while a level of forward-mode differentiation is open.

    It takes ``primals``, then those of ``tangents`` that are not None. ``graph_module`` returns a flat tuple.
    """
    given = [k for k, tangent in enumerate(tangents) if tangent is not None]
    with_tangent: list[bool] = []

    def on_dual_numbers(*values: Any) -> list[Any]:
        inputs = list(values[: len(primals)])
        for position, tangent in zip(given, values[len(primals) :], strict=True):
            inputs[position] = forward_ad.make_dual(inputs[position], tangent)
        results: list[Any] = []
        found: list[Any] = []
        with_tangent.clear()
        for result in graph_module(*inputs):
            primal, tangent = forward_ad.unpack_dual(result) if isinstance(result, torch.Tensor) else (result, None)
            results.append(primal)
            with_tangent.append(tangent is not None)
            if tangent is not None:
                found.append(tangent)
        return [*results, *found]

    detached = [value.detach() if isinstance(value, torch.Tensor) else value for value in primals]
    arguments = [*detached, *(tangents[k].detach() for k in given)]
    mode = FakeTensorMode(allow_non_fake_inputs=True)  # constants that derivatives of operators make
    fakes = [mode.from_tensor(value) if isinstance(value, torch.Tensor) else value for value in arguments]
    traced = make_fx(on_dual_numbers)(*fakes)
    eliminate_dead_code(traced.graph, has_effect)  # tangents that are zero leave computations on no device behind
    traced.recompile()
    written = Aliases(traced.graph).written
    if any(node in written for node in traced.graph.find_nodes(op="placeholder")):
        raise UnsupportedError("forward-mode differentiation of a function that writes to its inputs")
    return TangentGraph(traced, tuple(with_tangent))


def as_dual_numbers(values: Sequence[Any], with_tangent: Sequence[bool]) -> tuple[Any, ...]:
    """Results and the tangents that follow them, put together."""
    tangents = iter(values[len(with_tangent) :])
    return tuple(
        forward_ad.make_dual(value, next(tangents)) if has_tangent else value
        for value, has_tangent in zip(values, with_tangent, strict=False)
    )
