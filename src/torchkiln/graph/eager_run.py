"""Running a graph eagerly, node by node: the user's tensors, random numbers and modes stay as they are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.fx

from torchkiln.native.tensor_classes import is_no_subclass


@contextmanager
def state_kept() -> Iterator[None]:
    """Random numbers, autocast and function transforms go on after the block as before, also where a graph fails."""
    random = torch.get_rng_state()
    depth = _transform_depth()
    on, dtype = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
    hooks = torch._C._autograd._saved_tensors_hooks_get_disabled_error_message()  # transforms turn these off
    try:
        yield
    finally:
        torch.set_rng_state(random)
        while _transform_depth() > depth:
            torch._C._functorch.pop_dynamic_layer_stack()
        torch.set_autocast_enabled("cpu", on)
        torch.set_autocast_dtype("cpu", dtype)
        if hooks is None:
            torch._C._autograd._saved_tensors_hooks_enable()
        else:
            torch._C._autograd._saved_tensors_hooks_disable(hooks)


def _transform_depth() -> int:
    return len(torch._C._functorch.get_interpreter_stack() or ())


class OnCopies(torch.fx.Interpreter):
    """Interprets a graph with copies in place of the tensors of its module, which it may write."""

    def __init__(self, graph_module: torch.fx.GraphModule) -> None:
        super().__init__(graph_module, garbage_collect_values=False)
        self._copies: dict[int, torch.Tensor] = {}

    def fetch_attr(self, target: str) -> Any:
        value = super().fetch_attr(target)
        return self._copy(value) if isinstance(value, torch.Tensor) else value

    def call_module(self, target: Any, args: Any, kwargs: Any) -> Any:
        module = super().fetch_attr(target)
        state = {name: self._copy(value) for name, value in (*module.named_parameters(), *module.named_buffers())}
        return torch.func.functional_call(module, state, args, kwargs)

    def _copy(self, value: torch.Tensor) -> torch.Tensor:
        return self._copies.setdefault(id(value), value.detach().clone())


def copies_of(values: Sequence[Any]) -> list[Any]:
    """Copies with the strides of the originals; what shares memory shares it again."""
    storages: dict[int, torch.UntypedStorage] = {}
    return [_copy(value, storages) if isinstance(value, torch.Tensor) else value for value in values]


def _copy(value: torch.Tensor, storages: dict[int, torch.UntypedStorage]) -> torch.Tensor:
    plain = value.layout is torch.strided and is_no_subclass(value)
    if not plain or value.is_conj() or value.is_neg():
        return value.detach().clone()
    storage = value.untyped_storage()
    if storage._cdata not in storages:
        storages[storage._cdata] = storage.clone()
    empty = torch.empty(0, dtype=value.dtype, device=value.device)
    return empty.set_(storages[storage._cdata], value.storage_offset(), value.shape, value.stride())
