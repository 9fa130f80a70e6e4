"""A recording as tables for the terminal: where compiling took its time, and what runs."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TypeVar

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from torchkiln.debug.recording.model import Compilation, Kernel, LibraryCall, Limits, Line, Recording
from torchkiln.stats import counted

_Work = TypeVar("_Work", Kernel, LibraryCall)
_MOST_ROWS = 12
_WIDTH = 120


def summary_text(recording: Recording, width: int = _WIDTH) -> str:
    """The tables as plain text."""
    file = io.StringIO()
    Console(file=file, width=width, color_system=None).print(summary(recording))
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines())


def summary(recording: Recording) -> RenderableType:
    """Everything a first look asks for; the longest of each kind."""
    parts: list[RenderableType] = [_head(recording), _stages(recording), _passes(recording)]
    parts += [_kernels(recording), _library_calls(recording), _fusions(recording), _memory(recording)]
    parts += [_breaks(recording), _recompilations(recording), _cache(recording), _fallbacks(recording)]
    return Group(*(part for part in parts if not (isinstance(part, Table) and not part.row_count)))


def _head(recording: Recording) -> Text:
    about, kinds = recording.about, [one.kind for one in recording.compilations]
    with_what = f"torch {about.torch}, torchkiln {about.torchkiln}, {about.target}, {counted(about.threads, 'thread')}"
    breaks = counted(len(recording.graph_breaks), "graph break")
    seconds = sum(recording.seconds.values())
    lines = [f"{about.name}: {with_what}"]
    lines.append(f"{counted(len(kinds), 'graph')} ({', '.join(kinds) or 'none'}) compiled in {seconds:.2f} s, {breaks}")
    if recording.eager_seconds is not None and recording.compiled_seconds is not None:
        ratio = recording.eager_seconds / recording.compiled_seconds
        lines.append(
            f"a call takes {duration(recording.compiled_seconds)} compiled,"
            f" {duration(recording.eager_seconds)} eager ({ratio:.2f} times as fast)"
        )
    return Text("\n".join(lines))


def _table(title: str, columns: Sequence[str], *, text: int = 1) -> Table:
    """The first ``text`` columns are words, others figures."""
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for k, column in enumerate(columns):
        table.add_column(column, justify="left" if k < text else "right", overflow="fold")
    return table


def _add_row(table: Table, *cells: str) -> None:
    """Cells are texts of the user's: rich would take parts of them for markup (``[b]``) or for pictures (``:100:``)."""
    table.add_row(*map(Text, cells))


def _stages(recording: Recording) -> Table:
    table = _table("Compiling, by stage", ("stage", "seconds", "share"))
    total = sum(recording.seconds.values())
    for name, seconds in sorted(recording.seconds.items(), key=lambda item: -item[1]):
        _add_row(table, name, f"{seconds:.3f}", f"{100 * seconds / total:.0f} %" if total else "")
    return table


def _passes(recording: Recording) -> Table:
    table = _table("Slowest passes", ("pass", "graph", "changed", "ms"), text=3)
    for one in sorted(recording.passes, key=lambda one: -one.seconds)[:_MOST_ROWS]:
        changed = "yes" if one.changed else "no"
        _add_row(table, f"{one.number} {one.stage}/{one.name}", one.graph, changed, f"{1e3 * one.seconds:.1f}")
    return table


def _kernels(recording: Recording) -> Table:
    columns = ("kernel", "lines", "launches", "time", "moved", "GFLOP", "bandwidth", "FLOPs")
    rows = [(one, kernel) for one in recording.compilations for kernel in one.kernels]
    table = _table(_title("Kernels by measured time; shares are of this machine's limits", rows), columns, text=2)
    for compilation, kernel in _longest(rows):
        what = f"{compilation.id} {kernel.name}", places(kernel.lines), str(kernel.launches)
        _add_row(table, *what, *_work(kernel, recording.limits))
    return table


def _library_calls(recording: Recording) -> Table:
    columns = ("library call", "lines", "no kernel, because", "time", "moved", "GFLOP", "bandwidth", "FLOPs")
    rows = [(one, call) for one in recording.compilations for call in one.library_calls]
    table = _table(_title("Library calls", rows), columns, text=3)
    for compilation, call in _longest(rows):
        what = f"{compilation.id} {call.name}", places(call.lines), call.reason
        _add_row(table, *what, *_work(call, recording.limits))
    return table


