"""What the host's processor offers, as LLVM names it."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import metadata


@dataclass(frozen=True)
class Processor:
    """What object code is good for, as LLVM writes it: a triple of architecture, system and ABI, a processor's name and
    its features."""

    triple: str
    name: str
    features: str

    @property
    def architecture(self) -> str:
        return self.triple.partition("-")[0]

    @property
    def enabled(self) -> frozenset[str]:
        """The features that are switched on by name."""
        return frozenset(feature[1:] for feature in self.features.split(",") if feature.startswith("+"))

    @property
    def vector_bits(self) -> int:
        """Bits of the widest vector register worth using."""
        if self.enabled >= {"avx512f", "avx512vl", "avx512bw"}:
            return 512
        return 256 if "avx2" in self.enabled else 128

    @property
    def sleef_bits(self) -> int:
        """Width of the vectors that SLEEF's functions take on this machine; 0 where it is not known."""
        if "avx512f" in self.enabled:
            return 512
        if self.enabled >= {"avx2", "fma"}:
            return 256
        return 128 if self.architecture in ("aarch64", "arm64") else 0


def host_processor() -> Processor:
    """That of this process."""
    # Here and not above: a process that only loads code does without LLVM, whose import takes 50 ms.
    import llvmlite.binding as llvm

    return Processor(str(llvm.get_process_triple()), llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten())


def llvmlite_version() -> str:
    """What names LLVM and its build, without importing it."""
    return metadata.version("llvmlite")
