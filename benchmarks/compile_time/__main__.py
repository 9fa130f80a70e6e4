"""First-call seconds of BERT-base beside other backends, and what each stage of ours takes on larger models.

Every measurement is a process of its own with empty caches. Run as ``python -m benchmarks.compile_time``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.compile_time import first_call, stages
from benchmarks.compile_time.first_call import BACKENDS, FirstCall
from benchmarks.compile_time.models import MODELS, Job
from benchmarks.compile_time.stages import Stages

_BACKENDS, _MODELS = ",".join(BACKENDS), ",".join(MODELS)


def _apart(kind: str, name: str, job: Job) -> dict[str, Any]:
    """What a new process measures whose caches are empty."""
    with tempfile.TemporaryDirectory(prefix="compile-time-") as cache:
        environment = {
            **os.environ,
            "TORCHINDUCTOR_CACHE_DIR": str(Path(cache, "inductor")),
            "TRITON_CACHE_DIR": str(Path(cache, "triton")),
            "HF_HUB_OFFLINE": "1",
        }
        command = [sys.executable, "-m", "benchmarks.compile_time", "--one", f"{kind}:{name}", "--job", job.value]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{name}, {job}: the process failed\n{done.stderr[-4000:]}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result | {"job": job}


def _here(kind: str, name: str, job: Job) -> FirstCall | Stages:
    return first_call.measure(name, job) if kind == "first" else stages.measure(name, job)


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def main(
    backends: Annotated[str, typer.Option(help="Backends for the first call of BERT-base, with commas.")] = _BACKENDS,
    models: Annotated[str, typer.Option(help="Models to show stages of, with commas; llama-N has N layers.")] = _MODELS,
    job: Annotated[list[Job] | None, typer.Option(help="What to measure; may be repeated.")] = None,
    rounds: Annotated[int, typer.Option(help="Runs of everything, taken in turn; tables show the least times.")] = 1,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all figures to this file.")] = None,
    one: Annotated[str | None, typer.Option(hidden=True)] = None,
) -> None:
    """Print what compiling costs."""
    if one is not None:
        assert job is not None
        kind, _, name = one.partition(":")
        print(json.dumps(asdict(_here(kind, name, job[0]))))
        return
    console = Console()
    jobs = job or list(Job)
    calls: list[FirstCall] = []
    compiled: list[Stages] = []
    orders = [("first", name) for name in _names(backends)] + [("stages", name) for name in _names(models)]
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=rounds * len(jobs) * len(orders))
        for _ in range(rounds):
            for each in jobs:
                for kind, name in orders:
                    progress.update(task, description=f"{each}: {name}")
                    found = _apart(kind, name, each)
                    if kind == "first":
                        calls.append(FirstCall(**found))
                    else:
                        compiled.append(Stages(**found))
                    progress.advance(task)
    for each in jobs:
        if runs := [call for call in calls if call.job is each]:
            first_call.show(console, each, runs)
        of_model = [[s for s in compiled if s.job is each and s.model == name] for name in _names(models)]
        if of_model:
            stages.show(console, each, [stages.best(runs) for runs in of_model])
    if json_file is not None:
        figures = {"first_calls": [asdict(call) for call in calls], "stages": [asdict(run) for run in compiled]}
        json_file.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
