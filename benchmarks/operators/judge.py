"""Which cells are losses, and what all of them say together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from benchmarks.operators.records import Record
from torchkiln.bench.records import BASE, OURS, PEER, spread
from torchkiln.bench.summary import geometric_mean

# A loss is more than a tenth and 10 µs: less is what a call costs, and the noise of a machine.
SHARE, MICROSECONDS = 0.10, 10.0


@dataclass(frozen=True)
class Ratio:
    """Time of ours over that of another: the median of the rounds' ratios, their spread, and of the fastest rounds.

    ``more_us`` is how many microseconds ours takes more, by medians and by fastest rounds, whichever is less.
    """

    median: float
    spread: float
    fastest: float
    more_us: float

    @property
    def is_loss(self) -> bool:
        """By medians and by fastest rounds alike: other programs make rounds slower, never faster."""
        return min(self.median, self.fastest) > 1 + SHARE and self.more_us > MICROSECONDS


def ratio(record: Record, other: str) -> Ratio | None:
    """None where one of the two has no times."""
    mine, theirs = record.figures.get(OURS), record.figures.get(other)
    if mine is None or theirs is None or not mine.rounds or not theirs.rounds:
        return None
    ratios = [a / b for a, b in zip(mine.rounds, theirs.rounds, strict=True)]
    more = min(median(mine.rounds) - median(theirs.rounds), min(mine.rounds) - min(theirs.rounds))
    return Ratio(median(ratios), spread(ratios), min(mine.rounds) / min(theirs.rounds), 1000 * more)


def losses(records: Sequence[Record], other: str = BASE) -> list[Record]:
    """Cells in which ours is slower, by far enough, than the other; those with the highest ratio first."""
    found = [(ratio(record, other), record) for record in records]
    lost = [(known.median, record) for known, record in found if known is not None and known.is_loss]
    return [record for _, record in sorted(lost, key=lambda pair: (-pair[0], str(pair[1].cell)))]


def is_overhead(record: Record) -> bool:
    """Whether ours would be no loss if the call itself took no time."""
    known, base = ratio(record, BASE), record.figures[BASE]
    if known is None:
        return False
    rest = known.more_us - record.overhead_us
    return rest <= MICROSECONDS or rest <= SHARE * 1000 * min(base.rounds)


@dataclass(frozen=True)
class Summary:
    """``times`` is the geometric mean of our time over eager's; ``at_least_peer`` of those measured with the peer."""

    name: str
    cells: int
    losses: int
    overheads: int
    times: float
    with_peer: int
    at_least_peer: int


def summary(name: str, records: Sequence[Record]) -> Summary:
    measured = [record for record in records if record.is_measured]
    lost = losses(measured)
    to_peer = [known for record in measured if (known := ratio(record, PEER)) is not None]
    return Summary(
        name,
        len(measured),
        len(lost),
        sum(map(is_overhead, lost)),
        geometric_mean([known.median for record in measured if (known := ratio(record, BASE)) is not None]),
        len(to_peer),
        sum(not known.is_loss for known in to_peer),
    )


def summaries(records: Sequence[Record]) -> list[Summary]:
    """Of all, and by each of what a cell is made of."""
    kinds: tuple[Callable[[Record], str], ...] = (
        lambda record: str(record.cell.layout),
        lambda record: record.cell.dtype,
        lambda record: str(record.cell.job),
        lambda record: record.cell.kind.split(" ", 3)[3],
    )
    found = [summary("all", records)]
    for kind in kinds:
        groups: dict[str, list[Record]] = {}
        for record in records:
            groups.setdefault(kind(record), []).append(record)
        found += [summary(name, group) for name, group in groups.items() if len(groups) > 1]
    return [line for line in found if line.cells]
