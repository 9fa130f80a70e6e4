"""The rules that forbid computing a value again in backward, each a setting of the same name.

A rule only says that repeating *this* node is not worth it: the node is then saved if backward needs it, unless what
is computed from it costs less to save. What cannot be repeated at all, or must be by the user's request, is no rule's
matter (:mod:`torchkiln.partition.classify`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.fx

from torchkiln.config import Settings
from torchkiln.partition import kinds
from torchkiln.partition.classify import NodeInfo

# Kernels between a value and its last reader beyond which repeating it means to repeat it several times over. A
# normalization reads its input one or two kernels later, a residual connection three or more.
FAR_APART = 2
# Operators on single elements in a row after which one is saved.
LONG_CHAIN = 20


@dataclass(frozen=True)
class RuleContext:
    """What rules look at beside the node."""

    info: NodeInfo
    level: Mapping[torch.fx.Node, int]
    """How many reductions and library calls, one after the other, come before the result of a node."""
    ends_long_chain: frozenset[torch.fx.Node]


@dataclass(frozen=True)
class Rule:
    """``setting`` names the option that turns the rule on; ``relaxed`` rules are off in aggressive recomputation."""

    setting: str
    relaxed: bool
    forbids: Callable[[RuleContext, torch.fx.Node], bool]

    def applies(self, settings: Settings) -> bool:
        return bool(getattr(settings, self.setting)) and not (self.relaxed and settings.aggressive_recomputation)


def is_product(_context: RuleContext, node: torch.fx.Node) -> bool:
    """Matrix products, convolutions, attention: a backward costs two of them, one more makes it half as long again."""
    return kinds.is_product(node)


def is_reduction(_context: RuleContext, node: torch.fx.Node) -> bool:
    """Reductions: the result is small, and to have it again all of the input is read again."""
    return kinds.is_reduction(node)


def is_unlisted(_context: RuleContext, node: torch.fx.Node) -> bool:
    """Operators that are not known to be cheap: library calls, sorting, scatters, the user's own."""
    return not kinds.is_listed(node)


def is_random(_context: RuleContext, node: torch.fx.Node) -> bool:
    """Random numbers made from a seed; those that a generator draws cannot be drawn again anyhow."""
    return kinds.is_seeded(node)


def is_used_far_apart(context: RuleContext, node: torch.fx.Node) -> bool:
    """Values that kernels read again much later, such as the sum a residual connection carries on.

    Backward would need them in kernels as far apart, and what is computed from them at the far end would draw in the
    whole chain of them. What kernels compute from inputs alone, such as the angles of rotary embeddings, is no link
    of a chain.
    """
    level = context.level[node]
    return level > 0 and any(
        kinds.is_fusible(user) and context.level[user] - level > FAR_APART
        for user in _readers(node, context.info.views)
        if user in context.level
    )


def ends_long_chain(context: RuleContext, node: torch.fx.Node) -> bool:
    """Every so many operators on single elements in a row: the kernel that repeats them all would be long."""
    return node in context.ends_long_chain


def is_materialized(context: RuleContext, node: torch.fx.Node) -> bool:
    """Values that a library call of backward reads from memory: repeated, they would be written again as well."""
    info = context.info
    return any(
        user in info.required_backward and kinds.runs_outside_kernels(user) for user in _readers(node, info.views)
    )


def is_view(context: RuleContext, node: torch.fx.Node) -> bool:
    """Views: always free to make again, so this is off unless one looks for a fault in it."""
    return node in context.info.views


RULES = (
    Rule("save_matmuls", False, is_product),
    Rule("save_reductions", True, is_reduction),
    Rule("save_unlisted", True, is_unlisted),
    Rule("save_random", False, is_random),
    Rule("save_far_used", False, is_used_far_apart),
    Rule("save_long_chains", True, ends_long_chain),
    Rule("save_materialized", True, is_materialized),
    Rule("save_views", False, is_view),
)


def rules_for(settings: Settings) -> tuple[Rule, ...]:
    """The rules that ``settings`` leave on."""
    return tuple(rule for rule in RULES if rule.applies(settings))


def forbidden(info: NodeInfo, rules: Sequence[Rule], context: RuleContext | None = None) -> dict[torch.fx.Node, str]:
    """The nodes that ``rules`` forbid to compute again, each with the setting of the first that does.

    Nodes that forward does not need are not among them: in backward they are computed for the first time.
    """
    context = context if context is not None else rule_context(info)
    found: dict[torch.fx.Node, str] = {}
    for node in context.level:
        if node in info.either or node not in info.repeatable or node in info.requested:
            continue
        if kinds.is_free(node) and not (node in info.views and isinstance(node.meta.get("val"), torch.Tensor)):
            continue
        for rule in rules:
            if (rule.forbids is is_view) == (node in info.views) and rule.forbids(context, node):
                found[node] = rule.setting
                break
    return found


def rule_context(info: NodeInfo) -> RuleContext:
    """What rules look at in the graph of ``info``, for several calls of :func:`forbidden`."""
    level: dict[torch.fx.Node, int] = {}
    chain: dict[torch.fx.Node, int] = {}
    ends = set()
    for node in info.position:
        if node.op == "output" or node in info.required_backward:
            continue
        before = max((level[source] for source in info.reads[node]), default=0)
        length = max((chain[source] for source in info.reads[node]), default=0)
        if kinds.is_free(node):
            level[node], chain[node] = before, length
        elif kinds.is_fusible(node):
            length += 1
            if length > LONG_CHAIN:
                ends.add(node)
                length = 0
            level[node], chain[node] = before, length
        else:
            level[node], chain[node] = before + 1, 0
    return RuleContext(info, level, frozenset(ends))


def _readers(node: torch.fx.Node, views: Mapping[torch.fx.Node, torch.fx.Node]) -> Iterator[torch.fx.Node]:
    """Who reads the memory of ``node``, through views too."""
    pending = list(node.users)
    while pending:
        user = pending.pop()
        if user in views:
            pending.extend(user.users)
        elif user.op != "output":
            yield user
