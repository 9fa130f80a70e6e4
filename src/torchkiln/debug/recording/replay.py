"""``kiln replay``: compile the captured graph of a traced compilation again, and compare it with eager.

The graph is the program ``reproduce.py`` of the folder, which is imported as ``kiln minify`` does.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchkiln.debug.check import check
from torchkiln.debug.children import ask
from torchkiln.debug.command import loaded_program
from torchkiln.debug.recording.collector import Collector
from torchkiln.debug.recording.folder import NO_PROGRAM, PROGRAM, RECORDING, give_values, read_recording
from torchkiln.debug.recording.model import Compilation, Recording
from torchkiln.errors import RecordingError, first_line
from torchkiln.recorder import observe

_MOST_SECONDS = 3600.0


@dataclass(frozen=True)
class Replay:
    """What came of compiling a folder's graph again.

    ``before`` is None where the first attempt did not get through, ``after`` where this one did not. A recording that
    cannot be read, such as one of another version, is not compared; ``unread`` says why. A graph that has no program is
    not replayed; ``no_program`` says why.
    """

    folder: Path
    before: Recording | None
    after: Recording | None
    saved_values: bool
    failure: str = ""
    no_program: str = ""
    unread: str = ""

    @property
    def same_kernels(self) -> bool | None:
        """Whether the kernels of every graph compiled before are the same; None where nothing was."""
        if self.before is None or self.after is None or not self.before.compilations:
            return None
        return _kernels(self.before) == _kernels(self.after)

    def __str__(self) -> str:
        if self.no_program:
            return f"{self.folder}: not replayed, it has no program ({self.no_program})"
        if self.after is None:
            return f"{self.folder}: not compiled\n  FAILED: {self.failure}"
        values = "with the values that were saved" if self.saved_values else "with random values"
        kinds = ", ".join(f"{one.kind} in {one.seconds:.2f} s" for one in self.after.compilations) or "nothing"
        lines = [f"{self.folder}: compiled {kinds}, {values}"]
        known = {
            True: "the same kernels as recorded",
            False: "other kernels than recorded: sizes, settings, passes of yours or torchkiln have changed",
            None: "",
        }[self.same_kernels]
        lines += [f"  {known}"] if known else []
        lines += [f"  kernels are not compared: {self.unread}"] if self.unread else []
        lines.append(f"  FAILED: {self.failure}" if self.failure else "  agrees with eager")
        return "\n".join(lines)


def _kernels(recording: Recording) -> list[tuple[str, tuple[str, ...]]]:
    def of(compilation: Compilation) -> tuple[str, tuple[str, ...]]:
        return compilation.kind, tuple(kernel.text for kernel in compilation.kernels)

    return sorted(of(one) for one in recording.compilations)


def folders_in(path: Path) -> list[Path]:
    """``path`` itself where it is the folder of one compilation, or those in it."""
    names = PROGRAM, NO_PROGRAM
    if any((path / name).is_file() for name in names):
        return [path]
    found = sorted({file.parent for name in names for file in path.glob(f"*/{name}")})
    if not found:
        raise RecordingError(f"There is no {PROGRAM} in {path} or a folder in it; give a folder that KILN_TRACE wrote.")
    return found


def replay_apart(folder: Path) -> Replay:
    """:func:`replay` in a child process: whatever is wrong with a folder, a crash too, is a failure of that one."""
    if not (folder / PROGRAM).is_file():
        why = (folder / NO_PROGRAM).read_text(encoding="utf-8", errors="replace")
        return Replay(folder, None, None, False, no_program=why.strip())
    answer = ask(lambda: _as_json(replay(folder)), timeout=_MOST_SECONDS)
    if answer.ending != "answered":
        return Replay(folder, None, None, False, f"{answer.ending}: {answer.text}")
    before, after, saved_values, failure, unread = answer.value
    recorded = None if before is None else Recording.from_json(before)
    return Replay(folder, recorded, Recording.from_json(after), saved_values, failure, unread=unread)


def _as_json(done: Replay) -> list[Any]:
    recordings = (None if one is None else one.to_json() for one in (done.before, done.after))
    return [*recordings, done.saved_values, done.failure, done.unread]


def replay(folder: Path) -> Replay:
    """Compile the program of one folder and compare it with eager, results and gradients."""
    program, inputs, options = loaded_program(folder / PROGRAM)
    given = inputs()
    saved = give_values(given, folder)
    before, unread = None, ""
    if (folder / RECORDING).is_file():
        try:
            before = read_recording(folder)
        except RecordingError as error:
            unread = str(error)
    collector = Collector()
    failure = ""
    with observe(collector):
        try:
            check(program, given, **options)
        except Exception as error:
            failure = f"{type(error).__name__}: {first_line(error)}"
    return Replay(folder, before, collector.recording(f"replay of {folder}"), saved, failure, unread=unread)
