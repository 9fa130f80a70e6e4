"""The figures of a memory report as plain data, and how they are put together."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
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
from torchkiln.memory.capture import Captured, JointGraph, capture
from torchkiln.partition import kinds
from torchkiln.partition.budget import Planner, SavedPlan
from torchkiln.partition.classify import NodeInfo
from torchkiln.target import capture_target

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
        target = Path(folder)
        target.mkdir(parents=True, exist_ok=True)
        page, picture = (_write(target / name, content) for name, content in contents.items())
        return page, picture


def _write(path: Path, content: bytes) -> Path:
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(temporary, 0o666 & ~mask)  # those of a file written plainly; a temporary one is the owner's alone
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
    return path


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


@dataclass(frozen=True)
class _Planned:
    """One graph with the plans for every step of the ladder, and for the budget in force."""

    info: NodeInfo
    ladder: tuple[tuple[float, SavedPlan], ...]
    chosen: SavedPlan
    forward_seconds: float


def _planned(graph: JointGraph, settings: Settings) -> _Planned:
    info = NodeInfo(graph.module.graph, graph.num_fwd_outputs)
    planner = Planner(info, settings, capture_target(settings))
    forward = planner.seconds_of(planner.default.schedule.forward)
    return _Planned(info, tuple(planner.ladder()), planner.plan(settings.memory_budget), forward)


def _report(name: str, captured: Captured, settings: Settings) -> MemoryReport:
    planned = [_planned(graph, settings) for graph in captured.graphs]
    infos = [graph.info for graph in planned]
    eager = captured.eager.by_line
    default = sum(graph.ladder[0][1].saved_bytes for graph in planned)
    outside = max(0, captured.compiled.bytes - default)

    def point(budget: float | str, plans: Sequence[SavedPlan]) -> BudgetPoint:
        return _point(budget, infos, plans, outside, eager)

    steps = [step for step, _ in planned[0].ladder]
    return MemoryReport(
        model=name,
        graphs=len(planned),
        nodes=sum(len(graph.module.graph.nodes) for graph in captured.graphs),
        eager_bytes=captured.eager.bytes,
        outside_bytes=outside,
        forward_seconds=sum(graph.forward_seconds for graph in planned),
        points=tuple(point(step, [graph.ladder[k][1] for graph in planned]) for k, step in enumerate(steps)),
        chosen=point(settings.memory_budget, [graph.chosen for graph in planned]),
    )


def _point(
    budget: float | str,
    infos: Sequence[NodeInfo],
    plans: Sequence[SavedPlan],
    outside: int,
    eager: dict[str | None, int],
) -> BudgetPoint:
    peak = before = 0
    saved: dict[str, list[TensorUse]] = {}
    recomputed: dict[str, list[TensorUse]] = {}
    for info, plan in zip(infos, plans, strict=True):
        # While a graph runs, forward or backward, what the graphs before it saved is still there.
        peak = max(peak, before + plan.peak_bytes)
        before += plan.saved_bytes
        for node in dict.fromkeys(map(info.aliases.root, plan.saved)):
            if node in info.activation_bytes:
                saved.setdefault(_line(node), []).append(_use(info, node))
        for node in sorted(plan.recomputed, key=info.position.__getitem__):
            if isinstance(node.meta.get("val"), torch.Tensor) and not kinds.is_free(node) and node not in info.views:
                recomputed.setdefault(_line(node), []).append(_use(info, node))
    known = {line or "": size for line, size in eager.items()}
    lines = [
        LineUse(line, tuple(saved.get(line, ())), tuple(recomputed.get(line, ())), known.get(line, 0))
        for line in dict.fromkeys((*saved, *recomputed, *known))
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
    return TensorUse(
        name=node.name,
        operator=_operator(node),
        dtype=str(value.dtype).removeprefix("torch."),
        shape=tuple(info.sizes.number(size) for size in value.shape),
        bytes=info.sizes.of(value),
        module=owner.__name__ if isinstance(owner, type) else str(owner).rpartition(".")[2],
    )


def _operator(node: torch.fx.Node) -> str:
    """The operator that computes ``node``, of several results that of the one the node takes."""
    if getattr(node.target, "__name__", "") == "getitem" and node.all_input_nodes:
        node = node.all_input_nodes[0]
    name = str(getattr(node.target, "_opname", None) or getattr(node.target, "__name__", node.target))
    return name.partition(".")[0]
