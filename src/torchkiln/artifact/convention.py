"""A compiled captured graph as plain data: its compiled graphs, and how calls of it become calls of these."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils import _pytree as pytree

from torchkiln.artifact.artifact import Artifact
from torchkiln.errors import ArtifactError


@dataclass(frozen=True)
class Result:
    """One result of a captured graph; the sizes of its ``dynamic`` dimensions follow sizes of inputs."""

    requires_grad: bool
    dynamic: tuple[int, ...] = ()

    def __str__(self) -> str:
        gradient = "with" if self.requires_grad else "without"
        return f"{gradient} gradient" + (f", dynamic dimensions {list(self.dynamic)}" if self.dynamic else "")


@dataclass(frozen=True)
class Tangent:
    """The layout that backward was compiled for of the gradient of result ``result``.

    Strides where they are known, else a memory format.
    """

    result: int
    sizes: tuple[int, ...] = ()
    strides: tuple[int, ...] = ()
    format: torch.memory_format | None = None

    def __str__(self) -> str:
        layout = f"{list(self.sizes)} strides {list(self.strides)}" if self.format is None else str(self.format)
        return f"of result {self.result}: {layout}"


@dataclass(frozen=True)
class CallingConvention:
    """How one captured graph is called.

    The forward graph takes the inputs and returns the results, then tensors and ``saved_numbers`` numbers for backward.
    The backward graph takes those numbers, those tensors and the tangents. A graph without tangents is for inference.

    ``weights`` are the inputs that the graph of weights takes, if there is one: its results follow the inputs of the
    forward graph, and stay until one of these changes.

    ``mutated`` are the inputs that the graph writes to; their version counters advance with each call. ``structure`` is
    what the caller gets the results in. ``consumed`` are the nested inputs that a call empties, None where no input is
    nested. With ``autocast``, the graph was captured under it, and has the casts: it is off while compiled graphs run,
    or the operators they call would cast too. ``wrapped`` says why calls go through AOTAutograd's wrapper; it is empty
    where they go straight to the compiled graphs.
    """

    inputs: int
    results: tuple[Result, ...]
    structure: pytree.TreeSpec
    mutated: tuple[int, ...] = ()
    consumed: tuple[int, ...] | None = None
    saved_numbers: int = 0
    tangents: tuple[Tangent, ...] = ()
    autocast: bool = False
    wrapped: str = ""
    weights: tuple[int, ...] = ()

    def __str__(self) -> str:
        called = f"through AOTAutograd's wrapper: {self.wrapped}" if self.wrapped else "directly"
        lines = [f"{self.inputs} inputs, called {called}"]
        lines += ["captured under autocast"] if self.autocast else []
        lines += [f"prepares weights of inputs {list(self.weights)}"] if self.weights else []
        lines += [f"writes to input {position}" for position in self.mutated]
        lines += [f"result {k}: {result}" for k, result in enumerate(self.results)]
        lines += [f"tangent {tangent}" for tangent in self.tangents]
        return "\n".join(lines)


@dataclass(frozen=True, eq=False)
class CompiledFunction:
    """All that is needed to run one captured graph.

    ``backward`` is None for one of inference, ``weights`` where nothing is computed from weights alone.
    """

    convention: CallingConvention
    forward: Artifact
    backward: Artifact | None = None
    weights: Artifact | None = None

    def graphs(self) -> dict[str, Artifact]:
        """The artifacts there are, by name."""
        found = {"forward": self.forward, "backward": self.backward, "weights": self.weights}
        return {name: artifact for name, artifact in found.items() if artifact is not None}

    def with_graphs(self, changed: Callable[[Artifact], Artifact]) -> CompiledFunction:
        """The same function with every artifact changed."""
        graphs: dict[str, Any] = {name: changed(artifact) for name, artifact in self.graphs().items()}
        return replace(self, **graphs)

    def reject_incomplete(self) -> None:
        """Raise :class:`ArtifactError` where a graph is missing that the convention speaks of, or is one too many."""
        for name, wanted in (("backward", self.convention.tangents), ("weights", self.convention.weights)):
            if bool(wanted) != (name in self.graphs()):
                raise ArtifactError(f"This compiled function lacks its {name}, or has one too many; compile it again.")


@dataclass(frozen=True, eq=False)
class StoredFunction:
    """A compiled function as a cache keeps it. ``guards`` are conditions on symbolic sizes that compiling it added to
    those of the captured graph, as trees; ``can_run_twice`` says that a second run leaves no trace."""

    function: CompiledFunction
    can_run_twice: bool
    guards: tuple[tuple[object, ...], ...] = ()
