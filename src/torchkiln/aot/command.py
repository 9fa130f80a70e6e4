"""``kiln package``: what a package holds, for a terminal, and whether it is whole."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from torchkiln.aot.archive import Archive
from torchkiln.aot.signature import (
    ConstantInput,
    ConstantResult,
    Input,
    NumberInput,
    Signature,
    Size,
    SymbolicSize,
    signature_from_json,
)
from torchkiln.errors import shown
from torchkiln.target import read_target, runs_here


def verify(path: Path) -> None:
    """Raise :class:`PackageError` unless everything in a package is as it was written."""
    with Archive(path) as archive:
        archive.verify()


def described(path: Path) -> RenderableType:
    """A package in words and tables; nothing of it is loaded."""
    with Archive(path) as archive, archive.errors():
        signature = signature_from_json(archive.metadata["signature"])
        facts = Table.grid(padding=(0, 2))
        for subject, text in _facts(archive, signature, path):
            facts.add_row(Text(subject, "bold"), Text(text))
    return Group(facts, Text(), _inputs(signature), Text(), _weights(signature))


def _facts(archive: Archive, signature: Signature, path: Path) -> Iterator[tuple[str, str]]:
    metadata = archive.metadata
    yield "package", f"{path}, {path.stat().st_size / 2**20:.1f} MiB"
    yield "for", "training and inference" if metadata["train"] else "inference"
    for name, target in metadata["targets"].items():
        fits = "runs here" if runs_here(read_target(json.dumps(target))) else "does not run here"
        yield f"target {name}", f"{target['cpu']}, {target['triple']}: {fits}"
    for name, version in metadata["interface"].items():
        yield name, str(version)
    constants = [result.value for result in signature.results if isinstance(result, ConstantResult)]
    computed = len(signature.results) - len(constants)
    always = f", and always {', '.join(map(shown, constants))}" if constants else ""
    yield "returns", f"{computed} computed values{always}"


def _inputs(signature: Signature) -> Table:
    table = Table(title="arguments", title_justify="left")
    for heading in ("name", "dtype", "sizes", ""):
        table.add_column(heading)
    for found in signature.inputs:
        table.add_row(*map(Text, _input_row(found, signature)))
    return table


def _input_row(found: Input, signature: Signature) -> tuple[str, str, str, str]:
    if isinstance(found, ConstantInput):
        return found.name, "constant", "", shown(found.value)
    if isinstance(found, NumberInput):
        return found.name, "integer", _size(found.value, signature), ""
    sizes = ", ".join(_size(size, signature) for size in found.sizes)
    marks = [text for mark, text in ((found.mutated, "written to"), (found.trained, "with gradient")) if mark]
    return found.name, str(found.dtype).removeprefix("torch."), f"[{sizes}]", ", ".join(marks)


def _size(size: Size, signature: Signature) -> str:
    if size is None:
        return "checked by native code"
    if not isinstance(size, SymbolicSize):
        return str(size)
    return f"s{size.symbol}: {signature.ranges[size.symbol].scaled(size.times, size.plus)}"


def _weights(signature: Signature) -> Table:
    table = Table(title="weights", title_justify="left")
    for heading in ("name", "kind", "dtype", "shape", ""):
        table.add_column(heading)
    for weight in signature.weights:
        marks = [text for mark, text in ((weight.mutated, "written to"), (weight.trained, "with gradient")) if mark]
        row = (", ".join(weight.names), weight.kind, str(weight.dtype).removeprefix("torch."), str(list(weight.shape)))
        table.add_row(*map(Text, (*row, ", ".join(marks))))
    return table
