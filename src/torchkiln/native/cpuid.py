"""What an x86-64 processor says of itself with the CPUID instruction, in LLVM's names, without LLVM.

A feature counts where the system keeps the registers it needs across a switch of threads (XGETBV).
"""

from __future__ import annotations

import ctypes
import mmap
import platform
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache

from torchkiln.native.code_memory import allocate, protect, release

_EAX, _EBX, _ECX, _EDX = range(4)

# Bits of XCR0: registers of AVX, of AVX-512, of AMX, and those of APX.
_XCR0 = {"ymm": 0x6, "zmm": 0xE6, "tmm": 0x60000, "r16": 0x80000}

# Leaf, subleaf, register, and features by bit. A feature may need registers of ``_XCR0``, named after a colon.
_FEATURES: tuple[tuple[int, int, int, dict[int, str]], ...] = (
    (1, 0, _EDX, {8: "cx8", 15: "cmov", 23: "mmx", 24: "fxsr", 25: "sse", 26: "sse2"}),
    (1, 0, _ECX, {0: "sse3", 1: "pclmul", 9: "ssse3", 13: "cx16", 19: "sse4.1", 20: "sse4.2 crc32", 22: "movbe"}),
    (1, 0, _ECX, {23: "popcnt", 25: "aes", 30: "rdrnd", 12: "fma:ymm", 28: "avx:ymm", 29: "f16c:ymm", 27: "xsave"}),
    (7, 0, _EBX, {0: "fsgsbase", 2: "sgx", 3: "bmi", 5: "avx2:ymm", 8: "bmi2", 10: "invpcid", 11: "rtm"}),
    (7, 0, _EBX, {16: "avx512f:zmm", 17: "avx512dq:zmm", 18: "rdseed", 19: "adx", 21: "avx512ifma:zmm"}),
    (7, 0, _EBX, {23: "clflushopt", 24: "clwb", 28: "avx512cd:zmm", 29: "sha", 30: "avx512bw:zmm", 31: "avx512vl:zmm"}),
    (7, 0, _ECX, {1: "avx512vbmi:zmm", 4: "pku", 5: "waitpkg", 6: "avx512vbmi2:zmm", 7: "shstk", 8: "gfni"}),
    (7, 0, _ECX, {9: "vaes:ymm", 10: "vpclmulqdq:ymm", 11: "avx512vnni:zmm", 12: "avx512bitalg:zmm"}),
    (7, 0, _ECX, {14: "avx512vpopcntdq:zmm", 22: "rdpid", 23: "kl", 25: "cldemote", 27: "movdiri", 28: "movdir64b"}),
    (7, 0, _ECX, {29: "enqcmd"}),
    (7, 0, _EDX, {5: "uintr", 8: "avx512vp2intersect:zmm", 14: "serialize", 16: "tsxldtrk", 18: "pconfig"}),
    (7, 0, _EDX, {22: "amx-bf16:tmm", 23: "avx512fp16:zmm", 24: "amx-tile:tmm", 25: "amx-int8:tmm"}),
    (7, 1, _EAX, {0: "sha512", 1: "sm3", 2: "sm4", 3: "raoint", 4: "avxvnni:ymm", 5: "avx512bf16:zmm"}),
    (7, 1, _EAX, {7: "cmpccxadd", 21: "amx-fp16:tmm", 22: "hreset", 23: "avxifma:ymm", 31: "movrs"}),
    (7, 1, _EDX, {4: "avxvnniint8:ymm", 5: "avxneconvert:ymm", 8: "amx-complex:tmm", 10: "avxvnniint16:ymm"}),
    (7, 1, _EDX, {14: "prefetchi", 15: "usermsr", 19: "avx10.1:zmm"}),
    (7, 1, _EDX, {21: "egpr:r16 push2pop2:r16 ppx:r16 ndd:r16 ccmp:r16 nf:r16 cf:r16 zu:r16"}),
    (0xD, 1, _EAX, {0: "xsaveopt", 1: "xsavec", 3: "xsaves"}),
    (0x14, 0, _EBX, {4: "ptwrite"}),
    (0x19, 0, _EBX, {2: "widekl"}),
    (0x1E, 1, _EAX, {4: "amx-fp8:tmm", 6: "amx-tf32:tmm", 7: "amx-avx512:tmm", 8: "amx-movrs:tmm"}),
    (0x80000001, 0, _ECX, {0: "sahf", 5: "lzcnt", 6: "sse4a", 8: "prfchw", 11: "xop:ymm", 15: "lwp", 16: "fma4:ymm"}),
    (0x80000001, 0, _ECX, {21: "tbm", 29: "mwaitx"}),
    (0x80000001, 0, _EDX, {29: "64bit"}),
    (0x80000008, 0, _EBX, {0: "clzero", 4: "rdpru", 9: "wbnoinvd"}),
)


