"""Passes on the graph Dynamo captured: torch-level calls, before autograd, where mutation may still happen."""

from __future__ import annotations

import torch.fx

from torchkiln import canonicalize
from torchkiln.canonicalize.torch_calls import only_computes
from torchkiln.graph.dead_code import eliminate_dead_code
from torchkiln.graph.effects import may_have_effect
from torchkiln.graph.manager import Pass, PassPipeline, Slot
from torchkiln.passes.pre_grad.class_checks import add_class_checks
from torchkiln.passes.pre_grad.constant_masks import use_constant_masks
from torchkiln.passes.pre_grad.conv_batch_norm import fold_batch_norms
from torchkiln.passes.pre_grad.group_layer_norms import group_layer_norms, is_wanted
from torchkiln.passes.pre_grad.group_linears import group_linears
from torchkiln.passes.pre_grad.linear_permute import transpose_linears
from torchkiln.passes.pre_grad.permute_matmul import read_transposed_matrices
from torchkiln.passes.pre_grad.scaled_updates import fuse_scaled_updates
from torchkiln.passes.pre_grad.sink_cat import sink_cats
from torchkiln.passes.pre_grad.split_cat import cancel_splits


def remove_dead_code(graph_module: torch.fx.GraphModule) -> bool:
    """Unused calls that are known to have no effect."""
    return eliminate_dead_code(graph_module.graph, lambda node: may_have_effect(node) and not only_computes(node))


PRE_GRAD = PassPipeline(
    "pre_grad",
    (
        Slot("pre"),
        *canonicalize.CAPTURED,
        Pass("scaled_updates", fuse_scaled_updates),
        Pass("class_checks", add_class_checks),
        Pass("constant_masks", use_constant_masks),
        Slot("priority_0"),
        Pass("split_cat", cancel_splits),
        Pass("sink_cat", sink_cats),
        Slot("priority_1"),
        Pass("conv_batch_norm", fold_batch_norms),
        Pass("linear_permute", transpose_linears),
        Pass("permute_matmul", read_transposed_matrices),
        Pass("group_linears", group_linears),
        Pass("group_layer_norms", group_layer_norms, wanted=is_wanted),
        Slot("priority_2"),
        Pass("dead_code", remove_dead_code),
        Slot("post"),
    ),
)

# After these, gradients of the graph share memory only where they do in eager. Others may take away the operator that
# would have computed one into memory of its own.
KEEP_SHARING = frozenset(
    f"pre_grad/{name}" for name in ("normalize", "identities", "scaled_updates", "constant_masks", "dead_code")
)
