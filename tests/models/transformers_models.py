"""Whole models of the transformers library, compiled and checked against eager: ``make models``.

    python -m tests.models.transformers_models --models bert,mamba --dtypes float32 --workers 2

Random weights, small configurations, no downloads. Each model is a process of its own, so that a crash is a line of the
table. Graph breaks by Dynamo are allowed, and counted; a graph that is not compiled is a failure. What is compared, and
how closely, is in ``model_check.py``.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

import torchkiln
from tests.models.architectures import ARCHITECTURES, KINDS
from tests.models.model_check import Judgement, check

BACKEND = os.environ.get("TORCHKILN_TEST_BACKEND", "kiln")
DTYPES = ("float32", "bfloat16")
# The longest takes a minute on a quiet core.
TIME_LIMIT = 1200
PAGE = Path("docs/models.md")


@dataclass(frozen=True)
class Row:
    """One model in one dtype; ``code`` says which sources and versions it is about."""

    model: str
    code: str
    judgement: Judgement

    @property
    def status(self) -> str:
        return "wrong" if self.judgement.failures else "capture differs" if self.judgement.captured else "ok"

    @classmethod
    def read(cls, stored: dict[str, Any]) -> Row:
        judgement = dict(stored["judgement"])
        judgement |= {name: tuple(judgement[name]) for name in ("failures", "captured", "undecided")}
        return cls(stored["model"], stored["code"], Judgement(**judgement))


def sources() -> str:
    """The backend and versions a row is about; for kiln also a digest of its sources, so no row of old code stays."""
    import transformers

    digest = hashlib.sha256()
    for path in sorted(Path(torchkiln.__file__).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    versions = f"torch {torch.__version__} transformers {transformers.__version__}"
    return f"{BACKEND} {versions} {digest.hexdigest()[:16] if BACKEND == 'kiln' else ''}".strip()


def _check_here(name: str, dtype: str) -> Judgement:
    try:
        return check(ARCHITECTURES[name], dtype, BACKEND)
    except Exception as error:
        traceback.print_exc()
        text = f"{type(error).__name__}: {error}".split("\n\nSet TORCHDYNAMO_VERBOSE")[0]
        return Judgement(dtype, (text[:1000],))


def _check_apart(name: str, dtypes: list[str]) -> list[Judgement]:
    """The same in a process of its own, with one thread: many of them may run at once."""
    alone = {"KILN_CACHE": "0", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    environment = {**os.environ, **alone}
    command = [sys.executable, "-m", "tests.models.transformers_models", "--one", name, "--dtypes", ",".join(dtypes)]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=TIME_LIMIT)
        printed, end = done.stdout, f"exit code {done.returncode}: {done.stderr[-1000:].strip() or 'no message'}"
    except subprocess.TimeoutExpired as expired:
        output = expired.stdout or b""
        printed, end = output if isinstance(output, str) else output.decode(), f"no end after {TIME_LIMIT} s"
    found = [Row.read(json.loads(line)).judgement for line in printed.splitlines() if line.startswith('{"model"')]
    missing = [dtype for dtype in dtypes if dtype not in {one.dtype for one in found}]
    return found + [Judgement(dtype, (end,)) for dtype in missing]


def _run(names: list[str], dtypes: list[str], kept: list[Row], workers: int) -> Iterator[list[Row]]:
    """Rows of one model after the other, as they end; ``kept`` ones are not run again."""
    code = sources()
    there = {(row.model, row.judgement.dtype): row for row in kept}
    todo: dict[str, list[str]] = {}
    for name in names:
        wanted = [dtype for dtype in dtypes if dtype in ARCHITECTURES[name].eager_dtypes]
        found = [there[name, dtype] for dtype in wanted if (name, dtype) in there]
        if len(found) < len(wanted):
            todo[name] = [dtype for dtype in wanted if (name, dtype) not in there]
        if found:
            yield found
    with ThreadPoolExecutor(workers) as pool:
        running = {pool.submit(_check_apart, name, wanted): name for name, wanted in todo.items()}
        for done in as_completed(running):
            yield [Row(running[done], code, judgement) for judgement in done.result()]


_HEADINGS = (
    "dtype", "outputs", "eager's", "gradients", "eager's", "graphs", "breaks", "kernels", "externs", "compiled",
    "seconds", "status",
)  # fmt: skip
_INTRODUCTION = """# Models

Architectures of the transformers library with random weights and small configurations, compiled with
`options={"fallback": False, "rng": "eager"}` and compared with eager: inference, then two training steps with dropout
whose gradients add up. Graph breaks by Dynamo are allowed; a graph that is not compiled is a failure.

Errors are relative to a float64 run from the same weights and with the same dropout masks, in the Euclidean norm, of
the worst output and of the worst gradient; eager's stand beside them. A tensor is wrong when it is several times
further off than eager's and than roundings of the weights move the float64 run (`tests/models/model_check.py`). An
output whose size such a rounding changes (a speech model rounds durations) is not compared, and named below.

