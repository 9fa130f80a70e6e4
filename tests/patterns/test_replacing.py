"""What a replacement leaves behind: metadata, strides, and memory of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.fx

import torchkiln
from tests.patterns.graphs import calls, graph_of, same_numbers
from torchkiln.errors import PatternError
from torchkiln.graph.fake import same_metadata
from torchkiln.patterns import Call, Capture, Match, Outputs, RewriteSet
from torchkiln.patterns.rewrites import DirectRewrite

aten = torch.ops.aten
X = torch.randn(4, 6)
SIN_OF_EXP = Call(aten.sin.default, Call(aten.exp.default, Capture("x")))


def replaced(graph_module: torch.fx.GraphModule, pattern: Call | Outputs, function: Callable[..., Any]) -> bool:
    """Put ``function`` of the capture ``x`` in place of every match."""

    def handler(match: Match, x: torch.fx.Node) -> None:
        match.replace_by_example(function, [x])

    changed = RewriteSet("test", [DirectRewrite("test", pattern, handler)]).apply(graph_module)
    graph_module.graph.lint()
    graph_module.recompile()
    return changed


def turned(x: torch.Tensor) -> torch.Tensor:
    """``x.exp().sin()`` with the strides of its transpose."""
    return x.t().contiguous().t().exp().sin()


def fake_values_are_true(graph_module: torch.fx.GraphModule, *inputs: torch.Tensor) -> None:
    """Every node's fake value looks like the value it has when the graph runs."""

    class Comparing(torch.fx.Interpreter):
        def run_node(self, node: torch.fx.Node) -> Any:
            value = super().run_node(node)
            assert node.op == "output" or same_metadata(node.meta["val"], value), node
            return value

    Comparing(graph_module).run(*(value.clone() for value in inputs))


def test_new_nodes_say_what_they_are_and_where_they_come_from() -> None:
    graph = graph_of(lambda x: x.exp().sin() + 1, X)
    (sin,) = graph.graph.find_nodes(op="call_function", target=aten.sin.default)
    sin.meta["stack_trace"] = 'File "model.py", line 7, in forward\n    y = x.exp().sin()'
    assert replaced(graph, SIN_OF_EXP, lambda x: (x * 2).cos())
    made = [node for node in graph.graph.nodes if node.target in (aten.mul.Tensor, aten.cos.default)]
    assert [node.target for node in made] == [aten.mul.Tensor, aten.cos.default]
    for node in made:
        assert node.meta["stack_trace"] == sin.meta["stack_trace"]
        assert node.meta["replaced"] == ("exp", "sin")
        assert node.meta["val"].shape == X.shape
    same_numbers(graph, lambda x: (x * 2).cos() + 1, X)
    fake_values_are_true(graph, X)


def test_a_replacement_with_several_results_takes_the_place_of_several_outputs() -> None:
    x = Capture("x")
    pattern = Outputs(Call(aten.sin.default, x), Call(aten.cos.default, x))
    graph = graph_of(lambda x: (x.sin() + 1, x.cos() * 2), X)
    assert replaced(graph, pattern, lambda x: (x.tan(), x.exp()))
    same_numbers(graph, lambda x: (x.tan() + 1, x.exp() * 2), X)


def test_a_result_read_before_the_last_node_of_the_match_is_there_in_time() -> None:
    x = Capture("x")
    pattern = Outputs(Call(aten.sin.default, x), Call(aten.cos.default, x))

    def function(x: torch.Tensor) -> torch.Tensor:
        first = x.sin()
        later = first * 3
        return x.cos() + later

    graph = graph_of(function, X)
    assert replaced(graph, pattern, lambda x: (x.exp(), x.tan()))
    same_numbers(graph, lambda x: x.tan() + x.exp() * 3, X)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda x: (x, x), "returns 2 values where the pattern has 1"),
        (lambda x: x[:2], r"float32 of \[2, 6\] where the pattern has torch.float32 of \[4, 6\]"),
        (lambda x: x.double(), "float64"),
    ],
)
def test_a_replacement_of_another_form_is_refused(function: Callable[..., Any], message: str) -> None:
    with pytest.raises(PatternError, match=message):
        replaced(graph_of(lambda x: x.exp().sin(), X), SIN_OF_EXP, function)


# Strides.


def test_outputs_keep_the_strides_of_eager() -> None:
    graph = graph_of(lambda x: x.exp().sin(), X)
    assert replaced(graph, SIN_OF_EXP, turned)
    same_numbers(graph, lambda x: x.exp().sin(), X)
    fake_values_are_true(graph, X)


