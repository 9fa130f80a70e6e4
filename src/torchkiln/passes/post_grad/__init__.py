"""Passes on one functional graph (inference, forward or backward), the last ones before lowering."""

from __future__ import annotations

import torch.fx

from torchkiln.canonicalize.no_ops import remove_no_ops
from torchkiln.graph.dead_code import eliminate_dead_code
from torchkiln.graph.effects import has_effect
from torchkiln.graph.manager import INFERENCE, TRAINING, Pass, PassPipeline, Slot
from torchkiln.graph.order import sort_nodes
from torchkiln.passes.freezing.onednn.fusion import fuse_into_calls
from torchkiln.passes.library_strides import note_eager_strides, restore_eager_strides
from torchkiln.passes.post_grad.addmm import fuse_or_split_addmm
from torchkiln.passes.post_grad.batched_matmuls import batch_matmuls
from torchkiln.passes.post_grad.circular_padding import gather_circular_padding
from torchkiln.passes.post_grad.common_subexpressions import merge_common_subexpressions
from torchkiln.passes.post_grad.effect_tokens import remove_effect_tokens
from torchkiln.passes.post_grad.higher_order_decompositions import decompose_higher_order
from torchkiln.passes.post_grad.in_place import write_in_place
from torchkiln.passes.post_grad.library_sums import add_into_other_operand
from torchkiln.passes.post_grad.locality import move_to_readers
from torchkiln.passes.post_grad.merged_matmuls import merge_matmuls
from torchkiln.passes.post_grad.mutating_calls import call_mutating_operators
from torchkiln.passes.post_grad.onednn_matmuls import call_onednn, call_onednn_for_results, may_sum_in_another_order
from torchkiln.passes.post_grad.redundant_copies import remove_redundant_copies
from torchkiln.passes.post_grad.slices_of_cat import simplify_slices_of_cat
from torchkiln.passes.post_grad.small_matmuls import decompose_small_matmuls
from torchkiln.passes.random_numbers import is_fused, seed_random_numbers
from torchkiln.passes.random_order import draw_in_memory_order, is_eager
from torchkiln.passes.shared_arguments import note_shared_arguments
from torchkiln.passes.triton_kernels import call_triton_kernels


def _remove_no_ops(graph_module: torch.fx.GraphModule) -> bool:
    return remove_no_ops(graph_module, saves_for_backward=False)


def remove_dead_code(graph_module: torch.fx.GraphModule) -> bool:
    return eliminate_dead_code(graph_module.graph, has_effect)


POST_GRAD = PassPipeline(
    "post_grad",
    (
        Pass("higher_order_decompositions", decompose_higher_order, required=True),
        Pass("effect_tokens", remove_effect_tokens, required=True),
        Pass("triton_kernels", call_triton_kernels, required=True),
        Pass("eager_strides", note_eager_strides, required=True),
        Pass("shared_arguments", note_shared_arguments, required=True),
        Slot("pre"),
        # Priority 0: less to do. What is gone here is not looked at by anything below.
        Pass("circular_padding", gather_circular_padding),
        Pass("early_dead_code", remove_dead_code),
        Pass("slices_of_cat", simplify_slices_of_cat),
        Pass("no_ops", _remove_no_ops),
        Slot("priority_0"),
        # Priority 1: the same work by fewer and larger calls.
        Pass("batched_matmuls", batch_matmuls),
        Pass("merged_matmuls", merge_matmuls),
        Slot("priority_1"),
        # Priority 2: which calls are loops of ours, and which of our loops go into a call.
        Pass("small_matmuls", decompose_small_matmuls),
        Pass("addmm", fuse_or_split_addmm),
        Pass("onednn_matmuls", call_onednn, kinds=INFERENCE, wanted=may_sum_in_another_order, needs_target=True),
        Pass(
            "onednn_results",
            call_onednn_for_results,
            kinds=TRAINING,
            wanted=may_sum_in_another_order,
            needs_target=True,
        ),
        Pass("library_fusions", fuse_into_calls, kinds=INFERENCE, needs_target=True),
        Slot("priority_2"),
        Pass("random_numbers", seed_random_numbers, wanted=is_fused, keep_numbers=False),
        Pass("random_order", draw_in_memory_order, wanted=is_eager, keep_numbers=False),
        Pass("common_subexpressions", merge_common_subexpressions),
        Pass("library_strides", restore_eager_strides, required=True),
        # Memory: from here on the graph writes into tensors, and the order of the nodes says who sees what.
        Pass("redundant_copies", remove_redundant_copies),
        Pass("mutating_calls", call_mutating_operators, required=True),
        Pass("in_place", write_in_place),
        Pass("library_sums", add_into_other_operand, kinds=INFERENCE),
        Pass("locality", move_to_readers, kinds=INFERENCE),
        Slot("post"),
        Pass("late_library_strides", restore_eager_strides, required=True),
        Pass("dead_code", remove_dead_code),
        Pass("order", sort_nodes),
    ),
)
