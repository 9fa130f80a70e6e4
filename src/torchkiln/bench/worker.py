"""The process of one backend in one cell: builds, compiles, and times steps when told to.

It reads a JSON object from each line of standard input and answers with one on standard output:

    {"do": "first"}                     seconds of the first call, which compiles
    {"do": "round", "seconds": 0.3}     milliseconds of steps for about so long
    {"do": "memory"}                    peak resident memory of this process in MiB: from its start, and of steps
    {"do": "check"}                     how far the results are from eager's, and what kiln compiled

and ends when its input does. Everything else that is printed goes to standard error.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import torchkiln
from torchkiln.bench.backends import BACKENDS, Compile
from torchkiln.bench.cells import Cell, Job, Precision, Shapes
from torchkiln.bench.entries import ENTRIES
from torchkiln.bench.entries.entry import arguments, loss_of, prepared, tensors
from torchkiln.bench.entries.quantized import quantized
from torchkiln.bench.process import own_standard_output, serve
from torchkiln.bench.resident import forget_peak, peak_mib


class Measured:
    """A compiled entry and the step that is timed."""

    def __init__(self, cell: Cell, compile_it: Compile) -> None:
        self.cell = cell
        self.peak_so_far = 0.0
        self.entry = ENTRIES[cell.entry]
        self.dtype = cell.precision.dtype
        self.function = prepared(self.entry, cell.job, self.dtype)
        trainable = not isinstance(self.function, nn.Module)
        self.sizes = [arguments(self.entry, k, cell.job, self.dtype, trainable) for k in range(2)]
        if cell.precision is Precision.int8:
            self.function = quantized(self.function, self.sizes[0])
        # Looked up once: to walk through a module takes as long as to run a small one.
        own = list(self.function.parameters()) if isinstance(self.function, nn.Module) else []
        self.leaves = [own + [x for x in given.values() if isinstance(x, Tensor)] for given in self.sizes]
        self.compiled = compile_it(self.function, cell.shapes is Shapes.dynamic)

    def step(self, size: int = 0) -> None:
        """One step; gradients are recorded or not as the caller's mode says."""
        given = self.sizes[size]
        if self.cell.job is Job.inference:
            self.compiled(**given)
            return
        loss_of(self.compiled(**given)).backward()
        for tensor in self.leaves[size]:
            tensor.grad = None

    def mode(self) -> torch.set_grad_enabled:
        """The mode that steps are taken in, to be entered around them: a user does not enter it for each call."""
        return torch.set_grad_enabled(self.cell.job is Job.training)

    def first(self) -> dict[str, Any]:
        with self.mode():
            start = time.perf_counter()
            self.step(1 if self.cell.shapes is Shapes.dynamic else 0)
            seconds = time.perf_counter() - start
            for _ in range(3):
                self.step()
        self.peak_so_far = peak_mib()
        forget_peak()
        return {"seconds": seconds}

    def round(self, seconds: float) -> dict[str, Any]:
        taken: list[float] = []
        with self.mode():
            self.step()
            begin = time.perf_counter()
            while len(taken) < 3 or time.perf_counter() - begin < seconds:
                start = time.perf_counter()
                self.step()
                taken.append(time.perf_counter() - start)
        return {"ms": 1000 * statistics.median(taken), "steps": len(taken)}

    def memory(self) -> dict[str, Any]:
        of_steps = peak_mib()
        return {"peak": max(of_steps, self.peak_so_far), "steps": of_steps}

    def check(self) -> dict[str, Any]:
        """The largest difference from eager, relative to the largest element; results with random numbers have none."""
        if self.cell.job is Job.training or not self.deterministic():
            worst = None
        else:
            with torch.no_grad():
                pairs = zip(
                    tensors(self.compiled(**self.sizes[0])), tensors(self.function(**self.sizes[0])), strict=True
                )
                worst = max((_difference(mine, eagers) for mine, eagers in pairs), default=0.0)
        stats = torchkiln.stats()
        return {
            "difference": worst,
            "graphs": stats.graphs,
            "launches": stats.launches,
            "externs": dict(stats.extern_calls),
            "fallbacks": [f.reason for f in stats.fallbacks],
            "slower": [str(graph) for graph in stats.slower],
        }

    def deterministic(self) -> bool:
        with torch.no_grad():
            state = torch.get_rng_state()
            self.function(**self.sizes[0])
            return torch.equal(state, torch.get_rng_state())


def _difference(mine: Tensor, eagers: Tensor) -> float:
    if mine.shape != eagers.shape or mine.dtype != eagers.dtype:
        return float("inf")
    finite = eagers.isfinite()
    if not torch.equal(finite, mine.isfinite()):
        return float("inf")
    scale = eagers[finite].abs().max().item() if finite.any() else 0.0
    return (mine - eagers)[finite].abs().max().item() / (scale or 1.0) if finite.any() else 0.0


def main(entry: str, job: str, precision: str, shapes: str, backend: str, threads: str) -> None:
    answers = own_standard_output()
    torch.set_num_threads(int(threads))
    measured = Measured(Cell(entry, Job(job), Precision(precision), Shapes(shapes)), BACKENDS[backend].compile)
    print(json.dumps({"ready": True, "torch": torch.__version__}), file=answers, flush=True)
    known: dict[str, Callable[..., dict[str, Any]]] = {
        "first": measured.first,
        "round": measured.round,
        "memory": measured.memory,
        "check": measured.check,
    }
    serve(known, sys.stdin, answers)


if __name__ == "__main__":
    main(*sys.argv[1:])
