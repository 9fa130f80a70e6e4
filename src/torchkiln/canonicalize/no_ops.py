"""Operators of functional graphs that give back the values they were given, in the same layout."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.fx

from torchkiln.canonicalize.chains import axes_of
from torchkiln.graph.aliases import Aliases
from torchkiln.graph.fake import same_metadata
from torchkiln.graph.nodes import fake_tensor, replace
from torchkiln.graph.operators import CASTS, named_operators
from torchkiln.graph.tangents import is_tangent
from torchkiln.graph.uniform import Number

_aten = torch.ops.aten

# Show the same memory: nothing tells the result from the argument where their metadata are equal.
_VIEWS = frozenset(
    named_operators(
        "alias detach expand permute reshape slice.Tensor squeeze.default,dim,dims transpose.int t view _unsafe_view"
    )
)
_INVOLUTIONS = named_operators("neg bitwise_not")
_IDEMPOTENT = named_operators("abs ceil floor relu round sign trunc")
# Never -0.0, whatever they are given.
_NEVER_NEGATIVE_ZERO = frozenset(named_operators("abs cosh exp exp2 sigmoid _softmax"))


def _literal(argument: object) -> Number | None:
    """A number in an argument list; a boolean is none."""
    return argument if isinstance(argument, (int, float)) and not isinstance(argument, bool) else None


def keeps_when_zero_is_added(node: torch.fx.Node, zero: float) -> bool:
    """Whether every value of ``node`` plus ``zero`` is that value, bit for bit: -0.0 + 0.0 is 0.0."""
    value = fake_tensor(node)
    if value is None or value.dtype.is_complex:
        return False
    if not value.dtype.is_floating_point or math.copysign(1, zero) < 0:
        return True
    return _is_never_negative_zero(node)


def _is_never_negative_zero(node: torch.fx.Node) -> bool:
    if node.target in _NEVER_NEGATIVE_ZERO:
        return True
    value = fake_tensor(node)
    if node.target not in (_aten.add.Tensor, _aten.add.Scalar) or node.kwargs or value is None:
        return False
    # What cancels is 0.0, and only -0.0 + -0.0 is -0.0. Half types are left out: rounding to them makes -0.0 of small
    # negative numbers, as rounding a number to float32 does.
    number = node.args[1]
    if value.dtype not in (torch.float32, torch.float64) or not isinstance(number, (int, float)):
        return False
    positive_zero = _literal(number) == 0 and math.copysign(1, number) > 0
    return positive_zero or abs(number) > torch.finfo(torch.float32).tiny


# -- numbers that change nothing ---------------------------------------------------------------------------------------

Neutral = Callable[[Number, torch.fx.Node], bool]


def _adds_nothing(number: Number, other: torch.fx.Node) -> bool:
    return number == 0 and keeps_when_zero_is_added(other, float(number))


def _subtracts_nothing(number: Number, other: torch.fx.Node) -> bool:
    return number == 0 and keeps_when_zero_is_added(other, -float(number))


def _is_one(number: Number, other: torch.fx.Node) -> bool:
    return number == 1


def _is_zero(number: Number, other: torch.fx.Node) -> bool:
    return number == 0


def _is_true_for_booleans(number: Number, other: torch.fx.Node) -> bool:
    return bool(number) and other.meta["val"].dtype == torch.bool


def _is_false_for_booleans(number: Number, other: torch.fx.Node) -> bool:
    return not number and other.meta["val"].dtype == torch.bool


_BOTH, _SECOND = (1, 0), (1,)
# Binary operators, which numbers are neutral, and on which sides.
_NEUTRAL: dict[object, tuple[Neutral, tuple[int, ...]]] = {
    **dict.fromkeys(named_operators("add.Tensor,Scalar"), (_adds_nothing, _BOTH)),
    **dict.fromkeys(named_operators("sub.Tensor,Scalar"), (_subtracts_nothing, _SECOND)),
    **dict.fromkeys(named_operators("mul.Tensor,Scalar"), (_is_one, _BOTH)),
    **dict.fromkeys(named_operators("div.Tensor,Scalar pow.Tensor_Scalar"), (_is_one, _SECOND)),
    **dict.fromkeys(named_operators("bitwise_or.Tensor bitwise_xor.Tensor"), (_is_zero, _BOTH)),
    **dict.fromkeys(named_operators("bitwise_and.Tensor logical_and"), (_is_true_for_booleans, _BOTH)),
    **dict.fromkeys(named_operators("logical_or"), (_is_false_for_booleans, _BOTH)),
}


def beside_neutral(node: torch.fx.Node, number_of: Callable[[object], Number | None]) -> torch.fx.Node | None:
    """The operand whose values ``node`` has, as the other is a number that changes nothing.

    ``number_of`` tells the number an argument stands for. Not where a factor or a rounding is asked for beside them.
    """
    if node.target not in _NEUTRAL or len(node.args) != 2 or node.kwargs:
        return None
    is_neutral, sides = _NEUTRAL[node.target]
    for side in sides:
        number, other = number_of(node.args[side]), node.args[1 - side]
        if number is not None and isinstance(other, torch.fx.Node) and is_neutral(number, other):
            return other
    return None


# -- which argument comes back, by operator; None where that depends on values -----------------------------------------


def _first(node: torch.fx.Node) -> Any:
    return node.args[0]


def _first_where_all_are(number: int) -> Callable[[torch.fx.Node], Any]:
    def rule(node: torch.fx.Node) -> Any:
        numbers = node.args[1]
        assert isinstance(numbers, (list, tuple))
        return node.args[0] if all(isinstance(given, int) and given == number for given in numbers) else None

    return rule


def _copied(node: torch.fx.Node) -> Any:
    return node.args[1] if len(node.args) > 1 else None


def _only_piece(node: torch.fx.Node) -> Any:
    pieces = node.args[0]
    return pieces[0] if isinstance(pieces, (list, tuple)) and len(pieces) == 1 else None


def _either(node: torch.fx.Node) -> Any:
    return node.args[1] if len(node.args) == 3 and node.args[1] is node.args[2] else None


def _stored_whole(node: torch.fx.Node) -> Any:
    """What a store over all of a dimension stores: sizes and step of the source say that nothing else is left."""
    return node.args[1] if len(node.args) < 6 or _literal(node.args[5]) == 1 else None


def _undone(node: torch.fx.Node) -> Any:
    inner = node.args[0]
    return inner.args[0] if isinstance(inner, torch.fx.Node) and inner.target is node.target else None


def _done_already(node: torch.fx.Node) -> Any:
    inner = node.args[0]
    same = isinstance(inner, torch.fx.Node) and inner.target is node.target and not node.kwargs
    return inner if same and len(node.args) == 1 else None


def _kept_axes(node: torch.fx.Node) -> Any:
    """A square matrix may keep its metadata and still be transposed."""
    axes = axes_of(node)
    return node.args[0] if axes == sorted(axes) else None


def _whole_slice(node: torch.fx.Node) -> Any:
    """Same size and step 1 means same start: the sizes are compared too."""
    return node.args[0] if len(node.args) < 5 or _literal(node.args[4]) == 1 else None


# Those that are no views make new memory and fill it with what is in the argument.
_RETURNED: dict[object, Callable[[torch.fx.Node], Any]] = {
    **dict.fromkeys((*_VIEWS, *CASTS, *named_operators("clone lift_fresh_copy")), _first),
    **dict.fromkeys(named_operators("permute transpose.int t"), _kept_axes),
    _aten.slice.Tensor: _whole_slice,
    _aten.copy.default: _copied,
    _aten.constant_pad_nd.default: _first_where_all_are(0),
    _aten.repeat.default: _first_where_all_are(1),
    _aten.cat.default: _only_piece,
    _aten.where.self: _either,
    _aten.slice_scatter.default: _stored_whole,
    **dict.fromkeys(_INVOLUTIONS, _undone),
    **dict.fromkeys(_IDEMPOTENT, _done_already),
}


def remove_no_ops(graph_module: torch.fx.GraphModule, *, saves_for_backward: bool = True) -> bool:
    """Read through every no-op of the graph; returns whether any was found.

    A copy stays where it is the copy that matters (see :class:`Copies`).
    """
    graph = graph_module.graph
    copies = Copies(graph, saves_for_backward=saves_for_backward)
    changed = False
    for node in list(graph.nodes):
        if node.op != "call_function" or not node.args:
            continue
        source = _returned_argument(node)
        if source is None:
            continue
        if node in copies.outputs if node.target in _VIEWS else not copies.may_be_read_through(node, source):
            continue
        replace(node, source)
        changed = True
    return changed


class Copies:
    """Where the values of one graph, at the time of construction, may be read from the memory they were copied from.

    Not when that memory, or the copy, is written in the graph, nor when the copy leaves the graph. With
    ``saves_for_backward`` (a joint graph), also not from memory the user can write between forward and backward, as
    any value may still become a saved one.
    """

    def __init__(self, graph: torch.fx.Graph, *, saves_for_backward: bool) -> None:
        self.aliases = Aliases(graph)
        self.outputs = frozenset(graph.output_node().all_input_nodes)
        self._saves_for_backward = saves_for_backward
        self._made: set[torch.fx.Node] = set()

    def add(self, node: torch.fx.Node) -> None:
        """Tell of a node made since, with memory of its own."""
        self._made.add(node)

    def may_be_read_through(self, node: torch.fx.Node, source: torch.fx.Node) -> bool:
        """Whether readers of ``node``, memory of its own with the values of ``source``, may read ``source``."""
        aliases = self.aliases
        root = source if source in self._made else aliases.root(source)
        if node in self.outputs or root in aliases.written:
            return False
        if aliases.root(node) in aliases.written or aliases.root(node) in aliases.returned:
            return False
        if aliases.root(node) in aliases.read_as_storage:
            return False
        if not self._saves_for_backward:
            return True
        if root.op == "placeholder":
            return is_tangent(root)  # exist in backward only
        return root not in aliases.returned


def _returned_argument(node: torch.fx.Node) -> torch.fx.Node | None:
    """The argument whose values ``node`` gives back in the same layout, if there is one."""
    value = fake_tensor(node)
    if value is None:
        return None
    source = _RETURNED[node.target](node) if node.target in _RETURNED else beside_neutral(node, _literal)
    before = fake_tensor(source)
    return source if before is not None and same_metadata(before, value) else None
