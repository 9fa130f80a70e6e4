"""Compiling ahead of time: a model, an exported program or a captured graph to a package."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.fx
from torch.export import ExportedProgram

from torchkiln import config
from torchkiln.aot.archive import write_archive
from torchkiln.aot.capture import export, program_of_export, program_of_graph
from torchkiln.aot.functions import CompiledProgram, compile_program
from torchkiln.aot.program import Program
from torchkiln.aot.safetensors import parts
from torchkiln.aot.shared_library import write_shared_library
from torchkiln.aot.signature import ConstantInput, Input, Signature, TensorInput, Weight, signature_to_json
from torchkiln.artifact import encode
from torchkiln.codegen.llvm.support import compile_support
from torchkiln.config import Settings
from torchkiln.errors import OptionError, PackageError
from torchkiln.native.binary_interface import binary_interface
from torchkiln.passes import reject_unknown_passes
from torchkiln.target import target_for, write_target

NATIVE = "native"


def aot_compile(
    model: torch.nn.Module | ExportedProgram,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    dynamic_shapes: Any = None,
    freeze: bool = True,
    train: bool = False,
    targets: Sequence[str] = (NATIVE,),
    shared_library: bool = False,
    settings: Settings | None = None,
    path: str | os.PathLike[str],
) -> Path:
    """Compile a model and write it to ``path`` as one package, for :func:`torchkiln.load`.

    ``args``, ``kwargs`` and ``dynamic_shapes`` are those of ``torch.export.export``, which captures the model; an
    ``ExportedProgram`` has its own. ``targets`` are the machines to compile for, of which a process that loads the
    package takes the best that it can run: "native" (this one), "x86-64-v3", "x86-64-v4", "aarch64". ``train`` keeps
    the backward too. ``freeze`` lets a package for inference compute what depends on weights alone once, when it is
    first called and after weights were replaced; a library for C computes it at each call. ``shared_library`` also
    links code and weights as a library of the same name for C, with a header beside it (``docs/aot.md``). Returns
    ``path``.
    """
    if not isinstance(args, (tuple, list)):
        kind = type(args).__name__
        raise OptionError(f"The arguments must be a tuple, as in aot_compile(model, (x,)), not a {kind}.")
    if isinstance(model, ExportedProgram) and dynamic_shapes is not None:
        raise OptionError("An exported program has its own dynamic shapes; give dynamic_shapes to torch.export.export.")
    exported = model if isinstance(model, ExportedProgram) else export(model, args, kwargs, dynamic_shapes)
    settings = _settings(settings, freeze=freeze and not shared_library)
    return _write(program_of_export(exported), path, targets, settings, train=train, shared_library=shared_library)


def compile_fx_aot(
    gm: torch.fx.GraphModule,
    inputs: Sequence[Any],
    *,
    freeze: bool = True,
    train: bool = False,
    targets: Sequence[str] = (NATIVE,),
    shared_library: bool = False,
    settings: Settings | None = None,
    path: str | os.PathLike[str],
) -> Path:
    """As :func:`aot_compile` for a captured graph; parameters, buffers and constants of it become weights.

    Sizes of ``inputs`` that are fake tensors may be symbolic; code for others is for the sizes that they have.
    """
    settings = _settings(settings, freeze=freeze and not shared_library)
    return _write(program_of_graph(gm, inputs), path, targets, settings, train=train, shared_library=shared_library)


def _settings(given: object, *, freeze: bool) -> Settings:
    settings = given if given is not None else config.resolve()
    if not isinstance(settings, Settings):
        raise OptionError(f"The settings must be a torchkiln.Settings, not a {type(settings).__name__}.")
    return replace(settings, prepare_weights=settings.prepare_weights and freeze)


def _write(
    program: Program,
    path: str | os.PathLike[str],
    targets: Sequence[str],
    settings: Settings,
    *,
    train: bool,
    shared_library: bool,
) -> Path:
    reject_unknown_passes(settings)
    if Path(path).is_dir():
        raise OptionError(f"A package is a file, and {os.fspath(path)!r} is a folder; give the path of a file in it.")
    if isinstance(targets, str):
        raise OptionError(f"The targets must be a tuple, as in targets=({targets!r},), not text.")
    if not targets:
        raise OptionError("A package needs a target; the default is targets=('native',).")
    _require_folder(Path(path))
    machines = {name: target_for(name, settings) for name in targets}
    if shared_library and Path(path).suffix in (".so", ".h"):
        raise OptionError("The library and its header stand beside the package; give it another suffix, such as .kiln.")
    if shared_library and len(machines) != 1:
        raise OptionError("A shared library is for one target; compile one for each.")
    members: dict[str, bytes] = {}
    for name, target in machines.items():
        compiled = compile_program(program, settings, target, train=train)
        members[f"{name}/function"] = encode(compiled.function)
        members[f"{name}/support"] = encode(compile_support(target))
    signature = _with_marks(program.signature, compiled)
    metadata = {
        "interface": dict(binary_interface()),
        "train": train,
        "targets": {name: json.loads(write_target(target)) for name, target in machines.items()},
        "signature": signature_to_json(signature),
    }
    whole = Path(path)
    try:
        if shared_library:
            (target,) = machines.values()
            write_shared_library(whole.with_suffix(".so"), signature, compiled.function, target, program.weights)
        write_archive(whole, metadata, members, parts(program.weights))
    except OSError as error:
        raise _cannot_be_written(whole, error) from error
    return whole


def _require_folder(path: Path) -> None:
    """Make the folder of a package, before minutes are spent on it; PackageError where nothing can be written there."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if not os.access(path.parent, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise _cannot_be_written(path, error) from error


def _cannot_be_written(path: Path, error: OSError) -> PackageError:
    why = error.strerror or str(error)
    return PackageError(
        f"The package {os.fspath(path)!r} cannot be written ({why}); give a path that can, or make room."
    )


def _with_marks(signature: Signature, compiled: CompiledProgram) -> Signature:
    """The signature with the marks of what the compiled function writes to and of what it computes gradients of."""
    mutated = compiled.function.convention.mutated
    marks = iter([(k in mutated, trained) for k, trained in enumerate(compiled.trained)])
    weights = tuple(_marked(weight, *next(marks)) for weight in signature.weights)
    inputs: list[Input] = []
    for found in signature.inputs:
        mark = next(marks) if not isinstance(found, ConstantInput) else None
        inputs.append(_marked(found, *mark) if isinstance(found, TensorInput) and mark is not None else found)
    return replace(signature, weights=weights, inputs=tuple(inputs))


_Marked = TypeVar("_Marked", Weight, TensorInput)


def _marked(value: _Marked, mutated: bool, trained: bool) -> _Marked:
    return replace(value, mutated=mutated, trained=trained)
