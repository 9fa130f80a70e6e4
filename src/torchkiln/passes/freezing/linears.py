"""Linear layers of an inference graph, whatever matmul they were traced to.

``torch.nn.Linear`` is ``mm`` or ``addmm`` with a permuted weight, of a matrix or of a view that makes the leading
dimensions one; a weight that is stored in by out is read as it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx

from torchkiln.graph.fake import equal_expressions, expression, has_one_dtype
from torchkiln.graph.insertion import insert_call
from torchkiln.graph.nodes import argument, calls_of, fake_tensor
from torchkiln.graph.weights import weight_values

_aten = torch.ops.aten
_VIEWS = frozenset({_aten.view.default, _aten._unsafe_view.default, _aten.reshape.default})


@dataclass(frozen=True)
class Linear:
    """``node`` is ``input @ matrix + bias``, a call of ``mm`` or ``addmm``; matrix and bias depend on weights alone.

    ``matrix`` is in by out, as the call reads it, and ``weight`` the same out by in, None where no node has that
    (:func:`weight_of` makes one). A layer of more dimensions has a view on either side: ``source`` is what ``input`` is
    a view of and ``result`` the view of ``node`` with the leading dimensions of ``source``, which nothing but it reads.
    In two dimensions these are ``input`` and ``node`` themselves.
    """

    node: torch.fx.Node
    input: torch.fx.Node
    matrix: torch.fx.Node
    weight: torch.fx.Node | None
    bias: torch.fx.Node | None
    source: torch.fx.Node
    result: torch.fx.Node

    @property
    def is_2d(self) -> bool:
        return self.result is self.node

    @property
    def features(self) -> tuple[int, int]:
        """How many the layer takes, and how many it gives."""
        return tuple(self.matrix.meta["val"].shape)


def linears(graph: torch.fx.Graph, constant: frozenset[torch.fx.Node] | None = None) -> Iterator[Linear]:
    """Those of the graph; ``constant`` are its :func:`weight_values`.

    Each is read when it is asked for: its operands may be linears that the caller has replaced by then.
    """
    known = weight_values(graph) if constant is None else constant
    for node in sorted(calls_of(graph, _aten.mm.default, _aten.addmm.default)):
        found = linear_of(node, known)
        if found is not None:
            yield found


def linear_of(node: torch.fx.Node, constant: frozenset[torch.fx.Node]) -> Linear | None:
    """``node`` as a linear layer, if it is one."""
    given: list[Any] = list(node.args)
    bias = given.pop(0) if node.target is _aten.addmm.default else None
    left, matrix = given
    if left in constant or matrix not in constant or fake_tensor(node) is None or not has_one_dtype(node):
        return None
    if bias is not None and not (bias in constant and _is_bias(node, bias)):
        return None
    weight = matrix.args[0] if _transposes(matrix) else None
    source, result = _outside(node, left)
    return Linear(node, left, matrix, weight, bias, source, result)


def weight_of(linear: Linear) -> torch.fx.Node:
    """The weight out by in; a permutation inserted before the matmul where there is none."""
    return linear.weight or insert_call(linear.node, _aten.permute.default, linear.matrix, [1, 0])


def _is_bias(node: torch.fx.Node, bias: torch.fx.Node) -> bool:
    value, result = fake_tensor(bias), node.meta["val"]
    if value is None or value.dim() != 1 or value.shape[0] != result.shape[1]:
        return False
    return bool(argument(node, "alpha") == 1 and argument(node, "beta") == 1)


def _transposes(matrix: torch.fx.Node) -> bool:
    if matrix.target in (_aten.t.default, _aten.transpose.int):
        return True  # of two dimensions: another one than [0, 1] would be none
    return matrix.target is _aten.permute.default and list(argument(matrix, "dims")) == [1, 0]


def _outside(node: torch.fx.Node, left: torch.fx.Node) -> tuple[torch.fx.Node, torch.fx.Node]:
    """What a layer of more dimensions takes and gives, or what the matmul does."""
    users = [user for user in node.users if user.users or user.op == "output"]
    if left.target in _VIEWS and len(users) == 1 and users[0].target in _VIEWS:
        source, result = left.args[0], users[0]
        outer, inner = fake_tensor(source), fake_tensor(result)
        if outer is not None and inner is not None and _same_but_last(outer, left.meta["val"], inner):
            assert isinstance(source, torch.fx.Node)
            return source, result
    return left, node


def _same_but_last(source: torch.Tensor, left: torch.Tensor, result: torch.Tensor) -> bool:
    leading = [(expression(a), expression(b)) for a, b in zip(source.shape[:-1], result.shape[:-1], strict=False)]
    return (
        source.dim() == result.dim() > 0
        and expression(source.shape[-1]) == expression(left.shape[-1])
        and all(equal_expressions(a, b) for a, b in leading)
    )
