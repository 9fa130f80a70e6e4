"""The artifact of one graph: object code, constants, and what a loader must know of its native functions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from torchkiln.artifact.calls import TRITON_KERNEL_NAME, Call, OperatorCall
from torchkiln.artifact.texts import Description

InputKind = Literal["tensor", "opaque", "number", "unused"]
Route = Literal["typed", "dispatcher", "python"]
StepKind = Literal["kernel", "copy", "library", "python", "check", "entry"]

ENTRY_SYMBOL = "kiln_entry"
RUN_SYMBOL = "kiln_run"
TIMES_SYMBOL = "kiln_times"
TIMES_PER_STEP = 3
TEXTS_SYMBOL = "kiln_texts"
CARD_SYMBOL = "kiln_card"

CARD_FUNCTIONS = (
    *("cuLaunchKernel", "cuCtxGetCurrent", "cuCtxSetCurrent", "cuStreamIsCapturing"),
    *("aoti_torch_get_current_cuda_stream", "aoti_torch_create_cuda_guard", "aoti_torch_delete_cuda_guard"),
)
"""What native code calls of the driver and of torch's CUDA library, in the order of the array of ``CARD_SYMBOL``.

Behind their addresses it has the context of the card, a mark that native code sets when a CUDA graph is captured, the
bytes that the arena of the last call took, a tensor that is lent for the arena of calls on one stream (that stream, the
tensor's handle, its bytes), and the kernels of the graph in the order of :class:`CardInfo`.
"""
CARD_CONTEXT = len(CARD_FUNCTIONS)
CARD_CAPTURED = CARD_CONTEXT + 1
CARD_ARENA_BYTES = CARD_CAPTURED + 1
CARD_LENT_STREAM = CARD_ARENA_BYTES + 1
CARD_LENT_TENSOR = CARD_LENT_STREAM + 1
CARD_LENT_BYTES = CARD_LENT_TENSOR + 1
FIRST_CARD_KERNEL = CARD_LENT_BYTES + 1


@dataclass(frozen=True)
class OutputSource:
    """Where an output comes from: tensor or integer ``number`` of those the graph makes, an input, or a known
    value. A boolean is one of the integers, returned as a bool."""

    kind: Literal["tensor", "input", "value", "number", "boolean"]
    number: int


@dataclass(frozen=True)
class TimedStep:
    """A step as a profile names it, with the nodes of the graph it comes from and the position of the user's line in
    ``Artifact.sources``.

    ``kind``: "kernel" is one of ours, "copy" one that only moves elements, or torch's; "library" is a call of torch's
    operators by native code, "python" through Python, "check" looks at values, and "entry" is what comes around steps.
    """

    name: str
    kind: StepKind
    bytes: int = 0
    operations: int = 0
    nodes: tuple[str, ...] = ()
    source: int | None = None


@dataclass(frozen=True)
class CardInfo:
    """The card of a graph: torch's ``number`` for it, below 0 for an emulated one, and the symbols of its ``kernels``.

    ``constants`` are the positions of those that are given to the graph on the card.

    The rest is for CUDA graphs of calls. ``static`` are inputs that somebody holds beyond each call, ``sized`` those
    whose sizes or strides differ from call to call, and ``saved`` results that only backward sees. ``uncapturable``
    says why calls cannot be captured; it is empty where they can.
    """

    number: int
    kernels: tuple[str, ...]
    constants: tuple[int, ...] = ()
    static: tuple[int, ...] = ()
    sized: tuple[int, ...] = ()
    saved: tuple[int, ...] = ()
    uncapturable: str = ""


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
    card: CardInfo | None = None

    @property
    def is_for_this_process(self) -> bool:
        """Whether it means nothing to another process, which must not be given it."""
        return any(
            call.operator == TRITON_KERNEL_NAME
            if isinstance(call, OperatorCall)
            else any(body.artifact.entry.is_for_this_process for body in call.bodies)
            for call in self.python_calls
        )

    def positions(self, kind: InputKind) -> tuple[int, ...]:
        """The inputs of one kind."""
        return tuple(position for position, found in enumerate(self.inputs) if found == kind)


@dataclass(frozen=True)
class GraphSummary:
    """What is counted of a graph, whether it was compiled in this process or loaded.

    ``kind``, ``nodes``, ``operations``, ``kernels`` and ``launches`` as in :class:`torchkiln.stats.GraphRecord`;
    ``extern_calls`` are torch operators and how often one run calls each. ``allocated_bytes`` is the most
    memory that a call has from the C library at a time, its results included, for symbolic sizes of typical values.
    """

    kind: str
    nodes: int
    operations: int
    kernels: int
    launches: int
    extern_calls: tuple[tuple[str, int], ...]
    allocated_bytes: int


@dataclass(frozen=True, eq=False)
class Artifact:
    """All that is needed to run one compiled graph.

    ``step_code`` runs the graph, and calls the kernels in ``kernel_code`` (empty where there are none). It names
    ``texts`` by number, through an array of C strings that the loader makes (:data:`TEXTS_SYMBOL`). ``sources`` are the
    distinct lines of the user's program that they name. ``summary`` is None for a body: its graph counts it.
    ``card_code`` is the PTX of the kernels of a card, empty where there are none, and LLVM's IR for an emulated card;
    ``card_object`` the machine code of it, empty where only the driver makes that.
    """

    step_code: bytes
    kernel_code: bytes
    entry: EntryInfo
    constants: tuple[torch.Tensor, ...]
    texts: tuple[Description, ...] = ()
    sources: tuple[str, ...] = ()
    summary: GraphSummary | None = None
    card_code: bytes = b""
    card_object: bytes = b""
