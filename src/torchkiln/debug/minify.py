"""Minify: a failing program becomes a file with a few nodes that fails in the same way.

Parts of the captured graph are compiled and judged in child processes: its start, its end, chunks of nodes replaced by
inputs with the values they had, calls replaced by an argument or a number, then smaller sizes. What is left is written
as one Python file, and counts only if that fails in a process of its own.
"""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.fx
from torch import Tensor

from torchkiln import config
from torchkiln.debug.check import NondeterministicError
from torchkiln.debug.children import import_compiler
from torchkiln.debug.failure import HANG, Failure, failure_of, failure_of_file
from torchkiln.debug.reproduction import tensor, view
from torchkiln.debug.shrink import Candidate, bypassed, ends_of, part, smaller_sizes
from torchkiln.errors import UnsupportedError
from torchkiln.frontend.reproductions import reproduction_options
from torchkiln.graph.eager_run import copies_of
from torchkiln.graph.program_text import constants_as_inputs, file_text
from torchkiln.graph.shared_memory import shared_memory
from torchkiln.graph.subgraphs import copy_graph_module
from torchkiln.graph.weights import static_as
from torchkiln.memory.capture import calling
from torchkiln.memory.unchanged import copied_inputs, state_kept
from torchkiln.user_files import write_whole

Say = Callable[[str], None]
# Seconds: of one check, of the check that is made even after time ran out, and of the file.
_LONGEST_CHECK, _LAST_CHECK, _LONGEST_RUN = 600.0, 60.0, 300.0
_MISSING_SETUP = (
    "Where the failure needs code that ran before, such as what registers a rewrite, give it as setup="
    ' ("import MODULE"; kiln minify FILE --import MODULE).'
)
# With more elements, a file that a better one is to replace has random inputs: values are text.
_MOST_WRITTEN = 1 << 20


@dataclass(frozen=True)
class MinifyReport:
    """What is left: ``file`` fails by itself with ``failure``, in a process of its own where ``verified``.

    ``nodes`` counts calls. ``complete`` is False where time ran out or the user stopped it.
    """

    file: Path
    failure: Failure
    nodes: int
    nodes_before: int
    seconds: float
    checks: int
    verified: bool
    complete: bool

    def __str__(self) -> str:
        proven = "fails in a process of its own" if self.verified else "does NOT fail in a process of its own"
        stopped = "" if self.complete else " (stopped early)"
        command = shlex.join(["python", str(self.file)])
        lines = [
            f"{self.file}: {self.nodes} of {self.nodes_before} nodes{stopped}, {proven}",
            f"  {self.failure.text}",
            f"  {self.checks} checks in {self.seconds:.0f} s; run it: {command}",
        ]
        return "\n".join(lines if self.verified else [*lines, f"  {_MISSING_SETUP}"])


def minify(
    function: Callable[..., Any],
    /,
    *args: Any,
    output: str | os.PathLike[str] = "reproduction.py",
    setup: str = "",
    dynamic: bool = False,
    slower: float | None = None,
    seconds: float = 300.0,
    say: Say | None = None,
    **kwargs: Any,
) -> MinifyReport:
    """Make the smallest program that fails as ``function(*args, **kwargs)`` does when it is compiled.

    Failures are exceptions while compiling, crashes, results or gradients worse than eager's, numbers that are not
    finite, and with ``slower``, more than that many times eager's time. The kind of failure is kept. ``setup`` is code
    that the file runs first, such as imports that register rewrites. With ``dynamic`` sizes are symbolic. After
    ``seconds``, or when interrupted (Ctrl-C), the search ends, and the file is made to fail by itself; a second Ctrl-C
    ends that too. The best so far is in the file at any time. Raises UnsupportedError where nothing fails.
    """
    import_compiler()
    others = ""
    for candidate in captured_graphs(function, args, kwargs, dynamic=dynamic):
        minifier = _Minifier(candidate, dynamic, slower, seconds, say or (lambda _: None), Path(output), setup)
        if minifier.failure is None:
            continue
        if minifier.failure.kind != NondeterministicError.__name__:
            return minifier.run()
        others = f"; of one nothing can be judged ({minifier.failure.text})"
    raise UnsupportedError(f"Nothing to minify: every captured graph compiles and agrees with eager{others}.")


