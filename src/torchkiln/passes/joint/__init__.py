"""Passes on the functional joint graph of forward and backward, before it is partitioned."""

from __future__ import annotations

from torchkiln.graph.manager import Pass, PassPipeline, Slot
from torchkiln.passes.joint.no_ops import remove_joint_no_ops
from torchkiln.passes.joint.random_numbers import seed_joint_random_numbers
from torchkiln.passes.joint.random_order import draw_joint_in_memory_order
from torchkiln.passes.joint.unread_arguments import drop_unread_arguments
from torchkiln.passes.random_numbers import is_fused
from torchkiln.passes.random_order import is_eager

JOINT = PassPipeline(
    "joint",
    (
        Slot("pre"),
        Pass("no_ops", remove_joint_no_ops),
        Pass("random_numbers", seed_joint_random_numbers, wanted=is_fused),
        Pass("unread_arguments", drop_unread_arguments),
        Pass("random_order", draw_joint_in_memory_order, wanted=is_eager),
        Slot("post"),
    ),
)
