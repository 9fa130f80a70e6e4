"""How the compiler runs a node: as part of a kernel, as a reduction, as a library call, or not at all."""

from __future__ import annotations

import operator

import torch
from torch.fx import Node

from torchkiln.graph import operators
from torchkiln.graph.aliases import view_source
from torchkiln.graph.fake import SYMBOLIC
from torchkiln.graph.operators import Kind, becomes_loop, kind_of


def is_projection(node: Node) -> bool:
    """Whether ``node`` picks one of several results."""
    return node.op == "call_function" and node.target is operator.getitem


def computing_node(node: Node) -> Node:
    """The node whose operator computes ``node``, which may be one of several results of it."""
    while is_projection(node):
        source = node.args[0]
        assert isinstance(source, Node)
        node = source
    return node


def is_matmul(node: Node) -> bool:
    """Whether ``node`` is a matmul, a convolution or attention: time grows faster than the data."""
    return kind_of(computing_node(node).target) is Kind.MATMUL


def is_reduction(node: Node) -> bool:
    """Whether every element of ``node`` needs many elements of an input."""
    return kind_of(computing_node(node).target) is Kind.REDUCTION


def is_free(node: Node) -> bool:
    """Whether nothing runs for ``node``: a view, a constant, a number, one of several results."""
    if node.op in ("get_attr", "placeholder") or view_source(node) is not None or is_projection(node):
        return True
    return isinstance(node.meta.get("val"), (int, float, bool, *SYMBOLIC))


def is_fusible(node: Node) -> bool:
    """Whether ``node`` becomes part of the kernels that read it, if it is not needed in memory."""
    return operators.is_fusible(node.target)


def is_listed(node: Node) -> bool:
    """Whether ``node`` is known to be cheap to recompute: kernels compute it where they read it."""
    return is_fusible(node) if isinstance(node.target, torch._ops.OpOverload) else is_free(node)


def runs_outside_kernels(node: Node) -> bool:
    """Whether ``node`` calls a library, which reads its inputs from memory."""
    return node.op == "call_function" and not is_free(node) and not becomes_loop(node)
