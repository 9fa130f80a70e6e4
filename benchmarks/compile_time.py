"""First-call seconds of BERT-base at sequence 128 for four backends, each in a fresh process with an empty cache.

The clock starts at the first call of the compiled model, with torch imported and the model built, so it includes
importing the backend itself. ``eager`` is Dynamo alone, ``aot_eager`` Dynamo and AOTAutograd alone: what any backend
of ``torch.compile`` costs at least.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table


class Job(StrEnum):
    inference = "inference"
    training = "training"


BACKENDS = ("eager", "aot_eager", "inductor", "kiln")
BASE = "aot_eager"


def measure_here(backend: str, job: Job, layers: int) -> dict[str, float]:
    """First and second call in this process; meant to be called once in a process."""
    import torch
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    model = BertModel(BertConfig(num_hidden_layers=layers)).train(job is Job.training)
    ids = torch.randint(model.config.vocab_size, (1, 128))
    options = {"fallback": False} if backend == "kiln" else None
    compiled = torch.compile(model, backend=backend, options=options)

    def step() -> None:
        if job is Job.training:
            compiled(ids).last_hidden_state.square().mean().backward()
        else:
            with torch.no_grad():
                compiled(ids)

    seconds = []
    for _ in range(2):
        start = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - start)
    return {"first": seconds[0], "second": seconds[1]}


def measure_apart(backend: str, job: Job, layers: int) -> dict[str, float]:
    """The same in a new process whose caches are empty."""
    with tempfile.TemporaryDirectory(prefix="compile-time-") as cache:
        environment = {
            **os.environ,
            "TORCHINDUCTOR_CACHE_DIR": str(Path(cache, "inductor")),
            "TRITON_CACHE_DIR": str(Path(cache, "triton")),
            "HF_HUB_OFFLINE": "1",
        }
        command = [sys.executable, __file__, "--one", backend, "--job", job.value, "--layers", str(layers)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{backend}, {job}: the process failed\n{done.stderr[-4000:]}")
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def main(
    backends: Annotated[str, typer.Option(help="Backends to measure, with commas.")] = ",".join(BACKENDS),
    job: Annotated[list[Job] | None, typer.Option(help="What to measure; may be repeated.")] = None,
    layers: Annotated[int, typer.Option(help="Transformer layers; BERT-base has 12.")] = 12,
    rounds: Annotated[int, typer.Option(help="Runs of every backend, taken in turn; the table shows the best.")] = 1,
    one: Annotated[str | None, typer.Option(hidden=True)] = None,
) -> None:
    """Print first-call seconds and their ratio to aot_eager."""
    if one is not None:
        assert job is not None
        print(json.dumps(measure_here(one, job[0], layers)))
        return
    console = Console()
    names = [name.strip() for name in backends.split(",")]
    for each in job or list(Job):
        results: dict[str, list[dict[str, float]]] = {name: [] for name in names}
        for _ in range(rounds):
            for name in names:
                with console.status(f"{each}: {name}"):
                    results[name].append(measure_apart(name, each, layers))
        best = {name: min(runs, key=lambda run: run["first"]) for name, runs in results.items()}
        table = Table(title=f"BERT-base ({layers} layers), sequence 128, {each}: first call")
        table.add_column("backend")
        for heading in ("first call, s", f"× {BASE}", "second call, ms"):
            table.add_column(heading, justify="right")
        for name, run in best.items():
            ratio = f"{run['first'] / best[BASE]['first']:.2f}" if BASE in best else "-"
            table.add_row(name, f"{run['first']:.2f}", ratio, f"{run['second'] * 1e3:.1f}")
        console.print(table)


if __name__ == "__main__":
    typer.run(main)
