"""The command ``kiln explain``: a script in, tables, a page and files out."""

from __future__ import annotations

import json as json_text
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from torchkiln.debug.recording.collector import Collector
from torchkiln.debug.recording.dynamo import noting
from torchkiln.debug.recording.explain import with_dynamo
from torchkiln.debug.recording.limits import measure_limits
from torchkiln.debug.recording.model import Recording
from torchkiln.debug.recording.summary import summary
from torchkiln.errors import RecordingError
from torchkiln.recorder import observe
from torchkiln.scripts import run_script
from torchkiln.user_files import write_whole

# Kernels are timed, and none is given up for eager. Options of the script's own go first.
_SETTINGS = {"KILN_PROFILE": "1", "KILN_ADAPTIVE": "0"}


def explain_script(
    script: Path,
    arguments: Sequence[str],
    console: Console,
    *,
    html: Path | None = None,
    json: Path | None = None,
    folder: Path | None = None,
) -> bool:
    """Run a script under recording and show what was recorded; False where it raised something."""
    recording, done = record_script(script, arguments)
    console.print(summary(recording))
    if json is not None:
        write_whole(json, json_text.dumps(recording.to_json()).encode())
    if folder is not None:
        recording.save(folder)
    if html is not None:
        recording.html(html)
    for written in (json, folder, html):
        if written is not None:
            console.print(f"written to {written}", markup=False, highlight=False, soft_wrap=True)
    return done


def record_script(script: Path, arguments: Sequence[str]) -> tuple[Recording, bool]:
    """The recording of a script, and whether it ran to its end."""
    if not script.is_file():
        raise RecordingError(f"There is no script {script}; give the path of a Python file.")
    collector = Collector()
    with noting() as notes, observe(collector), _environment(_SETTINGS):
        done = run_script(script, arguments)
        recording = with_dynamo(collector.recording(shlex.join([str(script), *arguments])), notes)
    return replace(recording, limits=measure_limits()), done


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Variables that are not set have these values inside the block."""
    missing = [name for name in variables if name not in os.environ]
    os.environ.update({name: variables[name] for name in missing})
    try:
        yield
    finally:
        for name in missing:
            os.environ.pop(name, None)
