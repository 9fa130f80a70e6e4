"""Figures on disk: one JSON line for each cell, so that a run can be stopped and taken up again."""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import date
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torchkiln
from torchkiln.bench.cells import Cell, Job, Precision, Shapes
from torchkiln.bench.load import Load

# The names of the backends that are judged: our own, the one it competes with, and no compiler at all.
OURS, PEER, BASE = "kiln", "inductor", "eager"


@dataclass(frozen=True)
class Figures:
    """What was measured of one backend in one cell; with ``failure``, the line it failed with and nothing else.

    ``ms`` is the median of ``rounds``. ``peak_mib`` is the most memory that the process and all it started were seen to
    hold together, at least ``process_mib``, the peak of the process itself from its start; ``step_mib`` is its peak in
    steps alone. ``difference`` is the largest one from eager relative to the largest element. ``fallbacks`` are reasons
    why graphs of ours could not be compiled, ``slower`` times of those that were left to eager because that was
    measured to be faster.
    """

    first_seconds: float = 0.0
    ms: float = 0.0
    rounds: tuple[float, ...] = ()
    peak_mib: float = 0.0
    process_mib: float = 0.0
    step_mib: float = 0.0
    difference: float | None = None
    externs: Mapping[str, int] = field(default_factory=dict)
    launches: int = 0
    fallbacks: tuple[str, ...] = ()
    slower: tuple[str, ...] = ()
    failure: str = ""

    @property
    def spread(self) -> float:
        """That of its rounds."""
        return spread(self.rounds)

    @property
    def is_reliable(self) -> bool:
        """Whether it did not fail and its rounds agree well enough for ``ms`` to be compared with others."""
        return not self.failure and uncertainty(self.rounds) <= LARGEST_ERROR


# Above this standard error a median is unreliable: of two such, a speed-up of 1.7 is within two standard errors of 1.
LARGEST_ERROR = 0.25


def spread(rounds: Sequence[float]) -> float:
    """Half the distance between the quartiles of these rounds as a share of their median; infinite for fewer than two.

    Of few rounds a quartile lies between the outermost and the one next to it: one of five that is far off shows.
    """
    if len(rounds) < 2:
        return math.inf
    low, middle, high = statistics.quantiles(rounds, n=4)
    return (high - low) / 2 / middle if middle > 0 else math.inf


def uncertainty(rounds: Sequence[float]) -> float:
    """The standard error of the median of these rounds as a share of it, if they were independent and normal.

    Rounds of a machine that is busy for seconds on end are not independent, so it is the least to expect. Infinite
    where nothing can be said.
    """
    # The quartiles of a normal distribution are 1.35 standard deviations apart; a median's error is 1.25 of a mean's.
    return 1.25 * 2 * spread(rounds) / 1.35 / math.sqrt(max(len(rounds), 1))


def percent(share: float) -> str:
    """A spread or an error as text."""
    return f"{share:.0%}" if share < math.inf else "unknown"


@dataclass(frozen=True)
class Record:
    """A cell, the figures of its backends from one interleaved run, and where they were taken.

    ``source`` is a digest of the compiler's sources, ``threads`` how many torch was given, ``command`` what was typed,
    ``round_seconds`` how long a round was to take, ``load`` what else the machine did during the rounds.
    """

    cell: Cell
    figures: Mapping[str, Figures]
    machine: str
    versions: Mapping[str, str]
    source: str
    day: str
    threads: int = 0
    command: str = ""
    round_seconds: float = 0.0
    load: Load = field(default_factory=Load)

    def speedup(self, backend: str, over: str) -> float | None:
        """How many times as fast ``backend`` is as ``over``; None where one of them failed or is unreliable."""
        mine, other = self.figures.get(backend), self.figures.get(over)
        if mine is None or other is None or not mine.is_reliable or not other.is_reliable:
            return None
        return other.ms / mine.ms

    def left_out(self) -> list[str]:
        """Backends that got through, but whose rounds differ so much that their time is unreliable."""
        return [name for name, figures in self.figures.items() if not figures.failure and not figures.is_reliable]

    def best_speedup(self, backend: str, over: str) -> float | None:
        """The same of the fastest round of each: what other programs take from a machine makes rounds slower only."""
        if self.speedup(backend, over) is None or not self.figures[backend].rounds or not self.figures[over].rounds:
            return None
        return min(self.figures[over].rounds) / min(self.figures[backend].rounds)


