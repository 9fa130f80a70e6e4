"""What the host's processor offers, as LLVM names it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import llvmlite.binding as llvm


@dataclass(frozen=True)
class Processor:
    """What object code is good for, as LLVM writes it: a triple of architecture, system and ABI, a processor's name and
    its features."""

    triple: str
    name: str
    features: str


def host_processor() -> Processor:
    """That of this process."""
    return Processor(str(llvm.get_process_triple()), llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten())


@cache
def vector_bits() -> int:
    """Bits of the widest vector register worth using."""
    features = llvm.get_host_cpu_features()
    if features.get("avx512f") and features.get("avx512vl") and features.get("avx512bw"):
        return 512
    if features.get("avx2"):
        return 256
    return 128


@cache
def sleef_bits() -> int:
    """Width of the vectors that SLEEF's functions take on this machine; 0 where it is not known."""
    features = llvm.get_host_cpu_features()
    if features.get("avx512f"):
        return 512
    if features.get("avx2") and features.get("fma"):
        return 256
    if str(llvm.get_process_triple()).startswith(("aarch64", "arm64")):
        return 128
    return 0
