"""What our backend is to reach on this benchmark, and whether the records say that it does."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from torchkiln.bench.entries import ENTRIES, SERVING_GROUP
from torchkiln.bench.records import BASE, OURS, PEER, Figures, Record
from torchkiln.bench.summary import geometric_mean
from torchkiln.stats import counted

FROZEN, FROZEN_PEER = "kiln-frozen", "inductor-freezing"

Ratio = Callable[[Figures, Figures], float | None]
"""Ours to that of another; None where one of them is unreliable."""


@dataclass(frozen=True)
class Outcome:
    """``met`` is None where there is nothing to judge by. ``misses`` are cells with their figures, the worst first.

    ``left_out`` are cells with unreliable times, by which it is not judged.
    """

    target: str
    met: bool | None
    figure: str
    misses: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()

    @property
    def word(self) -> str:
        if self.met is None:
            return "not measured"
        if not self.met:
            return "missed"
        return f"met where measured, {len(self.left_out)} left out" if self.left_out else "met"


@dataclass(frozen=True)
class _Target:
    """A bound on the ratio of figures of ``ours`` to those of ``against``, for each cell, or for the mean of all.

    ``least`` says whether the bound is a lower one.
    """

    text: str
    against: str
    ratio: Ratio
    bound: float
    least: bool
    mean: bool = False
    group: str = ""
    ours: str = OURS

    def holds(self, ratio: float) -> bool:
        return ratio >= self.bound if self.least else ratio <= self.bound


def speed(mine: Figures, other: Figures) -> float | None:
    """How many times as fast ours is."""
    return other.ms / mine.ms if mine.is_reliable and other.is_reliable else None


def first_call(mine: Figures, other: Figures) -> float:
    return mine.first_seconds / other.first_seconds


def peak(mine: Figures, other: Figures) -> float:
    return mine.peak_mib / other.peak_mib


def peak_of_steps(mine: Figures, other: Figures) -> float:
    return mine.step_mib / other.step_mib


_TARGETS = (
    _Target("at least as fast as inductor in every cell", PEER, speed, 1.0, least=True),
    _Target("1.25 × inductor in geometric mean", PEER, speed, 1.25, least=True, mean=True),
    _Target("at least as fast as eager in every cell", BASE, speed, 1.0, least=True),
    _Target("small networks at least 2 × inductor", PEER, speed, 2.0, least=True, group="small"),
    _Target("serving at least as fast as inductor frozen", FROZEN_PEER, speed, 1.0, least=True, group=SERVING_GROUP),
    _Target("serving 1.1 × inductor frozen in geometric mean", FROZEN_PEER, speed, 1.1, True, True, SERVING_GROUP),
    _Target("frozen, at least as fast as inductor frozen", FROZEN_PEER, speed, 1.0, True, False, SERVING_GROUP, FROZEN),
    _Target("frozen, 1.1 × inductor frozen in the mean", FROZEN_PEER, speed, 1.1, True, True, SERVING_GROUP, FROZEN),
    _Target("first call at most a quarter of inductor's", PEER, first_call, 0.25, least=False),
    _Target("peak memory with all processes no higher than inductor's", PEER, peak, 1.0, least=False),
    _Target("peak memory of steps no higher than inductor's", PEER, peak_of_steps, 1.0, least=False),
)


def outcomes(records: Sequence[Record]) -> Iterator[Outcome]:
    """Every target in order; those of serving where it was measured."""
    for target in _TARGETS:
        concerned = [r for r in records if _in_group(r, target.group)]
        if concerned or target.group != SERVING_GROUP:
            yield _outcome(target, concerned)


def _in_group(record: Record, group: str) -> bool:
    entry = ENTRIES.get(record.cell.entry)
    return not group or (entry is not None and entry.group == group)


def _outcome(target: _Target, records: Sequence[Record]) -> Outcome:
    """What ours failed at counts as missed, whoever else failed; where only the other failed, there is no ratio."""
    failed: list[str] = []
    left_out: list[str] = []
    ratios: list[tuple[float, str]] = []
    for record in records:
        mine, other = record.figures.get(target.ours), record.figures.get(target.against)
        if mine is None or other is None:
            continue
        if mine.failure:
            failed.append(f"{record.cell} (failed: {mine.failure})")
        elif not other.failure:
            ratio = target.ratio(mine, other)
            if ratio is None:
                left_out.append(str(record.cell))
            else:
                ratios.append((ratio, str(record.cell)))
    if not ratios and not failed:
        return Outcome(target.text, None, "", left_out=tuple(left_out))
    mean = geometric_mean([ratio for ratio, _ in ratios])
    ratios.sort(reverse=not target.least)
    missed = [] if target.mean else [f"{cell} ({ratio:.2f} ×)" for ratio, cell in ratios if not target.holds(ratio)]
    good = target.holds(mean) if target.mean else not missed
    figure = f"mean {mean:.2f} ×, worst {ratios[0][0]:.2f} ×, {counted(len(ratios), 'cell')}" if ratios else "no ratios"
    return Outcome(target.text, good and not failed, figure, (*failed, *missed), tuple(left_out))
