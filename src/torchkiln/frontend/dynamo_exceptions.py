"""Exceptions that Dynamo takes from a backend as they are; every other one it wraps in BackendCompilerFailed.

With some, Dynamo captures the frame again. With others it breaks the graph: where an operator cannot be traced, such as
a data-dependent one in a mixture of experts, it leaves that frame as it is and compiles the frames called in it.
"""

from __future__ import annotations

from typing import Any, Self

from torch._dynamo.exc import (
    ShortenTraceback,
    SkipFrame,
    TensorifyScalarRestartAnalysis,
    exceptions_allowed_to_be_fallback,
)
from torch._dynamo.symbolic_convert import InstructionTranslator

from torchkiln.errors import DiscardedError, OptionError

_ANOTHER_ATTEMPT = (TensorifyScalarRestartAnalysis, ShortenTraceback, SkipFrame)


def is_for_dynamo(error: BaseException) -> bool:
    """Whether ``error``, raised while AOTAutograd traces, makes the Dynamo that called this backend try something else.

    Nobody hears it outside of Dynamo, in a backward that is compiled when it first runs, and where the user asked for
    one graph (``fullgraph=True``): there it is a failure like any other.
    """
    return isinstance(error, _ANOTHER_ATTEMPT) or breaks_the_graph(error)


def breaks_the_graph(error: BaseException) -> bool:
    """Whether Dynamo leaves the frame it captured as it is, and goes on with those called in it."""
    return isinstance(error, exceptions_allowed_to_be_fallback) and _dynamo_may_break_the_graph()


def _dynamo_may_break_the_graph() -> bool:
    try:
        tracer: Any = InstructionTranslator.current_tx()
    except AttributeError:  # Dynamo has not traced in this thread
        return False
    if tracer is None:  # nor does it now, in torch 2.11
        return False
    wants_one_graph = tracer.one_graph or getattr(tracer, "error_on_graph_break", False)
    # Dynamo does not go around functions that the user marked with allow_in_graph.
    return not (wants_one_graph or tracer.output.has_user_defined_allowed_in_graph)


class _OnItsWayThroughDynamo(ShortenTraceback):
    """An error of ours that the user sees with its own sentence and no inner frames.

    Dynamo appends to the arguments of what passes it how to report a bug to PyTorch, and this is none.
    """

    def __init__(self, sentence: str) -> None:
        super().__init__(sentence, first_useful_frame=None)
        self._sentence = sentence

    def __str__(self) -> str:
        return self._sentence

    def remove_dynamo_frames(self) -> Self:
        return self.with_traceback(None)


class OptionErrorInDynamo(_OnItsWayThroughDynamo, OptionError):
    """An OptionError that a backend raises."""


class DiscardedErrorInDynamo(_OnItsWayThroughDynamo, DiscardedError):
    """A DiscardedError that a backend raises."""
