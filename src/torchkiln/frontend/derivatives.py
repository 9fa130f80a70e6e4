"""Derivatives of resizes while AOTAutograd traces: one operator of torch each, as in eager.

torch's Python kernels for autograd make index operations of a resize. Their derivatives add to each element of the
input as often as it was read, one scatter for each tap. Without these kernels the derivative is the operator that eager
calls, which lowering turns into reads. Below autograd a resize is decomposed as any operator is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch._C import DispatchKey
from torch._ops import OpOverload
from torch._subclasses.fake_impls import op_implementations_dict

_KEYS = (DispatchKey.Autograd, DispatchKey.CompositeImplicitAutograd)
_RESIZES = """
    upsample_nearest1d upsample_nearest2d upsample_nearest3d
    _upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d
    upsample_linear1d upsample_bilinear2d upsample_trilinear3d upsample_bicubic2d
"""
# Of them, those whose gradient has its channels last where the tangent has; the others' is contiguous.
_KEEP_FORMAT = frozenset(
    {"upsample_nearest2d", "_upsample_nearest_exact2d", "upsample_bilinear2d", "upsample_trilinear3d"}
)
_PADS = "reflection_pad2d reflection_pad3d replication_pad2d replication_pad3d"


def differentiate_whole() -> Callable[[], None]:
    """Register this for the process; what is returned ends it."""
    aten = torch.ops.aten
    resizes = [getattr(aten, name) for name in _RESIZES.split()]
    overloads = [getattr(packet, name) for packet in resizes for name in ("default", "vec")]
    kernels = {op: dict(op.py_kernels) for op in overloads}
    for packet in resizes:
        _without_kernels(packet.default)
        _without_kernels(packet.vec)
        # Not the kernel in C++, which makes numbers of symbolic sizes.
        packet.vec.py_kernels[DispatchKey.CompositeImplicitAutograd] = partial(_resize, packet.default)
    fakes: dict[OpOverload, Callable[..., Any]] = {
        **{getattr(aten, f"{name}_backward").default: _fake_gradient(name) for name in _RESIZES.split()},
        **{getattr(aten, f"{name}_backward").default: _fake_of_pad for name in _PADS.split()},
    }
    replaced = {op: op_implementations_dict[op] for op in fakes if op in op_implementations_dict}
    op_implementations_dict.update(fakes)

    def end() -> None:
        for op, saved in kernels.items():
            _without_kernels(op)
            op.py_kernels.update(saved)
        for op in fakes:
            op_implementations_dict.pop(op)
        op_implementations_dict.update(replaced)

    return end


def _without_kernels(op: OpOverload) -> None:
    for key in _KEYS:
        op.py_kernels.pop(key, None)
    op._dispatch_cache.clear()


def _resize(op: OpOverload, x: Any, output_size: Sequence[Any] | None, *arguments: Any, **named: Any) -> Any:
    """A resize by sizes or by factors, as the operator that takes both."""
    *flags, factors = (*arguments, *named.values())
    if (output_size is None) is (factors is None):
        raise RuntimeError("Must specify exactly one of output_size and scale_factors")
    spatial = x.shape[2:]
    if output_size is None:
        output_size = [_scaled(size, factor) for size, factor in zip(spatial, factors, strict=True)]
    return op(x, output_size, *flags, *(factors or [None] * len(spatial)))


def _scaled(size: Any, factor: float) -> Any:
    return size * int(factor) if int(factor) == factor else torch.sym_int(size * factor)


def _fake_gradient(name: str) -> Callable[..., Any]:
    """The fake gradient of a resize. torch has none with symbolic sizes for most of them."""

    def fake(
        mode: Any, _op: OpOverload, grad: torch.Tensor, _output_size: Any, input_size: Any, *_: Any, **__: Any
    ) -> Any:
        with mode:
            made = grad.new_empty(list(input_size))
            return made.contiguous(memory_format=_format(grad)) if name in _KEEP_FORMAT else made

    return fake


def _fake_of_pad(mode: Any, _op: OpOverload, _grad: torch.Tensor, x: torch.Tensor, *_: Any, **__: Any) -> Any:
    """The fake gradient of a padding, which torch takes for contiguous."""
    with mode:
        return torch.empty_like(x, memory_format=_format(x))


def _format(image: torch.Tensor) -> torch.memory_format:
    found: torch.memory_format = torch._prims_common.suggest_memory_format(image)
    return found
