"""The artifact of one graph: object code, constants, and what a loader must know of its native functions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from torchkiln.artifact.calls import Call

InputKind = Literal["tensor", "opaque", "number", "unused"]
Route = Literal["typed", "dispatcher", "python"]
StepKind = Literal["kernel", "copy", "library", "python", "check", "entry"]

ENTRY_SYMBOL = "kiln_entry"
RUN_SYMBOL = "kiln_run"
TIMES_SYMBOL = "kiln_times"


@dataclass(frozen=True)
class OutputSource:
    """Where an output comes from: tensor or integer ``number`` of those the graph makes, an input, or a known
    value. A boolean is one of the integers, returned as a bool."""

    kind: Literal["tensor", "input", "value", "number", "boolean"]
    number: int


@dataclass(frozen=True)
class TimedStep:
    """A step as a profile names it, with the nodes of the graph and the line of the user's program it comes from.

    ``kind``: "kernel" is one of ours, "copy" one that only moves elements, or torch's; "library" is a call of torch's
    operators by native code, "python" through Python, "check" looks at values, and "entry" is what comes around steps.
    """

    name: str
    kind: StepKind
    bytes: int = 0
    operations: int = 0
    nodes: tuple[str, ...] = ()
    source: str | None = None


@dataclass(frozen=True)
class EntryInfo:
    """What a process that loads the object code must know about the graph.

    ``python_calls`` are the calls made through Python, and those made so again when they have failed. The tuple given
    to the native functions holds the constants, then a function for each of them, then ``values``; an
    :class:`OutputSource` of kind "value" counts from the first of ``values``. ``reused`` are the inputs whose memory is
    written to after their last use; the caller says with a bit for each whether nobody else holds it. ``timed_steps``
    are what the graph keeps times of, if it does. ``kernels`` are the names of those it calls. ``written`` are the
    inputs that the graph writes to for its caller to see. ``opaque_constants`` are not read, but handed to operators.
    """

    inputs: tuple[InputKind, ...]
    python_calls: tuple[Call, ...]
    values: tuple[object, ...]
    outputs: tuple[OutputSource, ...]
    tensor_outputs: int
    number_outputs: int
    extern_calls: tuple[tuple[str, Route], ...]
    reused: tuple[int, ...] = ()
    timed_steps: tuple[TimedStep, ...] = ()
    kernels: tuple[str, ...] = ()
    written: tuple[int, ...] = ()
    opaque_constants: tuple[int, ...] = ()

    def positions(self, kind: InputKind) -> tuple[int, ...]:
        """The inputs of one kind."""
        return tuple(position for position, found in enumerate(self.inputs) if found == kind)


@dataclass(frozen=True, eq=False)
class Artifact:
    """All that is needed to run one compiled graph.

    ``object_code`` runs the graph, and calls the kernels in ``kernel_code`` (empty where there are none).
    """

    object_code: bytes
    kernel_code: bytes
    entry: EntryInfo
    constants: tuple[torch.Tensor, ...]
