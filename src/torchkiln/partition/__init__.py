"""Splitting a joint graph into the forward graph and the backward graph.

``classify`` says what nodes are, ``rules`` what is not worth computing again, ``network`` finds the smallest set to
save, ``budget`` decides, ``extract`` makes both graphs.
"""

from __future__ import annotations

from torchkiln.partition.joint import min_cut_rematerialization_partition

__all__ = ["min_cut_rematerialization_partition"]
