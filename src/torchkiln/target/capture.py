"""This process's machine as a target.

LLVM and the probes of BLAS and SLEEF take 0.1 s, so a cache may remember what they found. The key has all that their
answers depend on. What users change at run time is never remembered.
"""

from __future__ import annotations

import hashlib
import platform
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from torchkiln.cache.entries import Entries
from torchkiln.cache.key import CacheKey
from torchkiln.errors import ArtifactError
from torchkiln.native import blas, host, onednn, symbols, vector_math
from torchkiln.native.cpuid import ProcessorIdentity, identify_processor
from torchkiln.native.levels import runs_code_for
from torchkiln.target.card import current_card
from torchkiln.target.target import Target
from torchkiln.target.text import read_target, write_target

if TYPE_CHECKING:
    from torchkiln.config import Settings

_PROBES = (blas, host, onednn, symbols, vector_math)

_found: Target | None = None  # the answers of this process


def capture_target(settings: Settings, remembered: Entries | None = None) -> Target:
    """This process's machine as it is now, with the registers that ``settings`` ask for.

    The first call of a process asks ``remembered`` before it asks LLVM, and adds what it found out.
    """
    global _found
    if _found is None:
        _found = _probe() if remembered is None else _recall(remembered)
    return with_flags(_found, settings)


def with_flags(target: Target, settings: Settings) -> Target:
    """``target`` with what the user allows now, and the card in use. Beside an emulated one, no library is called."""
    card = current_card()
    if card is not None and card.emulated:
        nothing: frozenset[str] = frozenset()
        target = replace(target, blas=nothing, packs=nothing)
    allowed = str(torch.backends.mkldnn.matmul.fp32_precision)  # type: ignore[attr-defined]
    return replace(
        target,
        vector_bits=settings.vector_bits or target.vector_bits,
        packs=target.packs if torch.backends.mkldnn.enabled else frozenset(),
        float32_matmul="ieee" if allowed == "none" else allowed,
        deterministic=torch.are_deterministic_algorithms_enabled(),
        default_dtype=str(torch.get_default_dtype()).removeprefix("torch."),
        card=card,
    )


def target_key(processor: ProcessorIdentity) -> CacheKey:
    """All that the probes of a machine with ``processor`` depend on."""
    fields = {
        "machine": platform.machine(),
        "vendor": processor.vendor,
        "family": str(processor.family),
        "model": str(processor.model),
        "stepping": str(processor.stepping),
        "features": " ".join(sorted(processor.features)),
        "torch": f"{torch.__version__} {torch.version.git_version}",
        "llvmlite": host.llvmlite_version(),
        "probes": _digest_of_probes(),
    }
    return CacheKey("target", fields)


@cache
def _digest_of_probes() -> str:
    digest = hashlib.sha256()
    for module in _PROBES:
        digest.update(Path(str(module.__file__)).read_bytes())
    return digest.hexdigest()


def _probe() -> Target:
    """The machine, with torch's own flags."""
    processor = host.host_processor()
    return Target(
        device="cpu",
        triple=processor.triple,
        cpu=processor.name,
        features=processor.features,
        vector_bits=processor.vector_bits,
        sleef_bits=processor.sleef_bits,
        sleef=vector_math.carried_functions(processor.sleef_bits),
        blas=blas.callable_routines(),
        packs=onednn.packed_dtypes(),
        float32_matmul="ieee",
        deterministic=False,
        default_dtype="float32",
    )


def _recall(remembered: Entries) -> Target:
    processor = identify_processor()
    if processor is None:
        return _probe()
    key = target_key(processor)
    stored = remembered.get(key)
    target = _usable(stored) if stored is not None else None
    if target is None:
        target = _probe()
        # With a feature that CPUID did not show, the key would not tell machines apart.
        if runs_code_for(target.processor):
            remembered.put(key, write_target(target).encode())
    return target


def _usable(stored: bytes) -> Target | None:
    """The target that was stored, where it is one of this machine: a key is trusted to find it, not to vouch for it."""
    try:
        target = read_target(stored)
    except ArtifactError:
        return None
    processor, called = target.processor, target.sleef | target.blas
    fits = (
        runs_code_for(processor)
        and (target.vector_bits, target.sleef_bits) == (processor.vector_bits, processor.sleef_bits)
        and target.packs <= onednn.packed_dtypes()
        and called <= vector_math.symbols_for(target.sleef_bits) | blas.ROUTINES
        and all(symbols.address_of(name) is not None for name in called)
    )
    return target if fits else None
