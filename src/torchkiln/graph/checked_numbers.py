"""Numbers that eager refuses because a dtype does not hold them: which operators look, and at which arguments.

Most operators compute with a number as it is, or wrap it to the tensor's type. These convert it to the type they
compute in and raise where its range ends: the fills to that of the result, the others to that or a wider one.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.fx

_aten = torch.ops.aten

# Operators and the arguments that they convert so. (pow looks at integers and half types only.)
_CHECKED: dict[object, tuple[str, ...]] = {
    _aten.full: ("fill_value",),
    _aten.full_like: ("fill_value",),
    _aten.new_full: ("fill_value",),
    _aten.fill: ("value",),
    _aten.scalar_tensor: ("s",),
    _aten.masked_fill: ("value",),
    _aten.constant_pad_nd: ("value",),
    _aten.scatter: ("value",),
    _aten.index_fill: ("value",),
    _aten.where: ("self", "other"),
    _aten.clamp: ("min", "max"),
    _aten.clamp_min: ("min",),
    _aten.clamp_max: ("max",),
    _aten.hardtanh: ("min_val", "max_val"),
    _aten.hardtanh_backward: ("min_val", "max_val"),
    _aten.add: ("alpha",),
    _aten.sub: ("alpha",),
    _aten.rsub: ("alpha",),
    _aten.addcmul: ("value",),
    _aten.addcdiv: ("value",),
    _aten.lerp: ("weight",),
    _aten.pow: ("exponent",),
    _aten.leaky_relu: ("negative_slope",),
    _aten.leaky_relu_backward: ("negative_slope",),
    _aten.elu: ("alpha", "scale", "input_scale"),
    _aten.elu_backward: ("alpha", "scale", "input_scale"),
}


def may_be_refused(node: torch.fx.Node) -> bool:
    """Whether a number of this call is outside of the range of the result's dtype, and eager looks at it.

    Eager may take it nevertheless, where it computes in a wider type: only the operator itself tells.
    """
    target, result = node.target, node.meta.get("val")
    if not isinstance(target, torch._ops.OpOverload) or not isinstance(result, torch.Tensor):
        return False
    names = _CHECKED.get(target.overloadpacket)
    if names is None:
        return False
    given = dict(zip((argument.name for argument in target._schema.arguments), node.args, strict=False)) | node.kwargs
    return any(not _holds(result.dtype, given.get(name)) for name in names)


def _holds(dtype: torch.dtype, number: Any) -> bool:
    if not isinstance(number, (int, float)) or dtype == torch.bool or dtype.is_complex:
        return True  # every number is a bool
    if dtype.is_floating_point:
        return not math.isfinite(number) or abs(number) <= torch.finfo(dtype).max
    info = torch.iinfo(dtype)
    lowest = info.min if info.min < 0 else -info.max  # of unsigned types, negative numbers wrap
    return math.isfinite(number) and lowest <= number <= info.max
