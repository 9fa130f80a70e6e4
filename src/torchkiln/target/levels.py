"""Targets for other machines than this one, and whether one's code runs here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchkiln.errors import OptionError
from torchkiln.native.blas import callable_routines
from torchkiln.native.levels import runs_code_for
from torchkiln.native.onednn import packed_dtypes
from torchkiln.native.vector_math import carried_functions
from torchkiln.target.capture import capture_target, with_flags
from torchkiln.target.target import Target

if TYPE_CHECKING:
    from torchkiln.config import Settings

_X86_BITS = {"x86-64-v3": 256, "x86-64-v4": 512}
# oneDNN computes in bfloat16 with AVX-512, and in float16 with more than any level has.
_PACKED = {"x86-64-v3": frozenset({"float32"}), "x86-64-v4": frozenset({"float32", "bfloat16"})}

TARGETS = ("native", *_X86_BITS, "aarch64")
"""What :func:`target_for` takes."""


def target_for(name: str, settings: Settings) -> Target:
    """The machine of this process ("native"), or any of a level.

    Code for a level of x86-64 calls SLEEF and BLAS as this process's torch has them, and is for machines with the same
    torch. For AArch64 neither is known here: code calls the C library and torch's operators.
    """
    if name == "native":
        return capture_target(settings)
    if name not in TARGETS:
        raise OptionError.unknown("target", name, TARGETS)
    if name == "aarch64":
        return with_flags(_unprobed("aarch64-unknown-linux-gnu", "generic"), settings)
    bits = _X86_BITS[name]
    level = Target(
        device="cpu",
        triple="x86_64-unknown-linux-gnu",
        cpu=name,
        features="",
        vector_bits=bits,
        sleef_bits=bits,
        sleef=carried_functions(bits),
        blas=callable_routines(),
        packs=_PACKED[name] & packed_dtypes(),
        float32_matmul="ieee",
        deterministic=False,
        default_dtype="float32",
    )
    return with_flags(level, settings)


def runs_here(target: Target) -> bool:
    """Whether this machine has every instruction that code for ``target`` may use; never asks LLVM."""
    return runs_code_for(target.processor)


def _unprobed(triple: str, cpu: str) -> Target:
    """A machine of which nothing was tried."""
    nothing: frozenset[str] = frozenset()
    return Target("cpu", triple, cpu, "", 128, 128, nothing, nothing, nothing, "ieee", False, "float32")
