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
from torchkiln.graph.operators import Kind, kind_of, lowered, overloads
from torchkiln.graph.resizes import resize_decompositions

Decomposition = Callable[..., Any]

# Decomposed in addition to torch's core table, which keeps them for backends that have kernels for them. Overloads that
# are lowered here, such as ``_softmax.default``, stay whole all the same (:func:`_may_be_decomposed`).
_ALSO = """
    _batch_norm_no_update _batch_norm_with_update_functional _log_softmax _native_batch_norm_legit
    _native_batch_norm_legit_functional _native_batch_norm_legit_no_training _softmax batch_norm_backward dist elu gelu
    hardtanh ldexp leaky_relu linalg_vector_norm native_batch_norm native_group_norm native_layer_norm relu
    rrelu_with_noise_backward upsample_bilinear2d.vec upsample_nearest2d.vec
    upsample_linear1d upsample_bilinear2d upsample_trilinear3d upsample_nearest1d upsample_nearest2d upsample_nearest3d
    _upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d
"""

# Kept whole although torch can decompose them, beside matmuls and what we lower: the library kernel is the better code,
# or, for the operators that come in pairs of forward and backward, the two must be of one kind. torch refuses input of
# binary_cross_entropy outside of 0 to 1, and indices of the last four, or dtypes of them, that its decompositions take.
_KEPT_WHOLE = """
    _embedding_bag avg_pool2d_backward binary_cross_entropy col2im embedding_dense_backward index_add
    index_copy index_fill max_unpool2d max_unpool3d
    reflection_pad1d_backward reflection_pad2d_backward reflection_pad3d_backward
"""

# Of integers, rounding in another precision than torch's kernels use would show as another integer.
_NOT_TO_INTEGERS = "linspace logspace"

# torch takes classes as int64 or uint8 here; its decompositions take other types that it refuses. With the place of the
# tensor of classes among the arguments.
_CLASSES_INT64 = {1: "nll_loss_forward nll_loss2d_forward", 2: "nll_loss_backward nll_loss2d_backward"}


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
    found: dict[Any, Decomposition] = {**core(), **get_decompositions(_overloads(_ALSO)), **resize_decompositions()}
    whole = set(_overloads(_KEPT_WHOLE))
    declines: dict[OpOverload, Callable[..., bool]] = dict.fromkeys(_overloads(_NOT_TO_INTEGERS), _makes_integers)
    for place, names in _CLASSES_INT64.items():
        declines.update(dict.fromkeys(_overloads(names), partial(_takes_other_classes, place)))
    return MappingProxyType(
        {
            op: _except_where(declines[op], decomposition) if op in declines else decomposition
            for op, decomposition in found.items()
            if isinstance(op, OpOverload) and op not in whole and _may_be_decomposed(op)
        }
    )


def _except_where(declines: Callable[..., bool], decomposition: Decomposition) -> Decomposition:
    """``decomposition``, leaving the operator whole for arguments that ``declines`` says."""

    def decompose(*args: Any, **kwargs: Any) -> Any:
        return NotImplemented if declines(*args, **kwargs) else decomposition(*args, **kwargs)

    return decompose


def _makes_integers(*_args: Any, dtype: torch.dtype | None = None, **_options: Any) -> bool:
    return dtype is not None and not (dtype.is_floating_point or dtype.is_complex)


def _takes_other_classes(place: int, *args: Any, **kwargs: Any) -> bool:
    classes = args[place] if len(args) > place else kwargs["target"]
    return bool(classes.dtype != torch.int64)


def _may_be_decomposed(op: OpOverload) -> bool:
    """Whether ``op`` is neither lowered here, nor a matmul, nor random: decomposed, it would draw other numbers."""
    return op not in lowered() and kind_of(op) is not Kind.MATMUL and not draws_random_numbers(op)


def _overloads(names: str) -> list[OpOverload]:
    return [overload for name in names.split() for overload in overloads(name)]
