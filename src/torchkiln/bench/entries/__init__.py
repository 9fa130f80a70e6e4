"""What there is to measure, by name: whole models, small networks where overhead rules, and plain functions."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from torchkiln.bench.entries.entry import Entry
from torchkiln.bench.entries.functions import FUNCTIONS
from torchkiln.bench.entries.models import MODELS
from torchkiln.bench.entries.networks import NETWORKS
from torchkiln.bench.entries.serving import GROUP as SERVING_GROUP
from torchkiln.bench.entries.serving import SERVING

ENTRIES: Mapping[str, Entry] = MappingProxyType(
    {entry.name: entry for entry in (*MODELS, *NETWORKS, *FUNCTIONS, *SERVING)}
)

__all__ = ["ENTRIES", "SERVING_GROUP", "Entry"]
