"""The engine alone: expressions against small graphs."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
import torch.fx

from tests.patterns.graphs import calls, graph_of, only_place, places, reason, same_numbers
from torchkiln.patterns import IGNORED, Call, Capture, ListOf, Match, OneOf, Outputs, Repeated, RewriteSet
from torchkiln.patterns.rewrites import DirectRewrite

aten = torch.ops.aten
X = torch.randn(4, 4)
Y = torch.randn(4, 4)


def in_place(function: Any, *inputs: torch.Tensor) -> torch.fx.GraphModule:
    """The graph of a function that writes to values; those are read afterwards as what they were before."""
    graph_module = graph_of(function, *inputs)
    for node in graph_module.graph.nodes:
        if node.op == "call_function" and node.target._schema.is_mutable:
            node.replace_all_uses_with(node.args[0])
    return graph_module


def names(nodes: Any) -> list[str]:
    return [node.name for node in nodes]


# Calls and their arguments.


def test_a_call_matches_its_overload_and_no_other() -> None:
    graph = graph_of(lambda x, y: (x + y, x * 2, x.sin()), X, Y)
    assert names(place.outputs[0] for place in places(Call(aten.add.Tensor, IGNORED, IGNORED), graph)) == ["add"]
    assert places(Call(aten.add.Scalar, IGNORED, IGNORED), graph) == []


def test_a_call_may_have_several_targets() -> None:
    graph = graph_of(lambda x: x.sin() + x.cos() + x.tan(), X)
    found = places(Call([aten.sin.default, aten.cos.default], Capture("x")), graph)
    assert names(place.outputs[0] for place in found) == ["sin", "cos"]


def test_candidates_come_in_the_order_of_the_graph_whatever_the_order_of_targets() -> None:
    graph = graph_of(lambda x: x.sin() + x.cos() + (x + 1).sin(), X)
    found = places(Call([aten.cos.default, aten.sin.default], Capture("x")), graph)
    assert names(place.outputs[0] for place in found) == ["sin", "cos", "sin_1"]


@pytest.mark.parametrize(
    "pattern",
    [
        Call(aten.sum.dim_IntList, Capture("x"), [1], True),
        Call(aten.sum.dim_IntList, Capture("x"), [1], keepdim=True),
        Call(aten.sum.dim_IntList, Capture("x"), keepdim=True, dim=[1]),
        Call(aten.sum.dim_IntList, Capture("x"), [1], True, dtype=None),
    ],
)
def test_arguments_are_compared_by_name_however_they_are_written(pattern: Call) -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    by_position = graph.call_function(aten.sum.dim_IntList, (x, [1], True))
    by_name = graph.call_function(aten.sum.dim_IntList, (x,), {"dim": [1], "keepdim": True})
    in_full = graph.call_function(aten.sum.dim_IntList, (x, [1], True), {"dtype": None})
    graph.output((by_position, by_name, in_full))
    assert len(places(pattern, torch.fx.GraphModule(torch.nn.Module(), graph))) == 3


def test_arguments_left_out_have_their_defaults() -> None:
    graph = graph_of(lambda x: x.sum(1, keepdim=True), X)
    assert places(Call(aten.sum.dim_IntList, Capture("x"), [1]), graph) == []
    assert "argument keepdim of sum_1 is True where the pattern has False" in reason(
        Call(aten.sum.dim_IntList, Capture("x"), [1]), graph, "sum_1"
    )


def test_functions_in_python_are_matched_by_the_names_of_their_arguments() -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    graph.output((graph.call_function(torch.nn.functional.softmax, (x,), {"dim": -1}),))
    module = torch.fx.GraphModule(torch.nn.Module(), graph)
    assert len(places(Call(torch.nn.functional.softmax, Capture("x"), -1), module)) == 1
    assert places(Call(torch.nn.functional.softmax, Capture("x"), 0), module) == []


def test_methods_are_matched_by_name_and_inputs_of_that_name_are_not() -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("relu")
    graph.output((graph.call_method("sin", (graph.call_method("relu", (x,)),)),))
    module = torch.fx.GraphModule(torch.nn.Module(), graph)
    place = only_place(Call("sin", Call("relu", Capture("x"))), module)
    assert place.captures["x"] is x
    assert places(Call("relu", Call("relu", IGNORED)), module) == []


def test_numbers_match_by_value_and_truths_do_not_match_numbers() -> None:
    graph = graph_of(lambda x: (x * 2, x.sum(1, keepdim=True)), X)
    assert len(places(Call(aten.mul.Tensor, Capture("x"), 2.0), graph)) == 1
    assert places(Call(aten.mul.Tensor, Capture("x"), 3), graph) == []
    assert places(Call(aten.sum.dim_IntList, Capture("x"), [1], 1), graph) == []


def test_not_a_number_matches_itself() -> None:
    graph = graph_of(lambda x: x * float("nan"), X)
    assert len(places(Call(aten.mul.Tensor, Capture("x"), float("nan")), graph)) == 1


# Captures and lists.


def test_one_name_is_one_value() -> None:
    square = Call(aten.mul.Tensor, Capture("x"), Capture("x"))
    graph = graph_of(lambda x, y: (x * x, x * y), X, Y)
    place = only_place(square, graph)
    assert place.outputs[0].name == "mul"
    assert place.captures["x"].name == "x_1"


def test_one_object_is_one_node_and_two_that_look_alike_may_be_two() -> None:
    graph = graph_of(lambda x, y: x.sin() * y.sin(), X, Y)
    shared = Call(aten.sin.default, IGNORED)
    assert places(Call(aten.mul.Tensor, shared, shared), graph) == []
    apart = Call(aten.mul.Tensor, Call(aten.sin.default, IGNORED), Call(aten.sin.default, IGNORED))
    assert len(places(apart, graph)) == 1


def test_captured_constants_are_kept_and_consistent() -> None:
    graph = graph_of(lambda x: (x * 3 + 3, x * 3 + 4), X)
    pattern = Call(aten.add.Tensor, Call(aten.mul.Tensor, Capture("x"), Capture("n")), Capture("n"))
    assert only_place(pattern, graph).captures["n"] == 3


def test_lists_match_element_by_element() -> None:
    graph = graph_of(lambda x, y: (torch.cat([x, y]), torch.cat([x, y, x])), X, Y)
    place = only_place(Call(aten.cat.default, [Capture("a"), Capture("b")]), graph)
    assert names((place.captures["a"], place.captures["b"])) == ["x_1", "y_1"]
    place = only_place(Call(aten.cat.default, [Capture("a"), IGNORED, Capture("a")]), graph)
    assert place.captures["a"].name == "x_1"


def test_a_list_of_any_length_captures_lists() -> None:
    graph = graph_of(lambda x, y: torch.cat([x.sin(), y.sin(), (x + y).sin()]), X, Y)
    pattern = Call(aten.cat.default, ListOf(Call(aten.sin.default, Capture("x"))))
    assert names(only_place(pattern, graph).captures["x"]) == ["x_1", "y_1", "add"]
    assert len(only_place(pattern, graph).nodes) == 4


def test_every_element_of_a_list_must_match_and_there_must_be_enough() -> None:
    element = Call(aten.sin.default, Capture("x"))
    graph = graph_of(lambda x, y: torch.cat([x.sin(), y.cos()]), X, Y)
    assert places(Call(aten.cat.default, ListOf(element)), graph) == []
    graph = graph_of(lambda x, y: torch.cat([x.sin(), y.sin()]), X, Y)
    assert places(Call(aten.cat.default, ListOf(element, at_least=3)), graph) == []
    assert len(places(Call(aten.cat.default, ListOf(element, at_least=2)), graph)) == 1


def test_a_list_that_may_be_empty_needs_none_of_its_elements() -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    graph.output((graph.call_function(aten.index.Tensor, (x, [])),))
    module = torch.fx.GraphModule(torch.nn.Module(), graph)
    pattern = Call(aten.index.Tensor, Capture("x"), ListOf(Call(aten.sin.default, Capture("i")), at_least=0))
    assert only_place(pattern, module).captures["i"] == []


def test_what_is_captured_outside_a_list_is_the_same_in_every_element() -> None:
    scaled = Call(aten.cat.default, ListOf(Call(aten.mul.Tensor, Capture("part"), Capture("scale"))), Capture("dim"))
    pattern = Call(aten.add.Tensor, Capture("scale"), scaled)

    tall = torch.randn(4, 4)
    graph = graph_of(lambda x, y: y + torch.cat([x * y, x.sin() * y]), tall, torch.randn(1, 4))
    assert names(only_place(pattern, graph).captures["part"]) == ["x_1", "sin"]
    graph = graph_of(lambda x, y, z: y + torch.cat([x * y, x.sin() * z]), tall, torch.randn(1, 4), torch.randn(1, 4))
    assert places(pattern, graph) == []


def test_a_shared_call_in_a_list_is_one_node_for_all_elements() -> None:
    whole = Call(aten.split.Tensor, Capture("x"), Capture("size"), Capture("dim"), shared=True)
    pieces = ListOf(Call(operator.getitem, whole, Capture("place")))
    pattern = Call(aten.cat.default, pieces, Capture("dim"))
    graph = graph_of(lambda x: torch.cat(torch.split(x, 2, 1), 1), X)
    place = only_place(pattern, graph)
    assert place.captures["place"] == [0, 1]
    assert place.captures["x"].name == "x_1"
    assert place.captures["dim"] == 1
    assert names(place.nodes) == ["split", "getitem", "getitem_1", "cat"]
    graph = graph_of(lambda x, y: torch.cat([torch.split(x, 2, 1)[0], torch.split(y, 2, 1)[1]], 1), X, Y)
    assert places(pattern, graph) == []


def test_elements_of_a_list_take_choices_back_when_a_later_element_does_not_fit() -> None:
    # Of the first product, either factor may be the shared one; only one of them is in the second product.
    common = Call(aten.relu.default, IGNORED, shared=True)
    pattern = Call(aten.cat.default, ListOf(Call(aten.mul.Tensor, common, Capture("factor"))))

    def products(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        first, second = x.relu(), y.relu()
        return torch.cat([first * second, second * x])

    place = only_place(pattern, graph_of(products, X, Y))
    assert names(place.captures["factor"]) == ["relu", "x_1"]


# Several outputs.


def test_repeated_gets_every_piece_of_one_split() -> None:
    whole = Call(aten.split.Tensor, Capture("x"), Capture("size"), Capture("dim"))
    first = Call(operator.getitem, whole, 0)
    pattern = Outputs(first, Repeated(Call(operator.getitem, whole, Capture("place"))))
    graph = graph_of(lambda x, y: [*(p.sin() for p in x.split(1, 1)), y.split(3, 1)[1]], X, Y)
    place, other = places(pattern, graph)
    assert other.captures["place"] == [0, 1]
    assert place.captures["place"] == [0, 1, 2, 3]
    assert names(place.outputs) == ["getitem", "getitem", "getitem_1", "getitem_2", "getitem_3"]
    assert place.captures["x"].name == "x_1"


def test_several_outputs_are_found_from_what_they_share() -> None:
    x = Capture("x")
    pattern = Outputs(Call(aten.sin.default, x), Call(aten.cos.default, x))
    graph = graph_of(lambda x, y: (y.cos(), x.sin(), y.sin(), (x + y).cos(), (x + y).tan()), X, Y)
    place = only_place(pattern, graph)
    assert names(place.outputs) == ["sin_1", "cos"]
    assert place.captures["x"].name == "y_1"


def test_the_choice_of_a_second_output_is_taken_back() -> None:
    x = Capture("x")
    pattern = Outputs(Call(aten.sin.default, x), Call(aten.mul.Tensor, x, Call(aten.cos.default, Capture("y"))))

    def several(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x.sin(), x * y, x * y.tan(), x * y.cos()

    place = only_place(pattern, graph_of(several, X, Y))
    assert names(place.outputs) == ["sin", "mul_2"]


# Conditions on readers.


def test_users_asks_for_the_number_of_readers() -> None:
    graph = graph_of(lambda x: (s := x.sin(), s + 1, s + 2), X)
    assert len(places(Call(aten.sin.default, IGNORED, users=3), graph)) == 1
    assert places(Call(aten.sin.default, IGNORED, users=2), graph) == []
    assert "has 3 users where the pattern asks for 2" in reason(Call(aten.sin.default, IGNORED, users=2), graph, "sin")


def test_exclusive_captures_are_read_by_the_match_alone() -> None:
    pattern = Call(aten.sin.default, Capture("x", exclusive=True))
    assert len(places(pattern, graph_of(lambda x: (x + 1).sin(), X))) == 1
    graph = graph_of(lambda x: ((x + 1).sin(), (y := x + 1).sin(), y * 2), X)
    assert names(place.outputs[0] for place in places(pattern, graph)) == ["sin"]
    assert "add_1 must be read by the match alone and is also read by mul" in reason(pattern, graph, "sin_1")


def test_exclusive_captures_inside_a_list_are_read_by_the_match_alone() -> None:
    pattern = Call(aten.cat.default, ListOf(Call(aten.sin.default, Capture("x", exclusive=True))))
    assert len(places(pattern, graph_of(lambda x: torch.cat([(x + 1).sin(), (x + 2).sin()]), X))) == 1
    graph = graph_of(lambda x: (torch.cat([(x + 1).sin(), (y := x + 2).sin()]), y * 2), X)
    assert places(pattern, graph) == []


def test_a_node_inside_that_others_read_forbids_the_match() -> None:
    pattern = Call(aten.sin.default, Call(aten.exp.default, Capture("x")))
    graph = graph_of(lambda x: ((e := x.exp()).sin(), e + 1), X)
    assert places(pattern, graph) == []
    assert "exp is also read by add, outside of the match" in reason(pattern, graph, "sin")


def test_a_view_of_an_input_may_be_read_by_others() -> None:
    pattern = Call(aten.mm.default, Capture("x"), Call(aten.t.default, Capture("y")))
    graph = graph_of(lambda x, y: (x @ (turned := y.t()), turned + 1), X, Y)
    assert len(places(pattern, graph)) == 1


def test_a_view_of_what_the_match_computes_may_not_be_read_by_others() -> None:
    """It would keep what is replaced alive, and have it computed twice."""
    pattern = Call(aten.sin.default, Call(aten.t.default, Call(aten.exp.default, Capture("x"))))
    assert len(places(pattern, graph_of(lambda x: x.exp().t().sin(), X))) == 1
    graph = graph_of(lambda x: ((turned := x.exp().t()).sin(), turned + 1), X)
    assert places(pattern, graph) == []


def test_a_tensor_made_from_numbers_may_be_read_by_others() -> None:
    pattern = Call(aten.mul.Tensor, Capture("x"), Call(aten.full.default, [4], 2.0, pin_memory=False, device=IGNORED))
    graph = graph_of(lambda x: (x * (two := torch.full([4], 2.0)), two + 1), X)
    assert len(places(pattern, graph)) == 1


def test_a_random_tensor_may_not_be_read_by_others() -> None:
    pattern = Call(aten.mul.Tensor, Capture("x"), Call(aten.rand.default, [4], device=IGNORED, pin_memory=IGNORED))
    assert len(places(pattern, graph_of(lambda x: x * torch.rand(4), X))) == 1
    assert places(pattern, graph_of(lambda x: (x * (r := torch.rand(4)), r + 1), X)) == []


# Choices.


def test_alternatives_are_tried_in_order() -> None:
    part = OneOf(Call(aten.sin.default, Capture("inner")), Capture("outer"))
    place = only_place(Call(aten.exp.default, part), graph_of(lambda x: x.sin().exp(), X))
    assert set(place.captures) == {"inner"}
    place = only_place(Call(aten.exp.default, part), graph_of(lambda x: x.cos().exp(), X))
    assert set(place.captures) == {"outer"}


def test_an_alternative_that_fits_here_and_fails_later_is_taken_back() -> None:
    # The first alternative takes sin apart; then the same value is not there a second time, and sin itself is.
    part = OneOf(Call(aten.sin.default, Capture("x")), Capture("x"))
    pattern = Call(aten.sub.Tensor, Call(aten.exp.default, part), Capture("x"))
    place = only_place(pattern, graph_of(lambda x: (s := x.sin()).exp() - s, X))
    assert place.captures["x"].name == "sin"
    assert names(place.nodes) == ["exp", "sub"]
    place = only_place(pattern, graph_of(lambda x: x.sin().exp() - x, X))
    assert place.captures["x"].name == "x_1"


def test_an_alternative_is_taken_back_when_somebody_else_reads_its_node() -> None:
    part = OneOf(Call(aten.sin.default, Capture("x")), Capture("x"))
    graph = graph_of(lambda x: ((s := x.sin()).exp(), s + 1), X)
    assert only_place(Call(aten.exp.default, part), graph).captures["x"].name == "sin"


def test_alternatives_may_be_constants() -> None:
    graph = graph_of(lambda x: (x * 2, x * 3, x * 4), X)
    found = places(Call(aten.mul.Tensor, Capture("x"), OneOf(2, 4)), graph)
    assert names(place.outputs[0] for place in found) == ["mul", "mul_2"]


def test_a_graph_without_the_calls_of_an_alternative_still_matches_the_other() -> None:
    graph = graph_of(lambda x: x.cos().exp(), X)
    part = OneOf(Call(aten.sin.default, Capture("x")), Call(aten.cos.default, Capture("x")))
    assert len(places(Call(aten.exp.default, part), graph)) == 1


@pytest.mark.parametrize(
    "function", [lambda x, y: x.sin() + y.cos(), lambda x, y: y.cos() + x.sin()], ids=["as written", "exchanged"]
)
def test_arguments_of_commuting_operators_may_be_exchanged(function: Any) -> None:
    pattern = Call(aten.add.Tensor, Call(aten.sin.default, Capture("x")), Call(aten.cos.default, Capture("y")))
    place = only_place(pattern, graph_of(function, X, Y))
    assert names((place.captures["x"], place.captures["y"])) == ["x_1", "y_1"]


def test_arguments_of_others_may_not_be_exchanged() -> None:
    pattern = Call(aten.sub.Tensor, Call(aten.sin.default, Capture("x")), Call(aten.cos.default, Capture("y")))
    assert len(places(pattern, graph_of(lambda x, y: x.sin() - y.cos(), X, Y))) == 1
    assert places(pattern, graph_of(lambda x, y: y.cos() - x.sin(), X, Y)) == []


@pytest.mark.parametrize("alpha", [2, IGNORED, Capture("alpha")])
def test_a_scaled_addition_is_not_exchanged(alpha: Any) -> None:
    sin, cos = Call(aten.sin.default, Capture("x")), Call(aten.cos.default, Capture("y"))
    pattern = Call(aten.add.Tensor, sin, cos, alpha=alpha)
    assert len(places(pattern, graph_of(lambda x, y: torch.add(x.sin(), y.cos(), alpha=2), X, Y))) == 1
    assert places(pattern, graph_of(lambda x, y: torch.add(y.cos(), x.sin(), alpha=2), X, Y)) == []


def test_exchanging_is_taken_back_deep_inside() -> None:
    # Four products, each to be exchanged or not, and a common factor that fits one way only.
    x = Capture("x")
    pattern: Any = x
    for _ in range(4):
        pattern = Call(aten.mul.Tensor, Call(aten.add.Tensor, pattern, IGNORED), x)

    def nested(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        value = x
        for step in range(4):
            value = x * (y + value) if step % 2 else (value + y) * x
        return value

    assert only_place(pattern, graph_of(nested, X, Y)).captures["x"].name == "x_1"


# Writes.


def test_a_write_between_the_nodes_of_a_match_forbids_it() -> None:
    pattern = Call(aten.add.Tensor, Call(aten.sin.default, Capture("x")), Capture("x"))

    def written(x: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        y = x.sin()
        x.mul_(2)
        return y + x

    def written_through_a_view(x: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        y = x.sin()
        x.t().mul_(2)
        return y + x

    def written_elsewhere(x: torch.Tensor) -> torch.Tensor:
        x, z = x.clone(), x.clone()
        y = x.sin()
        z.mul_(2)
        return y + x + z

    def written_before(x: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        x.mul_(2)
        return x.sin() + x

    assert places(pattern, in_place(written, X)) == []
    assert places(pattern, in_place(written_through_a_view, X)) == []
    assert len(places(pattern, in_place(written_elsewhere, X))) == 1
    assert len(places(pattern, in_place(written_before, X))) == 1
    assert "mul_ writes to memory of the match" in reason(pattern, in_place(written, X), "add")


def _halved(match: Match, x: torch.fx.Node) -> None:
    match.replace_by_example(lambda value: torch.sin(value * 2) / 2, [x])


SIN_TIMES_COS = Call(aten.mul.Tensor, Call(aten.sin.default, Capture("x")), Call(aten.cos.default, Capture("x")))


def test_a_replacement_reads_its_inputs_after_the_writes_that_came_before_the_match() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        x.mul_(3)
        return x.sin() * x.cos()

    graph = in_place(function, X)
    assert RewriteSet("test", [DirectRewrite("half", SIN_TIMES_COS, _halved)]).apply(graph)
    assert "aten.cos.default" not in calls(graph)
    same_numbers(graph, function, X)


def test_a_replacement_reads_its_inputs_before_the_writes_that_come_after_the_match() -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = x.clone()
        y = x.sin() * x.cos()
        x.mul_(3)
        return y, x

    graph = in_place(function, X)
    assert RewriteSet("test", [DirectRewrite("half", SIN_TIMES_COS, _halved)]).apply(graph)
    same_numbers(graph, function, X)


# Seeing through.


def test_no_ops_are_seen_through_where_asked_for() -> None:
    pattern = Call(aten.sin.default, Call(aten.exp.default, Capture("x")))
    graph = graph_of(lambda x: x.exp()[:].view(4, 4).expand(4, 4).clone().sin(), X)
    assert places(pattern, graph) == []
    place = only_place(pattern, graph, through="no_ops")
    assert place.captures["x"].name == "x_1"
    assert place.nodes[0].name == "exp"
    assert place.nodes[-1].name == "sin"


@pytest.mark.parametrize(
    "between",
    [lambda v: v[1:], lambda v: v.view(2, 8), lambda v: v.t(), lambda v: v.expand(3, 4, 4), lambda v: v[:, ::2]],
    ids=["slice", "view", "turned", "expand", "step"],
)
def test_what_changes_something_is_not_a_no_op(between: Any) -> None:
    pattern = Call(aten.sin.default, Call(aten.exp.default, Capture("x")))
    assert places(pattern, graph_of(lambda x: between(x.exp()).sin(), X), through="no_ops") == []


def test_views_are_seen_through_where_asked_for() -> None:
    pattern = Call(aten.sin.default, Call(aten.exp.default, Capture("x")))
    graph = graph_of(lambda x: x.exp().view(2, 8).unsqueeze(0).sin(), X)
    assert places(pattern, graph, through="no_ops") == []
    assert only_place(pattern, graph, through="views").captures["x"].name == "x_1"
    assert places(pattern, graph_of(lambda x: x.exp().t().sin(), X), through="views") == []


def test_a_value_read_beside_a_no_op_of_it_is_the_same_value() -> None:
    square = Call(aten.mul.Tensor, Capture("x"), Capture("x"))
    graph = graph_of(lambda x: x * x[:].view(4, 4), X)
    assert places(square, graph) == []
    assert len(places(square, graph, through="no_ops")) == 1


def test_a_node_seen_through_that_others_read_does_no_harm_to_an_input() -> None:
    graph = graph_of(lambda x: ((same := x[:]).sin(), same + 1), X)
    assert len(places(Call(aten.sin.default, Capture("x")), graph, through="no_ops")) == 1
