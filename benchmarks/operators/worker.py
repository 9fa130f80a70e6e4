"""The process that measures cells: ``python -m benchmarks.operators.worker THREADS``, an order a line.

    {"do": "measure", "entry": "relu", "layout": "rows", "dtype": "float32", "job": "forward", "backends": [...]}
"""

from __future__ import annotations

import json
import logging
import os
import resource
import sys
from typing import Any

import torch

from benchmarks.operators.cells import Cell, Job
from benchmarks.operators.entries import entry_of
from benchmarks.operators.entry import Call
from benchmarks.operators.layouts import Layout
from benchmarks.operators.measure import Effort, measure
from conformance.cases import seed_everything
from torchkiln.bench.process import own_standard_output, serve


class Measuring:
    """Keeps the call of the last entry and dtype: the cells of one follow each other."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._made: tuple[tuple[str, str], Call] | None = None

    def measure(
        self, entry: str, layout: str, dtype: str, job: str, backends: list[str], effort: dict[str, Any]
    ) -> dict[str, Any]:
        if self._made is None or self._made[0] != (entry, dtype):
            self._made = None
            seed_everything(0)
            try:
                self._made = (entry, dtype), entry_of(entry).make(getattr(torch, dtype))
            except LookupError as reason:
                return {"left_out": str(reason)}
        cell = Cell(entry, Layout(layout), dtype, Job(job), self.threads)
        return measure(self._made[1], cell, backends, Effort(**effort))


def main(threads: str) -> None:
    answers = own_standard_output()
    logging.disable(logging.ERROR)
    # A call whose result does not fit, as the Kronecker product of two large matrices, fails; the machine goes on.
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
    torch.set_num_threads(int(threads))
    print(json.dumps({"ready": True}), file=answers, flush=True)
    serve({"measure": Measuring(int(threads)).measure}, sys.stdin, answers)


if __name__ == "__main__":
    main(*sys.argv[1:])
