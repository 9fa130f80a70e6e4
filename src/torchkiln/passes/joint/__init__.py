"""Passes on the functional joint graph of forward and backward before it is partitioned, and on inference graphs."""

from __future__ import annotations

from torchkiln.graph.manager import Pass, PassPipeline, Slot
from torchkiln.passes.joint.attention import ATTENTION, fuse_attention
from torchkiln.passes.joint.attention_statistics import state_dtype_of_statistics
from torchkiln.passes.joint.canonical import canonicalize_joint_graph
from torchkiln.passes.joint.casts import shorten_casts
from torchkiln.passes.joint.chains import collapse_joint_chains
from torchkiln.passes.joint.channels_last import put_channels_last
from torchkiln.passes.joint.depthwise_gradients import sum_depthwise_gradients
from torchkiln.passes.joint.distinct_positions import use_distinct_positions
from torchkiln.passes.joint.no_ops import remove_joint_no_ops
from torchkiln.passes.joint.order import sort_joint_nodes
from torchkiln.passes.joint.pad_products import pad_cpu_products, pad_gpu_products, pads_on_cpu, pads_on_gpu
from torchkiln.passes.joint.pointwise_convolutions import multiply_pixels
from torchkiln.passes.joint.random_numbers import seed_joint_random_numbers
from torchkiln.passes.joint.random_order import draw_joint_in_memory_order
from torchkiln.passes.joint.running_sums import replace_running_sums
from torchkiln.passes.joint.unfolded_convolutions import unfold_small_images
from torchkiln.passes.joint.uniform_values import fold_joint_uniform_values
from torchkiln.passes.joint.unread_arguments import drop_unread_arguments
from torchkiln.passes.library_strides import note_eager_strides, restore_eager_strides
from torchkiln.passes.random_numbers import is_fused
from torchkiln.passes.random_order import is_eager
from torchkiln.passes.shared_arguments import note_shared_arguments

# What every graph, and every function of a rewrite, goes through before the first rewrite looks at it. Nothing here may
# join an operator with one before it: where a rewrite begins in the middle, its own trace shows both.
NORMAL_FORM = (
    Pass("casts", shorten_casts),
    Pass("no_ops", remove_joint_no_ops),
    Pass("uniform_values", fold_joint_uniform_values),
    Pass("running_sums", replace_running_sums),
    Pass("canonical", canonicalize_joint_graph),
)

JOINT = PassPipeline(
    "joint",
    (
        Pass("eager_strides", note_eager_strides, required=True),
        Pass("shared_arguments", note_shared_arguments, required=True),
        Slot("pre"),
        *NORMAL_FORM,
        Slot("priority_0"),  # users' rewrites see what the built-in ones would take away
        Pass("attention", fuse_attention, sources=ATTENTION.fingerprint),
        Slot("priority_1"),
        Slot("priority_2"),
        Pass("chains", collapse_joint_chains),
        Pass("random_numbers", seed_joint_random_numbers, wanted=is_fused, keep_numbers=False),
        Pass("unread_arguments", drop_unread_arguments),
        Pass("random_order", draw_joint_in_memory_order, wanted=is_eager, keep_numbers=False),
        Pass("pad_gpu_products", pad_gpu_products, wanted=pads_on_gpu),
        Pass("pad_cpu_products", pad_cpu_products, wanted=pads_on_cpu),
        Pass("distinct_positions", use_distinct_positions),
        Pass("channels_last", put_channels_last, needs_target=True),
        Pass("unfolded_convolutions", unfold_small_images, needs_target=True),
        Pass("pointwise_convolutions", multiply_pixels, needs_target=True),
        Pass("depthwise_gradients", sum_depthwise_gradients),
        Slot("post"),
        Pass("library_strides", restore_eager_strides, required=True),
        Pass("attention_statistics", state_dtype_of_statistics, required=True),
        Pass("order", sort_joint_nodes),
    ),
)
