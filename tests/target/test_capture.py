"""Targets that a cache remembers: found again on the same machine only, and never believed unchecked."""

from __future__ import annotations

import json
import platform
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.target.processors import HASWELL, SKYLAKE_X
from torchkiln.cache.key import CacheKey
from torchkiln.config import Settings
from torchkiln.native.cpuid import identify_processor
from torchkiln.target import Target, capture, capture_target, read_target, write_target
from torchkiln.target.capture import target_key

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="targets are remembered by CPUID")


class _Entries:
    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}

    def get(self, key: CacheKey) -> bytes | None:
        return self.values.get(key.digest)

    def put(self, key: CacheKey, value: bytes) -> None:
        self.values[key.digest] = value


@pytest.fixture
def new_process(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Forgets what this process found out, as a new one has not found out anything."""

    def forget() -> None:
        monkeypatch.setattr(capture, "_found", None)

    forget()
    return forget


@pytest.fixture
def remembered(new_process: Callable[[], None]) -> _Entries:
    entries = _Entries()
    capture_target(Settings(), entries)
    assert len(entries.values) == 1
    new_process()
    return entries


def _no_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture, "_probe", lambda: pytest.fail("the machine was probed"))


def test_a_remembered_target_is_the_probed_one(remembered: _Entries, monkeypatch: pytest.MonkeyPatch) -> None:
    probed = capture_target(Settings())
    monkeypatch.setattr(capture, "_found", None)
    _no_probe(monkeypatch)
    assert capture_target(Settings(), remembered) == probed


def test_what_users_change_is_not_remembered(remembered: _Entries, monkeypatch: pytest.MonkeyPatch) -> None:
    _no_probe(monkeypatch)
    assert capture_target(Settings(vector_bits=128), remembered).vector_bits == 128
    torch.use_deterministic_algorithms(True)
    try:
        assert capture_target(Settings(), remembered).deterministic
    finally:
        torch.use_deterministic_algorithms(False)
    assert not capture_target(Settings(), remembered).deterministic


def test_flags_of_the_process_that_stores_do_not_reach_others(new_process: Callable[[], None]) -> None:
    entries, precision = _Entries(), torch.get_float32_matmul_precision()
    torch.use_deterministic_algorithms(True)
    torch.set_float32_matmul_precision("medium")
    try:
        capture_target(Settings(vector_bits=128), entries)
    finally:
        torch.use_deterministic_algorithms(False)
        torch.set_float32_matmul_precision(precision)
    new_process()
    found = capture_target(Settings(), entries)
    new_process()
    assert found == capture_target(Settings())


@pytest.mark.parametrize(
    "other",
    [
        HASWELL,
        replace(SKYLAKE_X, features=HASWELL.features),
        replace(SKYLAKE_X, features=SKYLAKE_X.features - {"avx512vl"}),
        replace(SKYLAKE_X, stepping=7),
        replace(SKYLAKE_X, model=106),
        replace(SKYLAKE_X, vendor="AuthenticAMD"),
    ],
)
def test_another_processor_has_another_key(other: Any) -> None:
    key, same = target_key(SKYLAKE_X), target_key(SKYLAKE_X)
    assert key.digest == same.digest
    differing = {difference.field for difference in key.differences(target_key(other))}
    assert differing
    assert differing <= {"vendor", "family", "model", "stepping", "features"}


def test_another_torch_has_another_key(monkeypatch: pytest.MonkeyPatch) -> None:
    key = target_key(HASWELL)
    monkeypatch.setattr(torch.version, "git_version", "0" * 40)
    assert [difference.field for difference in key.differences(target_key(HASWELL))] == ["torch"]


def test_a_machine_of_another_kind_does_not_get_the_target(
    remembered: _Entries, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capture, "identify_processor", lambda: HASWELL)
    probed: list[Target] = []
    probe = capture._probe
    monkeypatch.setattr(capture, "_probe", lambda: probed.append(probe()) or probed[0])
    capture_target(Settings(), remembered)
    assert probed


def _changed(**fields: Any) -> Callable[[bytes], bytes]:
    return lambda stored: json.dumps(json.loads(stored) | fields).encode()


@pytest.mark.parametrize(
    "damage",
    [
        lambda stored: b"",
        lambda stored: stored[:-1],
        lambda stored: b"\xff" + stored,
        lambda stored: b"[" * 100_000,
        lambda stored: b"[]",
        lambda stored: b"{}",
        _changed(more=1),
        _changed(vector_bits="512"),
        _changed(vector_bits=True),
        _changed(vector_bits=1 << 20),
        _changed(sleef_bits=1024),
        _changed(sleef="Sleef_expf16_u10"),
        _changed(sleef=["system"]),
        _changed(blas=["abort"]),
        _changed(blas=[["sgemm_"]]),
        _changed(cpu=None),
        _changed(features="+avx512f,+a_feature_to_come"),
        _changed(triple="aarch64-unknown-linux-gnu"),
    ],
)
def test_what_is_no_target_of_this_machine_is_probed_anew(
    remembered: _Entries, new_process: Callable[[], None], damage: Callable[[bytes], bytes]
) -> None:
    expected = capture_target(Settings())
    ((digest, stored),) = remembered.values.items()
    remembered.values[digest] = damage(stored)
    new_process()
    assert capture_target(Settings(), remembered) == expected
    assert remembered.values[digest] == stored


def test_features_that_cpuid_does_not_show_are_not_remembered(
    new_process: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    probed = capture_target(Settings())
    new_process()
    newer = replace(probed, features=f"{probed.features},+a_feature_to_come")
    monkeypatch.setattr(capture, "_probe", lambda: newer)
    entries = _Entries()
    assert capture_target(Settings(), entries) == newer
    assert not entries.values


def test_a_target_comes_back_from_text_as_it_was() -> None:
    for settings in (Settings(), Settings(vector_bits=128)):
        target = capture_target(settings)
        assert read_target(write_target(target)) == target


def test_equal_targets_give_equal_text() -> None:
    target = capture_target(Settings())
    again = replace(target, sleef=frozenset(sorted(target.sleef, reverse=True)))
    assert write_target(again) == write_target(target)


def test_the_processor_of_this_machine_is_known() -> None:
    assert identify_processor() is not None
