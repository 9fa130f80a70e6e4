"""What the host's vector unit offers."""

from __future__ import annotations

from functools import cache

import llvmlite.binding as llvm


@cache
def vector_bits() -> int:
    """Bits of the widest vector register worth using."""
    features = llvm.get_host_cpu_features()
    if features.get("avx512f") and features.get("avx512vl") and features.get("avx512bw"):
        return 512
    if features.get("avx2"):
        return 256
    return 128
