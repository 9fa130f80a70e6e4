"""Weights that were discarded: what stands for them in the user's model and in the compiled one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from torchkiln.errors import DiscardedError

Slot = tuple[dict[str, Any], str]
"""Where a module keeps a tensor: its dictionary of parameters or of buffers, and the name."""


def slots(model: torch.nn.Module) -> Iterator[tuple[Slot, torch.Tensor]]:
    """Every parameter and buffer, as often as a module has it."""
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None:
                    yield (tensors, name), tensor


# What a tensor says of itself without its elements. Modules ask for these when they are printed or walked.
_ATTRIBUTES = "shape dtype device requires_grad ndim is_leaf grad layout grad_fn nbytes itemsize"
_METHODS = "size dim numel nelement element_size stride is_floating_point is_complex is_contiguous __len__ __format__"
_HARMLESS = frozenset(getattr(torch.Tensor, name).__get__ for name in _ATTRIBUTES.split()) | frozenset(
    getattr(torch.Tensor, name) for name in _METHODS.split()
)


class DiscardedTensor(torch.Tensor):
    """A parameter or buffer without elements. Every use but a look at its shape raises DiscardedError."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in _HARMLESS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        raise DiscardedError(f"{_name(func)} was asked of a tensor of this model")

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        with torch._C.DisableTorchFunctionSubclass():
            return f"DiscardedTensor(size={tuple(self.shape)}, dtype={self.dtype})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise DiscardedError("This model was to be pickled or copied")

    def __deepcopy__(self, memo: Any) -> Any:
        raise DiscardedError("This model was to be copied")


def _name(function: Any) -> str:
    """As the user wrote it: the getter of an attribute is ``__get__`` of a descriptor that has the name."""
    name = getattr(function, "__name__", "an operator")
    if name in ("__get__", "__set__"):
        return str(getattr(getattr(function, "__self__", None), "__name__", "an attribute"))
    return str(name)


def discarded(tensor: torch.Tensor) -> DiscardedTensor:
    """What stands for ``tensor`` in the user's model: on no device, so that no kernel can read it."""
    shape = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    made: DiscardedTensor = torch.Tensor._make_subclass(DiscardedTensor, shape, tensor.requires_grad)
    return made


def without_memory(tensor: torch.Tensor) -> torch.Tensor:
    """What compiled code is given in place of ``tensor``, which it does not read: the same but for its memory."""
    with torch.inference_mode(False), torch.no_grad():
        made = torch.empty(0, dtype=tensor.dtype)
        made.untyped_storage().resize_(_bytes(tensor))
        made = made.as_strided(tensor.shape, tensor.stride())
        made.untyped_storage().resize_(0)
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(made, tensor.requires_grad)
    return made.requires_grad_(tensor.requires_grad)


def _bytes(tensor: torch.Tensor) -> int:
    """What the elements of ``tensor`` take, from the first to the last."""
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return 0 if tensor.numel() == 0 else (reach + 1) * tensor.element_size()
