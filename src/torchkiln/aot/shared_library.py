"""Shared libraries: the compiled function of a package with its weights, linked for programs without Python.

The system's compiler, or that of the ``ziglang`` wheel, compiles the C interface (``c/library.c``) and links it with
the object code. The part of Python's C API that object code names is defined there, without Python behind it.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from importlib.resources import files
from pathlib import Path

import torch

from torchkiln.aot.c_interface import ConstantTensor, header, tables
from torchkiln.aot.package import with_strides
from torchkiln.aot.safetensors import StoredTensor, parts, read_header
from torchkiln.aot.signature import Signature
from torchkiln.artifact import Artifact, CompiledFunction
from torchkiln.codegen.llvm.support import compile_joined
from torchkiln.errors import PackageError
from torchkiln.native.elf import read_object
from torchkiln.target import Target
from torchkiln.user_files import writing_whole

# Code reaches its data with 32-bit distances.
_MOST_WEIGHTS = 2**31 - 2**26

_EMBEDDED = """.section .data
.balign 65536
.globl kiln_weights
.hidden kiln_weights
kiln_weights: .incbin "weights"
.byte 0
.balign 64
.globl kiln_constants
.hidden kiln_constants
kiln_constants: .incbin "constants"
.byte 0
.section .note.GNU-stack,"",@progbits
"""


def write_shared_library(
    path: Path,
    signature: Signature,
    function: CompiledFunction,
    target: Target,
    weights: Mapping[str, torch.Tensor],
) -> None:
    """Write ``path`` and the header beside it, which have the name of the file for a prefix."""
    artifact = function.forward
    _reject_unfit(function, target)
    compiler = _find_compiler()
    name = library_name(path)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        stored = _write_weights(folder / "weights", signature, weights)
        constants = _write_constants(folder / "constants", artifact.constants)
        (folder / f"{name}.h").write_text(header(name, signature))
        (folder / "tables.h").write_text(tables(name, signature, artifact, target, stored, constants))
        (folder / "library.c").write_text(files("torchkiln.aot").joinpath("c/library.c").read_text())
        (folder / "embedded.S").write_text(_EMBEDDED)
        (folder / "exports").write_text(f"{{ global: {name}_*; local: *; }};\n")
        objects = _write_objects(folder, artifact, target)
        _link(compiler, folder, objects)
        for built, place in (("library.so", path), (f"{name}.h", path.with_suffix(".h"))):
            with (folder / built).open("rb") as source, writing_whole(place) as file:
                shutil.copyfileobj(source, file)


def library_name(path: Path) -> str:
    """The prefix of a library's functions: the name of its file, as an identifier of C."""
    name = re.sub(r"\W", "_", path.stem.removeprefix("lib"), flags=re.ASCII)
    return name if name[:1].isalpha() else f"model_{name}"


def _reject_unfit(function: CompiledFunction, target: Target) -> None:
    entry = function.forward.entry
    through_python = sorted({name for name, route in entry.extern_calls if route == "python"})
    if function.backward is not None:
        raise PackageError("A shared library cannot train; compile it without train=True.")
    if through_python:
        raise PackageError(
            f"A shared library runs without Python, which this model calls {', '.join(through_python)} through; write"
            " it with other operators, or load the package with torchkiln.load."
        )
    if not target.triple.startswith(platform.machine()):
        raise PackageError(
            f"A shared library is linked for this machine ({platform.machine()}), not for {target.triple};"
            " compile it where it runs."
        )


def _find_compiler() -> list[str]:
    """The command of a C compiler: ``CC``, the system's, or that of the ziglang wheel."""
    given = shlex.split(os.environ.get("CC", ""))
    if given and shutil.which(given[0]) is None:
        raise PackageError(f"The C compiler {given[0]!r} that CC names cannot be found; correct CC or unset it.")
    for command in (given, ["cc"], ["gcc"], ["clang"]):
        if command and shutil.which(command[0]) is not None:
            return command
    if importlib.util.find_spec("ziglang") is not None:
        return [sys.executable, "-m", "ziglang", "cc"]
    raise PackageError("A shared library needs a C compiler: install gcc or clang, or `pip install ziglang`.")


def _write_weights(path: Path, signature: Signature, weights: Mapping[str, torch.Tensor]) -> list[StoredTensor]:
    """Write weights in the strides that code was compiled for; where each lies."""
    flat = {
        weight.names[0]: _in_memory_order(weights[weight.names[0]], weight.strides) for weight in signature.weights
    }
    with path.open("wb") as file:
        for part in parts(flat):
            file.write(part)
    if path.stat().st_size > _MOST_WEIGHTS:
        raise PackageError("The weights are over 2 GB, more than a shared library holds; load the package in Python.")
    found = read_header(memoryview(path.read_bytes()))
    return [found[weight.names[0]] for weight in signature.weights]


def _in_memory_order(value: torch.Tensor, strides: Sequence[int]) -> torch.Tensor:
    """A flat tensor of the elements as they lie in memory."""
    laid_out = with_strides(value.detach().contiguous(), tuple(strides))
    return laid_out.as_strided((laid_out.untyped_storage().nbytes() // value.itemsize,), (1,), 0)


def _write_constants(path: Path, constants: Sequence[torch.Tensor]) -> list[ConstantTensor]:
    found, content = [], bytearray()
    for tensor in constants:
        whole = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
        offset = len(content) + int(tensor.storage_offset()) * tensor.itemsize
        found.append(ConstantTensor(tensor, offset))
        content += whole.numpy().tobytes()
        content += bytes(-len(content) % 64)
    path.write_bytes(content)
    return found


def _write_objects(folder: Path, artifact: Artifact, target: Target) -> list[str]:
    """The object files of the graph, and of the support functions that it calls."""
    support = compile_joined(read_object(artifact.step_code).undefined, target)
    code = [artifact.step_code, artifact.kernel_code, support.code]
    names = []
    for k, content in enumerate(code):
        if content:
            names.append(f"code{k}.o")
            (folder / names[-1]).write_bytes(content)
    return names


def _link(compiler: Sequence[str], folder: Path, objects: Sequence[str]) -> None:
    libraries = Path(torch.__file__).parent / "lib"
    command = [
        *compiler,
        *("-shared", "-fPIC", "-O2", "-fvisibility=hidden", "-o", "library.so"),
        *("library.c", "embedded.S", *objects),
        *(f"-L{libraries}", "-ltorch_cpu", "-lc10", "-lm", "-Wl,--as-needed", *_cpp_library()),
        *(f"-Wl,-rpath,{libraries}", "-Wl,--version-script=exports", "-Wl,--no-undefined"),
    ]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        said = next(_errors(done.stderr), "it did not say why")
        raise PackageError(f"The C compiler ({shlex.join(compiler)}) could not link the shared library: {said}.")


def _cpp_library() -> list[str]:
    """The C++ library that torch runs with: before 2.13, torch frees values that the caller allocates with it."""
    mapped: list[str] = re.findall(r"/\S*/libstdc\+\+\.so\S*", Path("/proc/self/maps").read_text())
    return mapped[:1]


def _errors(text: str) -> Iterator[str]:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    yield from (line for line in lines if "error:" in line or "undefined" in line or "multiple" in line)
    yield from lines
