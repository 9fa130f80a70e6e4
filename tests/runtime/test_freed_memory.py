"""Freed memory stays for the next step, and the user's own limits are left alone."""

from __future__ import annotations

import subprocess
import sys

import pytest

from torchkiln.artifact import GraphSummary
from torchkiln.recorder import Recorder
from torchkiln.runtime.accounting import account_for
from torchkiln.runtime.freed_memory import FreedMemory

MIB = 1 << 20
TRIM, MAP = -1, -3

STEPS = """
import resource
import torch
import torch.nn.functional as F

torch.set_num_threads(1)
logits, target = torch.randn(512, 1000, requires_grad=True), torch.randint(1000, (512,))
loss = torch.compile(lambda x, t: F.cross_entropy(x.sin(), t), backend="kiln", options={"fallback": False})

def step():
    loss(logits, target).backward()
    logits.grad = None

for _ in range(10):
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    step()
print((resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / 20)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="counts the page faults of Linux")
def test_steps_after_the_first_fault_nothing_in() -> None:
    done = subprocess.run([sys.executable, "-c", STEPS], capture_output=True, text=True, check=True)
    # The gradient alone is 500 pages. What Python and torch themselves take for a step has come out as 0 to 100.
    assert float(done.stdout) < 250


def _limits(*sizes: int) -> list[tuple[int, int]]:
    told: list[tuple[int, int]] = []
    memory = FreedMemory(lambda what, value: told.append((what, value)) or 1)
    for nbytes in sizes:
        memory.keep(nbytes)
    return told


@pytest.fixture(autouse=True)
def _no_limits_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_", "GLIBC_TUNABLES"):
        monkeypatch.delenv(name, raising=False)


def test_limits_are_only_ever_raised() -> None:
    assert _limits(MIB, 100 * MIB, 50 * MIB, 2 * MIB) == [
        (MAP, 32 * MIB),
        (TRIM, 64 * MIB),
        (TRIM, 200 * MIB),
    ]


def test_they_stay_within_what_the_library_takes() -> None:
    assert _limits(10 << 30)[-1] == (TRIM, (1 << 31) - 1)


def test_graphs_that_hand_out_little_change_nothing() -> None:
    assert _limits(0, 1000, 100_000) == []


def test_limits_of_the_user_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "131072")
    assert _limits(100 * MIB) == []


def test_blocks_of_weights_are_mapped_one_by_one_until_they_are_prepared() -> None:
    told: list[tuple[int, int]] = []
    memory = FreedMemory(lambda what, value: told.append((what, value)) or 1)
    with memory.blocks_apart(100 * MIB):
        assert told == [(MAP, MIB)]
    assert told[1:] == [(MAP, 32 * MIB), (TRIM, 64 * MIB)]
    memory.keep(100 * MIB)
    with memory.blocks_apart(100 * MIB):
        told.clear()
    assert told == [(MAP, 32 * MIB), (TRIM, 200 * MIB)]  # what steps take is kept as before


def test_few_weights_change_no_limits() -> None:
    told: list[tuple[int, int]] = []
    with FreedMemory(lambda what, value: told.append((what, value)) or 1).blocks_apart(MIB):
        pass
    assert told == []


def test_memory_of_weights_is_not_kept_for_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[int] = []
    monkeypatch.setattr(FreedMemory, "keep", lambda _, nbytes: kept.append(nbytes))
    for kind in ("weights", "inference"):
        account_for(GraphSummary(kind, 1, 1, 1, 1, (), 7), Recorder(), keep_memory=True)
    assert kept == [7]


CALLS = """
import resource
import sys
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(96, 96, 1) for _ in range(3))

    def forward(self, x):
        first = self.layers[0](x)
        second = self.layers[1](first)
        return (self.layers[2](second) * second * first).sum()

torch.set_num_threads(1)
options = {"fallback": False, "keep_memory": sys.argv[1] == "keep"}
call = torch.compile(Model().eval(), backend="kiln", options=options)
x = torch.randn(4, 96, 128, 128).to(memory_format=torch.channels_last)  # 24 MiB, as each of three results
with torch.no_grad():
    for _ in range(3):
        call(x)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(5):
        call(x)
print((resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / 5)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="counts the page faults of Linux")
def test_what_library_calls_allocate_is_not_faulted_in_at_each_call() -> None:
    done = subprocess.run([sys.executable, "-c", CALLS, "keep"], capture_output=True, text=True, check=True)
    assert float(done.stdout) < 1000  # one result is 6,144 pages
