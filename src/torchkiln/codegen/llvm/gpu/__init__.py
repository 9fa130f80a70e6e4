"""Kernels for NVIDIA cards: the same statements as on CPUs, divided among threads; LLVM writes PTX of them."""

from torchkiln.codegen.llvm.gpu.kernel import emit_gpu_kernel

__all__ = ["emit_gpu_kernel"]
