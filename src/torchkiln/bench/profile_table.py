"""A profile as tables for a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from torchkiln.artifact.artifact import StepKind
from torchkiln.bench.profile import Part, Profile

MOST_PARTS = 40
MOST_OPERATORS = 2

_KINDS: Mapping[StepKind, str] = MappingProxyType(
    {
        "library": "calls of torch's library",
        "kernel": "kernels of ours",
        "copy": "copies",
        "python": "operators called through Python",
        "check": "checks of values and sizes",
        "entry": "inputs, outputs and arena",
    }
)


def profile_tables(profile: Profile) -> RenderableType:
    """A line on the whole, its parts by kind, a line on the machine, and every kernel and call."""
    whole = f"{profile.cell}: a step takes {1e3 * profile.seconds:.3f} ms (mean of {profile.steps})"
    limits = profile.limits
    copies = ", ".join(
        f"{one.bytes_per_second / 1e9:.1f} GB/s of {one.bytes / 2**20:g} MiB" for one in limits.bandwidths
    )
    machine = (
        f"This machine copies {copies} (read and written together) and multiplies matrices at"
        f" {limits.operations_per_second / 1e9:.0f} GFLOP/s; lines are compared with a copy of as much and with a"
        " matmul."
    )
    return Group(Text(whole, style="bold"), totals_table(profile), Text(machine), parts_table(profile))


def totals_table(profile: Profile) -> Table:
    """What a step consists of; the parts add up to the whole."""
    table = Table(box=box.SIMPLE)
    for title in ("where", "ms", "share"):
        table.add_column(title, justify="left" if title == "where" else "right")
    found = profile.by_kind()
    rows = [(text, found[kind]) for kind, text in _KINDS.items() if kind in found]
    for text, seconds in (*rows, ("outside of native calls", profile.outside_seconds)):
        table.add_row(text, f"{1e3 * seconds:.3f}", f"{seconds / profile.seconds:.1%}")
    return table


def parts_table(profile: Profile) -> Table:
    """Kernels and calls, the longest first; the rest of many are one line."""
    table = Table(box=box.SIMPLE)
    table.add_column("name", overflow="fold")
    for title in ("kind", "calls", "ms", "share", "MB", "GB/s", "of copy", "GFLOP/s", "of mm"):
        table.add_column(title, justify="left" if title == "kind" else "right", no_wrap=True)
    table.add_column("operators", overflow="fold")
    several = len({part.graph for part in profile.parts}) > 1
    shown, others = profile.parts[:MOST_PARTS], profile.parts[MOST_PARTS:]
    for part in shown:
        table.add_row(*_row(part, profile, several))
    if others:
        seconds = sum(part.seconds for part in others)
        calls = sum(part.calls for part in others)
        share = f"{seconds / profile.seconds:.1%}"
        table.add_row(f"{len(others)} others", "", f"{calls:g}", f"{1e3 * seconds:.3f}", share)
    return table


def _row(part: Part, profile: Profile, several: bool) -> list[str]:
    name = part.name.removeprefix("aten.").replace(".default", "")
    moved, computed = part.bytes / part.seconds, part.operations / part.seconds
    timed = part.kind not in ("entry", "check")
    return [
        f"{part.graph}: {name}" if several else name,
        part.kind,
        f"{part.calls:g}",
        f"{1e3 * part.seconds:.3f}",
        f"{part.seconds / profile.seconds:.1%}",
        f"{part.bytes / 1e6:.2f}" if timed else "",
        f"{moved / 1e9:.1f}" if timed else "",
        f"{moved / profile.limits.bytes_per_second(part.bytes / part.calls):.0%}" if timed else "",
        f"{computed / 1e9:.1f}" if timed and part.operations else "",
        f"{computed / profile.limits.operations_per_second:.0%}" if timed and part.operations else "",
        _shortened(part.operators),
    ]


def _shortened(operators: Sequence[str]) -> str:
    more = len(operators) - MOST_OPERATORS
    return ", ".join(operators[:MOST_OPERATORS]) + (f" and {more} more" if more > 0 else "")
