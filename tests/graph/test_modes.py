"""Modes around a graph: read, written to a file's options, and in force again."""

from __future__ import annotations

import pytest
import torch

from torchkiln.config import Settings
from torchkiln.frontend.reproductions import reproduction_options
from torchkiln.graph.modes import in_modes, modes_now


@pytest.mark.parametrize("autocast", [None, "bfloat16", "float16"])
@pytest.mark.parametrize("default_dtype", [None, "float64"])
def test_modes_that_are_read_are_in_force_again(autocast: str | None, default_dtype: str | None) -> None:
    given = {"autocast": autocast, "default_dtype": default_dtype}
    wanted = {name: value for name, value in given.items() if value is not None}
    with in_modes(**wanted):
        assert modes_now() == ({"modes": wanted} if wanted else {})
        assert torch.ones(1).dtype is getattr(torch, default_dtype or "float32")
        x = torch.ones(2, 2, dtype=torch.float32)
        assert (x @ x).dtype is getattr(torch, autocast or "float32")
        assert reproduction_options(Settings(), dynamic=False).get("modes", {}) == wanted
    assert modes_now() == {}


def test_modes_end_with_an_exception() -> None:
    with pytest.raises(ValueError, match="planted"), in_modes(autocast="bfloat16", default_dtype="float64"):
        raise ValueError("planted")
    assert modes_now() == {}
