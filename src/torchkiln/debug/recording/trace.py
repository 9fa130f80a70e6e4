"""``KILN_TRACE=folder``: every compilation of a program leaves a folder that can be read and replayed.

``KILN_TRACE_VALUES=1`` saves the values of the arguments too, at the first call with real ones.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

from torch._subclasses.fake_tensor import FakeTensor

from torchkiln.compiler import CapturedGraph
from torchkiln.debug.recording.collector import Collector
from torchkiln.debug.recording.folder import write_program, write_recording, write_values
from torchkiln.recorder import start_observing

_log = logging.getLogger(__name__)


def start(folder: Path, *, values: bool = False) -> Tracer:
    """Write every compilation of this process to ``folder`` from now on."""
    tracer = Tracer(folder, values=values)
    start_observing(tracer.collector)
    return tracer


class Tracer:
    """Writes a folder for each captured graph when one of its graphs has been compiled."""

    def __init__(self, folder: Path, *, values: bool = False) -> None:
        self._folder, self._values = folder, values
        self.collector = Collector(self._write)

    def _write(self, number: int) -> None:
        folder = self._folder / f"{os.getpid()}_{number:03}"
        try:
            write_recording(self.collector.recording(f"captured graph {number}", captures={number}), folder)
            captured = self.collector.captured_graph(number)
            if captured is not None:
                self._write_program(captured, folder)
        except OSError as error:  # a full disk stops no program
            _log.warning("a compilation is not traced: %s", error)

    def _write_program(self, captured: CapturedGraph, folder: Path) -> None:
        if not (folder / "arguments.json").exists():
            write_program(captured.graph_module, captured.inputs, folder)
        if self._values and not any(isinstance(value, FakeTensor) for value in captured.inputs):
            write_values(captured.inputs, folder)


def is_asked_for(environment: Any) -> bool:
    return bool(environment.get("KILN_TRACE"))
