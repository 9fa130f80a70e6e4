"""A recording is plain data: JSON and back gives an equal one, and damage is named."""

import dataclasses
import json
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest

from torchkiln.debug.recording.model import (
    VERSION,
    About,
    Argument,
    Bandwidth,
    BufferLife,
    CacheLookup,
    Compilation,
    Fusion,
    GraphBreak,
    Guards,
    Kernel,
    LibraryCall,
    Limits,
    Line,
    Memory,
    MemoryStep,
    Node,
    Pass,
    Recompiled,
    Recording,
    Stage,
)
from torchkiln.errors import RecordingError

LINE = Line("model.py", 3)
RECORDING = Recording(
    About("f", "2026-01-02T03:04:05", "2.13", "1.0", "x86-64", 2),
    {"model.py": "import torch\n"},
    (GraphBreak("a print", LINE), GraphBreak("unknown")),
    (Guards("f", "x is a tensor", LINE),),
    (Recompiled("f", ("size 0 of x is 3",), LINE),),
    ("one", "two"),
    (
        Stage(
            "captured graph",
            0,
            0.5,
            (Node("a", "call_function", "add", "a", "layers.0", (LINE,), "float32", (2, "s0")),),
        ),
    ),
    (Pass(1, "pre-grad", "normalize", "captured", 0.25, True, 0, 1),),
    (
        Compilation(
            "1.inference",
            "inference",
            1,
            (Argument("x", "float32", (2, "s0"), ("s0", 1), "cpu"), Argument("n", "int", value="3")),
            1.0,
            (0,),
            (0,),
            (Fusion("fuse", ("a",), ("b",), False, "sizes differ"),),
            (Kernel("kernel0", "for", "define", "mov", ("a",), (LINE,), 1, 16, 4, 1e-6),),
            (LibraryCall("aten.mm", "(a, b)", ("mm",), (LINE,), "a library is faster", 3, 4),),
            Memory(64, 0, (MemoryStep("kernel0", 64),), (BufferLife("b0", 64, 0, 0, "its own tensor"),)),
            (CacheLookup("graph", False, "settings"),),
        ),
    ),
    {"lowering": 0.125},
    0.5,
    None,
    Limits((Bandwidth(1024, 1e9), Bandwidth(2048, 1e8)), 1e9),
)


def test_json_and_back_gives_an_equal_recording():
    text = json.dumps(RECORDING.to_json())
    assert Recording.from_json(json.loads(text)) == RECORDING


def test_another_version_is_refused_by_name():
    content = RECORDING.to_json() | {"version": 999}
    with pytest.raises(RecordingError, match="999"):
        Recording.from_json(content)


@pytest.mark.parametrize("content", [None, [], {}, {"version": 1}])
def test_what_is_no_recording_is_refused(content):
    with pytest.raises(RecordingError):
        Recording.from_json(content)


def test_a_field_of_another_type_is_named():
    content = RECORDING.to_json()
    content["compilations"][0]["kernels"][0]["bytes"] = "many"
    with pytest.raises(RecordingError, match="bytes"):
        Recording.from_json(content)


def test_the_bandwidth_for_an_amount_is_that_of_the_smallest_copy_that_is_no_smaller():
    assert RECORDING.limits.bytes_per_second(1024) == 1e9
    assert RECORDING.limits.bytes_per_second(1025) == 1e8
    assert RECORDING.limits.bytes_per_second(10**9) == 1e8


def test_the_json_has_the_fields_of_its_version():
    """A field that is added, renamed or removed needs another VERSION, and this list with it."""
    kinds = [Recording]
    lines = []
    for kind in kinds:  # grows
        hints = get_type_hints(kind)
        for item in dataclasses.fields(kind):
            lines.append(f"{kind.__name__}.{item.name}: {item.type}")
            kinds += [named for named in _classes_in(hints[item.name]) if named not in kinds]
    listed = (Path(__file__).parent / "json_fields.txt").read_text().splitlines()
    assert [f"version {VERSION}", *lines] == listed


def _classes_in(hint: Any) -> list[type]:
    """The dataclasses that a type names."""
    if dataclasses.is_dataclass(hint):
        return [hint]
    return [found for part in get_args(hint) for found in _classes_in(part)]
