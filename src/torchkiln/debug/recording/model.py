"""A recording: what a program's compilations did, as plain data that a report, a terminal or a file shows.

Nodes have names that are unique in their stage; other parts name nodes of a graph by them. Texts, stages and passes
are in tables of the recording, since the graphs of one captured graph share some: elsewhere they are numbers, the
positions in those tables.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torchkiln.debug.recording import json_form
from torchkiln.user_files import write_whole

VERSION = 1
"""Changes when the JSON of a recording does."""


@dataclass(frozen=True)
class Line:
    """A line of the user's program; ``file`` is a key of :attr:`Recording.sources` where the file could be read."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass(frozen=True)
class About:
    """What was recorded: a function's name or a command, when, with which versions, for which machine."""

    name: str
    date: str
    torch: str
    torchkiln: str
    target: str
    threads: int


@dataclass(frozen=True)
class GraphBreak:
    """A place where Dynamo ended a captured graph, and why."""

    reason: str
    line: Line | None = None


@dataclass(frozen=True)
class Guards:
    """What Dynamo checks before it runs the code of one compiled frame, a guard per line."""

    function: str
    text: str
    line: Line | None = None


@dataclass(frozen=True)
class Recompiled:
    """A function that was compiled again, and the guards that failed."""

    function: str
    reasons: tuple[str, ...]
    line: Line | None = None


@dataclass(frozen=True)
class Argument:
    """An input of a graph. Sizes and strides are numbers, or expressions where they are symbolic.

    One that is no tensor has ``dtype`` "int", "float", "bool" or "", and its value as ``value`` where it is known.
    """

    name: str
    dtype: str
    sizes: tuple[int | str, ...] = ()
    strides: tuple[int | str, ...] = ()
    device: str = ""
    requires_grad: bool = False
    value: str = ""


@dataclass(frozen=True)
class Node:
    """A node of a graph. ``op`` is that of FX: placeholder, call_function, get_attr, output.

    ``module`` is the path of the module that made it ("layers.0.attention"), ``lines`` the user's line and those that
    called it, the innermost first. ``reads`` are nodes of the same stage, ``comes_from`` those of the stage before in
    the same compilation.
    """

    id: str
    op: str
    target: str
    label: str
    module: str = ""
    lines: tuple[Line, ...] = ()
    dtype: str = ""
    sizes: tuple[int | str, ...] = ()
    reads: tuple[str, ...] = ()
    comes_from: tuple[str, ...] = ()


@dataclass(frozen=True)
class Stage:
    """What one stage made. ``nodes`` are those of a graph; programs, groups, kernels and plans are text alone.

    ``seconds`` are those spent in making it, without stages nested inside.
    """

    name: str
    text: int
    seconds: float = 0.0
    nodes: tuple[Node, ...] = ()


@dataclass(frozen=True)
class Pass:
    """One run of a graph pass. ``graph`` is the kind of graph: captured, joint, inference, forward, backward, weights.

    ``before`` and ``after`` are texts; they are the same one where the pass changed nothing.
    """

    number: int
    stage: str
    name: str
    graph: str
    seconds: float
    changed: bool
    before: int
    after: int


@dataclass(frozen=True)
class Fusion:
    """Whether the loop of nodes ``second`` runs in the kernel of nodes ``first``, and why not.

    ``kind`` is "inline" where the loop is computed where it is read, or "fuse".
    """

    kind: str
    first: tuple[str, ...]
    second: tuple[str, ...]
    fused: bool
    reason: str = ""


@dataclass(frozen=True)
class Kernel:
    """A kernel of ours. ``nodes`` are of the last stage that has nodes; ``lines`` are the user's lines it computes.

    ``text`` is the loop nest, ``llvm`` its code before LLVM optimizes it, ``assembly`` the machine's. ``bytes``,
    ``operations`` (floating-point) and ``seconds`` are those of all its ``launches`` in one call of the graph.
    ``seconds`` is None where nothing was measured.
    """

    name: str
    text: str
    llvm: str
    assembly: str
    nodes: tuple[str, ...]
    lines: tuple[Line, ...]
    launches: int
    bytes: int
    operations: int
    seconds: float | None = None


@dataclass(frozen=True)
class LibraryCall:
    """A call of a torch operator or a library function. ``reason`` says why it is no kernel of ours.

    Other fields as in :class:`Kernel`, for this call alone.
    """

    name: str
    arguments: str
    nodes: tuple[str, ...]
    lines: tuple[Line, ...]
    reason: str
    bytes: int
    operations: int
    seconds: float | None = None


@dataclass(frozen=True)
class BufferLife:
    """Memory of one tensor, alive from step ``first`` to step ``last``; ``place`` is where it lies."""

    name: str
    bytes: int
    first: int
    last: int
    place: str


