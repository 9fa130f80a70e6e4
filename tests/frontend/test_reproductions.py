"""A failed compilation says the one command that reproduces it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

import torchkiln
from tests.debug.planted import plant
from torchkiln.errors import CompileError, FallbackWarning
from torchkiln.frontend import reproductions

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.usefixtures("no_cache")
def test_the_command_of_the_warning_reproduces_the_failure(tmp_path: Path) -> None:
    x = torch.randn(4, 3).t()
    undo = plant("crash_in_lowering")
    try:
        with pytest.warns(FallbackWarning, match=r"Reproduce it with: \S*python\S* (\S+)") as warned:
            torch.compile(lambda x: torch.erf(x + 1), backend="kiln", options={"reproductions": str(tmp_path)})(x)
    finally:
        undo()
    (file,) = tmp_path.glob("failed_*.py")
    assert str(file) in str(warned[0].message)
    text = file.read_text()
    assert "tensor([3, 4], [1, 3], torch.float32)" in text
    setup = "# setup\nfrom tests.debug.planted import plant\nplant('crash_in_lowering')\n"
    file.write_text(text.replace("# setup\n", setup))
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    run = [sys.executable, str(file)]
    failed = subprocess.run(run, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True, check=False)
    assert failed.returncode == 1
    assert "ValueError: planted" in failed.stderr


@pytest.mark.usefixtures("no_cache")
def test_the_error_has_the_command_as_a_note(tmp_path: Path) -> None:
    graph = torch.fx.symbolic_trace(lambda x: (torch.erf(x),))
    undo = plant("crash_in_lowering")
    try:
        with torchkiln.settings(fallback=False, reproductions=str(tmp_path)), pytest.raises(CompileError) as raised:
            torchkiln.compile_fx(graph, [torch.randn(3)])
    finally:
        undo()
    (file,) = tmp_path.glob("failed_*.py")
    assert raised.value.__notes__[0].endswith(str(file))


@pytest.mark.usefixtures("no_cache")
@pytest.mark.parametrize(
    ("bug", "dynamic", "options"),
    [("crash_with_symbolic_sizes", True, {}), ("crash_with_inline_limit", False, {"inline_limit": 3})],
)
def test_the_command_reproduces_with_symbolic_sizes_settings_and_blanks_in_paths(
    bug: str, dynamic: bool, options: dict[str, int], tmp_path: Path
) -> None:
    folder = tmp_path / "a folder"
    undo = plant(bug)
    try:
        with pytest.warns(FallbackWarning) as warned:
            torch.compile(
                lambda x: torch.erf(x * x.shape[0]),
                backend="kiln",
                options={"reproductions": str(folder), **options},
                dynamic=dynamic,
            )(torch.randn(5, 3))
    finally:
        undo()
    (file,) = folder.glob("failed_*.py")
    setup = f"# setup\nfrom tests.debug.planted import plant\nplant({bug!r})\n"
    file.write_text(file.read_text().replace("# setup\n", setup))
    (command,) = re.findall(r"Reproduce it with: (.*)", str(warned[0].message))
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    environment = {**os.environ, "PYTHONPATH": paths, "PATH": "/bin"}
    failed = subprocess.run(command, shell=True, env=environment, capture_output=True, text=True, check=False)
    assert failed.returncode == 1, failed.stdout
    assert "ValueError: planted" in failed.stderr


@pytest.mark.usefixtures("no_cache")
def test_without_a_cache_the_file_is_in_a_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    reproductions._temporary_folder.cache_clear()
    undo = plant("crash_in_lowering")
    try:
        with pytest.warns(FallbackWarning) as warned:
            torch.compile(torch.erf, backend="kiln")(torch.randn(3))
    finally:
        undo()
        reproductions._temporary_folder.cache_clear()
    (file,) = (tmp_path / "temporary").rglob("*.py")
    assert str(file) in str(warned[0].message)
    assert not (tmp_path / "cache").exists()


def test_nothing_is_written_where_no_file_is_wanted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    reproductions._temporary_folder.cache_clear()
    undo = plant("crash_in_lowering")
    try:
        with torchkiln.settings(cache=False, reproductions=os.devnull), pytest.warns(FallbackWarning) as warned:
            torch.compile(torch.erf, backend="kiln")(torch.randn(3))
    finally:
        undo()
    assert "Reproduce" not in str(warned[0].message)
    assert not list(tmp_path.rglob("*.py"))
