"""Which nodes of a functional graph have one known number in every element.

Numbers are kept as Python's, which hold every value of the types looked at here. They come from the operators that
fill tensors, and go through operators elementwise, through whatever moves elements around, and through reductions
that are exact in any order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.fx
from torch.utils._python_dispatch import _disable_current_modes

from torchkiln.graph.aliases import Aliases
from torchkiln.graph.dtypes import FLOATS, INTEGERS_AND_BOOL
from torchkiln.graph.effects import has_effect, may_end_the_process
from torchkiln.graph.fake import attribute_of
from torchkiln.graph.nodes import argument, fake_tensor
from torchkiln.graph.operators import CASTS, named_operators

_aten = torch.ops.aten
Number = bool | int | float


def uniform_values(graph_module: torch.fx.GraphModule, aliases: Aliases | None = None) -> dict[torch.fx.Node, Number]:
    """The number every element of a node has, for the nodes of which that is known.

    Nothing is said about memory that some operator of the graph writes. ``aliases`` are found if not given.
    """
    graph = graph_module.graph
    aliases = Aliases(graph) if aliases is None else aliases
    known: dict[torch.fx.Node, Number] = {}
    for node in graph.nodes:
        value = fake_tensor(node)
        if value is None or not _is_plain(value) or aliases.root(node) in aliases.written:
            continue
        number = None
        if node.op == "get_attr":
            number = _constant(graph_module, node)
        elif isinstance(node.target, torch._ops.OpOverload):
            number = _number_of(node, value, known)
        if number is not None and not has_effect(node):
            known[node] = number
    return known


def same_number(left: Number, right: Number) -> bool:
    """Whether two numbers are one to the bit: NaN is NaN, and 0.0 is not -0.0."""
    if isinstance(left, float) and isinstance(right, float):
        if math.isnan(left) or math.isnan(right):
            return math.isnan(left) and math.isnan(right)
        return left == right and math.copysign(1, left) == math.copysign(1, right)
    return type(left) is type(right) and left == right


def sums_exactly(number: Number, count: int, dtype: torch.dtype) -> bool:
    """Whether up to ``count`` times ``number`` is exact in ``dtype``, so that a sum does not depend on its order.

    Half types are summed in float32 and rounded at the end.
    """
    if dtype in INTEGERS_AND_BOOL:
        return True  # they wrap, in any order
    bits = 53 if dtype == torch.float64 else 24
    if not math.isfinite(number):
        return False
    if number == 0:
        return math.copysign(1, number) > 0
    odd, power = abs(float(number)).as_integer_ratio()
    odd //= odd & -odd  # the significand without its zeros
    largest = abs(float(number)) * count
    return odd * count <= 1 << bits and power <= 1 << 100 and largest <= 1e30


def _is_plain(value: torch.Tensor) -> bool:
    return value.layout is torch.strided and value.dtype in FLOATS + INTEGERS_AND_BOOL


def _constant(graph_module: torch.fx.GraphModule, node: torch.fx.Node) -> Number | None:
    constant = attribute_of(graph_module, str(node.target))
    if not isinstance(constant, torch.Tensor) or constant.numel() != 1 or constant.requires_grad:
        return None
    with _disable_current_modes():
        return _item(constant) if type(constant) is torch.Tensor and constant.device.type == "cpu" else None


def _item(value: torch.Tensor) -> Number:
    number: Number = value.item()
    return number


def _number_of(node: torch.fx.Node, value: torch.Tensor, known: dict[torch.fx.Node, Number]) -> Number | None:
    target = node.target
    if target in _FILLED:
        return _filled(node, value)
    if target in _MOVED:
        return _number_read(node.args[0], known)
    if target in _COMBINED:
        return _common_number(_COMBINED[target](node), known)
    if target in _REDUCTIONS:
        number, source = _number_read(node.args[0], known), fake_tensor(node.args[0])
        return None if number is None else _REDUCTIONS[target](number, source, value)
    assert isinstance(target, torch._ops.OpOverload)
    if torch.Tag.pointwise in target.tags or target in CASTS:
        number = _computed(node, value, known)
        return number if number is not None or target not in _ABSORBING else _ABSORBING[target](node, value, known)
    return None


def _number_read(source: Any, known: dict[torch.fx.Node, Number]) -> Number | None:
    return known.get(source) if isinstance(source, torch.fx.Node) else None


# -- tensors that are filled ------------------------------------------------------------------------------------------


def _filled(node: torch.fx.Node, value: torch.Tensor) -> Number | None:
    number: Any = _FILLED[node.target]
    if isinstance(number, str):
        number = argument(node, number)
    if not isinstance(number, (bool, int, float)):
        return None
    with _disable_current_modes():
        try:
            return _item(torch.full((), number, dtype=value.dtype))
        except RuntimeError:
            return None  # eager says that the type does not hold it


# By a number of their own, or by an argument of that name.
_FILLED: dict[object, str | int] = {
    **dict.fromkeys(named_operators("full full_like new_full"), "fill_value"),
    _aten.scalar_tensor.default: "s",
    _aten.fill.Scalar: "value",
    **dict.fromkeys(named_operators("zeros zeros_like new_zeros"), 0),
    **dict.fromkeys(named_operators("ones ones_like new_ones"), 1),
}


def is_filled(node: torch.fx.Node) -> bool:
    """Whether ``node`` makes a tensor of one number out of nothing."""
    return node.target in _FILLED


# -- elements that are moved ------------------------------------------------------------------------------------------

_MOVED = frozenset(
    named_operators("""
        alias clone detach diagonal expand flip lift_fresh_copy permute repeat reshape roll select.int slice.Tensor
        squeeze.default,dim,dims t transpose.int unfold unsqueeze view _unsafe_view
    """)
)


@dataclass(frozen=True)
class _Filling:
    """A number among tensors, in the type it is converted to."""

    number: Number | None


def _filling(node: torch.fx.Node, number: Any) -> _Filling:
    kind = float if node.meta["val"].dtype.is_floating_point else int
    return _Filling(kind(number) if isinstance(number, (int, float)) else None)


# What the elements of the result are taken from.
_COMBINED: dict[object, Callable[[torch.fx.Node], Sequence[Any]]] = {
    _aten.cat.default: lambda node: cast("Sequence[Any]", node.args[0]),
    _aten.constant_pad_nd.default: lambda node: (node.args[0], _filling(node, argument(node, "value"))),
    _aten.copy.default: lambda node: node.args[1:2],
    **dict.fromkeys(named_operators("select_scatter slice_scatter"), lambda node: node.args[:2]),
    **dict.fromkeys(named_operators("tril triu"), lambda node: (node.args[0], _filling(node, 0))),
}


def _common_number(sources: Sequence[Any], known: dict[torch.fx.Node, Number]) -> Number | None:
    """The one number of all sources; only of one type, as types would be converted on the way."""
    numbers = [source.number if isinstance(source, _Filling) else _number_read(source, known) for source in sources]
    first = numbers[0] if numbers else None
    if first is None or any(number is None or not same_number(first, number) for number in numbers):
        return None
    dtypes = {source.meta["val"].dtype for source in sources if isinstance(source, torch.fx.Node)}
    return first if len(dtypes) == 1 else None


# -- reductions, and running ones ------------------------------------------------------------------------------------


def _count(source: torch.Tensor, result: torch.Tensor) -> int | None:
    """How many elements make one of the result; None when that is not a fixed positive number."""
    sizes: list[Any] = [*source.shape, *result.shape]
    if not all(isinstance(size, int) for size in sizes) or 0 in sizes:
        return None
    return math.prod(source.shape) // math.prod(result.shape)


def _sum(number: Number, source: torch.Tensor, result: torch.Tensor) -> Number | None:
    number = converted(number, result.dtype)
    if number == 0:
        return number if sums_exactly(number, 1, result.dtype) else None  # of any count, and of none
    count = _count(source, result)
    if count is None or not sums_exactly(number, count, result.dtype):
        return None
    if result.dtype in INTEGERS_AND_BOOL:
        return _wrapped(int(number) * count, result.dtype)
    return converted(number * count, result.dtype)


def _mean(number: Number, source: torch.Tensor, result: torch.Tensor) -> Number | None:
    count = _count(source, result)
    return number if count is not None and sums_exactly(number, count, result.dtype) else None


def _extreme(number: Number, source: torch.Tensor, result: torch.Tensor) -> Number | None:
    return number  # of nothing, eager makes an error


def _product(number: Number, source: torch.Tensor, result: torch.Tensor) -> Number | None:
    return converted(number, result.dtype) if number == 1 else None


def _any(number: Number, source: torch.Tensor, result: torch.Tensor) -> Number | None:
    return _boolean(number, result) if number == 0 or _count(source, result) is not None else None


def _all(number: Number, source: torch.Tensor, result: torch.Tensor) -> Number | None:
    return _boolean(number, result) if number != 0 or _count(source, result) is not None else None


def _boolean(number: Number, result: torch.Tensor) -> Number:
    return number != 0 if result.dtype == torch.bool else int(number != 0)


def converted(number: Number, dtype: torch.dtype) -> Number:
    """``number`` as a tensor of that type has it."""
    with _disable_current_modes():
        return _item(torch.tensor(number, dtype=torch.float64 if isinstance(number, float) else torch.int64).to(dtype))


def _wrapped(number: int, dtype: torch.dtype) -> Number:
    bits = torch.iinfo(dtype).bits
    low = torch.iinfo(dtype).min
    return (number - low) % (1 << bits) + low


def _running_sum(number: Number, source: torch.Tensor, result: torch.Tensor) -> Number | None:
    number = converted(number, result.dtype)
    return number if number == 0 and sums_exactly(number, 1, result.dtype) else None


_REDUCTIONS: dict[object, Callable[..., Number | None]] = {
    **dict.fromkeys(named_operators("sum.default,dim_IntList"), _sum),
    **dict.fromkeys(named_operators("mean.default,dim"), _mean),
    **dict.fromkeys(named_operators("amax amin max min"), _extreme),
    **dict.fromkeys(named_operators("prod.default,dim_int cumprod"), _product),
    _aten.cumsum.default: _running_sum,
    **dict.fromkeys(named_operators("any.default,dim,dims"), _any),
    **dict.fromkeys(named_operators("all.default,dim,dims"), _all),
}

# -- operators with an absorbing operand: one that decides the result whatever the others are ------------------------


def _absorbed_by(deciding: Callable[[Number], bool], result: Number | None = None) -> Callable[..., Number | None]:
    """A binary operator whose result is ``result`` (or the number itself) where one side is a deciding number."""

    def decide(node: torch.fx.Node, value: torch.Tensor, known: dict[torch.fx.Node, Number]) -> Number | None:
        for operand in node.args:
            number = operand if isinstance(operand, (bool, int, float)) else _number_read(operand, known)
            if number is not None and deciding(number):
                return converted(number if result is None else result, value.dtype)
        return None

    return decide


def _zero_times(node: torch.fx.Node, value: torch.Tensor, known: dict[torch.fx.Node, Number]) -> Number | None:
    """Of integers: a float may be infinite or NaN."""
    return _absorbed_by(lambda number: number == 0)(node, value, known) if value.dtype in INTEGERS_AND_BOOL else None


def _chosen(node: torch.fx.Node, value: torch.Tensor, known: dict[torch.fx.Node, Number]) -> Number | None:
    condition = _number_read(node.args[0], known)
    if condition is None:
        return _common_number(node.args[1:3], known)
    number = _number_read(node.args[1 if condition else 2], known)
    return None if number is None else converted(number, value.dtype)


def _masked(node: torch.fx.Node, value: torch.Tensor, known: dict[torch.fx.Node, Number]) -> Number | None:
    filling = node.args[2]
    if not _number_read(node.args[1], known) or not isinstance(filling, (bool, int, float)):
        return None
    return converted(filling, value.dtype)


_ABSORBING: dict[object, Callable[..., Number | None]] = {
    _aten.mul.Tensor: _zero_times,
    _aten.bitwise_and.Tensor: _absorbed_by(lambda number: number == 0),
    _aten.logical_and.default: _absorbed_by(lambda number: number == 0, False),
    _aten.logical_or.default: _absorbed_by(lambda number: number != 0, True),
    _aten.where.self: _chosen,
    _aten.masked_fill.Scalar: _masked,
}

# -- elementwise ------------------------------------------------------------------------------------------------------


def _computed(node: torch.fx.Node, value: torch.Tensor, known: dict[torch.fx.Node, Number]) -> Number | None:
    """What torch computes from one element each. Tensors keep their rank, on which the type of the result depends."""
    sources = node.all_input_nodes
    if not sources or any(source not in known for source in sources) or may_end_the_process(node):
        return None
    if any(source.meta["val"].device.type != "cpu" for source in (*sources, node)):
        return None  # another device may round otherwise

    def element(source: torch.fx.Node) -> torch.Tensor:
        like = source.meta["val"]
        return torch.full((1,) * like.dim(), known[source], dtype=like.dtype)

    target: Any = node.target
    with _disable_current_modes(), torch.no_grad():
        args, kwargs = torch.fx.map_arg((node.args, node.kwargs), element)
        try:
            result = target(*args, **kwargs)
        except (RuntimeError, ValueError, TypeError, IndexError):
            return None  # eager's to raise, when the graph runs
        if not isinstance(result, torch.Tensor) or result.dtype != value.dtype or result.numel() != 1:
            return None
        return _item(result)
