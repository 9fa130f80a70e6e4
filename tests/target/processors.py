"""Processors that this machine may not be."""

from __future__ import annotations

from torchkiln.native.cpuid import ProcessorIdentity

_HASWELL = (
    "64bit cmov cx8 fxsr mmx sse sse2 crc32 cx16 popcnt sahf sse3 sse4.1 sse4.2 ssse3"
    " avx avx2 bmi bmi2 f16c fma lzcnt movbe xsave xsaveopt rdrnd fsgsbase aes pclmul invpcid rtm"
)
_SKYLAKE = f"{_HASWELL} avx512bw avx512cd avx512dq avx512f avx512vl adx clwb pku prfchw rdseed xsavec xsaves"

HASWELL = ProcessorIdentity("GenuineIntel", 6, 63, 2, frozenset(_HASWELL.split()))
SKYLAKE_X = ProcessorIdentity("GenuineIntel", 6, 85, 4, frozenset(_SKYLAKE.split()))
NEHALEM = ProcessorIdentity("GenuineIntel", 6, 26, 5, frozenset(_HASWELL.partition(" avx")[0].split()))
