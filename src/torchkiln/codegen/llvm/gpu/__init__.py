"""Kernels for NVIDIA cards: the same statements as on CPUs, divided among threads; LLVM writes PTX of them."""

from torchkiln.codegen.llvm.gpu.kernel import GpuWriter
from torchkiln.codegen.llvm.gpu.tiles import TileWriter
from torchkiln.codegen.llvm.module import ModuleBuilder
from torchkiln.schedule.kernel import Kernel


def emit_gpu_kernel(module: ModuleBuilder, kernel: Kernel, symbol: str) -> None:
    """Add the function of ``kernel`` to ``module`` under ``symbol`` (without ``@``)."""
    writer = GpuWriter if kernel.mapping.tile is None else TileWriter
    module.define(symbol, writer(module, kernel, symbol).function())


__all__ = ["emit_gpu_kernel"]
