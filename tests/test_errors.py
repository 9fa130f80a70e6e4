"""Error messages name what failed, where, and the way out."""

from __future__ import annotations

import pickle

import pytest
import torch
import torch.fx

from torchkiln.errors import CompileError, KilnError, NodeFailure, OptionError, UnsupportedError
from torchkiln.graph.source import blame, source_line
from torchkiln.memory.capture import calling


def test_a_compile_error_names_stage_node_line_cause_and_way_out() -> None:
    error = CompileError("lowering", ValueError("no such axis."), node="sum_1", source="model.py:3 in forward")
    for part in ("lowering", "sum_1", "model.py:3 in forward", "ValueError: no such axis", "fallback=True"):
        assert part in str(error)
    assert "fallback" not in error.reason()


def test_a_compile_error_survives_pickling() -> None:
    error = CompileError("schedule", RuntimeError("x"), node="n", source="s")
    again = pickle.loads(pickle.dumps(error))
    assert (again.stage, again.node, again.source, str(again)) == ("schedule", "n", "s", str(error))


MULTI_LINE = "\n  first line.\n\nWhile executing %add:\n  Original traceback: ...\n"


def test_a_cause_of_many_lines_is_shown_by_its_first_and_kept_whole() -> None:
    cause = RuntimeError(MULTI_LINE)
    error = CompileError("AOTAutograd", cause, graph_pass="no_ops", node="add", source="model.py:3 in forward")
    assert error.reason().endswith("RuntimeError: first line")
    assert str(error).splitlines() == [f"{error.reason()}. Set fallback=True to run this graph eagerly instead."]
    assert error.cause is cause
    assert CompileError("load", ValueError("\n \n")).reason() == "load failed: ValueError: no message"


@pytest.mark.parametrize("value", [torch.zeros(40, 40), "a\nb", [object()] * 1000])
def test_a_bad_value_is_shown_in_one_line_with_the_way_out(value: object) -> None:
    for error in (
        OptionError.bad_value("threads", value, "a number", where="KILN_THREADS"),
        OptionError.unknown("option", value, ["threads", "fuse"]),
    ):
        assert len(str(error).splitlines()) == 1
        assert len(str(error)) < 400
        assert str(error).endswith(("(given by KILN_THREADS).", "the valid ones are: fuse, threads."))


def test_the_family_has_one_base() -> None:
    for kind in (CompileError, NodeFailure, OptionError, UnsupportedError):
        assert issubclass(kind, KilnError)
    assert issubclass(OptionError, ValueError)


def _node_with_trace(trace: str | None) -> torch.fx.Node:
    node = torch.fx.Graph().placeholder("x")
    if trace is not None:
        node.meta["stack_trace"] = trace
    return node


def test_the_source_line_is_the_innermost_frame() -> None:
    trace = '  File "outer.py", line 1, in run\n    f(x)\n  File "inner.py", line 7, in f\n    return x + 1\n'
    assert source_line(_node_with_trace(trace)) == "inner.py:7 in f: return x + 1"


def test_the_line_at_which_a_tool_calls_a_model_is_not_the_users() -> None:
    lines: list[str | None] = []

    def backend(gm: torch.fx.GraphModule, _: object) -> torch.fx.GraphModule:
        lines.extend(source_line(node) for node in gm.graph.nodes if node.op == "call_function")
        return gm

    torch.compile(calling(torch.nn.Sequential(torch.nn.ReLU())), backend=backend)(torch.ones(3))
    assert lines == [None]


def test_a_node_without_a_trace_has_no_source_line() -> None:
    assert source_line(_node_with_trace(None)) is None
    assert source_line(_node_with_trace("nothing to see")) is None


def test_blame_names_the_innermost_node() -> None:
    outer, inner = _node_with_trace(None), _node_with_trace('File "a.py", line 2, in g\n  y = x.sum(9)')
    with pytest.raises(NodeFailure) as caught, blame(outer), blame(inner):
        raise IndexError("dim 9")
    assert caught.value.source == "a.py:2 in g: y = x.sum(9)"
    assert isinstance(caught.value.__cause__, IndexError)
