"""Calls of oneDNN's int8 operators in a graph: their arguments by name, and calls with some changed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
import torch.fx

from torchkiln.graph import quantized_operators as int8
from torchkiln.graph.fake import same_metadata
from torchkiln.graph.insertion import erase_made, insert_call
from torchkiln.graph.nodes import argument, argument_names, replace
from torchkiln.graph.operators import CASTS, CONVERT, WHOLE_VIEWS
from torchkiln.graph.weights import weight_values
from torchkiln.passes.freezing.quantized.affine import Quantized, QuantizedWeight, is_rounding
from torchkiln.target import Target

Node = torch.fx.Node
_aten = torch.ops.aten

FLIP_SIGN = _aten.bitwise_xor.Scalar
"""With -128: adds 128 to a byte with a sign, whose bits then are those of the sum without one."""


@dataclass(frozen=True)
class PostOperation:
    """How an operator names what it applies to its result, and which functions it knows (measured by calling it)."""

    name: str
    scalars: str
    algorithm: str
    known: frozenset[str]


_OF_CONVOLUTION = PostOperation("attr", "scalars", "algorithm", frozenset({"relu", "hardtanh", "hardswish", "swish"}))
_OF_LINEAR = PostOperation(
    "post_op_name",
    "post_op_args",
    "post_op_algorithm",
    frozenset({"relu", "hardtanh", "hardswish", "swish", "gelu", "tanh", "leaky_relu"}),
)

POST_OPERATIONS: Mapping[object, PostOperation] = MappingProxyType(
    {
        target: names
        for target, names in (
            (int8.QCONV, _OF_CONVOLUTION),
            (int8.QLINEAR, _OF_LINEAR),
            (int8.QLINEAR_TENSOR, _OF_LINEAR),
        )
        if target is not None
    }
)
"""The int8 calls that take one tensor, with their post-operation."""


def has_int8_matmuls(target: Target) -> bool:
    """Whether products of bytes are summed exactly: without VNNI pairs of them are summed in 16 bits, saturated."""
    features = target.features.split(",")
    return any(f"+{name}" in features for name in ("avx512vnni", "avxvnni", "amx-int8"))


@dataclass(frozen=True)
class Reached:
    """An int8 call whose result reaches a reader, through views and casts that nobody else reads."""

    call: Node
    between: tuple[Node, ...]


def reached(value: object, *, last: bool = True) -> Reached | None:
    """The int8 call that ``value`` is the result of. With ``last``, whose result nobody else reads."""
    between: list[Node] = []
    while isinstance(value, Node) and (value.target in WHOLE_VIEWS or is_rounding(value)):
        if last and len(value.users) != 1:
            return None
        between.append(value)
        value = value.args[0]
    if not isinstance(value, Node) or value.target not in POST_OPERATIONS or (last and len(value.users) != 1):
        return None
    return Reached(value, tuple(reversed(between)))


def is_plain(call: Node) -> bool:
    """Whether a call gives numbers, with nothing applied to them."""
    return argument(call, POST_OPERATIONS[call.target].name) == "none" and gives_numbers(call)


def takes(call: Node, function: str) -> bool:
    """Whether a call can apply a function to its result. Convolutions of volumes know none."""
    known = POST_OPERATIONS[call.target].known
    return function in known and not (call.target is int8.QCONV and call.meta["val"].dim() == 5)


def gives_numbers(call: Node) -> bool:
    return call.meta["val"].dtype in (torch.float32, torch.bfloat16)


def arguments_of(call: Node) -> dict[str, Any]:
    assert isinstance(call.target, torch._ops.OpOverload)
    return {name: argument(call, name) for name in argument_names(call.target)}


def take_over(reader: Node, source: Reached, **changes: Any) -> bool:
    """Let the call with ``changes`` compute what ``reader`` does with its result; False where it would look different.

    Casts in between fall away: the result has the dtype the changes ask for.
    """
    made = insert_changed(reader, source, **changes)
    if not same_metadata(made[-1].meta["val"], reader.meta["val"]):
        erase_made(made)
        return False
    replace(reader, made[-1])
    erase_unread((*reversed(source.between), source.call))
    return True


def insert_changed(before: Node, source: Reached, **changes: Any) -> list[Node]:
    """The call with ``changes`` before ``before``, and the views of its result; the last is what was reached."""
    assert isinstance(source.call.target, torch._ops.OpOverload)
    arguments = arguments_of(source.call) | changes
    call = insert_call(before, source.call.target, *arguments.values())
    return [call, *views_again(before, call, source.between)]


def views_again(before: Node, value: Node, between: tuple[Node, ...]) -> list[Node]:
    """The views among ``between`` on ``value``, inserted before ``before``."""
    made: list[Node] = []
    for view in between:
        if view.target not in CASTS:
            value = insert_call(before, view.target, value, *view.args[1:], **view.kwargs)  # type: ignore[arg-type]
            made.append(value)
    return made


def erase_unread(nodes: tuple[Node, ...]) -> None:
    """Erase those of ``nodes``, readers first, that nobody reads any more."""
    for node in nodes:
        if not node.users and not node._erased:
            node.graph.erase_node(node)


# -- weights ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scales:
    """Scales and zero points of a weight as the calls take them, and those that must be 0, checked."""

    scales: Node
    zero_points: Node


def insert_scales(before: Node, weight: QuantizedWeight) -> Scales:
    if isinstance(weight.scales, Node):
        scales = weight.scales
        if scales.meta["val"].dtype != torch.float32:
            scales = insert_call(before, CONVERT, scales, torch.float32)
    else:
        scales = insert_call(before, _aten.full.default, [1], weight.scales, dtype=torch.float32, device="cpu")
    if isinstance(weight.zero_points, Node):
        zero_points = insert_call(before, int8.REQUIRE_ZERO, weight.zero_points)
    else:
        zero_points = insert_call(before, _aten.full.default, [1], 0, dtype=torch.int64, device="cpu")
    return Scales(scales, zero_points)


@dataclass(frozen=True)
class Unsigned:
    """Bytes without a sign, and the scale and zero point they have as such."""

    stored: Node
    scale: float | Node
    zero_point: int | Node


def unsigned(before: Node, value: Quantized) -> Unsigned:
    """The bytes of an activation, those with a sign moved up by 128.

    oneDNN's convolutions take no others, and its matmuls of others are its reference: 16 x 768 x 3072 on one thread of
    a Zen 4 take 0.2 ms without a sign and 810 with one.
    """
    affine = value.affine
    if affine.dtype == torch.uint8:
        return Unsigned(value.stored, affine.scale, affine.zero_point)
    moved = insert_call(before, CONVERT, insert_call(before, FLIP_SIGN, value.stored, -128), torch.uint8)
    if isinstance(affine.zero_point, Node):
        return Unsigned(moved, affine.scale, insert_call(before, _aten.add.Tensor, affine.zero_point, 128))
    return Unsigned(moved, affine.scale, affine.zero_point + 128)


def contiguous(before: Node, value: Node) -> Node:
    """Integers for a call that may read memory as if it were contiguous, as packing does."""
    if value.meta["val"].is_contiguous():
        return value
    return insert_call(before, _aten.clone.default, value, memory_format=torch.contiguous_format)


def is_constant(weight: QuantizedWeight, constant: frozenset[Node]) -> bool:
    parts = (weight.stored, weight.scales, weight.zero_points)
    return all(part in constant for part in parts if isinstance(part, Node))


def constants(graph: torch.fx.Graph) -> frozenset[Node]:
    return weight_values(graph)


def as_float32(before: Node, value: Node | None) -> Node | None:
    """A bias as the calls take it."""
    if value is None or value.meta["val"].dtype == torch.float32:
        return value
    if value.target in CASTS and value.args[0].meta["val"].dtype == torch.float32:  # type: ignore[union-attr]
        return value.args[0]  # type: ignore[return-value]
    return insert_call(before, CONVERT, value, torch.float32)


def fuse_each(graph_module: torch.fx.GraphModule, fuse: Callable[[Node], bool]) -> bool:
    """Call ``fuse`` with every node of a graph that has int8 calls; whether one of these calls changed something."""
    graph = graph_module.graph
    if not any(node.target in POST_OPERATIONS for node in graph.nodes):
        return False
    changed = False
    for node in list(graph.nodes):
        if not node._erased:
            changed |= fuse(node)
    return changed
