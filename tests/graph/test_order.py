"""Topological sort, dead code and aliasing on FX graphs, also deeper than Python's recursion limit."""

from __future__ import annotations

import operator
import random
import sys

import pytest
import torch
import torch.fx
from hypothesis import given
from hypothesis import strategies as st

from torchkiln.graph.aliases import Aliases
from torchkiln.graph.dead_code import eliminate_dead_code
from torchkiln.graph.effects import has_effect, may_have_effect, mutated_arguments
from torchkiln.graph.order import stable_topological_sort

aten = torch.ops.aten


def _chain(length: int) -> tuple[torch.fx.Graph, list[torch.fx.Node]]:
    graph = torch.fx.Graph()
    nodes = [graph.placeholder("x")]
    for _ in range(length):
        nodes.append(graph.call_function(aten.sin.default, (nodes[-1],)))
    graph.output((nodes[-1],))
    return graph, nodes


def _is_sorted(graph: torch.fx.Graph) -> bool:
    seen: set[torch.fx.Node] = set()
    for node in graph.nodes:
        if not seen.issuperset(node.all_input_nodes):
            return False
        seen.add(node)
    return True


def test_a_sorted_graph_is_left_alone() -> None:
    graph, _ = _chain(4)
    before = [node.name for node in graph.nodes]
    assert not stable_topological_sort(graph)
    assert [node.name for node in graph.nodes] == before


def test_sorting_a_chain_of_5000_in_reverse_needs_no_recursion() -> None:
    assert sys.getrecursionlimit() < 5000
    graph, nodes = _chain(5000)
    for node in nodes[2:]:
        nodes[1].prepend(node)
    assert not _is_sorted(graph)
    assert stable_topological_sort(graph)
    assert _is_sorted(graph)
    assert len(graph.nodes) == 5002


@given(st.integers(0, 10**6))
def test_sorting_keeps_the_order_of_independent_nodes(seed: int) -> None:
    choose = random.Random(seed)
    graph = torch.fx.Graph()
    nodes = [graph.placeholder("x")]
    for _ in range(12):
        nodes.append(graph.call_function(aten.add.Tensor, tuple(choose.choices(nodes, k=2))))
    output = graph.output((nodes[-1],))
    moved = nodes[1:]
    choose.shuffle(moved)
    for node in moved:
        output.prepend(node)
    order = {node: place for place, node in enumerate(graph.nodes)}
    stable_topological_sort(graph)
    assert _is_sorted(graph)
    # First in, first out among the nodes that are ready: the definition, done the slow way.
    done: list[torch.fx.Node] = []
    waiting = sorted(order, key=order.__getitem__)
    while waiting:
        ready = next(node for node in waiting if set(node.all_input_nodes) <= set(done))
        waiting.remove(ready)
        done.append(ready)
    assert list(graph.nodes) == done


def test_a_cycle_is_an_error() -> None:
    graph, nodes = _chain(3)
    nodes[1].args = (nodes[3],)
    with pytest.raises(ValueError, match="cycle"):
        stable_topological_sort(graph)


def test_dead_chains_of_5000_go_in_one_walk() -> None:
    graph, nodes = _chain(5000)
    graph.output_node().args = ((nodes[0],),)
    assert eliminate_dead_code(graph, has_effect)
    assert [node.op for node in graph.nodes] == ["placeholder", "output"]
    assert not eliminate_dead_code(graph, has_effect)


def test_dead_code_keeps_writes_random_draws_and_checks() -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    doubled = graph.call_function(aten.mul.Tensor, (x, 2))
    graph.call_function(aten.copy_.default, (x, doubled))
    graph.call_function(aten.bernoulli.p, (x, 0.5))
    graph.call_function(aten._assert_async.msg, (x, "wrong"))
    graph.call_function(aten.sin.default, (x,))
    graph.output((x,))
    eliminate_dead_code(graph, has_effect)
    kept = [node.target for node in graph.nodes if node.op == "call_function"]
    assert kept == [aten.mul.Tensor, aten.copy_.default, aten.bernoulli.p, aten._assert_async.msg]


def test_torch_level_calls_that_may_write_are_not_dead() -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    norm = graph.call_function(torch.nn.functional.batch_norm, (x, x, x), {"training": True})
    in_place = graph.call_method("add_", (x, 1))
    view = graph.call_method("view", (x, -1))
    assert may_have_effect(norm)
    assert may_have_effect(in_place)
    assert not may_have_effect(view)


def test_mutated_arguments_are_found_by_position_and_by_name() -> None:
    graph = torch.fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    assert mutated_arguments(graph.call_function(aten.copy_.default, (x, y))) == (x,)
    assert mutated_arguments(graph.call_function(aten.add.out, (x, x), {"out": y})) == (y,)
    assert mutated_arguments(graph.call_function(aten.add.Tensor, (x, y))) == ()


def test_views_share_memory_with_their_root_and_copies_do_not() -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    pieces = graph.call_function(aten.split.Tensor, (x, 2))
    piece = graph.call_function(aten.unsqueeze.default, (x, 0))
    first = graph.call_function(operator.getitem, (pieces, 0))
    copied = graph.call_function(aten.clone.default, (first,))
    flat = graph.call_function(aten._unsafe_view.default, (copied, [-1]))
    top = graph.call_function(aten.topk.default, (x, 1))
    values = graph.call_function(operator.getitem, (top, 0))
    graph.call_function(aten.copy_.default, (piece, copied))
    graph.output((flat,))
    aliases = Aliases(graph)
    assert aliases.root(first) is x
    assert aliases.root(flat) is copied
    assert aliases.root(values) is values
    assert aliases.written == {x}
    assert aliases.returned == {copied}
