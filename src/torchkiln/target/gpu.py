"""NVIDIA cards as targets."""

from __future__ import annotations

from dataclasses import replace

import torch

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


def target_on(target: Target, device: str) -> Target:
    """The machine that runs loops over memory of ``device``: ``target`` itself, or its card."""
    if device == target.device or target.is_gpu:
        return target
    if target.card is None:
        raise ValueError(f"{target.cpu} has no device {device}")
    flags = {name: getattr(target, name) for name in ("float32_matmul", "deterministic", "default_dtype", "card")}
    return replace(gpu_target(target.card.capability), **flags)


def place_of(target: Target, device: torch.device) -> str:
    """The kind of device that computes with a tensor that torch has on ``device``: the CPU for all but cards."""
    takes_all = target.is_gpu or (target.card is not None and target.card.takes_all)
    return "cuda" if device.type == "cuda" or (device.type == "cpu" and takes_all) else "cpu"