*Graphs*, *kernels* and *externs* (calls of torch's operators) are those of the training steps. *Compiled* is the share
of eager's forward operators that lie in compiled graphs; operators that Dynamo computes while capturing are missing
from it.
"""


def _cells(row: Row) -> list[str]:
    j = row.judgement
    errors = [j.output_error, j.eager_output_error, j.gradient_error, j.eager_gradient_error]
    measured = [f"{error:.1e}" for error in errors] if j.graphs or BACKEND != "kiln" else ["–"] * 4
    counts = [str(j.graphs), str(j.breaks), str(j.kernels), str(j.externs), f"{j.share:.0%}", f"{j.seconds:.0f}"]
    return [j.dtype, *measured, *counts, row.status]


def _table(rows: list[Row]) -> Table:
    table = Table(title=f"transformers models, {BACKEND} against eager")
    table.add_column("model")
    for heading in _HEADINGS:
        table.add_column(heading, justify="left" if heading in ("dtype", "status") else "right")
    for row in rows:
        style = "red" if row.judgement.failures else None
        table.add_row(row.model, *_cells(row), style=style)
    return table


def page(rows: list[Row]) -> str:
    """docs/models.md."""
    order = {name: k for k, name in enumerate(ARCHITECTURES)}
    rows = sorted(rows, key=lambda row: (order[row.model], DTYPES.index(row.judgement.dtype)))
    wrong = [row for row in rows if row.judgement.failures]
    captured = [row for row in rows if row.status == "capture differs"]
    models = {row.model for row in rows}
    good = len(rows) - len(wrong) - len(captured)
    counts = f"{len(models)} models, {len(rows)} rows: {good} ok, {len(wrong)} wrong, {len(captured)} where Dynamo"
    lines = [
        _INTRODUCTION,
        f"Written by `make models` with {'; '.join(sorted({row.code for row in rows}))}.",
        f"{counts} captures another program than eager runs,",
        "so that `aot_eager` differs from eager in the same way.",
    ]
    for kind, members in KINDS.items():
        part = [row for row in rows if row.model in members]
        if part:
            lines += ["", f"## {kind.capitalize()}", "", f"| model | {' | '.join(_HEADINGS)} |"]
            lines += ["|---|---|" + "---:|" * 10 + "---|"]
            lines += [f"| {row.model} | {' | '.join(_cells(row))} |" for row in part]
    if undecided := [row for row in rows if row.judgement.undecided]:
        lines += ["", "## Sizes that rounding decides", ""]
        for row in undecided:
            lines.append(f"- {row.model} in {row.judgement.dtype}: {', '.join(row.judgement.undecided)}")
    for heading, some in (("What is wrong", wrong), ("What is captured otherwise", captured)):
        lines += ["", f"## {heading}", ""] if some else []
        for row in some:
            first = " ".join("; ".join(row.judgement.failures or row.judgement.captured).split())[:400]
            lines.append(f"- {row.model} in {row.judgement.dtype}: {first}")
    return "\n".join(lines) + "\n"


def _keep(path: Path, rows: list[Row]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps([asdict(row) for row in rows], indent=1))


def main(
    models: Annotated[str, typer.Option("--models", "--only", help="models or kinds to check, with commas")] = "",
    dtypes: Annotated[str, typer.Option(help="with commas")] = ",".join(DTYPES),
    workers: Annotated[int, typer.Option(help="processes at a time, of one thread each")] = 2,
    resume: Annotated[bool, typer.Option(help="keep the good rows of a stopped run of the same sources")] = False,
    results: Annotated[Path, typer.Option(help="where rows are kept for --resume")] = Path("results/models.json"),
    as_json: Annotated[bool, typer.Option("--json", help="print rows as JSON instead of a table")] = False,
    write_page: Annotated[bool, typer.Option("--page", help=f"write {PAGE} once all rows are there")] = False,
    one: Annotated[str | None, typer.Option(hidden=True)] = None,
) -> None:
    """Check whole models; exit code 1 when one differs from eager or does not compile."""
    precisions = [dtype.strip() for dtype in dtypes.split(",")]
    if unknown := [dtype for dtype in precisions if dtype not in DTYPES]:
        raise typer.BadParameter(f"unknown dtype {unknown[0]!r}; there are: {', '.join(DTYPES)}")
    if one is not None:
        for dtype in precisions:
            print(json.dumps(asdict(Row(one, sources(), _check_here(one, dtype)))), flush=True)
        return
    names = []
    for name in [name.strip() for name in models.split(",") if name.strip()] or list(ARCHITECTURES):
        if name not in ARCHITECTURES and name not in KINDS:
            choices = f"{', '.join(KINDS)}; {', '.join(ARCHITECTURES)}"
            raise typer.BadParameter(f"unknown model {name!r}; there are: {choices}")
        names += list(KINDS[name]) if name in KINDS else [name]
    console = Console(stderr=as_json, width=None if sys.stdout.isatty() else 150)
    stored = [Row.read(row) for row in json.loads(results.read_text())] if resume and results.exists() else []
    kept = [row for row in stored if row.status != "wrong" and row.code == sources()]
    rows: list[Row] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("models", total=len(names))
        for found in _run(names, precisions, kept, workers):
            rows += found
            for row in found:
                why = "; ".join(row.judgement.failures or row.judgement.captured)
                progress.console.print(f"{row.model} {row.judgement.dtype}: {row.status} {why}", markup=False)
            there = {(row.model, row.judgement.dtype) for row in rows}
            _keep(results, rows + [row for row in kept if (row.model, row.judgement.dtype) not in there])
            progress.update(task, completed=len({row.model for row in rows}))
    order = {name: k for k, name in enumerate(names)}
    rows.sort(key=lambda row: (order[row.model], DTYPES.index(row.judgement.dtype)))
    if as_json:
        print(json.dumps([asdict(row) for row in rows], indent=1))
    else:
        console.print(_table(rows))
    if write_page:
        there = {(row.model, row.judgement.dtype) for row in rows}
        everything = rows + [row for row in kept if (row.model, row.judgement.dtype) not in there]
        wanted = sum(dtype in one.eager_dtypes for one in ARCHITECTURES.values() for dtype in DTYPES)
        if len(everything) == wanted:
            PAGE.write_text(page(everything))
        else:
            console.print(f"{PAGE} is not written: {len(everything)} of its {wanted} rows are there")
    raise typer.Exit(1 if any(row.judgement.failures for row in rows) else 0)


if __name__ == "__main__":
    typer.run(main)
