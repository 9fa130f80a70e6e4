"""How the compiler runs an operator: as part of a kernel, as a reduction, as a library call, or not at all."""

from __future__ import annotations

import torch
import torch.fx

from torchkiln.graph import operators
from torchkiln.graph.aliases import view_source
from torchkiln.graph.operators import Kind, becomes_loop, kind_of
from torchkiln.graph.seeded import SEEDED
from torchkiln.partition.projections import computing_node, is_projection


def is_product(node: torch.fx.Node) -> bool:
    """Whether ``node`` is a matmul, a convolution or attention: time grows faster than the data."""
    return kind_of(computing_node(node).target) is Kind.MATMUL


def is_reduction(node: torch.fx.Node) -> bool:
    """Whether every element of ``node`` needs many elements of an input."""
    return kind_of(computing_node(node).target) is Kind.REDUCTION


def is_seeded(node: torch.fx.Node) -> bool:
    """Whether ``node`` makes random numbers from a seed."""
    return node.target in SEEDED


def is_listed(node: torch.fx.Node) -> bool:
    """Whether ``node`` is known to be cheap to compute again: kernels compute it where they read it."""
    return is_fusible(node) if isinstance(node.target, torch._ops.OpOverload) else is_free(node)


def is_free(node: torch.fx.Node) -> bool:
    """Whether nothing runs for ``node``: a view, a constant, a number, one of several results."""
    if node.op in ("get_attr", "placeholder") or view_source(node) is not None or is_projection(node):
        return True
    return isinstance(node.meta.get("val"), (int, float, bool, torch.SymInt, torch.SymFloat, torch.SymBool))


def is_fusible(node: torch.fx.Node) -> bool:
    """Whether ``node`` becomes part of the kernels that read it, if it is not needed in memory."""
    return operators.is_fusible(node.target)


def runs_outside_kernels(node: torch.fx.Node) -> bool:
    """Whether ``node`` calls a library, which reads its inputs from memory."""
    return node.op == "call_function" and not is_free(node) and not becomes_loop(node)