def test_outputs_behind_a_replacement_keep_the_strides_of_eager() -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x.exp().sin()
        return y + 1, y.t(), y.sum(0), y[1:]

    graph = graph_of(function, X)
    assert replaced(graph, SIN_OF_EXP, turned)
    same_numbers(graph, function, X)
    fake_values_are_true(graph, X)


def test_a_view_that_needs_the_old_strides_reads_a_copy() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return (x.exp().sin().view(24) * 2).view(2, 12)

    graph = graph_of(function, X)
    assert replaced(graph, SIN_OF_EXP, turned)
    same_numbers(graph, function, X)
    fake_values_are_true(graph, X)


def test_a_view_the_new_strides_allow_reads_no_copy() -> None:
    graph = graph_of(lambda x: x.exp().sin().view(4, 2, 3).sum((1, 2)), X)
    assert replaced(graph, SIN_OF_EXP, lambda x: (x * 2).exp().sin())
    assert "aten.clone.default" not in calls(graph)


@pytest.mark.parametrize("through", [lambda y: y, lambda y: y * 2], ids=["at once", "later"])
def test_reads_of_memory_find_it_as_it_was(through: Callable[[torch.Tensor], torch.Tensor]) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return through(x.exp().sin()).as_strided((6, 4), (4, 1)) + 1

    graph = graph_of(function, X)
    assert replaced(graph, SIN_OF_EXP, turned)
    same_numbers(graph, function, X)
    fake_values_are_true(graph, X)


def test_an_operator_of_the_users_is_given_the_strides_of_eager() -> None:
    with torch.library._scoped_library("kilntest", "FRAGMENT") as library:
        library.define("strides_of(Tensor x) -> Tensor")
        library.impl("strides_of", lambda x: x * x.stride(0), "CompositeExplicitAutograd")
        library.impl("strides_of", lambda x: torch.empty_like(x), "Meta")
        operator = torch.ops.kilntest.strides_of.default

        def function(x: torch.Tensor) -> torch.Tensor:
            return operator(x.exp().sin()) + 1

        graph = graph_of(function, X)
        assert replaced(graph, SIN_OF_EXP, turned)
        same_numbers(graph, function, X)


def test_symbolic_strides_are_kept_without_asking_for_them() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return x.exp().sin().view(-1)

    graph = graph_of(function, X, sizes="symbolic")
    (placeholder,) = (node for node in graph.graph.find_nodes(op="placeholder") if node.meta["val"].dim())
    environment = placeholder.meta["val"].fake_mode.shape_env
    before = len(environment.guards)
    assert replaced(graph, SIN_OF_EXP, turned)
    assert len(environment.guards) == before
    same_numbers(graph, function, X)
    same_numbers(graph, function, torch.randn(5, 3))


# Memory.


def test_a_result_has_memory_of_its_own(compile_strictly: Callable[..., Any]) -> None:
    @torchkiln.rewrite(stage="joint", example_inputs=(torch.empty(4),))
    class InverseOfExp:
        def search(x):
            return x.exp().log()

        def replace(x):
            return x

    def written_later(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = x.exp().log()
        z = y * 2
        x.add_(1)
        return y, z

    try:
        x = torch.randn(5)
        got = compile_strictly(lambda x: x.exp().log())(x)
        assert got.data_ptr() != x.data_ptr()
        assert torch.equal(got, x)
        before = x.clone()
        with torch.no_grad():
            y, z = compile_strictly(written_later)(x)
        assert torch.equal(y, before)
        assert torch.equal(z, before * 2)
        assert torch.equal(x, before + 1)
        torchkiln.reset_stats()
        compile_strictly(lambda x: x.exp().log() * 2)(x)
        assert torchkiln.stats().kernels == 1
    finally:
        InverseOfExp.unregister()


def test_two_results_do_not_share_memory() -> None:
    x = Capture("x")
    pattern = Outputs(Call(aten.sin.default, x), Call(aten.cos.default, x))
    graph = graph_of(lambda x: (x.sin(), x.cos()), X)
    assert replaced(graph, pattern, lambda x: (y := x.exp(), y))
    first, second = torch.fx.Interpreter(graph).run(X)
    assert first.data_ptr() != second.data_ptr()
    assert torch.equal(first, second)


def test_a_view_may_be_replaced_by_a_view() -> None:
    graph = graph_of(lambda x: x.t().t() + 1, X)
    pattern = Call(aten.t.default, Call(aten.t.default, Capture("x")))
    assert replaced(graph, pattern, lambda x: x)
    assert calls(graph) == ["aten.add.Tensor"]
