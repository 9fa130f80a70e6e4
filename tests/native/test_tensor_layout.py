"""The check that a Python tensor holds its C++ tensor where the fast entry reads it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.runtime.test_executable import add_graph
from torchkiln.native import tensor_layout as layout


@pytest.fixture(autouse=True)
def _forget_the_answer() -> Iterator[None]:
    layout.check_layout.cache_clear()
    yield
    layout.check_layout.cache_clear()


def test_the_layout_of_this_torch_is_usable_and_the_reason_says_so() -> None:
    found = layout.check_layout()
    assert found.usable
    assert "verified" in found.reason


@pytest.mark.parametrize("offset", [0, 8, 24])
def test_a_wrong_offset_is_found_without_a_crash(monkeypatch: pytest.MonkeyPatch, offset: int) -> None:
    monkeypatch.setattr(layout, "TENSOR_OFFSET", offset)
    found = layout.check_layout()
    assert not found.usable
    assert f"not at offset {offset}" in found.reason


def test_an_offset_beyond_the_object_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "TENSOR_OFFSET", 1 << 40)
    assert "bytes" in layout.check_layout().reason


def test_without_the_wrapping_function_graphs_run_through_handles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "WRAP_TENSOR", "no_such_function")
    assert "no_such_function" in layout.check_layout().reason
    x = torch.randn(3)
    graph = add_graph(x).build()
    assert not graph.direct
    assert torch.equal(graph([x, x])[0], x + x)
