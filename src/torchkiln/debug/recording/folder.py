"""A recording as a folder of files that a person can read, and what it takes to compile its graph again.

recording.json             everything, as :meth:`Recording.from_json` reads it
summary.txt                the tables of ``kiln explain``
1.forward/01_captured_graph.txt ...    what each stage made, in order
1.forward/passes.txt       passes with their times, and what each changed
1.forward/fusions.txt      which loops are one kernel, and why others are not
1.forward/kernel*.txt      loop nest, LLVM and assembly of a kernel, and the user's lines
1.forward/memory.txt       buffers over the steps
guards.txt                 what Dynamo checks before it runs the code
reproduce.py               the captured graph as a program, with inputs of the same kind (``kiln replay``)
arguments.json             dtypes, sizes and strides of the inputs
arguments.safetensors      their values, where they were asked for
"""

from __future__ import annotations

import contextlib
import difflib
import json
import mmap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.fx
from torch import Tensor

from torchkiln.aot.safetensors import parts, read_header, tensor_at
from torchkiln.debug.recording import json_form
from torchkiln.debug.recording.graphs import argument_of
from torchkiln.debug.recording.model import Compilation, Kernel, Memory, Pass, Recording
from torchkiln.debug.recording.summary import duration, summary_text
from torchkiln.debug.reproduction import store
from torchkiln.errors import PackageError, RecordingError, UnsupportedError
from torchkiln.graph.fake import SYMBOLIC
from torchkiln.graph.modes import modes_now
from torchkiln.graph.program_text import constants_as_inputs, file_text
from torchkiln.user_files import write_whole, writing_whole

RECORDING, PROGRAM, ARGUMENTS, VALUES = "recording.json", "reproduce.py", "arguments.json", "arguments.safetensors"
NO_PROGRAM, GUARDS, SUMMARY = "not_replayable.txt", "guards.txt", "summary.txt"


def write_recording(recording: Recording, folder: Path) -> None:
    """Write everything but the program and its arguments."""
    for compilation in recording.compilations:
        for name, text in _files_of(compilation, recording):
            _write(folder / compilation.id / name, text)
    write_overview(recording, folder)


def write_overview(recording: Recording, folder: Path) -> None:
    """Write what is about all compilations of a folder: guards, the tables, and everything as JSON."""
    if recording.guards:
        guards = (f"{one.function} ({one.line})\n{one.text}\n" for one in recording.guards)
        _write(folder / GUARDS, "\n".join(guards))
    _write(folder / SUMMARY, summary_text(recording))
    # Last: who sees it finds everything else there.
    _write(folder / RECORDING, json.dumps(recording.to_json(), separators=(",", ":")))


def remove_recording(folder: Path) -> None:
    """Remove what :func:`write_recording` wrote, by the names that the recording there has; other files stay.

    One that cannot be read names none.
    """
    try:
        earlier = read_recording(folder)
    except RecordingError:
        return
    for compilation in earlier.compilations:
        for name, _ in _files_of(compilation, earlier):
            (folder / compilation.id / name).unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # somebody else's files are in it
            (folder / compilation.id).rmdir()
    for name in (GUARDS, SUMMARY, RECORDING):
        (folder / name).unlink(missing_ok=True)


def read_recording(folder: Path) -> Recording:
    """What :func:`write_recording` wrote."""
    path = folder / RECORDING
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise RecordingError(f"There is no {path}; give a folder that KILN_TRACE or Recording.save wrote.") from error
    except (ValueError, RecursionError) as error:
        raise RecordingError(f"{path} is damaged: {error}.") from error
    return Recording.from_json(content)


def _write(path: Path, text: str) -> None:
    write_whole(path, text.encode(errors="backslashreplace"))


def _files_of(compilation: Compilation, recording: Recording) -> Iterator[tuple[str, str]]:
    for number, stage in enumerate(recording.stages_of(compilation), 1):
        yield f"{number:02}_{stage.name.replace(' ', '_')}.txt", f"{recording.texts[stage.text]}\n"
    yield "passes.txt", _passes_text([recording.passes[number] for number in compilation.passes], recording.texts)
    if compilation.fusions:
        yield "fusions.txt", _fusions_text(compilation)
    for kernel in compilation.kernels:
        yield f"{kernel.name}.txt", _kernel_text(kernel)
    if compilation.memory is not None:
        yield "memory.txt", _memory_text(compilation.memory)


def _passes_text(passes: Sequence[Pass], texts: Sequence[str]) -> str:
    lines = []
    for one in passes:
        lines.append(f"{one.number:>4} {one.stage}/{one.name} on the {one.graph} graph, {1e3 * one.seconds:.2f} ms")
        if one.changed:
            before, after = texts[one.before].splitlines(), texts[one.after].splitlines()
            changes = difflib.unified_diff(before, after, lineterm="", n=0)
            lines += [f"       {line}" for line in changes if not line.startswith(("---", "+++", "@@"))]
    return "\n".join(lines) + "\n"


def _fusions_text(compilation: Compilation) -> str:
    lines = []
    for one in compilation.fusions:
        done = {"inline": "computed where it is read by", "fuse": "in one kernel with"}[one.kind]
        reason = f": {one.reason}" if one.reason else ""
        lines.append(f"{', '.join(one.second)} {'' if one.fused else 'NOT '}{done} {', '.join(one.first)}{reason}")
    return "\n".join(lines) + "\n"


