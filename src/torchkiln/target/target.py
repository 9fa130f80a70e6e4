"""The machine that code is compiled for, as one value.

It is captured when a compilation starts and passed down; no later stage asks the process. Equal targets give equal
artifacts for equal graphs and settings, so a target is part of a cache key.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch

from torchkiln.native.blas import gemm_routine
from torchkiln.native.host import Processor
from torchkiln.native.vector_math import sleef_symbol
from torchkiln.target.card import Card

# Operations that have no code without a library, for floats of 32 bits; and those of 64 besides.
_CALL_A_LIBRARY = frozenset(("lgamma", "digamma"))
_CALL_A_LIBRARY_AS_DOUBLE = _CALL_A_LIBRARY | {
    *("atanh", "hypot", "fmod", "remainder", "floor_divide"),
    *("sin", "cos", "tan", "asin", "acos", "atan", "atan2", "sinh", "cosh", "tanh", "asinh", "acosh"),
    *("exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sigmoid", "pow", "erf", "erfc", "erfinv"),
    "random_normal",
}

_NARROW_AMD = frozenset({"znver1", "znver2", "znver3", "znver4"})


@dataclass(frozen=True)
class Target:
    """A processor, the libraries beside it, and what the user allows of them.

    ``sleef`` and ``blas`` are the symbols of vector functions and matmul routines that generated code may call.
    ``packs`` names the dtypes in which oneDNN takes weights in a layout of its own, none where the user has it off.
    ``float32_matmul`` is the precision users allow for float32 matmuls, "ieee" being that of float32 itself.
    ``deterministic`` is whether the user asks torch for deterministic algorithms, ``default_dtype`` what torch makes of
    numbers with a fraction and of quotients of integers. ``card`` is the GPU beside the processor, where the process
    uses one.
    """

    device: str
    triple: str
    cpu: str
    features: str
    vector_bits: int
    sleef_bits: int
    sleef: frozenset[str]
    blas: frozenset[str]
    packs: frozenset[str]
    float32_matmul: str
    deterministic: bool
    default_dtype: str
    card: Card | None = None

    @property
    def processor(self) -> Processor:
        return Processor(self.triple, self.cpu, self.features)

    @property
    def is_gpu(self) -> bool:
        return self.device == "cuda"

    @property
    def is_amd(self) -> bool:
        """Whether the processor is one of AMD's: there oneDNN was measured to multiply faster than MKL."""
        return self.cpu.startswith("znver")

    @property
    def multiplies_by_onednn(self) -> bool:
        """Whether oneDNN multiplies large float32 matrices faster than BLAS: on AMD's processors from Zen 5 on.

        MKL multiplies by vectors of 256 bits on AMD's processors. Before Zen 5 these have no wider units.
        """
        wide = self.is_amd and self.cpu not in _NARROW_AMD and self.vector_bits == 512
        return wide and self.full_float32_matmul and self.packs_weights_of(torch.float32)

    @property
    def default_float(self) -> torch.dtype:
        """The dtype named ``default_dtype``."""
        found: torch.dtype = getattr(torch, self.default_dtype)
        return found

    @property
    def full_float32_matmul(self) -> bool:
        """Whether float32 matmuls multiply float32 numbers."""
        return self.float32_matmul == "ieee"

    def gemm(self, dtype: torch.dtype, result: torch.dtype | None = None) -> str | None:
        """The BLAS routine for matrices of ``dtype``, with sums of ``result`` where that differs; None without one.

        None too where the user allows less than float32 for matmuls: torch has faster ones then.
        """
        routine = gemm_routine(dtype, dtype if result is None else result)
        if routine not in self.blas or (dtype == torch.float32 and not self.full_float32_matmul):
            return None
        return routine

    def packs_weights_of(self, dtype: torch.dtype) -> bool:
        """Whether oneDNN packs weights of ``dtype``."""
        return str(dtype).removeprefix("torch.") in self.packs

    def computes(self, operation: str, dtype: torch.dtype) -> bool:
        """Whether kernels can compute an operation of the IR on values of ``dtype``; else torch's operator must.

        On CPUs the C library has what we did not write.
        """
        if not self.is_gpu or not dtype.is_floating_point:
            return True
        return operation not in (_CALL_A_LIBRARY if dtype == torch.float32 else _CALL_A_LIBRARY_AS_DOUBLE)

    def vector_function(self, name: str, element: str) -> tuple[str, int] | None:
        """Symbol and lanes of SLEEF's version of a function of ``float`` or ``double``, where there is one."""
        symbol, lanes = sleef_symbol(name, element, self.sleef_bits)
        return (symbol, lanes) if symbol in self.sleef else None

    def field_texts(self) -> list[tuple[str, str]]:
        """Name and value of each field, as text; words are in order."""
        return [(field.name, _text(getattr(self, field.name))) for field in fields(self)]

    def __str__(self) -> str:
        return "\n".join(f"{name}: {value}" for name, value in self.field_texts())


def _text(value: object) -> str:
    return " ".join(sorted(map(str, value))) if isinstance(value, frozenset) else str(value)
