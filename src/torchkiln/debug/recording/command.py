"""The command ``kiln explain``: a script in, tables, a page and files out."""

from __future__ import annotations

import errno
import json as json_text
import os
import shlex
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from torch._dynamo import config as dynamo_config

from torchkiln.debug.recording.collector import Collector
from torchkiln.debug.recording.dynamo import noting
from torchkiln.debug.recording.explain import with_dynamo
from torchkiln.debug.recording.folder import RECORDING
from torchkiln.debug.recording.limits import measure_limits, raised_limits
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
    dynamic: bool | None = None,
) -> int:
    """Run a script under recording and show what was recorded, also where it ends early; its exit code.

    ``dynamic`` is for calls of ``torch.compile`` that do not say it. Raises RecordingError for outputs that cannot be
    written, before the script runs where that is known.
    """
    require_writable(html)
    require_writable(json)
    require_writable(folder / RECORDING if folder is not None else None)
    recording, code = record_script(script, arguments, dynamic=dynamic)
    console.print(summary(recording))
    outputs: list[tuple[Path | None, Callable[[Path], None]]] = [
        (json, lambda path: write_whole(path, json_text.dumps(recording.to_json()).encode())),
        (folder, recording.save),
        (html, recording.html),
    ]
    for path, write in outputs:
        if path is not None:
            with written(path):
                write(path)
            console.print(f"written to {path}", markup=False, highlight=False, soft_wrap=True)
    return code


def require_writable(path: Path | None) -> None:
    """RecordingError where a file ``path`` could not be written; its folder is made."""
    if path is None:
        return
    with written(path):
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, "it is a folder")
        path.parent.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path.parent).close()


@contextmanager
def written(path: Path) -> Iterator[None]:
    """The block writes ``path``; what the system says against it is a RecordingError."""
    try:
        yield
    except OSError as error:
        why = (error.strerror or str(error)).lower()
        raise RecordingError(f"{path} cannot be written ({why}); give another path.") from error


def record_script(
    script: Path, arguments: Sequence[str], *, dynamic: bool | None = None
) -> tuple[Recording, int]:
    """The recording of a script, and its exit code; ``dynamic`` as in :func:`explain_script`."""
    if not script.is_file():
        raise RecordingError(f"There is no script {script}; give the path of a Python file.")
    collector = Collector()
    with noting() as notes, observe(collector), _environment(_SETTINGS), _symbolic_sizes(dynamic):
        code = run_script(script, arguments).code
        recording = with_dynamo(collector.recording(shlex.join([str(script), *arguments])), notes)
    return replace(recording, limits=raised_limits(measure_limits(), recording)), code


def _symbolic_sizes(dynamic: bool | None) -> AbstractContextManager[object]:
    """Inside the block ``torch.compile`` has this for its ``dynamic`` where it is not given one."""
    if dynamic is None:
        return nullcontext()
    chosen = {"assume_static_by_default": not dynamic} | ({} if dynamic else {"automatic_dynamic_shapes": False})
    patched: AbstractContextManager[object] = dynamo_config.patch(chosen)
    return patched


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
