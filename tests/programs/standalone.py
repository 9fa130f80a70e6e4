"""How a program is run and its results compared: the part every printed program ends with, so it needs only torch."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from typing import Any

import torch


# -- printed with every program from here on --
def run(
    function: Callable[..., Any],
    made: tuple[list[Any], list[Any]],
    after: Callable[[list[Any]], None] | None = None,
    steps: int = 0,
    between: Callable[[Any], Any] | None = None,
    copies: bool = False,
) -> dict[str, Any]:
    """Call ``function`` and collect what a caller could look at afterwards, by name.

    ``after`` writes to the outputs before the backward pass. With ``steps``, that many calls add up gradients in the
    leaves, and ``between`` writes to these after each. An error of ``after`` or of the backward pass is collected too.
    With ``copies``, ``after`` writes to copies of the outputs.
    """
    arguments, leaves = made
    found: dict[str, Any] = {}
    for step in range(max(steps, 1)):
        outputs = [value.clone() for value in function(*arguments)] if copies else function(*arguments)
        kept = [value.detach().clone() if after else value.detach() for value in outputs]
        found |= {f"output {k}" + f" of step {step}" * bool(step): value for k, value in enumerate(kept)}
        if step == 0:
            everything = [t for t in (*arguments, *outputs) if isinstance(t, torch.Tensor) and t.numel()]
            places = [t.untyped_storage().data_ptr() for t in everything]
            found["memory shared"] = [places.index(place) for place in places]
            found["gradient needed"] = [bool(t.requires_grad) for t in outputs]
        ends = [t for t in outputs if t.requires_grad]
        seeds = [torch.linspace(-1, 1, t.numel(), dtype=torch.float64).reshape(t.shape).to(t.dtype) for t in ends]
        try:
            if after:
                versions = [t._version for t in outputs]
                after(list(outputs))
                written = [t for t, version in zip(outputs, versions, strict=True) if t._version != version]
                shown = [t.untyped_storage().data_ptr() for t in (*arguments, *outputs) if isinstance(t, torch.Tensor)]
                found["writes alone"] = all(shown.count(t.untyped_storage().data_ptr()) == 1 for t in written)
                found |= {f"output {k} afterwards": value.detach() for k, value in enumerate(outputs)}
            if leaves and ends and not steps:
                gradients = torch.autograd.grad(ends, leaves, seeds, allow_unused=True)
                found |= {f"gradient {k}": gradient for k, gradient in enumerate(gradients)}
            elif leaves and ends:
                # Through one more operation, so that nobody but the backward pass holds the gradients it is given.
                torch.autograd.backward([t * 1 for t in ends], seeds)
                for leaf in leaves:
                    if between and leaf.grad is not None:
                        between(leaf.grad)
        except RuntimeError as error:
            found["error"] = str(error)
            break
    found |= {f"input {k} afterwards": x.detach() for k, x in enumerate(arguments) if isinstance(x, torch.Tensor)}
    if steps and "error" not in found:
        found |= {f"gradient {k}": leaf.grad for k, leaf in enumerate(leaves)}
        grown = [leaf.grad for leaf in leaves if leaf.grad is not None and leaf.grad.numel()]
        places = [t.untyped_storage().data_ptr() for t in grown]
        found["memory of gradients shared"] = [places.index(place) for place in places]
    return found


def expected(function: Callable[..., Any], make: Callable[[], Any], **how: Any) -> dict[str, Any]:
    """What eager gives. Where it refuses a backward pass because of writes to outputs, the gradients are those of
    writes to copies, which mean the same where nobody else shows that memory; compiled may refuse or give these."""
    found = run(function, make(), **how)
    if "error" in found and found.get("writes alone"):
        meant = run(function, make(), copies=True, **how)
        if "error" not in meant:
            found |= {name: value for name, value in meant.items() if name.startswith("gradient ")}
    return found


def differences(wanted: dict[str, Any], got: dict[str, Any], allowed: dict[str, Any]) -> Iterable[tuple[str, str]]:
    """What differs, as (name, complaint). ``allowed`` is the largest error by name; with none, bits must agree."""
    if "error" in got and "error" not in wanted:
        yield "the backward pass", f"raises {got['error']}"
    if "error" in wanted or "error" in got:
        # Nothing that comes after an error is compared.
        gone = re.compile(r"error|writes alone|memory of|.* afterwards|.* of step" + r"|gradient \d" * ("error" in got))
        wanted = {name: value for name, value in wanted.items() if not gone.match(name)}
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
