"""Tensors with one number in every element: made where they are needed, and arithmetic that they do not change.

A computation whose result is uniform becomes ``full``. A uniform operand becomes a number in the argument list where
that means the same, and goes altogether where it is neutral. Nothing changes dtype, sizes or strides of a result, nor
a bit of a value: a float times zero stays (NaN, infinities), and so does a float plus 0.0 that may be -0.0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx

from torchkiln.canonicalize.no_ops import Copies, beside_neutral
from torchkiln.graph.aliases import view_source
from torchkiln.graph.fake import inverse_order, is_packed, is_row_major, is_symbolic, memory_order, same_metadata
from torchkiln.graph.insertion import SizeArguments, erase_made, insert_call
from torchkiln.graph.nodes import fake_tensor, replace
from torchkiln.graph.operators import CONVERT, named_operators
from torchkiln.graph.uniform import Number, converted, same_number, uniform_values

_aten = torch.ops.aten

# Filled tensors that need nothing else to be made.
_MADE_FROM_NUMBERS = frozenset(named_operators("full zeros ones scalar_tensor"))


def fold_uniform_values(graph_module: torch.fx.GraphModule, *, saves_for_backward: bool = True) -> bool:
    """``saves_for_backward``: see :class:`~torchkiln.canonicalize.no_ops.Copies`."""
    graph = graph_module.graph
    copies = Copies(graph, saves_for_backward=saves_for_backward)
    known = uniform_values(graph_module, copies.aliases)
    if not known:
        return False
    folding = _Folding(known, copies, SizeArguments(graph))
    changed = False
    for node in list(graph.nodes):
        if node.op != "call_function" or fake_tensor(node) is None:
            continue
        replacement = folding.filled(node) if node in known else folding.simplified(node)
        if replacement is not None:
            replace(node, replacement)
            changed = True
    return changed


@dataclass(frozen=True)
class _Folding:
    """What is known of one graph; ``filled`` and ``simplified`` give the node to read instead of one, or None."""

    known: dict[torch.fx.Node, Number]
    copies: Copies
    sizes: SizeArguments

    def filled(self, node: torch.fx.Node) -> torch.fx.Node | None:
        """``node``, which is uniform, made from numbers alone."""
        value, number, order = node.meta["val"], self.known[node], _order(node.meta["val"])
        if node.target in _MADE_FROM_NUMBERS or order is None:
            return None
        if view_source(node) is not None and self._shares_memory_outside(node):
            return None
        size = self.sizes.arguments([value.shape[dim] for dim in order], node)
        if size is None:
            return None
        made = [insert_call(node, _aten.full.default, size, number, dtype=value.dtype, device=value.device,
                            pin_memory=False)]  # fmt: skip
        if order != list(range(len(order))):
            made.append(insert_call(node, _aten.permute.default, made[0], inverse_order(order)))
        return self._kept(node, made)

    def _shares_memory_outside(self, node: torch.fx.Node) -> bool:
        """Whether the user can see that another tensor has the memory of ``node``."""
        root = self.copies.aliases.root(node)
        shown = [value for value in self.copies.outputs if self.copies.aliases.root(value) is root]
        return root.op == "placeholder" or bool(shown and shown != [node])

    def simplified(self, node: torch.fx.Node) -> torch.fx.Node | None:
        """``node`` without the uniform arguments that do not count, or with numbers in place of them."""
        source = self._unchanged_argument(node)
        replacement = None if source is None else self._read_instead(node, source)
        return self._with_number(node) if replacement is None else replacement

    def _unchanged_argument(self, node: torch.fx.Node) -> torch.fx.Node | None:
        """The argument that gives the values of ``node``, up to their type."""
        target, args = node.target, node.args
        if target is _aten.where.self and len(args) == 3:
            condition = self._number(args[0])
            return None if condition is None else _node(args[1 if condition else 2])
        if target in (_aten.masked_fill.Scalar, _aten.masked_fill.Tensor):
            mask = self._number(args[1])
            return _node(args[0]) if mask is not None and not mask else None
        return beside_neutral(node, self._number)

    def _read_instead(self, node: torch.fx.Node, source: torch.fx.Node) -> torch.fx.Node | None:
        before, after = source.meta["val"], node.meta["val"]
        if not isinstance(before, torch.Tensor):
            return None  # a number known at run time
        if same_metadata(before, after):
            return source if self.copies.may_be_read_through(node, source) else None
        if before.dtype == after.dtype:
            return None  # it is broadcast, or has another layout
        return self._kept(node, [insert_call(node, CONVERT, source, after.dtype)])

    def _with_number(self, node: torch.fx.Node) -> torch.fx.Node | None:
        target = _TAKES_NUMBER.get(node.target)
        if target is None or len(node.args) != 2 or node.kwargs:
            return None
        tensor, number = node.args[0], self._number(node.args[1])
        if number is None and node.target in _TAKES_NUMBER_FIRST:
            target, tensor, number = _TAKES_NUMBER_FIRST[node.target], node.args[1], self._number(node.args[0])
        if number is None or isinstance(number, bool) or not isinstance(tensor, torch.fx.Node):
            return None
        value, uniform = tensor.meta["val"], node.args[0 if tensor is node.args[1] else 1].meta["val"]  # type: ignore[union-attr]
        if not isinstance(value, torch.Tensor) or not _means_the_same(number, uniform, value):
            return None
        return self._kept(node, [insert_call(node, target, tensor, number)])

    def _kept(self, node: torch.fx.Node, made: list[torch.fx.Node]) -> torch.fx.Node | None:
        """The last of ``made`` if it looks like ``node`` to whoever reads it; otherwise all are erased."""
        last = made[-1]
        if not same_metadata(last.meta.get("val"), node.meta["val"]):
            erase_made(made)
            return None
        self.copies.add(last)
        if node in self.known:
            self.known[last] = self.known[node]
        return last

    def _number(self, argument: object) -> Number | None:
        return self.known.get(argument) if isinstance(argument, torch.fx.Node) else None


def _node(argument: object) -> torch.fx.Node | None:
    return argument if isinstance(argument, torch.fx.Node) else None


def _order(value: torch.Tensor) -> list[int] | None:
    """The dimensions as they lie in memory without gaps, from the outermost; None when they do not."""
    order = list(range(value.dim())) if is_symbolic(value) or is_row_major(value) else memory_order(value)
    return order if is_packed(value, reversed(order)) else None


def _means_the_same(number: Number, uniform: torch.Tensor, tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` computes the same with a number as with a tensor that has it in every element."""
    if uniform.dim() > 0 and uniform.dtype != tensor.dtype:
        return False  # the two have a say in the type of the result
    if tensor.dim() == 0 and uniform.dtype != tensor.dtype:
        return False
    if tensor.dtype == torch.bool or (uniform.dtype.is_floating_point and not tensor.dtype.is_floating_point):
        return False
    # Rounded to the type of the tensor first, or not: that must not show.
    return same_number(converted(number, tensor.dtype), float(number) if tensor.dtype.is_floating_point else number)


# -- operators that take a number for their second operand, and what they are with operands exchanged -----------------

_EXCHANGED = {"eq": "eq", "ne": "ne", "lt": "gt", "le": "ge", "gt": "lt", "ge": "le"}
_TAKES_NUMBER: dict[object, Callable[..., Any]] = {
    **{target: target for target in named_operators("add.Tensor sub.Tensor mul.Tensor div.Tensor")},
    **{getattr(_aten, name).Tensor: getattr(_aten, name).Scalar for name in _EXCHANGED},
}
_TAKES_NUMBER_FIRST: dict[object, Callable[..., Any]] = {
    **{target: target for target in named_operators("add.Tensor mul.Tensor")},
    **{getattr(_aten, name).Tensor: getattr(_aten, other).Scalar for name, other in _EXCHANGED.items()},
}
