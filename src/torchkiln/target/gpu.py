"""NVIDIA cards as targets."""

from __future__ import annotations

from torchkiln.target.target import Target


def gpu_target(capability: tuple[int, int]) -> Target:
    """Cards of a compute capability. LLVM writes PTX for it, which the driver turns into machine code."""
    nothing: frozenset[str] = frozenset()
    major, minor = capability
    return Target(
        device="cuda",
        triple="nvptx64-nvidia-cuda",
        cpu=f"sm_{major}{minor}",
        features="",
        vector_bits=128,
        sleef_bits=0,
        sleef=nothing,
        blas=nothing,
        packs=nothing,
        float32_matmul="ieee",
        deterministic=False,
        default_dtype="float32",
    )
