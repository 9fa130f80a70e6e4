"""The figures of a memory report as plain data, and how they are put together."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.fx
from rich.console import Console, ConsoleOptions, RenderResult

from torchkiln import config
from torchkiln.config import Settings
from torchkiln.errors import UnsupportedError
from torchkiln.graph.source import source_line
from torchkiln.memory.capture import Captured, capture
from torchkiln.partition import kinds
from torchkiln.partition.budget import Planner, SavedPlan
from torchkiln.partition.classify import NodeInfo
from torchkiln.target import capture_target
from torchkiln.user_files import write_whole

_OWN_FILES = str(Path(__file__).parent)


@dataclass(frozen=True)
class TensorUse:
    """A tensor that forward saves or backward recomputes. ``bytes`` is the memory behind it."""

    name: str
    operator: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int
    module: str
    """The class of the innermost module it was computed in; empty outside of modules."""


@dataclass(frozen=True)
class LineUse:
    """What one line of the user's saves and what of it is recomputed. ``line`` is empty where none is known."""

    line: str
    saved: tuple[TensorUse, ...]
    recomputed: tuple[TensorUse, ...]
    eager_bytes: int
    """What eager keeps of this line."""

    @property
    def saved_bytes(self) -> int:
        return sum(tensor.bytes for tensor in self.saved)

    @property
    def recomputed_bytes(self) -> int:
        return sum(tensor.bytes for tensor in self.recomputed)


@dataclass(frozen=True)
class BudgetPoint:
    """What a memory budget gives. Bytes are of activations: inputs, parameters, results and gradients are not in."""

    budget: float | str
    saved_bytes: int
    peak_bytes: int
    """The simulated peak of forward and backward together."""
    extra_seconds: float
    """Estimated run time of what backward recomputes, on one thread."""
    lines: tuple[LineUse, ...]
    """By falling bytes."""


@dataclass(frozen=True)
class MemoryReport:
    """What :func:`memory_report` found. ``str()`` is a table, :meth:`save` writes a page and a picture."""

    model: str
    graphs: int
    """Graphs that Dynamo made of the model; more than one where it breaks."""
    nodes: int
    """Nodes of all joint graphs."""
    eager_bytes: int
    """What eager keeps for backward."""
    outside_bytes: int
    """What is kept beside the graphs whatever the budget: values handed from graph to graph, eager parts between them.
    Part of the bytes of every point."""
    forward_seconds: float
    """Estimated run time of forward on one thread, to see the extra time against."""
    points: tuple[BudgetPoint, ...]
    """For budgets falling from 1 to 0."""
    chosen: BudgetPoint
    """For the setting ``memory_budget`` in force."""

    @property
    def title(self) -> str:
        return f"Memory for the backward of {self.model}"

    @property
    def default(self) -> BudgetPoint:
        """At budget 1: the least memory that costs no speed."""
        return self.points[0]

    def __str__(self) -> str:
        console = Console(width=140, color_system=None, force_terminal=False)
        with console.capture() as captured:
            console.print(self)
        return captured.get().rstrip()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from torchkiln.memory.table import tables

        yield from tables(self)

    def html(self) -> str:
        """A page of its own, with drawings and tables; it loads nothing and needs no script."""
        from torchkiln.memory.page import page

        return page(self)

    def png(self) -> bytes:
        """The drawings as a picture. Needs matplotlib, which the extra ``torchkiln[report]`` installs."""
        from torchkiln.memory.plot import picture

        return picture(self)

    def save(self, folder: str | os.PathLike[str]) -> tuple[Path, Path]:
        """Write ``report.html`` and ``report.png`` to ``folder``, which is made if it is not there.

        Each file is whole or as it was before. Returns both paths.
        """
        contents = {"report.html": self.html().encode(), "report.png": self.png()}
        for name, content in contents.items():
            write_whole(Path(folder) / name, content)
        page, picture = (Path(folder) / name for name in contents)
        return page, picture


