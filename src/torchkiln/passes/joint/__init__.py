"""Passes on the functional joint graph of forward and backward, before it is partitioned."""

from __future__ import annotations

from torchkiln.graph.manager import Pass, PassPipeline
from torchkiln.passes.joint.no_ops import remove_joint_no_ops

JOINT = PassPipeline("joint", (Pass("no_ops", remove_joint_no_ops),))
