"""Which operators AOTAutograd decomposes while tracing: those that we do not lower and torch can decompose."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, partial
from types import MappingProxyType
from typing import Any

import torch
from torch import _decomp
from torch._decomp import core_aten_decompositions, get_decompositions
from torch._ops import OpOverload

from torchkiln.graph.effects import draws_random_numbers
from torchkiln.graph.operators import Kind, kind_of, lowered

_aten = torch.ops.aten

Decomposition = Callable[..., Any]

# Decomposed in addition to torch's core table, which keeps them for backends that have kernels for them.
_ALSO = (
    _aten._batch_norm_no_update,
    _aten._batch_norm_with_update_functional,
    _aten._log_softmax,
    _aten._native_batch_norm_legit,
    _aten._native_batch_norm_legit_functional,
    _aten._native_batch_norm_legit_no_training,
    _aten._softmax,
    _aten.batch_norm_backward,
    _aten.dist,
    _aten.elu,
    _aten.gelu,
    _aten.hardtanh,
    _aten.ldexp,
    _aten.leaky_relu,
    _aten.linalg_vector_norm,
    _aten.native_batch_norm,
    _aten.native_group_norm,
    _aten.native_layer_norm,
    _aten.relu,
    _aten.rrelu_with_noise_backward,
    _aten.upsample_bilinear2d.vec,
    _aten.upsample_nearest2d.vec,
)

# Kept whole although torch can decompose them, beside matmuls and what we lower: the library kernel is the better code,
# or, for the operators that come in pairs of forward and backward, the two must be of one kind.
_KEPT_WHOLE = (
    _aten._embedding_bag,
    _aten.avg_pool2d_backward,
    _aten.binary_cross_entropy,  # torch refuses input outside of 0 to 1, its decomposition does not
    _aten.embedding_dense_backward,
    _aten.index_add,
    # torch refuses positions, or types of them, that its decompositions of these four take
    _aten.index_copy,
    _aten.index_fill,
    _aten.max_unpool2d,
    _aten.max_unpool3d,
)


# Of integers, rounding in another precision than torch's kernels use would show as another integer.
_NOT_TO_INTEGERS = (_aten.linspace, _aten.logspace)


# torch takes classes as int64 or uint8 here; its decompositions take other types that it refuses.
_CLASSES_INT64 = {
    _aten.nll_loss_forward: 1,
    _aten.nll_loss2d_forward: 1,
    _aten.nll_loss_backward: 2,
    _aten.nll_loss2d_backward: 2,
}
"""Where the tensor of classes is among the arguments."""


def decompositions() -> dict[OpOverload, Decomposition]:
    """The table for AOTAutograd. Built once per process; every call gives a copy."""
    return dict(_table()) | _late()


def _late() -> dict[OpOverload, Decomposition]:
    """Operators that are there only once Dynamo needed them: torch registers ``prims.fma`` where it captures an
    ``addcmul_`` or an ``add_`` scaled by a tensor, and computes it as a product and a sum."""
    packet = getattr(torch.ops.prims, "fma", None)
    return {} if packet is None else {packet.default: lambda a, b, c: a * b + c}


@cache
def _table() -> Mapping[OpOverload, Decomposition]:
    # The public table adds composite operators, which dispatch decomposes before AOTAutograd sees them: 0.2 s to
    # build against 2 ms for the part after autograd.
    core = getattr(_decomp, "_core_aten_decompositions_post_autograd", core_aten_decompositions)
    found: dict[Any, Decomposition] = {**core(), **get_decompositions(list(_ALSO))}
    whole = set(_overloads(_KEPT_WHOLE))
    guards: dict[OpOverload, Callable[[Decomposition], Decomposition]] = dict.fromkeys(
        _overloads(_NOT_TO_INTEGERS), _except_to_integers
    )
    for packet, place in _CLASSES_INT64.items():
        guards.update(dict.fromkeys(_overloads((packet,)), partial(_except_other_classes, place=place)))
    return MappingProxyType(
        {
            op: guards[op](decomposition) if op in guards else decomposition
            for op, decomposition in found.items()
            if isinstance(op, OpOverload) and op not in whole and _may_be_decomposed(op)
        }
    )


def _except_to_integers(decomposition: Decomposition) -> Decomposition:
    """``decomposition``, leaving the operator whole where it is asked for integers."""

    def decompose(*args: Any, dtype: torch.dtype | None = None, **kwargs: Any) -> Any:
        if dtype is not None and not (dtype.is_floating_point or dtype.is_complex):
            return NotImplemented
        return decomposition(*args, dtype=dtype, **kwargs)

    return decompose


def _except_other_classes(decomposition: Decomposition, place: int) -> Decomposition:
    """``decomposition``; the operator stays whole, and says what is wrong, where argument ``place`` is not int64."""

    def decompose(*args: Any, **kwargs: Any) -> Any:
        classes = args[place] if len(args) > place else kwargs["target"]
        if classes.dtype != torch.int64:
            return NotImplemented
        return decomposition(*args, **kwargs)

    return decompose


def _may_be_decomposed(op: OpOverload) -> bool:
    """Whether ``op`` is neither lowered here, nor a matmul, nor random: decomposed, it would draw other numbers."""
    return op not in lowered() and kind_of(op) is not Kind.MATMUL and not draws_random_numbers(op)


def _overloads(packets: tuple[Any, ...]) -> list[OpOverload]:
    return [getattr(packet, name) for packet in packets for name in packet.overloads()]
