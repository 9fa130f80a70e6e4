"""``kiln package``: what it prints, and its exit codes."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from torch.export import Dim
from typer.testing import CliRunner

import torchkiln
from tests.aot.models import Counter, Mlp
from torchkiln.cli import app

runner = CliRunner()


def test_show_names_arguments_sizes_weights_and_targets(tmp_path: Path) -> None:
    shapes = {"x": {0: Dim("rows", min=2, max=9)}, "log": None}
    path = torchkiln.aot_compile(
        Counter(), (torch.ones(4, 3), torch.zeros(2)), dynamic_shapes=shapes, path=tmp_path / "counter.kiln"
    )
    result = runner.invoke(app, ["package", "show", str(path)])
    assert result.exit_code == 0, result.output
    assert re.search(r"x\s+│ float32 │ \[s0: 2 to 9, 3\]", result.output)
    assert re.search(r"log\s+│ float32 │ \[2\]\s+│ written to", result.output)
    assert re.search(r"count │ buffer │ int64\s+│ \[\]\s+│ written to", result.output)
    assert re.search(r"target native\s.*runs here", result.output)
    assert torch.__version__ in result.output


def test_verify_finds_a_changed_weight(tmp_path: Path) -> None:
    model = Mlp()
    path = torchkiln.aot_compile(model, (torch.randn(5, 8),), path=tmp_path / "mlp.kiln")
    assert runner.invoke(app, ["package", "verify", str(path)]).exit_code == 0
    content = bytearray(path.read_bytes())
    content[content.index(model.layers[0].weight.detach().numpy().tobytes())] ^= 1
    path.write_bytes(content)
    result = runner.invoke(app, ["package", "verify", str(path)])
    assert result.exit_code == 1
    assert "is no package or a damaged one" in result.output
    assert runner.invoke(app, ["package", "show", str(tmp_path / "absent.kiln")]).exit_code == 1
