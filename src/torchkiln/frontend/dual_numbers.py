"""Forward-mode differentiation through a compiled function: dual numbers in, dual numbers out.

AOTAutograd traces plain tensors, and what it makes would drop the tangents of dual ones. Where an input has a tangent,
another graph is compiled instead: a function of the inputs and their tangents that returns the results and theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch.autograd import forward_ad

from torchkiln.frontend.copies_by_key import CopiesByKey

Function = Callable[..., Any]


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


def as_dual_numbers(values: Sequence[Any], with_tangent: Sequence[bool]) -> tuple[Any, ...]:
    """Results and the tangents that follow them, put together."""
    tangents = iter(values[len(with_tangent) :])
    return tuple(
        forward_ad.make_dual(value, next(tangents)) if has_tangent else value
        for value, has_tangent in zip(values, with_tangent, strict=False)
    )
