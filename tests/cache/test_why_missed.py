"""``kiln cache why-missed`` on real scripts: what moves causes no miss, and what changes is named."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import torchkiln

SCRIPT = """
import sys
from dataclasses import replace

import torch
import torchkiln
from torchkiln.target import capture

import factors

@torchkiln.graph_pass(name="mine", stage="joint")
def mine(graph_module):
    return factors.BY > 5

def run(size=8, **options):
    torch._dynamo.reset()
    torch.compile(lambda x: x.exp() + 1, backend="kiln", options=options)(torch.ones(size))

run()
if "others" in sys.argv:
    run(size=16)
    run(inline_limit=63)
    found = capture.capture_target(torchkiln.Settings())
    capture._found = replace(found, features=found.features + ",-kiln-tests")
    run()
"""
COMMAND = "from torchkiln.cli import main; main()"


class _Project:
    """A script and a module that its pass reads from, in a folder of their own."""

    def __init__(self, folder: Path, factor: int = 2) -> None:
        folder.mkdir()
        self.script = folder / f"{folder.name}_script.py"
        self.script.write_text(SCRIPT)
        (folder / "factors.py").write_text(f"BY = {factor}\n")

    def misses(self, cache: Path, *arguments: str) -> str:
        source = str(Path(torchkiln.__file__).parents[1])
        environment = {**os.environ, "PYTHONPATH": source, "KILN_CACHE": "1", "KILN_CACHE_DIR": str(cache)}
        command = [sys.executable, "-c", COMMAND, "cache", "why-missed", str(self.script), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=self.script.parent)
        assert done.returncode == 0, done.stderr
        return done.stdout


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache that has what a script compiles."""
    folder = tmp_path_factory.mktemp("filled")
    printed = _Project(folder / "first").misses(folder / "cache")
    assert "function" in printed
    assert "nothing of this kind was stored" in printed
    return folder / "cache"


def _copied(cache: Path, to: Path) -> Path:
    shutil.copytree(cache, to)
    to.chmod(0o700)
    return to


def test_moving_cache_project_and_script_causes_no_miss(filled: Path, tmp_path: Path) -> None:
    assert _Project(tmp_path / "moved").misses(_copied(filled, tmp_path / "elsewhere")) == "0 misses\n"


def test_a_size_a_setting_and_a_feature_of_the_processor_are_named(filled: Path, tmp_path: Path) -> None:
    printed = _Project(tmp_path / "other").misses(_copied(filled, tmp_path / "cache"), "others")
    functions = [part.splitlines()[1:] for part in printed.split("\n\n") if part.startswith("function")]
    size, setting, feature = functions
    assert size == ["  inputs: float32[8] strides [1] offset 0 cpu -> float32[16] strides [1] offset 0 cpu"]
    assert setting == ["  setting inline_limit: 64 -> 63"]
    assert feature == ["  target features: only the second has -kiln-tests"]


def test_what_a_pass_reads_from_another_file_is_named(filled: Path, tmp_path: Path) -> None:
    printed = _Project(tmp_path / "changed", factor=3).misses(_copied(filled, tmp_path / "cache"))
    function = next(part for part in printed.split("\n\n") if part.startswith("function"))
    lines = function.splitlines()[1:]
    assert len(lines) == 1
    assert lines[0].startswith("  passes of users: joint/post mine ")
