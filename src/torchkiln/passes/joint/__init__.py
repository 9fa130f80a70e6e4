"""Passes on the functional joint graph of forward and backward before it is partitioned, and on inference graphs."""

from __future__ import annotations

from torchkiln import canonicalize
from torchkiln.canonicalize.chains import collapse_chains
from torchkiln.graph.manager import INFERENCE, Pass, PassPipeline, Slot
from torchkiln.graph.order import sort_nodes
from torchkiln.passes.freezing import FREEZING, prepares_weights
from torchkiln.passes.freezing.onednn.packed_convolutions import pack_convolutions
from torchkiln.passes.freezing.onednn.packed_linears import pack_linears
from torchkiln.passes.freezing.quantized import AFTER_FREEZING
from torchkiln.passes.joint.attention import ATTENTION, fuse_attention
from torchkiln.passes.joint.attention_statistics import state_dtype_of_statistics
from torchkiln.passes.joint.channels_last import put_channels_last
from torchkiln.passes.joint.depthwise_gradients import sum_depthwise_gradients
from torchkiln.passes.joint.im2col import apply_im2col
from torchkiln.passes.joint.known_indices import use_known_indices
from torchkiln.passes.joint.pad_matmuls import pad_cpu_matmuls, pad_gpu_matmuls, pads_on_cpu, pads_on_gpu
from torchkiln.passes.joint.pointwise_convolutions import replace_pointwise_convolutions
from torchkiln.passes.joint.unused_arguments import drop_unused_arguments
from torchkiln.passes.library_strides import note_eager_strides, restore_eager_strides
from torchkiln.passes.random_numbers import is_fused, seed_random_numbers
from torchkiln.passes.random_order import draw_in_memory_order, is_eager
from torchkiln.passes.shared_arguments import note_shared_arguments
from torchkiln.passes.triton_kernels import call_triton_kernels

JOINT = PassPipeline(
    "joint",
    (
        Pass("triton_kernels", call_triton_kernels, required=True),
        Pass("eager_strides", note_eager_strides, required=True),
        Pass("shared_arguments", note_shared_arguments, required=True),
        Slot("pre"),
        *canonicalize.JOINT,
        Slot("priority_0"),  # users' rewrites see what the built-in ones would take away
        Pass("attention", fuse_attention, sources=ATTENTION.fingerprint),
        Slot("priority_1"),
        Slot("priority_2"),
        Pass("chains", collapse_chains),
        Pass("random_numbers", seed_random_numbers, wanted=is_fused, keep_numbers=False),
        Pass("unused_arguments", drop_unused_arguments),
        Pass("random_order", draw_in_memory_order, wanted=is_eager, keep_numbers=False),
        Pass("pad_gpu_matmuls", pad_gpu_matmuls, wanted=pads_on_gpu, needs_target=True, needs_settings=True),
        Pass("pad_cpu_matmuls", pad_cpu_matmuls, wanted=pads_on_cpu, needs_target=True, needs_settings=True),
        Pass("known_indices", use_known_indices),
        FREEZING,
        *AFTER_FREEZING,
        Pass("packed_convolutions", pack_convolutions, kinds=INFERENCE, wanted=prepares_weights, needs_target=True),
        Pass(
            "packed_linears",
            pack_linears,
            kinds=INFERENCE,
            wanted=prepares_weights,
            needs_target=True,
            needs_settings=True,
        ),
        Pass("channels_last", put_channels_last, needs_target=True),
        Pass("im2col", apply_im2col, needs_target=True),
        Pass("pointwise_convolutions", replace_pointwise_convolutions, needs_target=True),
        Pass("depthwise_gradients", sum_depthwise_gradients),
        Slot("post"),
        Pass("library_strides", restore_eager_strides, required=True),
        Pass("attention_statistics", state_dtype_of_statistics, required=True),
        Pass("order", sort_nodes),
    ),
)
