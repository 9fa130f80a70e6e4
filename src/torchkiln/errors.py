"""The exceptions torchkiln raises: one family, each message one line with a way out."""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import partial
from importlib.util import find_spec
from pathlib import Path

_LONGEST_VALUE = 200


class KilnError(Exception):
    """Base of everything torchkiln raises on purpose."""


class OptionError(KilnError, ValueError):
    """A setting, an option or a mode that does not exist, or a value it cannot take."""

    @classmethod
    def unknown(cls, what: str, name: object, valid: Iterable[str]) -> OptionError:
        """``what`` is the kind of name in the user's words ("option", "mode"); ``valid`` are all names that exist."""
        names = sorted(valid)
        near = get_close_matches(str(name), names, n=1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        return cls(f"Unknown {what} {shown(name)}{hint}; the valid ones are: {', '.join(names)}.")

    @classmethod
    def bad_value(cls, name: str, value: object, valid: str, *, where: str = "") -> OptionError:
        """``valid`` completes the sentence "... must be"; ``where`` says who gave the value, if not the caller."""
        given = f" (given by {where})" if where else ""
        return cls(f"Setting {name!r} must be {valid}, not {shown(value)}{given}.")


class UnsupportedError(KilnError, NotImplementedError):
    """Something torch can express and torchkiln does not handle; with ``fallback`` on, the graph runs eagerly."""


class NotPlainError(KilnError, RuntimeError):
    """A call of a compiled graph that native code cannot make, which reads and writes memory: ``what`` says why.

    Raised before anything of that graph has run, and ``compilation`` is the number of the compilation that the graph
    is of, where it has one: to whoever calls another graph, much may have run. Forward and inference then run as
    captured; a backward has no such form.
    """

    def __init__(self, what: str, compilation: int | None = None) -> None:
        self.compilation = compilation
        super().__init__(
            f"{what}: native code computes with strided CPU tensors only, be they inputs, gradients or what a hook for"
            " saved tensors unpacks; give it such ones or run this part eagerly"
        )


class DiscardedError(KilnError, RuntimeError):
    """A use of weights that :func:`torchkiln.freeze` has discarded."""

    def __init__(self, what: str) -> None:
        super().__init__(
            f"{what}, but torchkiln.freeze(..., discard_parameters=True) has discarded its weights; build the model"
            " again, load its weights, and freeze it anew or without discarding."
        )


class NotPreparedError(NotPlainError):
    """Weights that a compiled graph cannot be run with, found where they are prepared.

    ``weights`` are the inputs that those of refused layers are made of. Without them the call runs as captured.
    """

    def __init__(self, what: str, weights: Iterable[int] = ()) -> None:
        self.what, self.compilation, self.weights = what, None, frozenset(weights)
        RuntimeError.__init__(self, f"{what}; run this part eagerly, or compile with prepare_weights=False")


@dataclass
class Refusals:
    """Why layers cannot be remade, and the inputs that their weights are made of."""

    reasons: list[str] = field(default_factory=list)
    weights: set[int] = field(default_factory=set)

    def error(self) -> NotPreparedError | None:
        return NotPreparedError(self.reasons[0], self.weights) if self.reasons else None


_noted: ContextVar[Refusals | None] = ContextVar("noted", default=None)


@contextlib.contextmanager
def noting_refusals() -> Iterator[Refusals]:
    """Inside, this thread's refusals are noted in place of raised: one run finds all of them."""
    found = Refusals()
    token = _noted.set(found)
    try:
        yield found
    finally:
        _noted.reset(token)


def refuse(reason: str, weights: Sequence[int]) -> None:
    """Raise or note that a layer cannot be remade of these inputs."""
    noted = _noted.get()
    if noted is None:
        raise NotPreparedError(reason, weights)
    noted.reasons.append(reason)
    noted.weights.update(weights)


class VerificationError(KilnError):
    """A program, kernel or plan that breaks a rule of its kind: a mistake of the compiler, found by checking mode."""


class ArtifactError(KilnError):
    """A compiled graph that cannot be stored, or bytes that are none."""


class CacheEntryError(KilnError):
    """Bytes that are no entry of the cache for the key asked for. ``damaged`` is False for a good one of others.

    Such are entries of another format, or signed with another key or not at all.
    """

    def __init__(self, message: str, *, damaged: bool = True) -> None:
        self.damaged = damaged
        super().__init__(message)


class CacheError(KilnError):
    """Something that was asked of the cache and cannot be done."""


class PackageError(KilnError):
    """A model that cannot be compiled ahead of time, or a file that is no package, a damaged one or one for another
    machine."""


class ArgumentError(KilnError, ValueError):
    """A call of a package with other arguments, or weights for it, than it was compiled for."""


class RecordingError(KilnError):
    """A recording or the folder of one that cannot be read, or a program that cannot be recorded or replayed."""


class PatternError(KilnError):
    """A rewrite that cannot work as it is written."""


class GraphCheckError(KilnError):
    """A graph that is not well formed, found by checking mode; names the pass that left it so."""


class NodeFailure(KilnError):
    """Marks, on its way up, the node at which ``__cause__`` was raised; the stage turns it into CompileError."""

    def __init__(self, node: str, source: str | None) -> None:
        self.node = node
        self.source = source
        super().__init__(f"failed at node {node}")


class PassFailure(KilnError):
    """Marks, on its way up, the graph pass in which ``__cause__`` was raised; the stage turns it into CompileError."""

    def __init__(self, name: str) -> None:
        self.name = name
        super().__init__(f"failed in pass {name}")


class CompileError(KilnError):
    """A failure while compiling one graph.

    ``stage`` is the part of the flow that failed, ``graph_pass`` the pass or rewrite that was running, ``node`` the FX
    node it was working on and ``source`` the user's line that made the node; each is None where it does not apply.
    ``cause`` is the exception underneath, of whose message the first line is shown.
    """

    def __init__(
        self,
        stage: str,
        cause: BaseException,
        *,
        graph_pass: str | None = None,
        node: str | None = None,
        source: str | None = None,
    ) -> None:
        self.stage = stage
        self.graph_pass = graph_pass
        self.node = node
        self.source = source
        self.cause = cause
        super().__init__(f"{self.reason()}. Set fallback=True to run this graph eagerly instead.")

    def reason(self) -> str:
        """The failure without the way out, for a log or a table."""
        within = f" in {self.graph_pass!r}" if self.graph_pass else ""
        at = f" at node {self.node}" if self.node else ""
        line = f" ({self.source})" if self.source else ""
        text = first_line(self.cause).rstrip(".")
        return f"{self.stage} failed{within}{at}{line}: {type(self.cause).__name__}: {text}"

    def __reduce__(self) -> tuple[object, ...]:
        where = {"graph_pass": self.graph_pass, "node": self.node, "source": self.source}
        return partial(CompileError, **where), (self.stage, self.cause)  # type: ignore[arg-type]


class FallbackWarning(UserWarning):
    """Warns, once, that a graph could not be compiled and runs eagerly."""


class SettingWarning(UserWarning):
    """Warns, once, of an environment variable that looks like a setting and is none."""


class CacheWarning(UserWarning):
    """Warns, once, that compiled graphs are not kept or not found where they should be."""


class AdviceWarning(UserWarning):
    """A setting of torch would make the program faster; given once in a process for each setting."""


class TraceWarning(UserWarning):
    """Warns that a compilation could not be traced to a folder (``KILN_TRACE``)."""


class NotCheckedWarning(UserWarning):
    """Warns that a check that was asked for could not be made on some graph."""


def first_line(error: BaseException) -> str:
    """What the error says, without the explanations that many of torch's go on with."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "no message")


def shown(value: object) -> str:
    """A value a user gave, as text for one line."""
    text = " ".join(repr(value).split())
    return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]}..."


def warn_user(message: str, category: type[Warning]) -> None:
    """Warn at the line of the user's that led here: the innermost frame outside of torch and torchkiln."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_not_the_users()):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)


def _not_the_users() -> tuple[str, ...]:
    folders = [Path(__file__).parent]
    torch = find_spec("torch")
    if torch is not None and torch.origin is not None:
        folders.append(Path(torch.origin).parent)
    return (*(f"{folder}/" for folder in folders), contextlib.__file__, "<")
