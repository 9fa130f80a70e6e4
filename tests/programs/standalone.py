"""How a program is run and its results compared: the part every printed program ends with, so it needs only torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch


# -- printed with every program from here on --
def run(function: Callable[..., Any], made: tuple[list[Any], list[Any]]) -> dict[str, Any]:
    """Call ``function`` and collect what a caller could look at afterwards, by name."""
    arguments, leaves = made
    outputs = function(*arguments)
    found: dict[str, Any] = {f"output {k}": value.detach() for k, value in enumerate(outputs)}
    found |= {f"input {k} afterwards": x.detach() for k, x in enumerate(arguments) if isinstance(x, torch.Tensor)}
    everything = [t for t in (*arguments, *outputs) if isinstance(t, torch.Tensor) and t.numel()]
    places = [t.untyped_storage().data_ptr() for t in everything]
    found["memory shared"] = [places.index(place) for place in places]
    found["gradient needed"] = [bool(t.requires_grad) for t in outputs]
    ends = [t for t in outputs if t.requires_grad]
    if leaves and ends:
        seeds = [torch.linspace(-1, 1, t.numel(), dtype=torch.float64).reshape(t.shape).to(t.dtype) for t in ends]
        gradients = torch.autograd.grad(ends, leaves, seeds, allow_unused=True)
        found |= {f"gradient {k}": gradient for k, gradient in enumerate(gradients)}
    return found


def differences(wanted: dict[str, Any], got: dict[str, Any], allowed: dict[str, Any]) -> Iterable[tuple[str, str]]:
    """What differs, as (name, complaint). ``allowed`` is the largest error by name; with none, bits must agree."""
    for name, value in wanted.items():
        other = got.get(name)
        if not isinstance(value, torch.Tensor) or not isinstance(other, torch.Tensor):
            if isinstance(value, torch.Tensor) or isinstance(other, torch.Tensor) or value != other:
                yield name, f"is {type(other) if isinstance(other, torch.Tensor) else other}, eager has {value}"
            continue
        left, right = (value.dtype, list(value.shape)), (other.dtype, list(other.shape))
        if left != right:
            yield name, f"is {right}, eager has {left}"
            continue
        if not value.numel():
            continue
        moved = [a != b for a, b, n in zip(value.stride(), other.stride(), value.shape, strict=True) if n > 1]
        if any(moved) and not name.startswith("gradient"):  # the layout of a gradient is AOTAutograd's choice
            yield name, f"has strides {other.stride()}, eager {value.stride()}"
        limit = allowed.get(name, 0.0)
        a, b = value.double(), other.double()
        if not value.dtype.is_floating_point:
            wrong = value != other
        else:
            same = (a == b) | (a.isnan() & b.isnan())
            if isinstance(limit, float) and limit == 0:
                wrong = ~same | ((a == 0) & (a.signbit() != b.signbit()))
            else:
                wrong = ~(same | ((a - b).abs() <= limit))
                if isinstance(limit, torch.Tensor):
                    wrong &= limit != math.inf
        if bool(wrong.any()):
            first = tuple(int(i) for i in wrong.nonzero()[0])
            within = limit[first].item() if isinstance(limit, torch.Tensor) else limit
            yield (
                name,
                (
                    f"differs in {int(wrong.sum())} of {wrong.numel()} elements, first at {first}:"
                    f" {other[first].item()!r}, eager has {value[first].item()!r}, allowed {within:.3g}"
                ),
            )
