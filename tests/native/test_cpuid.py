"""What CPUID says agrees with what LLVM and the kernel make of it."""

from __future__ import annotations

import platform
from pathlib import Path

import llvmlite.binding as llvm
import pytest

from torchkiln.native.cpuid import _features, identify_processor

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="CPUID is an instruction of x86")

_AVX, _AVX512 = 0x7, 0xE7  # XCR0 of a system that keeps these registers


def test_features_are_those_that_llvm_finds() -> None:
    found = identify_processor()
    assert found is not None
    assert found.features == {name for name, present in llvm.get_host_cpu_features().items() if present}


def test_the_processor_is_the_one_the_kernel_names() -> None:
    lines = (line.partition(":") for line in Path("/proc/cpuinfo").read_text().splitlines())
    kernel = {name.strip(): value.strip() for name, _, value in lines}
    found = identify_processor()
    assert found is not None
    assert found.vendor == kernel["vendor_id"]
    assert [str(n) for n in (found.family, found.model, found.stepping)] == [
        kernel[name] for name in ("cpu family", "model", "stepping")
    ]


def test_features_need_a_system_that_keeps_their_registers() -> None:
    everything = (0xFFFFFFFF,) * 4
    without, avx, avx512 = (set(_features(lambda leaf, subleaf: everything, xcr0)) for xcr0 in (0, _AVX, _AVX512))
    assert "sse4.2" in without
    assert not {"avx", "fma", "f16c", "avx2", "avx512f", "amx-tile"} & without
    assert {"avx", "fma", "f16c", "avx2"} <= avx
    assert not {"avx512f", "avx512bf16", "avx10.2", "amx-tile"} & avx
    assert {"avx512f", "avx512bf16", "avx10.2"} <= avx512
    assert not {"amx-tile", "egpr"} & avx512


def test_a_processor_without_bits_has_no_features() -> None:
    assert not set(_features(lambda leaf, subleaf: (0, 0, 0, 0), _AVX512))
