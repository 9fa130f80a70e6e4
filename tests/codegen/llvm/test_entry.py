"""The native functions of a whole graph, as text and as described to the loader."""

from __future__ import annotations

import re

import pytest
import torch

from tests.runtime.hand_made import HandMade
from torchkiln.artifact.artifact import OutputSource
from torchkiln.artifact.calls import OperatorCall, TensorArgument
from torchkiln.ir.program import PassInput, PlainValue, StridedView
from torchkiln.native.host import host_processor
from torchkiln.native.jit import compile_module

aten = torch.ops.aten


def launch_graph(elements: int, grain: int) -> HandMade:
    x = torch.empty(elements)
    graph = HandMade()
    graph.input("x", x)
    graph.own("y", x)
    graph.launch("add", "x", "x", "y", grain=grain)
    graph.output("y")
    return graph


def parallel_calls(text: str) -> list[tuple[int, int]]:
    """Extent and grain of every parallel call."""
    found = re.findall(r"call i32 @torch_parallel_for\(i64 0, i64 (\d+), i64 (\d+),", text)
    return [(int(extent), int(grain)) for extent, grain in found]


@pytest.mark.parametrize(
    ("elements", "grain", "threads", "expected"),
    [
        (1000, 0, None, []),
        (1000, 100, None, [(1000, 100)]),
        (1000, 100, 1, []),
        (1000, 100, 3, [(1000, 334)]),
        (1000, 600, 3, [(1000, 600)]),
        (1000, 1000, None, []),
    ],
    ids=["serial", "torch's threads", "one thread", "three threads", "large grain", "too small"],
)
def test_parallel_calls(elements: int, grain: int, threads: int | None, expected: list[tuple[int, int]]) -> None:
    text = launch_graph(elements, grain).text(threads)
    assert parallel_calls(text) == expected


def test_the_loader_is_told_what_the_graph_needs() -> None:
    x = torch.empty(4)
    graph = HandMade()
    graph.input("x", x)
    graph.input("n", None)
    graph.constant("w", x)
    graph.own("soft", x)
    graph.own("sorted", x)
    graph.extern(aten.softplus.default, ("x", 2.0), ("soft",))
    graph.extern(aten.sort.default, ("soft",), ("sorted", None), frees=("soft",))
    graph.output("sorted", PassInput(0), PlainValue(None), StridedView("sorted", torch.float32, (2,), (1,)))
    artifact = graph.artifact()
    info = artifact.entry
    assert info.inputs == ("tensor", "unused")
    assert info.python_calls == (
        OperatorCall("aten::softplus", "", (TensorArgument(0), 2.0, 20), 1, where=0),
        OperatorCall("aten::sort", "", (TensorArgument(0), -1, False), 2, where=1),
    )
    assert info.python_calls[0].target is aten.softplus.default
    assert [artifact.texts[call.where].what for call in info.python_calls] == [
        "aten.softplus.default",
        "aten.sort.default",
    ]
    assert info.values == (None,)
    assert info.outputs == (
        OutputSource("tensor", 0),
        OutputSource("input", 0),
        OutputSource("value", 0),
        OutputSource("tensor", 1),
    )
    assert info.extern_calls == (("aten.softplus.default", "python"), ("aten.sort.default", "dispatcher"))


def test_an_output_in_the_arena_is_refused() -> None:
    graph = HandMade()
    graph.input("x", torch.empty(4))
    graph.arena("y", torch.empty(4))
    graph.launch("add", "x", "x", "y")
    graph.output("y")
    with pytest.raises(ValueError, match="output 0 is in memory that does not outlive the call"):
        graph.text()


def test_object_code_does_not_depend_on_the_process() -> None:
    text = launch_graph(1000, 100).text()
    again = launch_graph(1000, 100).text()
    assert text == again
    assert compile_module(text, host_processor()) == compile_module(again, host_processor())


def test_tensors_are_freed_where_the_plan_says() -> None:
    x = torch.empty(4)
    graph = HandMade()
    graph.input("x", x)
    graph.own("a", x)
    graph.own("b", x)
    graph.launch("add", "x", "x", "a")
    graph.launch("add", "a", "x", "b", frees=("a",))
    graph.launch("add", "b", "b", "x", frees=("b",))
    text = graph.text()
    body = text[text.index("define i32 @kiln_run") :]
    events = re.findall(r"aoti_torch_empty_strided|call void @add|call void @kiln_delete\(", body)
    names = [e.removeprefix("call void @") for e in events]
    first, second, third = ["aoti_torch_empty_strided", "add"], ["aoti_torch_empty_strided", "add"], ["add"]
    assert names == [*first, *second, "kiln_delete(", *third, "kiln_delete("]
