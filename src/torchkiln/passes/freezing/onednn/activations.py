"""Activations that oneDNN computes before it stores a result, in the forms that graphs have them in.

torch's own operators stay whole or are decomposed (:mod:`torchkiln.graph.decompositions`), and models write some by
hand. In half precision each may be computed in float32, with casts around it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torchkiln.graph.operators import CONVERT
from torchkiln.patterns.expressions import IGNORED, Call, Capture, Expression

_aten = torch.ops.aten


@dataclass(frozen=True)
class Fused:
    """An activation as oneDNN's operators take it."""

    attribute: str
    scalars: tuple[float, ...] = ()
    algorithm: str = ""


@dataclass(frozen=True)
class Activation:
    """A form of an activation: ``pattern`` of its argument; ``fused`` says what to ask for, given what was captured.

    That is None where the library has nothing for the numbers captured.
    """

    name: str
    pattern: Callable[[Expression], Call]
    fused: Callable[[Mapping[str, Any]], Fused | None]


def activations() -> Iterator[Activation]:
    """All forms, those that are part of others after these."""
    for name, pattern, attribute, algorithm in _FIXED:
        yield from _with_casts(Activation(name, pattern, _always(Fused(attribute, (), algorithm))))
    yield from _with_casts(Activation("leaky_relu", _leaky_relu, _leaky))
    yield from _with_casts(Activation("hardtanh", _clamp, _clamped))


def _with_casts(activation: Activation) -> Iterator[Activation]:
    """The activation of a value, and of a value cast to float32 with its result cast back."""
    pattern = activation.pattern

    def upcast(x: Expression) -> Call:
        return Call(CONVERT, pattern(Call(CONVERT, x, torch.float32)), IGNORED)

    yield Activation(activation.name, upcast, activation.fused)
    yield activation


def _always(fused: Fused) -> Callable[[Mapping[str, Any]], Fused]:
    return lambda _captures: fused


def _one(target: Any) -> Callable[[Expression], Call]:
    return lambda x: Call(target, x)


def _leaky_relu(x: Expression) -> Call:
    return Call(_aten.leaky_relu.default, x, Capture("slope"))


def _leaky(captures: Mapping[str, Any]) -> Fused | None:
    slope = captures["slope"]
    return Fused("leaky_relu", (float(slope),)) if _is_number(slope) else None


def _clamp(x: Expression) -> Call:
    return Call(_aten.clamp.default, x, Capture("low"), Capture("high"))


def _clamped(captures: Mapping[str, Any]) -> Fused | None:
    low, high = captures["low"], captures["high"]
    if high is None and _is_number(low) and low == 0:
        return Fused("relu")
    if not _is_number(low) or not _is_number(high) or not low < high:
        return None
    return Fused("hardtanh", (float(low), float(high)))


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _gate(x: Expression) -> Sequence[Call]:
    """``relu6(x + 3)`` in two calls, as torch decomposes it, in one, and in one of float32."""
    moved = Call(_aten.add.Tensor, x, 3)
    upcast = Call(_aten.clamp.default, Call(CONVERT, moved, torch.float32), 0, 6)
    return (
        Call(_aten.clamp.default, Call(_aten.clamp.default, moved, 0), None, 6),
        Call(_aten.clamp.default, moved, 0, 6),
        Call(CONVERT, upcast, IGNORED),
    )


def _gelu_of_tanh(x: Expression) -> Call:
    """As GPT-2 writes it."""
    cubed = Call(_aten.mul.Tensor, Call(_aten.pow.Tensor_Scalar, x, 3), 0.044715)
    inner = Call(_aten.mul.Tensor, Call(_aten.add.Tensor, x, cubed), math.sqrt(2 / math.pi))
    return _half_of(x, Call(_aten.tanh.default, inner))


def _gelu_of_erf(x: Expression) -> Call:
    return _half_of(x, Call(_aten.erf.default, Call(_aten.div.Tensor, x, math.sqrt(2))))


def _half_of(x: Expression, share: Call) -> Call:
    return Call(_aten.mul.Tensor, Call(_aten.mul.Tensor, x, 0.5), Call(_aten.add.Tensor, share, 1))


def _gated(form: int) -> Callable[[Expression], Call]:
    return lambda x: Call(_aten.div.Tensor, Call(_aten.mul.Tensor, x, _gate(x)[form]), 6)


def _times_share(form: int) -> Callable[[Expression], Call]:
    return lambda x: Call(_aten.mul.Tensor, x, _share(form)(x))


def _share(form: int) -> Callable[[Expression], Call]:
    return lambda x: Call(_aten.div.Tensor, _gate(x)[form], 6)


# Name, pattern, and what oneDNN's operators call it.
_FIXED: tuple[tuple[str, Callable[[Expression], Call], str, str], ...] = (
    ("gelu", _gelu_of_erf, "gelu", "none"),
    ("gelu", _one(_aten.gelu.default), "gelu", "none"),
    ("gelu_tanh", _gelu_of_tanh, "gelu", "tanh"),
    ("gelu_tanh", lambda x: Call(_aten.gelu.default, x, approximate="tanh"), "gelu", "tanh"),
    *(("hardswish", _gated(form), "hardswish", "") for form in range(3)),
    *(("hardswish", _times_share(form), "hardswish", "") for form in range(3)),
    *(("hardsigmoid", _share(form), "hardsigmoid", "") for form in range(3)),
    ("silu", lambda x: Call(_aten.mul.Tensor, x, Call(_aten.sigmoid.default, x)), "swish", ""),
    ("silu", _one(_aten.silu.default), "swish", ""),
    ("relu", _one(_aten.relu.default), "relu", ""),
    ("sigmoid", _one(_aten.sigmoid.default), "sigmoid", ""),
    ("tanh", _one(_aten.tanh.default), "tanh", ""),
)
