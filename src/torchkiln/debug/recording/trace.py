"""``KILN_TRACE=folder``: every compilation of a program leaves a folder that can be read and replayed.

With ``KILN_TRACE_VALUES=1`` it has the values of the arguments too.
"""

from __future__ import annotations

import atexit
import os
import threading
from dataclasses import dataclass, replace
from pathlib import Path
from types import CodeType

import torch
from torch._dynamo import convert_frame

from torchkiln.compiler import CapturedGraph
from torchkiln.debug.recording.collector import Collector
from torchkiln.debug.recording.dynamo import DynamoNotes
from torchkiln.debug.recording.folder import (
    RECORDING,
    read_recording,
    write_overview,
    write_program,
    write_recording,
    write_values,
)
from torchkiln.debug.recording.model import Recording
from torchkiln.errors import TraceWarning, first_line, warn_user
from torchkiln.graph.fake import outside_tracing
from torchkiln.recorder import Record, start_observing


def start(folder: Path, *, values: bool = False) -> None:
    """Write every compilation of this process to ``folder`` from now on."""
    tracer = Tracer(folder, values=values)
    convert_frame.register_bytecode_hook(tracer.compiled_frame)
    start_observing(tracer)
    atexit.register(tracer.finish)


@dataclass
class _Frame:
    """Where a captured graph comes from: the code of its frame, and the graph breaks up to it, by number."""

    first_break: int
    last_break: int
    code: CodeType | None = None


class Tracer:
    """Writes a folder for each captured graph: its program before it is compiled, the rest after each of its graphs.

    What Dynamo says of it is known later, and is added when the process ends.
    """

    def __init__(self, folder: Path, *, values: bool = False) -> None:
        self._folder, self._values = folder, values
        self._collector = Collector(captured=self._write_program, finished=self._write_recording, keep_code=False)
        self._notes = DynamoNotes()
        self._frames: dict[int, _Frame] = {}
        self._breaks = 0
        self._thread = threading.local()  # numbers of the graphs of the frame that Dynamo compiles

    def __call__(self, record: Record) -> None:
        """What an observer is called with. A full disk, or a mistake in here, stops no program."""
        try:
            self._collector(record)
        except Exception as error:
            warn_user(f"A compilation is not traced ({type(error).__name__}: {first_line(error)}).", TraceWarning)

    def _folder_of(self, number: int) -> Path:
        return self._folder / f"{os.getpid()}_{number:03}"

    def _write_program(self, number: int, captured: CapturedGraph) -> None:
        gradients = torch.is_grad_enabled()
        self._notes.read_guards()
        self._frames[number] = _Frame(self._breaks, self._notes.count_breaks())
        self._breaks = self._frames[number].last_break
        self._thread.graphs = [*getattr(self._thread, "graphs", ()), number]
        with outside_tracing():
            write_program(captured.graph_module, captured.inputs, self._folder_of(number), gradients=gradients)
            if self._values:
                write_values(captured.inputs, self._folder_of(number))

    def _write_recording(self, number: int) -> None:
        recording = self._collector.recording(f"captured graph {number}", captures={number})
        write_recording(recording, self._folder_of(number))

    def compiled_frame(self, code: CodeType, new_code: CodeType) -> CodeType | None:
        """Dynamo made new code for a frame: the graphs captured since the last time are its."""
        for number in getattr(self._thread, "graphs", ()):
            self._frames[number].code = code
        self._thread.graphs = []
        return self._notes.compiled(code, new_code)

    def finish(self) -> None:
        """Add to each folder the guards, graph breaks and recompilations of its frame."""
        if self._frames:
            self._frames[max(self._frames)].last_break = self._notes.count_breaks()
        for number, frame in self._frames.items():
            folder = self._folder_of(number)
            if (folder / RECORDING).is_file():
                try:
                    write_overview(self._with_notes(read_recording(folder), frame), folder)
                except Exception as error:
                    warn_user(f"{folder} has no guards ({type(error).__name__}: {first_line(error)}).", TraceWarning)

    def _with_notes(self, recording: Recording, frame: _Frame) -> Recording:
        recording = replace(recording, graph_breaks=self._notes.graph_breaks(frame.first_break, frame.last_break))
        if frame.code is None:  # the graph was compiled without Dynamo, or is still compiled
            return recording
        guards, again = self._notes.guards(frame.code), self._notes.recompilations(frame.code)
        return replace(recording, guards=guards, recompilations=again)
