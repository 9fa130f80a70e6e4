"""Whether a weight may be multiplied by constants: by numbers while compiling, by tensors where it is prepared.

A weight that overflows makes NaN of what a layer sums, where multiplying the result gives an infinity; one of float16
that becomes too small loses digits that the result would keep. Only the product of all constants and the weight tells.
Loaded code may name the operators, so nothing of the compiler is imported here.
"""

from __future__ import annotations

from functools import cache

import torch

from torchkiln.errors import refuse

_LARGEST = 2.0**30  # a number that weights are multiplied by while compiling
_LARGEST_HALF = 2.0**6  # weights of float16 are mostly between 2**-8 and 1, and its normal numbers begin at 2**-14

# Of float32 and bfloat16. A layer may sum products with inputs of 2**60, and most weights keep their digits.
_LARGEST_WEIGHT = 2.0**60
_SMALLEST_FACTOR = 2.0**-100


def is_foldable(factor: float, dtype: torch.dtype) -> bool:
    """Whether weights of ``dtype`` may be multiplied by a number."""
    largest = _LARGEST_HALF if dtype == torch.float16 else _LARGEST
    return 1 / largest <= abs(factor) <= largest


def is_addable(number: float, dtype: torch.dtype) -> bool:
    """Whether a number may be added to a bias of ``dtype``."""
    return abs(number) <= _largest_weight(dtype)


def _largest_weight(dtype: torch.dtype) -> float:
    return torch.finfo(torch.float16).max / _LARGEST_HALF if dtype is torch.float16 else _LARGEST_WEIGHT


def _scaled(
    weight: torch.Tensor, factor: torch.Tensor, wide: torch.dtype, dtype: torch.dtype, groups: int, inputs: list[int]
) -> torch.Tensor:
    """``weight * factor`` in the dtype ``wide``; raises NotPreparedError where ``dtype`` cannot hold it.

    ``factor`` has a dimension of channels, or two where each of ``groups`` parts of the first has its own of the
    second. ``inputs`` are those of the graph that the weight is made of.
    """
    product = weight.to(wide) * factor.to(wide)
    if product.numel() == 0:
        return product
    sizes = factor.abs()
    largest = max(abs(bound.item()) for bound in product.aminmax())
    if not (bool(sizes.isfinite().all()) and largest <= _largest_weight(dtype)):  # or NaN
        refuse("a weight overflows where an operation with constants is folded into it", inputs)
    elif bool((sizes.gt(0) & sizes.lt(_SMALLEST_FACTOR)).any()) or (
        dtype is torch.float16 and not _keeps_digits(product, factor, groups)
    ):
        refuse("a weight loses digits where an operation with constants is folded into it", inputs)
    return product


def _keeps_digits(product: torch.Tensor, factor: torch.Tensor, groups: int) -> bool:
    """Whether float16 rounds what is multiplied by one factor as it rounds its normal numbers, on the whole."""
    shape = [1] * (product.dim() - factor.dim()) + list(factor.shape)
    dims = [dim for dim, size in enumerate(shape) if size == 1]
    lost, kept = ((value.square().sum(dims, keepdim=True) if dims else value.square()) for value in (
        product.to(torch.float16).to(product.dtype) - product, product,
    ))  # fmt: skip
    if groups > 1:
        lost, kept = (total.view(groups, -1, shape[1]).sum(1) for total in (lost, kept))
    rounding = torch.finfo(torch.float16).eps / 2
    return bool((lost <= rounding**2 * kept).all())


def _require_finite(bias: torch.Tensor, dtype: torch.dtype, inputs: list[int]) -> torch.Tensor:
    """``bias`` in ``dtype``; raises NotPreparedError where it is not finite there."""
    found = bias.to(dtype, copy=True)
    if not bool(found.isfinite().all()):
        refuse("a bias overflows where an operation with constants is folded into it", inputs)
    return found


_SCALED = "(Tensor weight, Tensor factor, ScalarType wide, ScalarType dtype, int groups, int[] inputs) -> Tensor"


@cache
def _library() -> torch.library.Library:
    """The registration, which lives as long as the process."""
    library = torch.library.Library("kiln", "FRAGMENT")
    library.define("scaled_weight" + _SCALED, tags=(torch.Tag.pt2_compliant_tag,))
    library.impl("scaled_weight", _scaled, "CPU")
    torch.library.register_fake(
        "kiln::scaled_weight",
        lambda weight, factor, wide, *_: weight.to(wide) * factor.to(wide),
        lib=library,
    )
    finite = "require_finite(Tensor bias, ScalarType dtype, int[] inputs) -> Tensor"
    library.define(finite, tags=(torch.Tag.pt2_compliant_tag,))
    library.impl("require_finite", _require_finite, "CPU")
    torch.library.register_fake("kiln::require_finite", lambda bias, dtype, _: bias.to(dtype, copy=True), lib=library)
    return library


_library()
SCALED_WEIGHT: torch._ops.OpOverload = torch.ops.kiln.scaled_weight.default
REQUIRE_FINITE: torch._ops.OpOverload = torch.ops.kiln.require_finite.default
CHECKS = frozenset({SCALED_WEIGHT, REQUIRE_FINITE})
"""Those that may refuse."""


def has_checks(graph: torch.fx.Graph) -> bool:
    return any(node.target in CHECKS for node in graph.nodes)
