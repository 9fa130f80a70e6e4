"""Attention written out in many ways becomes one ``scaled_dot_product_attention``, for inference and for training."""

from __future__ import annotations

import torch.fx

from torchkiln.graph.dead_code import eliminate_dead_code
from torchkiln.graph.effects import has_effect
from torchkiln.passes.joint.attention.checks import check_for, may_pay
from torchkiln.passes.joint.attention.constant_masks import use_constant_masks
from torchkiln.passes.joint.attention.spellings import SPELLINGS, Spelling
from torchkiln.patterns.registration import gen_register_replacement
from torchkiln.patterns.rewrites import RewriteSet
from torchkiln.patterns.tracing import fwd_only, joint_fwd_bwd

ATTENTION = RewriteSet("attention")


def fuse_attention(graph_module: torch.fx.GraphModule) -> bool:
    changed = may_pay(graph_module.graph) and ATTENTION.apply(graph_module)
    if use_constant_masks(graph_module):
        changed = True
    if changed:
        eliminate_dead_code(graph_module.graph, has_effect)
    return changed


def _register(spelling: Spelling) -> None:
    check = check_for(spelling.turn, learned=spelling.learned)
    for wanted, kind, trace in (
        (spelling.inference, "inference", fwd_only),
        (spelling.training, "training", joint_fwd_bwd),
    ):
        if wanted:
            gen_register_replacement(
                f"attention/{spelling.name} ({kind})",
                spelling.search,
                spelling.replace,
                spelling.inputs,
                trace,
                ATTENTION,
                extra_check=check,
                scalar_workaround=spelling.scalars,
                priority=spelling.priority,
                early_check=True,
            )


for _spelling in SPELLINGS:
    _register(_spelling)
