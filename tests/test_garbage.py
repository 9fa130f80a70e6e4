"""The collector is paused while a stage runs, and only then."""

from __future__ import annotations

import gc

import pytest
import torch

from torchkiln.garbage import no_collections


def test_collections_go_on_after_a_stage_that_failed() -> None:
    def fail(collecting: bool) -> None:
        raise ValueError(f"collecting: {collecting}")

    assert gc.isenabled()
    with pytest.raises(ValueError, match="collecting: False"), no_collections():
        fail(gc.isenabled())
    assert gc.isenabled()


def test_a_user_who_turned_collections_off_keeps_them_off() -> None:
    gc.disable()
    try:
        torch.compile(lambda x: x.sin() + 1, backend="kiln")(torch.ones(3))
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_objects_made_meanwhile_start_no_collection() -> None:
    collected: list[str] = []

    def collecting(phase: str, info: dict[str, int]) -> None:
        collected.append(phase)

    gc.callbacks.append(collecting)
    try:
        with no_collections():
            before = len(collected)
            kept = [[number] for number in range(10 * gc.get_threshold()[0])]
            meanwhile = len(collected) - before
    finally:
        gc.callbacks.remove(collecting)
    assert kept
    assert meanwhile == 0
