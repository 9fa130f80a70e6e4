"""The command ``kiln minify``: a file or folder in, a smaller file out."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

from torch import Tensor

from torchkiln import config
from torchkiln.debug.minify import MinifyReport, minify
from torchkiln.debug.recording.folder import give_values
from torchkiln.errors import UnsupportedError
from torchkiln.graph.modes import in_modes
from torchkiln.graph.program_text import END_OF_SETUP, SETUP
from torchkiln.memory.unchanged import marked_dynamic


def minify_file(
    path: Path,
    *,
    output: Path,
    seconds: float,
    slower: float | None,
    imports: Sequence[str],
    say: Callable[[str], None],
) -> MinifyReport:
    """Minify the program of a file that torchkiln wrote, or that defines ``program`` and ``inputs`` as such files do.

    ``imports`` are modules to import first, such as one that registers rewrites, found in the current folder and in
    that of the file too. A folder's saved values are used.
    """
    file = path / "reproduce.py" if path.is_dir() else path
    if not file.is_file():
        raise UnsupportedError(f"There is no {file}; give a file that torchkiln wrote, or a folder of debug_compile.")
    setup = "\n".join([*(f"import {name}" for name in imports), _setup_of(file.read_text(encoding="utf-8"))]).strip()
    sys.path[:0] = [str(Path.cwd()), str(file.resolve().parent)]
    for name in imports:
        _import(name)
    program, inputs, options = loaded_program(file)
    if slower is not None:
        options["slower"] = slower
    given = inputs()
    if path.is_dir():
        give_values(given, path)
    if any(isinstance(value, Tensor) and marked_dynamic(value) for value in given):
        options.setdefault("dynamic", True)  # sizes change on the way
    with config.settings(**options.pop("settings", {})), in_modes(**options.pop("modes", {})):
        return minify(program, *given, output=output, setup=setup, seconds=seconds, say=say, **options)


def _import(name: str) -> None:
    try:
        import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name.partition(".")[0]:
            raise
        raise UnsupportedError(f"There is no module {name} here or beside the file to minify.") from None


def loaded_program(file: Path) -> tuple[Callable[..., Any], Callable[[], list[Any]], dict[str, Any]]:
    """The functions ``program`` and ``inputs`` of a file that torchkiln wrote, and the options of its check.

    The file is run for them.
    """
    names = _loaded(file)
    program, inputs = names.get("program"), names.get("inputs")
    if program is None or inputs is None:
        raise UnsupportedError(f"{file} has no functions program and inputs; `program(*inputs())` is what is compiled.")
    return program, inputs, dict(names.get("OPTIONS", {}))


def _loaded(file: Path) -> Mapping[str, Any]:
    """What a file defines. It is a module with a name, which Dynamo looks up."""
    spec = spec_from_file_location("torchkiln_reproduction", file)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return vars(module)


def _setup_of(text: str) -> str:
    return text.partition(f"{SETUP}\n")[2].partition(END_OF_SETUP)[0].strip()
