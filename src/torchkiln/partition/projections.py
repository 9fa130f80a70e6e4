"""Operators with several results, and the nodes that pick one."""

from __future__ import annotations

import operator

import torch.fx


def computing_node(node: torch.fx.Node) -> torch.fx.Node:
    """The node whose operator computes ``node``, which may be one of several results of it."""
    while is_projection(node):
        source = node.args[0]
        assert isinstance(source, torch.fx.Node)
        node = source
    return node


def is_projection(node: torch.fx.Node) -> bool:
    """Whether ``node`` picks one of several results."""
    return node.op == "call_function" and node.target is operator.getitem
