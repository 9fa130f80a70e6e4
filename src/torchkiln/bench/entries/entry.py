"""The type of an entry: something to call, its inputs, and what a training step of it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from torchkiln.bench.cells import Job

Inputs = dict[str, Any]

BOTH = (Job.inference, Job.training)


@dataclass(frozen=True)
class Entry:
    """``build`` makes the module or function, ``inputs(k)`` its arguments by name.

    ``inputs(0)`` is the size to measure; ``inputs(1)`` is another one, with which a program that is compiled for any
    size is called first. Floating-point inputs are made in float32 and converted. ``group`` is
    "models", "small", "functions" or "serving". ``needs`` are packages that ``build`` imports.
    """

    name: str
    group: str
    build: Callable[[], Callable[..., Any]]
    inputs: Callable[[int], Inputs]
    jobs: tuple[Job, ...] = BOTH
    needs: tuple[str, ...] = ()

    @property
    def missing(self) -> tuple[str, ...]:
        return tuple(package for package in self.needs if find_spec(package) is None)


def converted(value: Any, dtype: torch.dtype) -> Any:
    """``value`` with its floating-point tensors in ``dtype``."""
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, (list, tuple)):
        return type(value)(converted(v, dtype) for v in value)
    return value


def tensors(result: Any) -> Iterator[Tensor]:
    """The floating-point tensors of what an entry returned, wherever they are in it."""
    if isinstance(result, Tensor):
        if result.is_floating_point():
            yield result
    elif isinstance(result, dict):
        for value in result.values():
            yield from tensors(value)
    elif isinstance(result, (list, tuple)):
        for value in result:
            yield from tensors(value)


def loss_of(result: Any) -> Tensor:
    """A scalar that depends on every result that has a gradient."""
    parts = [t.float().square().mean() for t in tensors(result) if t.requires_grad]
    if not parts:
        raise ValueError("nothing this entry returns has a gradient, so that it cannot be trained")
    return torch.stack(parts).sum() if len(parts) > 1 else parts[0]


def prepared(entry: Entry, job: Job, dtype: torch.dtype) -> Callable[..., Any]:
    """The module or function of an entry, in the mode and dtype of a cell."""
    torch.manual_seed(0)
    built = entry.build()
    if isinstance(built, nn.Module):
        built = built.to(dtype).train(job is Job.training)
    return built


def arguments(entry: Entry, variant: int, job: Job, dtype: torch.dtype, trainable: bool) -> Inputs:
    """Inputs of a cell; ``trainable`` asks for gradients of the floating-point ones."""
    torch.manual_seed(variant + 1)
    given = {name: converted(value, dtype) for name, value in entry.inputs(variant).items()}
    if trainable and job is Job.training:
        for value in given.values():
            if isinstance(value, Tensor) and value.is_floating_point():
                value.requires_grad_()
    return given
