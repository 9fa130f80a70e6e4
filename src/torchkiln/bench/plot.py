"""Speed-up over eager against the seconds of the first call: the points, and a picture of them by matplotlib."""

from __future__ import annotations

import io
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from torchkiln.bench.cells import Cell
from torchkiln.bench.records import BASE, Record
from torchkiln.errors import KilnError

# Ours first; people with any color vision tell them apart, and markers differ too.
_COLORS = ("#2a6fbb", "#e08a1e", "#3a9d6e", "#a04a9c", "#c0392b", "#8a8f98", "#5b4b3a", "#00a3b4")
_MARKERS = "os^DvPX*"


@dataclass(frozen=True)
class Point:
    """One cell by one backend."""

    cell: Cell
    backend: str
    first_seconds: float
    speedup: float
    ms: float

    def __str__(self) -> str:
        return (
            f"{self.cell}, {self.backend}: {self.speedup:.2f} × eager, {self.ms:.3f} ms a step,"
            f" first call {self.first_seconds:.2f} s"
        )


def points(records: Iterable[Record]) -> list[Point]:
    """Every backend but eager, in every cell that it and eager got through with reliable times."""
    return [
        Point(record.cell, name, figures.first_seconds, speedup, figures.ms)
        for record in records
        for name, figures in record.figures.items()
        if name != BASE and (speedup := record.speedup(name, BASE)) is not None and figures.first_seconds > 0
    ]


def backends(shown: Sequence[Point]) -> list[str]:
    """The backends that have points, ours first."""
    return sorted({point.backend for point in shown}, key=lambda name: (not name.startswith("kiln"), name))


def colors(shown: Sequence[Point]) -> dict[str, str]:
    """The color of each backend that has points, ours first."""
    return dict(zip(backends(shown), itertools.cycle(_COLORS), strict=False))


def limits(values: Iterable[float]) -> tuple[float, float]:
    """Ends of a logarithmic axis with some room around the values and around 1."""
    given = [1.0, *values]
    return min(given) / 1.3, max(given) * 1.3


def ticks(low: float, high: float) -> Iterator[float]:
    """1, 2 and 5 times the powers of ten from ``low`` to ``high``."""
    for power in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1):
        yield from (digit * 10.0**power for digit in (1, 2, 5) if low <= digit * 10.0**power <= high)


def picture(records: Iterable[Record]) -> bytes:
    """A PNG with one point for each cell and backend."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.ticker import NullLocator
    except ImportError as error:
        raise KilnError(
            "The picture of a benchmark needs matplotlib; install it with: pip install 'torchkiln[bench]', or leave it"
            " out with: --no-plot."
        ) from error
    shown = points(records)
    figure = Figure(figsize=(10, 6.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for (name, color), marker in zip(colors(shown).items(), itertools.cycle(_MARKERS), strict=False):
        mine = [point for point in shown if point.backend == name]
        across, up = [point.first_seconds for point in mine], [point.speedup for point in mine]
        axes.scatter(across, up, color=color, marker=marker, alpha=0.75, s=30, label=name, linewidths=0)
    axes.axhline(1.0, color="#8a8f98", linewidth=1)
    across_limits, up_limits = limits(p.first_seconds for p in shown), limits(p.speedup for p in shown)
    axes.set(
        title="Speed-up over eager against the first call",
        xscale="log",
        xlabel="first call, seconds",
        xlim=across_limits,
        yscale="log",
        ylabel="speed-up over eager",
        ylim=up_limits,
    )
    for axis, ends in ((axes.xaxis, across_limits), (axes.yaxis, up_limits)):
        places = list(ticks(*ends))
        axis.set_ticks(places, [f"{place:g}" for place in places])
        axis.set_minor_locator(NullLocator())
    axes.grid(alpha=0.25)
    if shown:
        axes.legend(loc="best")
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=110)
    return content.getvalue()
