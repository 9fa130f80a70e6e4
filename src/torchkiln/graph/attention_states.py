"""What fused attention of a card keeps for its backward alone: random state, and the statistics of cuDNN's.

torch's fake tensors put it on the card. Memory-efficient attention that drops weights returns it on the CPU, or on the
card while a CUDA graph is captured, and its backward expects it where it was left. cuDNN's statistics may lie in
another order than fake tensors say, and its backward reads them in that. So only torch looks at both.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, TypeGuard

import torch
import torch.fx

# What schemas call it. Flash attention has all of it in the first part, and a second one for old callers.
_NAMES = frozenset({"philox_seed", "philox_offset", "rng_state", "unused"})


@lru_cache(maxsize=1024)
def states_returned(target: object) -> frozenset[int]:
    """Which results of an operator are for its backward alone."""
    if not _is_attention(target):
        return frozenset()
    return _positions(target, target._schema.returns)


@lru_cache(maxsize=1024)
def _states_taken(target: object) -> frozenset[int]:
    if not _is_attention(target):
        return frozenset()
    return _positions(target, target._schema.arguments)


def _positions(target: torch._ops.OpOverload, declared: Sequence[Any]) -> frozenset[int]:
    names = _NAMES | {"logsumexp"} if "cudnn" in target._opname else _NAMES
    return frozenset(k for k, one in enumerate(declared) if one.name in names)


def _is_attention(target: object) -> TypeGuard[torch._ops.OpOverload]:
    return isinstance(target, torch._ops.OpOverload) and target.namespace == "aten" and "attention" in target._opname


def is_state(node: torch.fx.Node) -> bool:
    """Whether an input of a graph is such state: all that the graph does with it is to give it to attention as that."""
    return bool(node.users) and all(_takes_as_state(user, node) for user in node.users)


def _takes_as_state(user: torch.fx.Node, node: torch.fx.Node) -> bool:
    taken = _states_taken(user.target)
    places = {k for k, argument in enumerate(user.args) if argument is node}
    return places <= taken and user.all_input_nodes.count(node) == 1 and bool(places)
