"""First-call seconds beside other backends, with empty and with filled caches, and what each stage of ours takes.

Every measurement is a process of its own, with caches of its own. Run as ``python -m benchmarks.compile_time``.
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

from benchmarks.compile_time import first_call, stages, warm
from benchmarks.compile_time.first_call import BACKENDS, FirstCall
from benchmarks.compile_time.models import MODELS, Job
from benchmarks.compile_time.stages import Stages
from benchmarks.compile_time.warm import WarmStart

_BACKENDS, _MODELS, _WARM = ",".join(BACKENDS), ",".join(MODELS), ",".join(warm.MODELS)


def _apart(kind: str, name: str, job: Job) -> dict[str, Any]:
    """What a new process measures: one with empty caches, or with those that another one filled."""
    with tempfile.TemporaryDirectory(prefix="compile-time-") as cache:
        way = name.partition("/")[2]
        if kind == "warm" and way != warm.BASE:
            _process(kind, name, job, Path(cache))
        return _process(kind, name, job, Path(cache))


def _process(kind: str, name: str, job: Job, cache: Path) -> dict[str, Any]:
    environment = {
        **os.environ,
        **warm.environment(name.partition("/")[2]),
        "KILN_CACHE_DIR": str(cache / "kiln"),
        "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
        "TRITON_CACHE_DIR": str(cache / "triton"),
        "HF_HUB_OFFLINE": "1",
    }
    command = [sys.executable, "-m", "benchmarks.compile_time", "--one", f"{kind}:{name}", "--job", job.value]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{name}, {job}: the process failed\n{done.stderr[-4000:]}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result | {"job": job}


def _here(kind: str, name: str, job: Job) -> FirstCall | Stages | WarmStart:
    if kind == "warm":
        model, _, way = name.partition("/")
        return warm.measure(model, way, job)
    return first_call.measure(name, job) if kind == "first" else stages.measure(name, job)


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def main(
    backends: Annotated[str, typer.Option(help="Backends for the first call of BERT-base, with commas.")] = _BACKENDS,
    models: Annotated[str, typer.Option(help="Models to show stages of, with commas; llama-N has N layers.")] = _MODELS,
    warm_models: Annotated[
        str, typer.Option("--warm", help="Models to start with filled caches, with commas.")
    ] = _WARM,
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
    warm_starts: list[WarmStart] = []
    orders = [("first", name) for name in _names(backends)] + [("stages", name) for name in _names(models)]
    orders += [("warm", f"{name}/{way}") for name in _names(warm_models) for way in warm.WAYS]
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
                    elif kind == "warm":
                        warm_starts.append(WarmStart(**found))
                    else:
                        compiled.append(Stages(**found))
                    progress.advance(task)
    for each in jobs:
        if runs := [call for call in calls if call.job is each]:
            first_call.show(console, each, runs)
        of_model = [[s for s in compiled if s.job is each and s.model == name] for name in _names(models)]
        if of_model:
            stages.show(console, each, [stages.best(runs) for runs in of_model])
        if starts := [start for start in warm_starts if start.job is each]:
            warm.show(console, each, starts)
    if json_file is not None:
        found_by_kind = {"first_calls": calls, "stages": compiled, "warm_starts": warm_starts}
        figures = {kind: [asdict(run) for run in runs] for kind, runs in found_by_kind.items()}
        json_file.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
