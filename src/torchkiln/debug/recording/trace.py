"""``KILN_TRACE=folder``: every compilation of a program leaves a folder that can be read and replayed.

With ``KILN_TRACE_VALUES=1`` it has the values of the arguments too.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch

from torchkiln.compiler import CapturedGraph
from torchkiln.debug.recording.collector import Collector
from torchkiln.debug.recording.folder import write_program, write_recording, write_values
from torchkiln.errors import TraceWarning, first_line, warn_user
from torchkiln.graph.fake import outside_tracing
from torchkiln.recorder import Record, start_observing


def start(folder: Path, *, values: bool = False) -> None:
    """Write every compilation of this process to ``folder`` from now on."""
    start_observing(Tracer(folder, values=values))


class Tracer:
    """Writes a folder for each captured graph: its program before it is compiled, the rest after each of its graphs."""

    def __init__(self, folder: Path, *, values: bool = False) -> None:
        self._folder, self._values = folder, values
        self._collector = Collector(captured=self._write_program, finished=self._write_recording, keep_code=False)

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
        with outside_tracing():
            write_program(captured.graph_module, captured.inputs, self._folder_of(number), gradients=gradients)
            if self._values:
                write_values(captured.inputs, self._folder_of(number))

    def _write_recording(self, number: int) -> None:
        recording = self._collector.recording(f"captured graph {number}", captures={number})
        write_recording(recording, self._folder_of(number))
