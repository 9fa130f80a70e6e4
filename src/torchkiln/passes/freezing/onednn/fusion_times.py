"""Where oneDNN computes an activation or adds a tensor faster than a kernel of ours after its call: a table.

``make bench-fusions`` writes ``fusion_times.csv``: microseconds of the call and a kernel, and of the call alone with
the same fused into it, on one thread. Each is the sum over a few sizes, of compiled functions in turns. A fusion that
is not in the table does not pay; float16, of as many bytes, is taken for bfloat16.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from torchkiln.target import Target

TABLE = Path(__file__).with_name("fusion_times.csv")
GAIN = 1.01
"""How many times as fast the fused form must be: less than a hundredth is noise, and the kernel may fuse further."""


@dataclass(frozen=True)
class FusionTime:
    """One line of the table; ``processor`` is LLVM's name of it, ``fusion`` as ``add_relu``."""

    processor: str
    call: str
    dtype: str
    fusion: str
    separate: float
    fused: float


def measured_on(target: Target) -> str:
    """The processor whose times stand for those of ``target``: its own, or the first of the table."""
    processors = list(dict.fromkeys(time.processor for time in fusion_times()))
    return target.cpu if target.cpu in processors else next(iter(processors), "")


def pays(processor: str, call: str, dtype: torch.dtype, fusion: str) -> bool:
    """Whether ``fusion`` is faster inside a ``call`` than after it."""
    name = "float32" if dtype == torch.float32 else "bfloat16"
    time = _by_name().get((processor, call, name, fusion))
    return time is not None and time.separate >= GAIN * time.fused


@cache
def fusion_times() -> tuple[FusionTime, ...]:
    with TABLE.open(newline="") as lines:
        return tuple(_read(row) for row in csv.DictReader(lines))


def _read(row: dict[str, str]) -> FusionTime:
    times = {"separate": float(row["separate"]), "fused": float(row["fused"])}
    return FusionTime(row["processor"], row["call"], row["dtype"], row["fusion"], **times)


@cache
def _by_name() -> dict[tuple[str, str, str, str], FusionTime]:
    return {(time.processor, time.call, time.dtype, time.fusion): time for time in fusion_times()}
