"""Figures on disk: one JSON line for each cell, which counts for the same sources, versions and machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.operators.cells import Cell, Job
from benchmarks.operators.layouts import Layout
from benchmarks.operators.measure import Effort
from benchmarks.operators.programs import PROGRAMS
from torchkiln.bench import records
from torchkiln.bench.load import Load
from torchkiln.bench.records import BASE, OURS, digest, figures_from_json, is_current

ROOT = Path(__file__).resolve().parent.parent.parent
PATH = ROOT / "results" / "operators" / "records.jsonl"


@dataclass(frozen=True)
class Record(records.Record):
    """A cell with its figures; or ``left_out``, why there are none.

    ``sizes`` are those of its tensors, ``wrong`` says how our results differ from eager's. ``overhead_us`` is what a
    compiled call with nothing to compute takes longer, ``benchmark`` a digest of the sources of this benchmark.
    """

    sizes: str = ""
    wrong: str = ""
    left_out_for: str = ""
    overhead_us: float = 0.0
    benchmark: str = ""

    @property
    def failure(self) -> str:
        """Why ours could not be measured, or the process."""
        ours = self.figures.get(OURS)
        return ours.failure if ours is not None else ""

    @property
    def is_measured(self) -> bool:
        """Whether there are times of eager and ours."""
        both = [self.figures.get(name) for name in (BASE, OURS)]
        return all(figures is not None and figures.rounds for figures in both)


def new_record(cell: Cell, answer: dict[str, Any], command: str, effort: Effort, load: Load) -> Record:
    """The record of what a process answered."""
    figures = {name: figures_from_json(value) for name, value in answer.get("figures", {}).items()}
    made = records.new_record(cell, figures, cell.threads, command, effort.seconds, load)  # type: ignore[arg-type]
    return Record(
        **vars(made),
        sizes=answer.get("sizes", ""),
        wrong=answer.get("wrong", ""),
        left_out_for=answer.get("left_out", ""),
        overhead_us=answer.get("overhead_us", 0.0),
        benchmark=benchmark_digest(cell.entry in PROGRAMS),
    )


def read(path: Path) -> dict[Cell, Record]:
    """The last record of each cell."""
    return {record.cell: record for record in records.read(path, _from_json)}  # type: ignore[misc]


def counts(record: Record, backends: Sequence[str], effort: Effort) -> bool:
    """Whether the record need not be taken again; spread is shown, whatever it is."""
    if record.benchmark != benchmark_digest(record.cell.entry in PROGRAMS):
        return False
    wanted = () if record.left_out_for else backends
    return all(name in record.figures for name in wanted) and is_current(
        record, (), record.threads, rounds=effort.rounds, seconds=effort.seconds
    )


def _from_json(given: dict[str, Any]) -> Record:
    cell = given["cell"]
    where = Cell(cell["entry"], Layout(cell["layout"]), cell["dtype"], Job(cell["job"]), cell["threads"])
    figures = {name: figures_from_json(value) for name, value in given["figures"].items()}
    return Record(**{**given, "cell": where, "figures": figures, "load": Load(**given["load"])})


@cache
def benchmark_digest(of_program: bool) -> str:
    """A digest of what is measured and how, of programs or of the database; not of how it is chosen and shown."""
    folder = Path(__file__).parent
    names = ("layouts", "entry", "programs" if of_program else "database", "measure")
    return digest(folder, (folder / f"{name}.py" for name in names))
