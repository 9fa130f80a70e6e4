"""Splitting a joint graph into the forward graph and the backward graph."""

from __future__ import annotations

from torchkiln.partition.joint import partition_joint_graph

__all__ = ["partition_joint_graph"]
