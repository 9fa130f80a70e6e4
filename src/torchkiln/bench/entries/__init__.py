"""What there is to measure, by name: whole models, small networks where overhead rules, and plain functions."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from torchkiln.bench.entries.entry import Entry
from torchkiln.bench.entries.functions import FUNCTIONS
from torchkiln.bench.entries.models import MODELS
from torchkiln.bench.entries.networks import NETWORKS

ENTRIES: Mapping[str, Entry] = MappingProxyType({entry.name: entry for entry in (*MODELS, *NETWORKS, *FUNCTIONS)})

__all__ = ["ENTRIES", "Entry"]
