"""Numbers that eager refuses because a dtype does not hold them: which operators look, and at which arguments.

Most operators compute with a number as it is, or wrap it to the tensor's type. These convert it to the type they
compute in and raise where its range ends: the fills to that of the result, the others to that or a wider one.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.fx

from torchkiln.graph.nodes import argument, fake_tensor

# The arguments that are converted so, and the operators that have them. (pow looks at integers and half types only.)
_CHECKED = {
    "fill_value": "full full_like new_full",
    "value": "fill masked_fill constant_pad_nd scatter index_fill addcmul addcdiv",
    "s": "scalar_tensor",
    "self other": "where",
    "min max": "clamp clamp_min clamp_max",
    "min_val max_val": "hardtanh hardtanh_backward",
    "alpha": "add sub rsub",
    "weight": "lerp",
    "exponent": "pow",
    "negative_slope": "leaky_relu leaky_relu_backward",
    "alpha scale input_scale": "elu elu_backward",
}
_ARGUMENTS = {f"aten::{name}": given.split() for given, names in _CHECKED.items() for name in names.split()}


def may_be_refused(node: torch.fx.Node) -> bool:
    """Whether a number of this call is outside of the range of the result's dtype, and eager looks at it.

    Eager may take it nevertheless, where it computes in a wider type: only the operator itself tells.
    """
    result = fake_tensor(node)
    if not isinstance(node.target, torch._ops.OpOverload) or result is None:
        return False
    names = _ARGUMENTS.get(node.target._schema.name, ())
    return any(not _holds(result.dtype, argument(node, name)) for name in names)


def _holds(dtype: torch.dtype, number: Any) -> bool:
    if not isinstance(number, (int, float)) or dtype == torch.bool or dtype.is_complex:
        return True  # every number is a bool
    if dtype.is_floating_point:
        return not math.isfinite(number) or abs(number) <= torch.finfo(dtype).max
    info = torch.iinfo(dtype)
    lowest = info.min if info.min < 0 else -info.max  # of unsigned types, negative numbers wrap
    return math.isfinite(number) and lowest <= number <= info.max
