"""Processes that compile the same graphs into one cache, some of which are killed: results stay right."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import torchkiln

PROCESSES, GRAPHS, KILLED = 4, 5, 2
SCRIPT = f"""
import torch
import torchkiln
from torchkiln import compiler

generated, generate = [], compiler.generate
compiler.generate = lambda *arguments: generated.append(1) or generate(*arguments)
for k in range({GRAPHS}):
    def f(x):
        return (x.sin() * k + x.exp()).softmax(-1).sum(0)
    x = torch.linspace(-1, 1, 32).reshape(4, 8)
    torch.testing.assert_close(torch.compile(f, backend="kiln", dynamic=False)(x), f(x))
    torch._dynamo.reset()
print(len(torchkiln.stats().by_graph), len(generated))
"""


def _started(cache: Path) -> subprocess.Popen[str]:
    source = str(Path(torchkiln.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": source, "KILN_CACHE": "1", "KILN_CACHE_DIR": str(cache)}
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, "-c", SCRIPT], env=environment, stdout=pipe, stderr=pipe, text=True)


def _finished(process: subprocess.Popen[str]) -> tuple[int, int]:
    """How many graphs it had, and for how many it generated code."""
    printed, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    graphs, generated = map(int, printed.split())
    return graphs, generated


def test_several_processes_fill_one_cache_although_some_are_killed(tmp_path: Path) -> None:
    cache, moments = tmp_path / "cache", random.Random(0)
    doomed = [_started(cache) for _ in range(KILLED)]
    others = [_started(cache) for _ in range(PROCESSES)]
    time.sleep(3 + 2 * moments.random())
    for process in doomed:
        process.kill()
        process.communicate()
    counted = [_finished(process) for process in others]
    assert [graphs for graphs, _ in counted] == [GRAPHS] * PROCESSES
    # One compiles and the others wait; another does where the first is killed.
    assert sum(generated for _, generated in counted) <= GRAPHS
    assert _finished(_started(cache)) == (GRAPHS, 0)
