"""Where the time of a step goes: calls of torch's library, kernels of ours, copies, and all that is not native code."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from torchkiln.artifact.artifact import StepKind
from torchkiln.bench.backends import torch_compile
from torchkiln.bench.cells import Cell, Shapes
from torchkiln.bench.worker import Measured
from torchkiln.debug.recording.limits import measure_limits
from torchkiln.debug.recording.model import Limits
from torchkiln.errors import KilnError, first_line
from torchkiln.runtime.timing import StepTimes, profiled


@dataclass(frozen=True)
class Part:
    """What one step of the model spends in one kernel, or one operator on tensors of some sizes.

    ``calls``, ``seconds``, ``bytes`` and ``operations`` are those of one step of the model. ``graph`` counts compiled
    graphs from 1.
    """

    graph: int
    name: str
    kind: StepKind
    calls: float
    seconds: float
    bytes: float
    operations: float
    operators: tuple[str, ...]


@dataclass(frozen=True)
class Profile:
    """``seconds`` is a whole step as the caller sees it. Parts are sorted, the longest first."""

    cell: Cell
    seconds: float
    steps: int
    parts: tuple[Part, ...]
    limits: Limits

    @property
    def native_seconds(self) -> float:
        return sum(part.seconds for part in self.parts)

    @property
    def outside_seconds(self) -> float:
        """Outside of the native calls: Dynamo's guards, autograd, the loss, Python."""
        return self.seconds - self.native_seconds

    def by_kind(self) -> Mapping[StepKind, float]:
        kinds = dict.fromkeys(part.kind for part in self.parts)
        return {kind: sum(part.seconds for part in self.parts if part.kind == kind) for kind in kinds}


def profile(cell: Cell, seconds: float = 1.0, say: Callable[[str], None] = lambda text: None) -> Profile:
    """Compile an entry with the setting ``profile`` and run it for about so long, in this process.

    Figures are means over the faster half of the steps: a machine does other things now and then.
    """
    others = set(profiled())
    say(f"{cell}: first call")
    measured = Measured(cell, torch_compile("kiln", fallback=False, adaptive=False, profile=True))
    with measured.mode():
        try:
            measured.step(1 if cell.shapes is Shapes.dynamic else 0)
        except Exception as error:
            cause = getattr(error, "inner_exception", None) or error  # Dynamo wraps what a backend raises
            raise KilnError(f"{cell} cannot be profiled: {first_line(cause)}") from error
        for _ in range(3):
            measured.step()
        graphs = [times for times in profiled() if times not in others]
        say(f"{cell}: steps")
        runs = _runs(measured, graphs, seconds)
    kept = sorted(runs, key=lambda run: run.seconds)[: -(-len(runs) // 2)]
    whole = sum(run.seconds for run in kept) / len(kept)
    say("what this machine can do")
    return Profile(cell, whole, len(kept), _parts(graphs, kept), measure_limits(measured.dtype))


@dataclass(frozen=True)
class _Run:
    """One step: its seconds, and for each step of each graph how often it ran and for how many nanoseconds."""

    seconds: float
    spent: list[list[tuple[int, int]]]


def _runs(measured: Measured, graphs: Sequence[StepTimes], seconds: float) -> list[_Run]:
    found: list[_Run] = []
    begin = time.perf_counter()
    while len(found) < 4 or time.perf_counter() - begin < seconds:
        before = [graph.read() for graph in graphs]
        start = time.perf_counter()
        measured.step()
        taken = time.perf_counter() - start
        pairs = [zip(old, graph.read(), strict=True) for old, graph in zip(before, graphs, strict=True)]
        spent = [[(b.calls - a.calls, b.nanoseconds - a.nanoseconds) for a, b in graph] for graph in pairs]
        found.append(_Run(taken, spent))
    return found


def _parts(graphs: Sequence[StepTimes], runs: Sequence[_Run]) -> tuple[Part, ...]:
    """Steps of equal name in one graph are one part: a kernel launched several times, an operator on equal sizes."""
    found: dict[tuple[int, str, StepKind], Part] = {}
    for number, graph in enumerate(graphs):
        for k, one in enumerate(graph.read()):
            step = one.step
            calls = sum(run.spent[number][k][0] for run in runs) / len(runs)
            if not calls:
                continue
            key = number, step.name, step.kind
            old = found.get(key, Part(number + 1, step.name, step.kind, 0, 0, 0, 0, ()))
            found[key] = replace(
                old,
                calls=old.calls + calls,
                seconds=old.seconds + sum(run.spent[number][k][1] for run in runs) / len(runs) / 1e9,
                bytes=old.bytes + calls * step.bytes,
                operations=old.operations + calls * step.operations,
                operators=tuple(dict.fromkeys((*old.operators, *step.nodes))),
            )
    return tuple(sorted(found.values(), key=lambda part: -part.seconds))