@dataclass(frozen=True)
class FeatureBit:
    """Where CPUID tells of a feature, and the bits of XCR0 that it needs. ``register`` counts from EAX."""

    leaf: int
    subleaf: int
    register: int
    bit: int
    saved_registers: int


def feature_bit(name: str) -> FeatureBit | None:
    """Where CPUID tells of the feature that LLVM has this name for; None for one that takes more than a bit."""
    for leaf, subleaf, register, names in _FEATURES:
        for bit, text in names.items():
            for feature, _, registers in (word.partition(":") for word in text.split()):
                if feature == name:
                    return FeatureBit(leaf, subleaf, register, bit, _XCR0[registers] if registers else 0)
    return None


@dataclass(frozen=True)
class ProcessorIdentity:
    """Who made a processor, which one it is, and what it can do."""

    vendor: str
    family: int
    model: int
    stepping: int
    features: frozenset[str]


@cache
def identify_processor() -> ProcessorIdentity | None:
    """The processor of this process; None where there is no CPUID instruction or no right to execute it."""
    if platform.machine() != "x86_64":
        return None
    try:
        with _Instructions() as instructions:
            return _identity(instructions)
    except OSError:
        return None


class _Instructions:
    """CPUID and XGETBV as functions, while they are in executable memory."""

    # push rbx; mov eax, edi; mov ecx, esi; mov r8, rdx; cpuid; mov [r8], eax; mov [r8+4], ebx; mov [r8+8], ecx;
    # mov [r8+12], edx; pop rbx; ret
    _CPUID = bytes.fromhex("53 89f8 89f1 4989d0 0fa2 418900 41895804 41894808 4189500c 5b c3")
    # xor ecx, ecx; xgetbv; shl rdx, 32; or rax, rdx; ret
    _XGETBV = bytes.fromhex("31c9 0f01d0 48c1e220 4809d0 c3")

    def __enter__(self) -> _Instructions:
        self._memory = allocate(mmap.PAGESIZE)
        try:
            ctypes.memmove(self._memory, self._CPUID + self._XGETBV, len(self._CPUID + self._XGETBV))
            protect(self._memory, mmap.PAGESIZE, mmap.PROT_READ | mmap.PROT_EXEC)
        except OSError:
            release(self._memory, mmap.PAGESIZE)
            raise
        arguments = (ctypes.c_uint32, ctypes.c_uint32, ctypes.c_void_p)
        self._cpuid = ctypes.CFUNCTYPE(None, *arguments)(self._memory)
        self._xgetbv = ctypes.CFUNCTYPE(ctypes.c_uint64)(self._memory + len(self._CPUID))
        return self

    def __exit__(self, *_: object) -> None:
        release(self._memory, mmap.PAGESIZE)

    def cpuid(self, leaf: int, subleaf: int) -> tuple[int, int, int, int]:
        """The four registers; zeros for a leaf that the processor does not have."""
        registers = (ctypes.c_uint32 * 4)()
        self._cpuid(leaf & 0x80000000, 0, registers)
        if registers[_EAX] < leaf:
            return 0, 0, 0, 0
        self._cpuid(leaf, subleaf, registers)
        return registers[0], registers[1], registers[2], registers[3]

    def saved_registers(self) -> int:
        """XCR0: which registers the system keeps."""
        uses_xsave = self.cpuid(1, 0)[_ECX] >> 27 & 1
        return int(self._xgetbv()) if uses_xsave else 0


def _identity(instructions: _Instructions) -> ProcessorIdentity:
    _, b, c, d = instructions.cpuid(0, 0)
    vendor = b"".join(word.to_bytes(4, "little") for word in (b, d, c)).decode("latin-1")
    signature = instructions.cpuid(1, 0)[_EAX]
    family, model = signature >> 8 & 15, signature >> 4 & 15
    if family in (6, 15):
        model |= (signature >> 16 & 15) << 4
    if family == 15:
        family += signature >> 20 & 255
    features = frozenset(_features(cache(instructions.cpuid), instructions.saved_registers()))
    return ProcessorIdentity(vendor, family, model, signature & 15, features)


def _features(cpuid: Callable[[int, int], tuple[int, int, int, int]], saved: int) -> Iterator[str]:
    for leaf, subleaf, register, names in _FEATURES:
        found = cpuid(leaf, subleaf)[register]
        for bit, text in names.items():
            for feature, _, registers in (name.partition(":") for name in text.split()):
                needed = _XCR0[registers] if registers else 0
                if found >> bit & 1 and saved & needed == needed:
                    yield feature
    if cpuid(0x24, 0)[_EBX] & 255 >= 2 and saved & _XCR0["zmm"] == _XCR0["zmm"]:
        yield "avx10.2"
