"""Passes on the functional joint graph of forward and backward, before it is partitioned."""

from __future__ import annotations

from torchkiln.graph.manager import Pass, PassPipeline, Slot
from torchkiln.passes.joint.attention import ATTENTION, fuse_attention
from torchkiln.passes.joint.casts import shorten_casts
from torchkiln.passes.joint.dimensions import count_dimensions_from_the_front
from torchkiln.passes.joint.no_ops import remove_joint_no_ops
from torchkiln.passes.joint.random_numbers import seed_joint_random_numbers
from torchkiln.passes.joint.random_order import draw_joint_in_memory_order
from torchkiln.passes.random_numbers import is_fused
from torchkiln.passes.random_order import is_eager

# What every graph, and every function of a rewrite, goes through before the first rewrite looks at it.
NORMAL_FORM = (
    Pass("no_ops", remove_joint_no_ops),
    Pass("casts", shorten_casts),
    Pass("dimensions", count_dimensions_from_the_front),
)

JOINT = PassPipeline(
    "joint",
    (
        Slot("pre"),
        *NORMAL_FORM,
        Pass("attention", fuse_attention, sources=ATTENTION.fingerprint),
        Slot("priority_0"),
        Slot("priority_1"),
        Slot("priority_2"),
        Pass("random_numbers", seed_joint_random_numbers, wanted=is_fused),
        Pass("random_order", draw_joint_in_memory_order, wanted=is_eager),
        Slot("post"),
    ),
)