def _kernel_text(kernel: Kernel) -> str:
    time = "" if kernel.seconds is None else f", {duration(kernel.seconds)} measured"
    head = f"{kernel.launches} launches, {kernel.bytes} bytes, {kernel.operations} operations{time}"
    lines = "\n".join(map(str, kernel.lines))
    return (
        f"{head}\nnodes: {', '.join(kernel.nodes)}\n{lines}\n\n"
        f"{kernel.text}\n\n; LLVM\n{kernel.llvm}\n\n# assembly\n{kernel.assembly}\n"
    )


def _memory_text(memory: Memory) -> str:
    lines = [f"peak {memory.peak_bytes} bytes, arena {memory.arena_bytes}"]
    lines += [f"{k:>5} {step.live_bytes:>12} {step.name}" for k, step in enumerate(memory.steps)]
    lines += [
        f"{life.name}: {life.bytes} bytes, steps {life.first} to {life.last}, in {life.place}"
        for life in memory.buffers
    ]
    return "\n".join(lines) + "\n"


# -- the program, and what it is called with --------------------------------------------------------------------------


def write_program(graph_module: torch.fx.GraphModule, inputs: Sequence[Any], folder: Path, *, gradients: bool) -> None:
    """Write a captured graph as a program that ``kiln replay`` compiles, with inputs of the same kind.

    Where it was captured for no ``gradients``, none of its inputs requires one. A graph that cannot be written so
    leaves a file that says why.
    """
    if not gradients:
        inputs = [value.detach() if isinstance(value, Tensor) else value for value in inputs]
    known = [argument_of(node.name, value) for node, value in zip(_inputs(graph_module), inputs, strict=False)]
    _write(folder / ARGUMENTS, json.dumps([json_form.encode(one) for one in known], indent=1))
    try:
        graph, given = constants_as_inputs(graph_module, inputs)
        what = f"a captured graph of {len(graph_module.graph.nodes)} nodes"
        # A number of the user's own cannot be marked.
        options: dict[str, Any] = {} if _read_sizes_from_tensors(graph) else {"dynamic": True}
        dynamic = {} if options else _symbolic_dimensions(graph)
        options |= modes_now()
        _write(folder / PROGRAM, file_text(graph, given, failure=what, options=options, dynamic=dynamic))
    except (UnsupportedError, RuntimeError, ValueError) as problem:
        _write(folder / NO_PROGRAM, f"{problem}\n")


def _symbolic_dimensions(graph_module: torch.fx.GraphModule) -> dict[int, list[int]]:
    """The dimensions of symbolic size, by the position of the input."""
    found = {}
    for position, node in enumerate(_inputs(graph_module)):
        value = _example(node)
        sizes: Sequence[Any] = value.shape if isinstance(value, Tensor) else ()
        found[position] = [dim for dim, size in enumerate(sizes) if isinstance(size, SYMBOLIC)]
    return {position: dims for position, dims in found.items() if dims}


def _read_sizes_from_tensors(graph_module: torch.fx.GraphModule) -> bool:
    """Replace symbolic numbers among the inputs by sizes of tensors, as the user's code has them.

    Dynamo adds these inputs; a number that is given would be one of its own. False where one is no such size.
    """
    nodes, graph = _inputs(graph_module), graph_module.graph
    sizes = {
        str(_example(nodes[position]).shape[dim]): (nodes[position], dim)
        for position, dims in _symbolic_dimensions(graph_module).items()
        for dim in dims
    }
    for node in nodes:
        if isinstance(_example(node), SYMBOLIC) and node.users:
            if str(_example(node)) not in sizes:
                return False
            with graph.inserting_after(nodes[-1]):
                node.replace_all_uses_with(graph.call_method("size", sizes[str(_example(node))]))
    return True


def _example(node: torch.fx.Node) -> Any:
    return node.meta.get("example_value")


def _inputs(graph_module: torch.fx.GraphModule) -> list[torch.fx.Node]:
    found: list[torch.fx.Node] = graph_module.graph.find_nodes(op="placeholder")
    return found


def write_values(inputs: Sequence[Any], folder: Path) -> None:
    """Write the values of the tensors among the inputs, by position."""
    tensors = {
        str(position): value.detach()
        for position, value in enumerate(inputs)
        if isinstance(value, Tensor) and value.layout is torch.strided and value.device.type == "cpu"
    }
    try:
        with writing_whole(folder / VALUES) as file:
            for part in parts(tensors):
                file.write(part)
    except PackageError as problem:
        _write(folder / "values_not_saved.txt", f"{problem}\n")


def give_values(inputs: Sequence[Any], folder: Path) -> bool:
    """Store the values that were saved in a folder in the ``inputs`` of its program; whether there are some."""
    saved = read_values(folder)
    for position, value in saved.items():
        if position < len(inputs) and isinstance(inputs[position], Tensor):
            _put(inputs[position], value, folder)
    return bool(saved)


def _put(target: Tensor, value: Tensor, folder: Path) -> None:
    """Store a saved value in a tensor that has the strides of the one it is of."""
    if target.shape != value.shape or target.dtype != value.dtype:
        raise RecordingError(f"The values saved in {folder} are for other inputs than its program has.")
    store(target, value)


def read_values(folder: Path) -> Mapping[int, Tensor]:
    """The values that were saved, by the position of the input; none where they were not asked for."""
    path = folder / VALUES
    if not path.is_file():
        return {}
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            data = bytearray(content)
        header = read_header(memoryview(data))
        return {int(name): tensor_at(data, stored) for name, stored in header.items()}
    except (ValueError, TypeError, LookupError, RecursionError, OSError) as error:
        raise RecordingError(f"{path} is damaged: {error}.") from error
