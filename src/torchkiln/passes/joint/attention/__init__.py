"""Attention in its many forms becomes one ``scaled_dot_product_attention``, for inference and for training."""

from __future__ import annotations

import torch.fx

from torchkiln.graph.dead_code import eliminate_dead_code
from torchkiln.graph.effects import has_effect
from torchkiln.passes.joint.attention.checks import check_for, may_pay
from torchkiln.passes.joint.attention.constant_masks import use_constant_masks
from torchkiln.passes.joint.attention.forms import FORMS, AttentionForm
from torchkiln.patterns.registration import gen_register_replacement
from torchkiln.patterns.rewrites import RewriteSet
from torchkiln.patterns.tracing import fwd_only, joint_fwd_bwd

ATTENTION = RewriteSet("attention")


def fuse_attention(graph_module: torch.fx.GraphModule) -> bool:
    changed = may_pay(graph_module.graph) and ATTENTION.apply(graph_module)
    changed |= use_constant_masks(graph_module)
    if changed:
        eliminate_dead_code(graph_module.graph, has_effect)
    return changed


def _register(form: AttentionForm) -> None:
    check = check_for(form.positions_first, learned=form.learned)
    kinds = {"inference": fwd_only, "training": joint_fwd_bwd} if form.inference else {"training": joint_fwd_bwd}
    for kind, trace in kinds.items():
        gen_register_replacement(
            f"attention/{form.name} ({kind})",
            form.search,
            form.replace,
            form.inputs,
            trace,
            ATTENTION,
            extra_check=check,
            scalar_workaround=form.scalars,
            priority=form.priority,
            early_check=True,
        )


for _form in FORMS:
    _register(_form)