def captured_graphs(
    function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], *, dynamic: bool
) -> list[Candidate]:
    """The graphs that Dynamo captures of one call, with the inputs each is given."""
    found: list[Candidate] = []

    def backend(gm: torch.fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        captured = copy_graph_module(gm)

        def call(*inputs: Any) -> Any:
            trains = torch.is_grad_enabled()
            copies = zip(copies_of(list(inputs)), inputs, strict=True)
            leaves = [_leaf(copy, value, trains=trains) for copy, value in copies]
            graph, given = constants_as_inputs(captured, leaves)
            found.append(Candidate(graph, tuple(given)))
            return captured(*inputs)

        return call

    model = getattr(function, "_orig_mod", function)
    with state_kept(model):
        given, named = copied_inputs((tuple(args), dict(kwargs)))
        torch.compile(calling(model), backend=backend, dynamic=dynamic)(*given, **named)
    return found


def _leaf(copy: Any, value: Any, *, trains: bool) -> Any:
    """A copy of an input; it requires no gradient where the program was called without gradients."""
    if not isinstance(value, Tensor):
        return copy
    return static_as(copy.detach().requires_grad_(trains and value.requires_grad), value)


class _OutOfTimeError(Exception):
    """No more checks are to be made."""


class _Minifier:
    """The best candidate so far, and the search for a better one."""

    def __init__(
        self,
        whole: Candidate,
        dynamic: bool,
        slower: float | None,
        seconds: float,
        say: Say,
        output: Path,
        setup: str,
    ) -> None:
        self._whole, self._dynamic, self._slower, self._say = whole, dynamic, slower, say
        self._output, self._setup = output, setup
        self._start = time.monotonic()
        self._seconds = seconds
        self._checks = 0
        self._best = whole
        self.failure = self._failure_of(whole, seconds)

    def run(self) -> MinifyReport:
        assert self.failure is not None
        self._say(f"{len(self._best.calls)} nodes: {self.failure.text}")
        complete = True
        verified = False
        self._write_best()
        try:
            for shrink in (self._shorten, self._cut_start, self._drop_outputs):
                shrink()
            self._remove_chunks()
            self._bypass()
            self._shrink_sizes()
            self._drop_gradients()
            self._remove_chunks()
        except (KeyboardInterrupt, _OutOfTimeError):
            complete = False
        try:
            self._say("running the file in a process of its own")
            verified = self._write_verified()
        except KeyboardInterrupt:
            complete = False
        return MinifyReport(
            file=self._output,
            failure=self.failure,
            nodes=len(self._best.calls),
            nodes_before=len(self._whole.calls),
            seconds=time.monotonic() - self._start,
            checks=self._checks,
            verified=verified,
            complete=complete,
        )

    def _failure_of(self, candidate: Candidate, seconds: float) -> Failure | None:
        self._checks += 1
        timeout = min(_LONGEST_CHECK, seconds)
        return failure_of(
            candidate.program(), candidate.inputs, dynamic=self._dynamic, slower=self._slower, timeout=timeout
        )

    @property
    def _left(self) -> float:
        return self._start + self._seconds - time.monotonic()

    def _takes(self, candidate: Candidate | None) -> bool:
        """Whether a candidate fails in the same way; it is the best one then."""
        if candidate is None or not candidate.calls or not candidate.outputs:
            return False
        left = self._left
        if left <= 0:
            raise _OutOfTimeError
        failure = self._failure_of(candidate, left)
        if failure is not None and failure.kind == HANG and left < _LONGEST_CHECK:
            raise _OutOfTimeError  # it was not given the time to show that it hangs
        if failure is None or self.failure is None or failure.kind != self.failure.kind:
            return False
        self._best, self.failure = candidate, failure
        self._write_best()
        taken = time.monotonic() - self._start
        self._say(f"{len(candidate.calls)} nodes, {candidate.elements} elements of inputs, {taken:.0f} s")
        return True

    def _shorten(self) -> None:
        """The shortest start of the graph that fails."""
        whole, values = self._best, self._best.values()
        calls = whole.calls
        passes, fails = 0, len(calls)
        while fails - passes > 1:
            middle = (passes + fails) // 2
            ends = ends_of(calls[:middle], values)
            if ends and self._takes(part(whole, calls[:middle], ends, values)):
                fails = middle
            else:
                passes = middle

    def _cut_start(self) -> None:
        """The shortest end of it: values of earlier nodes are inputs."""
        whole, values = self._best, self._best.values()
        calls = whole.calls
        fails, passes = 0, len(calls)
        while passes - fails > 1:
            middle = (passes + fails) // 2
            if self._takes(part(whole, calls[middle:], whole.outputs, values)):
                fails = middle
            else:
                passes = middle

    def _drop_outputs(self) -> None:
        """Half of the results, down to one."""
        while len(outputs := self._best.outputs) > 1:
            whole, values, half = self._best, self._best.values(), len(outputs) // 2
            halves = (outputs[half:], outputs[:half])
            if not any(self._takes(part(whole, whole.calls, kept, values)) for kept in halves):
                break

    def _remove_chunks(self) -> None:
        """Chunks of nodes become inputs, large chunks first."""
        size = max(1, len(self._best.calls) // 2)
        while size >= 1:
            position, values = 0, self._best.values()
            while position < len(self._best.calls):
                whole, calls = self._best, self._best.calls
                kept = [*calls[:position], *calls[position + size :]]
                outputs = [node for node in whole.outputs if node in kept] or ends_of(kept, values)
                if not (kept and outputs and self._takes(part(whole, kept, outputs, values))):
                    position += size
                else:
                    values = self._best.values()
            size //= 2

    def _bypass(self) -> None:
        """Calls become one of their arguments, or a number."""
        progress = True
        while progress:
            values = self._best.values()
            tries = (c for node in reversed(self._best.calls) for c in bypassed(self._best, node, values))
            progress = any(self._takes(candidate) for candidate in tries)

    def _shrink_sizes(self) -> None:
        while any(self._takes(candidate) for candidate in smaller_sizes(self._best)):
            pass

    def _drop_gradients(self) -> None:
        """Inputs that ask for no gradients."""
        inputs = self._best.inputs
        if any(isinstance(value, Tensor) and value.requires_grad for value in inputs):
            detached = tuple(static_as(x.detach(), x) if isinstance(x, Tensor) else x for x in inputs)
            self._takes(Candidate(self._best.graph_module, detached))

    def _write_verified(self) -> bool:
        """Write the best candidate, with random inputs if it fails with those; whether the file fails so by itself."""
        assert self.failure is not None
        random = Candidate(self._best.graph_module, _random_inputs(self._best.inputs))
        failure = self._failure_of(random, max(self._left, _LAST_CHECK))
        if failure is not None and failure.kind == self.failure.kind:
            self._write(values=False)
            if self._file_fails():
                return True
        self._write(values=True)
        return self._file_fails()

    def _file_fails(self) -> bool:
        assert self.failure is not None
        return failure_of_file(self._output, timeout=_LONGEST_RUN) == self.failure.kind

    def _write_best(self) -> None:
        """Nobody knows yet whether it fails with random inputs."""
        self._write(values=self._best.elements <= _MOST_WRITTEN)

    def _write(self, *, values: bool) -> None:
        assert self.failure is not None
        options = reproduction_options(config.resolve(), dynamic=self._dynamic)
        if self._slower is not None:
            options["slower"] = self._slower
        text = file_text(
            self._best.graph_module,
            self._best.inputs,
            failure=self.failure.text,
            setup=self._setup,
            options=options,
            values=values,
        )
        write_whole(self._output, text.encode())


def _random_inputs(inputs: Sequence[Any]) -> tuple[Any, ...]:
    """Inputs as the file makes them."""
    state = torch.get_rng_state()
    torch.manual_seed(0)
    views: dict[int, tuple[Tensor, int]] = {}
    for memory in shared_memory(inputs):
        shown = tensor([memory.elements], [1], memory.dtype)
        views |= {position: (shown, offset) for position, offset in memory.positions.items()}

    def random(position: int, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        trains = value.requires_grad
        if position in views:
            shown, offset = views[position]
            made = view(shown, offset, value.shape, value.stride(), value.dtype, requires_grad=trains)
        else:
            made = tensor(value.shape, value.stride(), value.dtype, requires_grad=trains)
        return static_as(made, value)

    found = tuple(random(position, value) for position, value in enumerate(inputs))
    torch.set_rng_state(state)
    return found
