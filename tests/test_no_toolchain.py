"""Compiling and running start no process and need no compiler on the machine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.conftest import BACKEND

# Runs in a process of its own: an audit hook cannot be removed again.
_PROGRAM = """
import sys

started = []

def watch(event, args):
    if event in {"subprocess.Popen", "os.system", "os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn",
                 "os.startfile", "pty.spawn"}:
        started.append((event, args))
        raise RuntimeError(f"a process was started: {event} {args}")

sys.addaudithook(watch)

import torch
from torch import nn

import torchkiln

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(20, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 4))
x = torch.randn(7, 20)
backend = sys.argv[1]
options = {"fallback": False} if backend == "kiln" else None
compiled = torch.compile(model, backend=backend, options=options)
expected = model(x)
expected.square().sum().backward()
gradients = [p.grad.clone() for p in model.parameters()]
model.zero_grad()
result = compiled(x)
result.square().sum().backward()
torch.testing.assert_close(result, expected)
for got, want in zip((p.grad for p in model.parameters()), gradients):
    torch.testing.assert_close(got, want)
assert not started, started
if backend == "kiln":
    assert torchkiln.stats().graphs == 2, torchkiln.stats()
print("compiled and ran")
"""


def test_compiling_and_running_start_no_process_and_find_no_compiler(tmp_path: Path) -> None:
    failing = tmp_path / "no-compiler"
    failing.write_text("#!/bin/sh\necho 'the compiler was called' >&2\nexit 1\n")
    failing.chmod(0o755)
    empty = tmp_path / "bin"
    empty.mkdir()
    environment = {**os.environ, "PATH": str(empty), "CC": str(failing), "CXX": str(failing)}
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, BACKEND],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "compiled and ran"
    assert "the compiler was called" not in done.stderr