def new_record(
    cell: Cell, figures: Mapping[str, Figures], threads: int, command: str, round_seconds: float, load: Load
) -> Record:
    taken = machine(), versions(), source_digest(), date.today().isoformat()
    return Record(cell, figures, *taken, threads, command, round_seconds, load)


def read(path: Path, parse: Callable[[dict[str, Any]], Record] | None = None) -> list[Record]:
    """The records of a file, the last one of each cell; lines that are no records are left out.

    ``parse`` makes a record of a line, for a benchmark with other cells than those of ``cells.py``.
    """
    if not path.exists():
        return []
    found: dict[Cell, Record] = {}
    for line in path.read_text().splitlines():
        try:
            record = (parse or _from_json)(json.loads(line))
        except (ValueError, KeyError, TypeError, AttributeError):
            continue
        found[record.cell] = record
    return list(found.values())


def append(path: Path, record: Record) -> None:
    """Add one line, which a reader finds also where the one before was cut short."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab+") as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.write(b"\n")
        file.write(json.dumps(asdict(record)).encode() + b"\n")


def is_current(record: Record, backends: Iterable[str], threads: int, *, rounds: int, seconds: float) -> bool:
    """Whether the record has these backends, in no fewer and no shorter reliable rounds, of these sources and
    versions on this machine."""
    same = record.source == source_digest() and record.versions == versions() and record.machine == machine()
    if not same or record.threads != threads or record.round_seconds < seconds:
        return False
    found = [record.figures.get(backend) for backend in backends]
    return all(
        figures is not None and (figures.failure or (len(figures.rounds) >= rounds and figures.is_reliable))
        for figures in found
    )


def figures_from_json(given: dict[str, Any]) -> Figures:
    values: dict[str, Any] = {name: tuple(kept) if isinstance(kept, list) else kept for name, kept in given.items()}
    return Figures(**values)


def _from_json(given: dict[str, Any]) -> Record:
    cell = given["cell"]
    where = Cell(cell["entry"], Job(cell["job"]), Precision(cell["precision"]), Shapes(cell["shapes"]))
    figures = {name: figures_from_json(value) for name, value in given["figures"].items()}
    return Record(**{**given, "cell": where, "figures": figures, "load": Load(**given.get("load", {}))})


@lru_cache(maxsize=1)
def machine() -> str:
    """The processor and how many cores of it there are."""
    name = platform.processor() or platform.machine()
    try:
        found = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    except OSError:
        found = None
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{found[1].strip() if found else name}, {cores} cores"


@lru_cache(maxsize=1)
def versions() -> Mapping[str, str]:
    """Versions of what the figures depend on, of the packages that are there."""
    found = {"python": platform.python_version()}
    for package in ("torch", "torchkiln", "llvmlite", "transformers", "openvino", "onnxruntime"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


@lru_cache(maxsize=1)
def source_digest() -> str:
    """A digest of the compiler's sources."""
    root = Path(torchkiln.__file__).parent
    return digest(root, (path for path in root.rglob("*.py") if "bench" not in path.relative_to(root).parts))


def digest(root: Path, paths: Iterable[Path]) -> str:
    """A digest of files in a folder: of their names in it and what is in them."""
    made = hashlib.sha256()
    for path in sorted(paths):
        made.update(str(path.relative_to(root)).encode())
        made.update(path.read_bytes())
    return made.hexdigest()[:16]
