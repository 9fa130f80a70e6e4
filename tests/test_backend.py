"""The backend object: found by name, light to import, strict about options and modes."""

from __future__ import annotations

import re
import subprocess
import sys
import traceback
from typing import Any

import pytest
import torch
import torch._dynamo

import torchkiln
from torchkiln.backend import MODES, kiln
from torchkiln.errors import OptionError


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()


def test_torch_finds_the_backend_by_name() -> None:
    assert "kiln" in torch._dynamo.list_backends()


def test_importing_the_backend_loads_neither_torch_nor_the_compiler() -> None:
    code = "import sys, torchkiln.backend; print('torch' in sys.modules, 'torchkiln.compiler' in sys.modules)"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed.split() == ["False", "False"]


def test_public_names_are_there_and_listed() -> None:
    for name in torchkiln.__all__:
        assert getattr(torchkiln, name) is not None
    assert set(torchkiln.__all__) <= set(dir(torchkiln))
    with pytest.raises(AttributeError, match="no_such_name"):
        torchkiln.no_such_name  # noqa: B018
    assert callable(torchkiln.stats)


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"options": {"thread": 1}}, r"Unknown option 'thread'.*parallel_threshold.*\."),
        ({"options": {"fuse": "maybe"}}, r"Setting 'fuse' must be .*, not 'maybe'\."),
        ({"mode": "fast"}, r"Unknown mode 'fast'.*max-autotune.*\."),
    ],
)
def test_a_wrong_option_reaches_the_user_as_one_sentence(wrong: dict[str, Any], sentence: str) -> None:
    compiled = torch.compile(torch.sin, backend="kiln", **wrong)
    with pytest.raises(OptionError) as caught:
        compiled(torch.ones(2))
    # Nothing of Dynamo's around it, such as how to report a bug to PyTorch.
    assert re.fullmatch(sentence, str(caught.value))
    assert not any("torchkiln" in frame.filename for frame in traceback.extract_tb(caught.value.__traceback__))


def test_a_wrong_setting_in_the_environment_reaches_the_user_as_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KILN_FUSE", "maybe")
    with pytest.raises(OptionError) as caught:
        torch.compile(torch.sin, backend="kiln")(torch.ones(2))
    assert re.fullmatch(r"Setting 'fuse' must be .* \(given by KILN_FUSE\)\.", str(caught.value))


def test_unknown_modes_are_refused_with_the_valid_ones() -> None:
    gm = torch.fx.symbolic_trace(torch.nn.Identity())
    with pytest.raises(OptionError, match="Unknown mode 'fast'") as caught:
        kiln(gm, [torch.ones(2)], mode="fast")
    for mode in MODES:
        assert mode in str(caught.value)


@pytest.mark.parametrize("mode", sorted(MODES))
def test_every_mode_of_torch_compile_compiles(mode: str) -> None:
    x = torch.randn(3)
    compiled = torch.compile(lambda v: v.sin() + 1, backend="kiln", mode=mode)
    with torchkiln.settings(fallback=False):
        torch.testing.assert_close(compiled(x), x.sin() + 1)