def memory_report(model: Callable[..., Any], /, *args: Any, **kwargs: Any) -> MemoryReport:
    """What training ``model`` keeps in memory for backward, and what lower memory budgets would change.

    ``model(*args, **kwargs)`` is called twice, with copies of the tensors given and with gradients on, as
    ``torch.compile(model, backend="kiln")`` would trace it; backward does not run. Parameters, buffers, gradients,
    attributes of modules and the random numbers to come stay as they are. The settings in force here hold
    (``with torchkiln.settings(memory_budget=0.5):``). Raises UnsupportedError where nothing needs gradients.
    """
    settings = config.resolve()
    captured = capture(model, args, kwargs, settings)
    if not captured.graphs and captured.eager.gradients:
        raise UnsupportedError(
            "Dynamo made no graph of this call that needs gradients, so it runs eagerly and no memory budget changes"
            f" what it keeps for backward, which is {captured.eager.bytes:,} bytes; TORCH_LOGS=graph_breaks tells why."
        )
    if not captured.graphs:
        raise UnsupportedError(
            "A memory report is about training, and no graph of this call needs gradients; give a model with"
            " parameters that require them."
        )
    return _report(_name_of(model), captured, settings)


def _name_of(model: Callable[..., Any]) -> str:
    model = getattr(model, "_orig_mod", model)
    return type(model).__name__ if isinstance(model, torch.nn.Module) else getattr(model, "__name__", "the function")


def _report(name: str, captured: Captured, settings: Settings) -> MemoryReport:
    target = capture_target(settings)
    infos = [NodeInfo(graph.module.graph, graph.num_fwd_outputs) for graph in captured.graphs]
    planners = [Planner(info, settings, target) for info in infos]
    outside = max(0, captured.compiled.bytes - sum(planner.default.saved_bytes for planner in planners))
    eager = {line or "": size for line, size in captured.eager.by_line.items()}
    ladders = zip(*(planner.ladder() for planner in planners), strict=True)
    chosen = [planner.plan(settings.memory_budget) for planner in planners]
    return MemoryReport(
        model=name,
        graphs=len(infos),
        nodes=sum(len(info.position) for info in infos),
        eager_bytes=captured.eager.bytes,
        outside_bytes=outside,
        forward_seconds=sum(planner.seconds_of(planner.default.schedule.forward) for planner in planners),
        points=tuple(_point(plans[0][0], [plan for _, plan in plans], outside, eager) for plans in ladders),
        chosen=_point(settings.memory_budget, chosen, outside, eager),
    )


def _point(budget: float | str, plans: Sequence[SavedPlan], outside: int, eager: Mapping[str, int]) -> BudgetPoint:
    peak = before = 0
    saved: dict[str, list[TensorUse]] = {}
    recomputed: dict[str, list[TensorUse]] = {}
    for plan in plans:
        info = plan.schedule.info
        # While a graph runs, forward or backward, what the graphs before it saved is still there.
        peak = max(peak, before + plan.peak_bytes)
        before += plan.saved_bytes
        for node in dict.fromkeys(map(info.aliases.root, plan.saved)):
            if node in info.activation_bytes:
                saved.setdefault(_line(node), []).append(_use(info, node))
        for node in sorted(plan.recomputed, key=info.position.__getitem__):
            if isinstance(node.meta.get("val"), torch.Tensor) and node not in info.free:
                recomputed.setdefault(_line(node), []).append(_use(info, node))
    lines = [
        LineUse(line, tuple(saved.get(line, ())), tuple(recomputed.get(line, ())), eager.get(line, 0))
        for line in dict.fromkeys((*saved, *recomputed, *eager))
    ]
    lines.sort(key=lambda use: (-use.saved_bytes, -use.recomputed_bytes, -use.eager_bytes, use.line))
    extra = sum(plan.extra_seconds for plan in plans)
    return BudgetPoint(budget, before + outside, peak + outside, extra, tuple(lines))


def _line(node: torch.fx.Node) -> str:
    line = source_line(node) or ""
    return "" if line.startswith(_OWN_FILES) else line


def _use(info: NodeInfo, node: torch.fx.Node) -> TensorUse:
    value = node.meta["val"]
    modules = list((node.meta.get("nn_module_stack") or {}).values())
    owner = modules[-1][1] if modules else ""
    target = kinds.computing_node(node).target
    operator = str(getattr(target, "__name__", target))
    return TensorUse(
        name=node.name,
        operator=operator.partition(".")[0],
        dtype=str(value.dtype).removeprefix("torch."),
        shape=info.sizes.shape(value),
        bytes=info.sizes.of(value),
        module=owner.__name__ if isinstance(owner, type) else str(owner).rpartition(".")[2],
    )