def _title(title: str, rows: Sequence[object]) -> str:
    return f"{title} ({_MOST_ROWS} of {len(rows)})" if len(rows) > _MOST_ROWS else title


def _longest(rows: Iterable[tuple[Compilation, _Work]]) -> list[tuple[Compilation, _Work]]:
    return sorted(rows, key=lambda row: -(row[1].seconds or 0.0))[:_MOST_ROWS]


def _work(item: Kernel | LibraryCall, limits: Limits | None) -> tuple[str, ...]:
    """Time, bytes, operations, and shares of what the machine can do."""
    moved, operations = amount(item.bytes), f"{item.operations / 1e9:.4f}"
    if item.seconds is None:
        return "not measured", moved, operations, "", ""
    shares = shares_of(item, limits)
    return duration(item.seconds), moved, operations, *(f"{100 * share:.0f} %" for share in shares)


def shares_of(item: Kernel | LibraryCall, limits: Limits | None) -> tuple[float, ...]:
    """Of the bandwidth of a copy as large, and of the operations of a matmul; none where nothing was measured."""
    if limits is None or not item.seconds:
        return ()
    launches = item.launches if isinstance(item, Kernel) else 1
    bandwidth = limits.bytes_per_second(item.bytes / max(launches, 1))
    return item.bytes / item.seconds / bandwidth, item.operations / item.seconds / limits.operations_per_second


def _fusions(recording: Recording) -> Table:
    table = _table("Not fused or inlined, by reason", ("reason", "how", "pairs"), text=2)
    counts: dict[tuple[str, str], int] = {}
    for one in recording.compilations:
        for fusion in one.fusions:
            if not fusion.fused:
                what = fusion.reason, "not inlined" if fusion.kind == "inline" else "not fused"
                counts[what] = counts.get(what, 0) + 1
    for (reason, how), count in sorted(counts.items(), key=lambda item: -item[1]):
        _add_row(table, reason, how, str(count))
    return table


def _memory(recording: Recording) -> Table:
    table = _table("Memory of a call", ("graph", "peak", "arena", "buffers", "steps"))
    for one in recording.compilations:
        if one.memory is not None:
            memory = one.memory
            counts = str(len(memory.buffers)), str(len(memory.steps))
            _add_row(table, one.id, amount(memory.peak_bytes), amount(memory.arena_bytes), *counts)
    return table


def _breaks(recording: Recording) -> Table:
    table = _table("Graph breaks", ("reason", "line"), text=2)
    for one in recording.graph_breaks:
        _add_row(table, one.reason, "" if one.line is None else str(one.line))
    return table


def _recompilations(recording: Recording) -> Table:
    table = _table("Compiled again", ("function", "because"), text=2)
    for one in recording.recompilations:
        _add_row(table, f"{one.function} ({one.line})", "\n".join(one.reasons))
    return table


def _cache(recording: Recording) -> Table:
    table = _table("Cache", ("looked for", "found", "why"), text=3)
    for lookup in dict.fromkeys(lookup for one in recording.compilations for lookup in one.cache):
        _add_row(table, lookup.what, "yes" if lookup.hit else "no", lookup.why)
    return table


def _fallbacks(recording: Recording) -> Table:
    table = _table("Run eagerly", ("graph", "because"), text=2)
    for one in recording.compilations:
        if one.fallback:
            _add_row(table, one.id, one.fallback)
    return table


def places(lines: Sequence[Line], most: int = 3) -> str:
    """``model.py:12, 14; norm.py:3`` in short."""
    by_file: dict[str, list[int]] = {}
    for line in lines[:most]:
        by_file.setdefault(Path(line.file).name, []).append(line.line)
    text = "; ".join(f"{file}:{', '.join(map(str, numbers))}" for file, numbers in by_file.items())
    return f"{text}, …" if len(lines) > most else text


def duration(seconds: float) -> str:
    """With a unit that fits: 1.2 s, 3.4 ms, 5.6 µs."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.2f} {unit}"
    return f"{seconds / 1e-6:.1f} µs"


def amount(nbytes: float) -> str:
    """With a unit that fits: 12 B, 3.4 KiB, 5.6 MiB."""
    for unit in ("B", "KiB", "MiB"):
        if nbytes < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} GiB"
