"""Levels of x86-64, and whether this machine runs code that was compiled for one or for another machine."""

from __future__ import annotations

import platform

from torchkiln.native.cpuid import identify_processor
from torchkiln.native.host import Processor

_V1 = frozenset({"64bit", "cmov", "cx8", "fxsr", "mmx", "sse", "sse2"})
_V2 = _V1 | {"crc32", "cx16", "popcnt", "sahf", "sse3", "sse4.1", "sse4.2", "ssse3"}
_V3 = _V2 | {"avx", "avx2", "bmi", "bmi2", "f16c", "fma", "lzcnt", "movbe", "xsave"}
_V4 = _V3 | {"avx512bw", "avx512cd", "avx512dq", "avx512f", "avx512vl"}

LEVELS = {"x86-64": _V1, "x86-64-v2": _V2, "x86-64-v3": _V3, "x86-64-v4": _V4}
"""What a processor of each level has, by the name LLVM has for the level; from the x86-64 ABI's supplement."""


def needed_features(processor: Processor) -> frozenset[str]:
    """What code for an x86-64 ``processor`` may use, in LLVM's names."""
    return processor.enabled | LEVELS.get(processor.name, frozenset())


def runs_code_for(processor: Processor) -> bool:
    """Whether code for ``processor`` runs on this machine, which CPUID tells: False where that does not suffice.

    Any AArch64 machine runs code for LLVM's "generic" one.
    """
    if processor.architecture != platform.machine():
        return False
    if platform.machine() == "aarch64":
        return processor.name == "generic" and not processor.features
    here = identify_processor()
    needed = needed_features(processor)
    return here is not None and bool(needed) and needed <= here.features
