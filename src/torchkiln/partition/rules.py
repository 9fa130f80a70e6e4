"""The rules that forbid recomputing a value in backward, each a setting of the same name.

A rule only says that recomputing *this* node is not worth it: the node is then saved if backward needs it, unless what
is computed from it costs less to save. What cannot be recomputed at all, or must be by the user's request, is no rule's
matter (:mod:`torchkiln.partition.classify`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.fx import Node

from torchkiln.config import Settings
from torchkiln.graph.seeded import SEEDED
from torchkiln.partition import kinds
from torchkiln.partition.classify import NodeInfo

# Kernels between a value and its last reader beyond which it would be recomputed several times over. A
# normalization reads its input one or two kernels later, a residual connection three or more.
FAR_APART = 2
# Pointwise operators in a row after which one is saved.
LONG_CHAIN = 20


class RuleContext:
    """What rules look at beside the node."""

    def __init__(self, info: NodeInfo) -> None:
        self.info = info
        self.level: dict[Node, int] = {}
        """How many reductions and library calls, one after the other, come before the result of a node."""
        self.ends_long_chain: set[Node] = set()
        chain: dict[Node, int] = {}  # pointwise operators in a row
        for node in info.outside_backward:
            if node.op == "output":
                continue
            level = max((self.level[source] for source in info.reads[node]), default=0)
            length = max((chain[source] for source in info.reads[node]), default=0)
            if kinds.is_fusible(node) and node not in info.free:
                length += 1
                if length > LONG_CHAIN:
                    self.ends_long_chain.add(node)
                    length = 0
            elif node not in info.free:
                level, length = level + 1, 0
            self.level[node], chain[node] = level, length


@dataclass(frozen=True)
class Rule:
    """``setting`` names the option that turns the rule on; ``relaxed`` rules are off in aggressive recomputation."""

    setting: str
    relaxed: bool
    forbids: Callable[[RuleContext, Node], bool]

    def applies(self, settings: Settings) -> bool:
        return bool(getattr(settings, self.setting)) and not (self.relaxed and settings.aggressive_recomputation)


def is_used_far_apart(context: RuleContext, node: Node) -> bool:
    """Values that kernels read again much later, such as the sum a residual connection carries on.

    Backward would need them in kernels as far apart, and what is computed from them at the far end would need the whole
    chain of them. What kernels compute from inputs alone, such as the angles of rotary embeddings, is no link of a
    chain.
    """
    level = context.level[node]
    readers = (user for user in _readers(node, context.info.views) if user in context.level)
    return level > 0 and any(kinds.is_fusible(user) and context.level[user] - level > FAR_APART for user in readers)


def is_materialized(context: RuleContext, node: Node) -> bool:
    """Values that a library call of backward reads from memory: recomputed, they would be written again as well."""
    readers = (user for user in _readers(node, context.info.views) if user in context.info.required_backward)
    return any(map(kinds.runs_outside_kernels, readers))


def is_view(context: RuleContext, node: Node) -> bool:
    """Views: always free to recompute, so this is off unless one looks for a fault in it."""
    return node in context.info.views


RULES = (
    # A backward costs two matmuls, convolutions or attentions for each: one more makes it half as long again.
    Rule("save_matmuls", False, lambda _, node: kinds.is_matmul(node)),
    # The result is small, and to have it again all of the input is read again.
    Rule("save_reductions", True, lambda _, node: kinds.is_reduction(node)),
    # Not known to be cheap: library calls, sorting, scatters, the user's own operators.
    Rule("save_unlisted", True, lambda _, node: not kinds.is_listed(node)),
    # Made from a seed; numbers that a generator draws cannot be drawn again anyhow.
    Rule("save_random", False, lambda _, node: node.target in SEEDED),
    Rule("save_far_used", False, is_used_far_apart),
    # The kernel that recomputes a long chain at once would be long.
    Rule("save_long_chains", True, lambda context, node: node in context.ends_long_chain),
    Rule("save_materialized", True, is_materialized),
    Rule("save_views", False, is_view),
)


def rules_for(settings: Settings) -> tuple[Rule, ...]:
    """The rules that ``settings`` leave on."""
    return tuple(rule for rule in RULES if rule.applies(settings))


def forbidden(context: RuleContext, rules: Sequence[Rule]) -> frozenset[Node]:
    """The nodes that ``rules`` forbid to recompute.

    Nodes that forward does not need are not among them: in backward they are computed for the first time.
    """
    info = context.info
    candidates = info.recomputable - info.either - info.requested

    def is_forbidden(node: Node) -> bool:
        if node not in candidates:
            return False
        is_tensor_view = node in info.views and isinstance(node.meta.get("val"), torch.Tensor)
        if node in info.free and not is_tensor_view:
            return False
        return any((rule.forbids is is_view) == (node in info.views) and rule.forbids(context, node) for rule in rules)

    return frozenset(filter(is_forbidden, context.level))


def _readers(node: Node, views: Mapping[Node, Node]) -> Iterator[Node]:
    """Who reads the memory of ``node``, through views too."""
    pending = list(node.users)
    while pending:
        user = pending.pop()
        if user in views:
            pending.extend(user.users)
        elif user.op != "output":
            yield user
