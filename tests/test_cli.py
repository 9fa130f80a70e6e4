"""The command ``kiln``: what it prints and the exit codes scripts rely on."""

from __future__ import annotations

import re

import pytest
import torch
from typer.testing import CliRunner

import torchkiln
from torchkiln.cli import app

runner = CliRunner()


def test_version_is_that_of_the_package() -> None:
    result = runner.invoke(app, ["--version"])
    assert result.exit_code == 0
    assert result.stdout.strip() == torchkiln.__version__


def test_doctor_finds_this_machine_fit_to_compile() -> None:
    result = runner.invoke(app, ["doctor"])
    assert result.exit_code == 0, result.stdout
    assert torch.__version__ in result.stdout
    assert re.search(r"compiling\s+a small function compiles", result.stdout)
    assert "torchkiln can compile here" in result.stdout


def test_doctor_says_which_environment_variable_gave_a_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KILN_THREADS", "3")
    result = runner.invoke(app, ["doctor"])
    assert re.search(r"threads\s+│\s+3\s+│\s+KILN_THREADS", result.stdout)
    assert re.search(r"fallback\s+│\s+True\s+│\s+default", result.stdout)


def test_doctor_fails_on_a_setting_that_cannot_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KILN_THREADS", "many")
    result = runner.invoke(app, ["doctor"])
    assert result.exit_code == 1
    assert "KILN_THREADS" in result.stdout
    assert "torchkiln cannot compile here" in result.stdout


def test_doctor_fails_on_a_torch_it_does_not_support(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.10.1+cpu")
    result = runner.invoke(app, ["doctor"])
    assert result.exit_code == 1
    assert "2.10.1+cpu" in result.stdout


def test_demo_checks_both_networks_in_both_jobs() -> None:
    result = runner.invoke(app, ["demo", "--rounds", "2"])
    assert result.exit_code == 0, result.stdout
    for network in ("transformer", "convolutional"):
        assert re.search(rf"{network}\s+│ inference\s+│ yes", result.stdout)
        assert re.search(rf"{network}\s+│ training step\s+│ yes", result.stdout)
