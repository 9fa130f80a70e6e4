"""What a process finds out before it compiles or loads its first graph, from the cache where that knows."""

from __future__ import annotations

from torchkiln.cache import open_cache
from torchkiln.config import Settings
from torchkiln.graph.fingerprints import package_digest
from torchkiln.runtime.support import provide_from
from torchkiln.target import Target, capture_target


def start(settings: Settings) -> Target:
    """The machine to compile for; from here on, support functions come from the cache too."""
    cache = open_cache(settings)
    target = capture_target(settings, cache)
    if cache is not None:
        provide_from(cache, capture_target(Settings()), package_digest())
    return target
