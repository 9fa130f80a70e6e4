"""Targets for levels of processors: which machines run them."""

from __future__ import annotations

import platform
from dataclasses import replace

import pytest

from tests.target.processors import HASWELL, NEHALEM, SKYLAKE_X
from torchkiln.config import Settings
from torchkiln.errors import OptionError
from torchkiln.native import levels
from torchkiln.native.cpuid import ProcessorIdentity
from torchkiln.target import TARGETS, runs_here, target_for

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="levels are of x86-64")


@pytest.mark.parametrize(
    ("processor", "expected"),
    [
        (NEHALEM, set()),
        (HASWELL, {"x86-64-v3"}),
        (SKYLAKE_X, {"x86-64-v3", "x86-64-v4"}),
        (replace(SKYLAKE_X, features=SKYLAKE_X.features - {"avx512vl"}), {"x86-64-v3"}),
        (replace(SKYLAKE_X, features=SKYLAKE_X.features - {"movbe"}), set()),
        (None, set()),
    ],
)
def test_a_processor_runs_the_levels_it_has_all_features_of(
    processor: ProcessorIdentity | None, expected: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    targets = {name: target_for(name, Settings()) for name in TARGETS if name != "native"}
    monkeypatch.setattr(levels, "identify_processor", lambda: processor)
    assert {name for name, target in targets.items() if runs_here(target)} == expected


def test_code_for_this_machine_runs_here_and_not_on_a_smaller_one(monkeypatch: pytest.MonkeyPatch) -> None:
    native = target_for("native", Settings())
    assert runs_here(native)
    monkeypatch.setattr(levels, "identify_processor", lambda: NEHALEM)
    assert not runs_here(native)


def test_code_for_a_processor_of_unknown_features_does_not_run_here() -> None:
    native = target_for("native", Settings())
    assert not runs_here(replace(native, features=f"{native.features},+a_feature_to_come"))
    assert not runs_here(replace(native, cpu="a_processor_to_come", features=""))


def test_levels_have_the_registers_and_the_vector_functions_of_their_width() -> None:
    v3, v4 = (target_for(name, Settings()) for name in ("x86-64-v3", "x86-64-v4"))
    assert (v3.vector_bits, v4.vector_bits) == (256, 512)
    assert v3.vector_function("sin", "float") in (("Sleef_sinf8_u10", 8), None)
    assert v4.vector_function("sin", "double") in (("Sleef_sind8_u10", 8), None)
    assert target_for("x86-64-v4", Settings(vector_bits=256)).vector_bits == 256


def test_code_for_another_architecture_calls_no_library_that_was_not_tried() -> None:
    arm = target_for("aarch64", Settings())
    assert not runs_here(arm)
    assert not arm.sleef | arm.blas


def test_an_unknown_target_is_refused_with_the_known_ones() -> None:
    with pytest.raises(OptionError, match=r"Unknown target 'x86-64-v5'.*aarch64, native, x86-64-v3, x86-64-v4"):
        target_for("x86-64-v5", Settings())
