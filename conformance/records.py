"""Verdicts on disk: one JSON line per operator and dtype, so that a run can be stopped and taken up again.

A line counts for one version of torch, one backend and one state of the sources; others are left alone.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from conformance.cases import Case
from conformance.check import CATEGORIES, PASSED, Verdict

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "results" / "conformance"


@dataclass
class Record:
    """What came of one case. ``verdicts`` keeps only what did not pass or passed with a note."""

    operator: str
    dtype: str
    backend: str
    torch_version: str
    source: str
    chosen: str = "all"
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(CATEGORIES, 0))
    verdicts: list[dict[str, Any]] = field(default_factory=list)
    externs: dict[str, int] = field(default_factory=dict)
    kernels: int = 0
    lowerings: dict[str, list[int]] = field(default_factory=dict)  # by name: the first batch that reached it
    seconds: float = 0.0

    @property
    def case(self) -> Case:
        return Case(self.operator, self.dtype)

    def add(self, verdicts: Iterable[Verdict]) -> None:
        for verdict in verdicts:
            self.counts[verdict.category] += 1
            if verdict.category != PASSED or verdict.note:
                self.verdicts.append(asdict(verdict))


@lru_cache(maxsize=1)
def source_hash() -> str:
    """A digest of the compiler's sources."""
    digest = hashlib.sha256()
    for path in sorted((ROOT / "src").rglob("*.py")):
        digest.update(str(path.relative_to(ROOT)).encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def path_for(backend: str) -> Path:
    return FOLDER / f"{backend}.jsonl"


def new_record(case: Case, backend: str, chosen: str) -> Record:
    return Record(case.operator, case.dtype, backend, torch.__version__, _source_of(backend), chosen)


def append(record: Record) -> None:
    path = path_for(record.backend)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as out:
        out.write(json.dumps(asdict(record)) + "\n")


def read(backend: str, *, any_source: bool = False) -> dict[tuple[Case, str], Record]:
    """Records of this torch and these sources, by case and choice of samples; the last one of a case counts."""
    found = {}
    for record in _lines(backend):
        if record.torch_version == torch.__version__ and (any_source or record.source == _source_of(backend)):
            found[record.case, record.chosen] = record
    return found


def _lines(backend: str) -> Iterator[Record]:
    path = path_for(backend)
    if not path.exists():
        return
    with path.open() as lines:
        for line in lines:
            try:
                yield Record(**json.loads(line))
            except (json.JSONDecodeError, TypeError):
                continue  # cut off when a run was stopped, or written by an older form of this file


def _source_of(backend: str) -> str:
    return source_hash() if backend == "kiln" else "-"
