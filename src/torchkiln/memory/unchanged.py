"""Calling a model for a look at it: afterwards its state, its inputs and the random numbers are as they were."""

from __future__ import annotations

import copy
import functools
import inspect
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves, tree_map

from torchkiln.graph.eager_run import copies_of

# Beside attributes that begin with _dynamo_: what torch._dynamo.mark_dynamic and its like leave in a tensor.
_MARKS = frozenset({"_has_dynamo_dim_marking", "_specialize_on"})


def copied_inputs(values: Any) -> Any:
    """``values`` with every tensor replaced by a leaf of the same contents, so that none is written to.

    Copies have the strides of the originals, expanded ones too, and what shares memory shares it again: a program is
    compiled for both. Dimensions stay marked for Dynamo as they are: dynamic, perhaps dynamic, unbacked or static.
    """
    tensors = {id(value): value for value in tree_leaves(values) if isinstance(value, Tensor)}
    made = dict(zip(tensors, copies_of(list(tensors.values())), strict=True))
    for key, value in tensors.items():
        made[key].requires_grad_(value.requires_grad)
        for name, mark in vars(value).items():
            if name.startswith("_dynamo_") or name in _MARKS:
                setattr(made[key], name, copy.copy(mark))
    return tree_map(lambda value: made[id(value)] if isinstance(value, Tensor) else value, values)


def marked_dynamic(tensor: Tensor) -> list[int]:
    """The dimensions that ``torch._dynamo.mark_dynamic`` was called for."""
    return sorted(getattr(tensor, "_dynamo_dynamic_indices", ()))


@contextmanager
def state_kept(function: Callable[..., Any]) -> Iterator[None]:
    """Whatever a call of ``function`` inside the block does to its modules and to random numbers is undone after it.

    Kept are parameters, buffers and other tensors of the modules, their attributes, and lists, dictionaries and sets
    among those.
    """
    modules = {id(part): part for module in modules_of(function) for part in module.modules()}
    snapshots = [_Snapshot(module) for module in modules.values()]
    try:
        with random_numbers_kept():
            yield
    finally:
        for snapshot in snapshots:
            snapshot.restore()


@contextmanager
def random_numbers_kept() -> Iterator[None]:
    """The random numbers after the block are those that would have come without it: Python's, numpy's and torch's."""
    python_state, numpy_state = random.getstate(), np.random.get_state()
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)


def modules_of(function: Callable[..., Any]) -> list[nn.Module]:
    """The modules that ``function`` is, belongs to, or names in its code."""
    if isinstance(function, nn.Module):
        return [function]
    if isinstance(function, functools.partial):
        given = [*function.args, *function.keywords.values()]
        return [*modules_of(function.func), *(value for value in given if isinstance(value, nn.Module))]
    if inspect.ismethod(function):
        return [function.__self__] if isinstance(function.__self__, nn.Module) else []
    if inspect.isfunction(function):
        named = inspect.getclosurevars(function)
        found = (*named.nonlocals.values(), *named.globals.values())
        return [value for value in found if isinstance(value, nn.Module)]
    return []


class _Snapshot:
    """The attributes of one module, what its containers hold, and what its tensors are."""

    def __init__(self, module: nn.Module) -> None:
        attributes = module.__dict__
        containers = [attributes, *(value for value in attributes.values() if isinstance(value, (dict, list, set)))]
        items = (item for held in containers for item in (held.values() if isinstance(held, dict) else held))
        self._containers: list[tuple[Any, Any]] = [(held, held.copy()) for held in containers]
        self._tensors = [(t, t.detach().clone()) for t in items if isinstance(t, Tensor) and not is_lazy(t)]

    def restore(self) -> None:
        for container, items in self._containers:
            if not _same_items(container, items):
                container.clear()
                (container.extend if isinstance(container, list) else container.update)(items)
        for tensor, value in self._tensors:
            # Not through autograd, and not counted as a write: backward of an earlier call may still be to come.
            tensor.data.copy_(value)


def _same_items(left: Any, right: Any) -> bool:
    """Whether the very same objects are in both, in the same order; equal ones may be tensors, which do not say."""
    if isinstance(left, dict):
        return _same_items(list(left), list(right)) and _same_items([*left.values()], [*right.values()])
    if isinstance(left, set):
        return bool(left == right)
    return len(left) == len(right) and all(a is b for a, b in zip(left, right, strict=True))
