"""Best times of quantized models in one interleaved run, in milliseconds.

    python -m benchmarks.quantized                     all models on one thread
    python -m benchmarks.quantized --threads 2 --only residual --rounds 200

On one thread these are times of the processor, which a busy machine disturbs least; on several they are of the clock.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch

from benchmarks.quantized.models import CASES, Case


def _functions(case: Case, backends: list[str]) -> dict[str, Callable[[], object]]:
    made: dict[str, Callable[[], object]] = {}
    compiled = {"kiln": "kiln", "inductor": "inductor"}
    for name in backends:
        if name == "eager":
            made[name] = lambda: case.converted(*case.inputs)
        elif name == "kiln float":
            if case.original is not None:
                run = torch.compile(case.original, backend="kiln")
                made[name] = lambda run=run: run(*case.inputs)
        else:
            run = torch.compile(case.converted, backend=compiled[name])
            made[name] = lambda run=run: run(*case.inputs)
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--only", default="", help="part of a model's name")
    parser.add_argument("--backends", default="kiln,inductor,kiln float", help="and eager")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    clock = time.thread_time if options.threads == 1 else time.perf_counter
    import torch._inductor.config as inductor_config

    inductor_config.freezing = True
    for name, make in CASES.items():
        if options.only not in name:
            continue
        torch.manual_seed(0)
        torch._dynamo.reset()
        with torch.no_grad():
            functions = _functions(make(), options.backends.split(","))
            for function in functions.values():
                for _ in range(8):
                    function()
            best = dict.fromkeys(functions, float("inf"))
            for _ in range(options.rounds):
                for backend, function in functions.items():
                    start = clock()
                    function()
                    best[backend] = min(best[backend], clock() - start)
        times = "  ".join(f"{backend} {1e3 * seconds:.3f}" for backend, seconds in best.items())
        ratio = f"  inductor / kiln {best['inductor'] / best['kiln']:.2f}" if {"kiln", "inductor"} <= set(best) else ""
        print(f"{name}: {times}{ratio}", flush=True)


if __name__ == "__main__":
    main()