@dataclass(frozen=True)
class MemoryStep:
    """A step of the plan, and the bytes that are taken while it runs: the arena, and tensors of its own that live.

    Inputs and constants are not counted. The most of all steps is :attr:`Memory.peak_bytes`.
    """

    name: str
    live_bytes: int


@dataclass(frozen=True)
class Memory:
    """The memory plan of a graph. ``peak_bytes`` is what a call takes at most: the arena and tensors of its own."""

    peak_bytes: int
    arena_bytes: int
    steps: tuple[MemoryStep, ...]
    buffers: tuple[BufferLife, ...]


@dataclass(frozen=True)
class CacheLookup:
    """What was looked for in the cache; ``why`` says in which fields the nearest entry differs, or who had it."""

    what: str
    hit: bool
    why: str = ""


@dataclass(frozen=True)
class Compilation:
    """One functional graph on its way to native code.

    ``kind`` is inference, forward, backward or weights; "captured" is a graph that did not get so far. Those of one
    captured graph have the same number ``capture``. ``stages`` and ``passes`` lead from the captured graph to its
    plan. A graph that runs eagerly has a ``fallback``: the reason. ``seconds`` are spent in its own stages. Times of
    kernels and calls are the least of ``measured_calls``.
    """

    id: str
    kind: str
    capture: int
    inputs: tuple[Argument, ...]
    seconds: float
    stages: tuple[int, ...]
    passes: tuple[int, ...] = ()
    fusions: tuple[Fusion, ...] = ()
    kernels: tuple[Kernel, ...] = ()
    library_calls: tuple[LibraryCall, ...] = ()
    memory: Memory | None = None
    cache: tuple[CacheLookup, ...] = ()
    fallback: str = ""
    measured_calls: int = 0


@dataclass(frozen=True)
class Bandwidth:
    """How many bytes a second a copy moves that reads and writes ``bytes`` together."""

    bytes: int
    bytes_per_second: float


@dataclass(frozen=True)
class Limits:
    """What this machine reached with torch's threads: copies, smallest first, and a matmul, or a kernel if faster."""

    bandwidths: tuple[Bandwidth, ...]
    operations_per_second: float

    def bytes_per_second(self, moved: float) -> float:
        """What a copy reaches that moves as much: the smallest measured one that is no smaller, or the largest."""
        return self.bandwidths[self.place_of(moved)].bytes_per_second

    def place_of(self, moved: float) -> int:
        """Which of the bandwidths holds for so many bytes."""
        fitting = (place for place, known in enumerate(self.bandwidths) if known.bytes >= moved)
        return next(fitting, len(self.bandwidths) - 1)


@dataclass(frozen=True)
class Recording:
    """Everything that was recorded of one function or program. ``sources`` are the user's files that lines name.

    ``seconds`` are those of compiling, by stage. ``eager_seconds`` and ``compiled_seconds`` are those of one call.
    """

    about: About
    sources: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    graph_breaks: tuple[GraphBreak, ...] = ()
    guards: tuple[Guards, ...] = ()
    recompilations: tuple[Recompiled, ...] = ()
    texts: tuple[str, ...] = ()
    stages: tuple[Stage, ...] = ()
    passes: tuple[Pass, ...] = ()
    compilations: tuple[Compilation, ...] = ()
    seconds: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    eager_seconds: float | None = None
    compiled_seconds: float | None = None
    limits: Limits | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "sources", MappingProxyType(dict(self.sources)))
        object.__setattr__(self, "seconds", MappingProxyType(dict(self.seconds)))

    def stages_of(self, compilation: Compilation) -> list[Stage]:
        """What the stages of one compilation made, in order."""
        return [self.stages[number] for number in compilation.stages]

    def __str__(self) -> str:
        from torchkiln.debug.recording.summary import summary_text

        return summary_text(self)

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write the recording to a folder: files that a person can read, and all of it as ``recording.json``.

        Files of another recording that was saved there are removed.
        """
        from torchkiln.debug.recording.folder import remove_recording, write_recording

        remove_recording(Path(folder))
        write_recording(self, Path(folder))

    def html(self, path: str | os.PathLike[str]) -> None:
        """Write the recording as one HTML file that needs nothing else."""
        from torchkiln.debug.report import report_page

        write_whole(Path(path), report_page(self).encode())

    def to_json(self) -> dict[str, Any]:
        """As JSON values; :meth:`from_json` makes an equal recording of them."""
        return {"version": VERSION, **json_form.encode(self)}

    @classmethod
    def from_json(cls, content: Any) -> Recording:
        """The recording that :meth:`to_json` wrote; RecordingError for anything else."""
        return json_form.decode_versioned(cls, content, VERSION)
