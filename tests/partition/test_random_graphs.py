"""Random joint graphs: forward and backward together compute what the joint graph does, whatever is saved."""

from __future__ import annotations

import operator
from dataclasses import replace
from typing import Any

import torch
import torch.fx
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from torchkiln.config import Settings
from torchkiln.graph.effects import has_effect
from torchkiln.graph.tangents import mark_tangent
from torchkiln.partition import min_cut_rematerialization_partition
from torchkiln.partition.budget import Planner, choose_saved_values
from torchkiln.partition.classify import NodeInfo
from torchkiln.partition.extract import schedule_for
from torchkiln.partition.min_cut import smallest_saved
from torchkiln.partition.rules import RULES, RuleContext, forbidden, rules_for
from torchkiln.target import capture_target

aten = torch.ops.aten
SIZE = 4
TARGET = capture_target(Settings())
UNARY = (aten.sin.default, aten.tanh.default, aten.relu.default, aten.clone.default, aten.t.default, aten.neg.default)
BINARY = (aten.add.Tensor, aten.mul.Tensor, aten.mm.default, aten.sub.Tensor, aten.maximum.default)


def _call(graph: torch.fx.Graph, mode: FakeTensorMode, target: Any, *args: Any, tag: str) -> torch.fx.Node:
    node = graph.call_function(target, args)
    with mode:
        node.meta["val"] = target(*torch.fx.map_arg(args, lambda n: n.meta["val"]))
    node.meta["partitioner_tag"] = tag
    return node


@st.composite
def joints(draw: st.DrawFn) -> tuple[torch.fx.GraphModule, int]:
    """A graph of square matrices; what is tagged as backward reads tangents and anything of forward."""
    mode = FakeTensorMode()
    graph = torch.fx.Graph()

    def placeholder(name: str) -> torch.fx.Node:
        node = graph.placeholder(name)
        with mode:
            node.meta["val"] = torch.empty(SIZE, SIZE)
        return node

    forward = [placeholder(f"primals_{k}") for k in range(draw(st.integers(1, 3)))]
    tangents = [placeholder(f"tangents_{k}") for k in range(draw(st.integers(1, 2)))]
    for position, tangent in enumerate(tangents):
        mark_tangent(tangent, position)

    def grow(values: list[torch.fx.Node], count: int, tag: str) -> None:
        def one() -> torch.fx.Node:
            # Mostly recent values, so that graphs get deep.
            return values[-draw(st.integers(1, min(len(values), draw(st.sampled_from((2, 5, 30))))))]

        for _ in range(count):
            kind = draw(st.sampled_from(("unary", "binary", "binary", "softmax", "sum", "split", "var", "random")))
            if kind == "unary":
                values.append(_call(graph, mode, draw(st.sampled_from(UNARY)), one(), tag=tag))
            elif kind == "binary":
                values.append(_call(graph, mode, draw(st.sampled_from(BINARY)), one(), one(), tag=tag))
            elif kind == "softmax":
                values.append(_call(graph, mode, aten._softmax.default, one(), 1, False, tag=tag))
            elif kind == "sum":
                total = _call(graph, mode, aten.sum.dim_IntList, one(), [1], True, tag=tag)
                values.append(_call(graph, mode, aten.add.Tensor, total, one(), tag=tag))
            elif kind == "random":
                values.append(_call(graph, mode, aten.rand_like.default, one(), tag=tag))
            else:
                target: Any = aten.split.Tensor if kind == "split" else aten.var_mean.correction
                whole = _call(graph, mode, target, one(), *([2] if kind == "split" else [[1]]), tag=tag)
                parts = [_call(graph, mode, operator.getitem, whole, k, tag=tag) for k in range(2)]
                if kind == "split":
                    values.append(_call(graph, mode, aten.cat.default, parts[::-1], tag=tag))
                else:
                    row = _call(graph, mode, aten.unsqueeze.default, parts[1], 1, tag=tag)
                    values.append(_call(graph, mode, aten.mul.Tensor, row, one(), tag=tag))

    grow(forward, draw(st.integers(1, 20)), "is_forward")
    results = draw(st.lists(st.sampled_from(forward), min_size=1, max_size=3))
    everything = [*forward, *tangents]
    grow(everything, draw(st.integers(1, 20)), "is_backward")
    gradients = draw(st.lists(st.sampled_from([*everything[len(forward) :], *forward, None]), min_size=1, max_size=4))
    graph.output((*results, *gradients))
    return torch.fx.GraphModule(torch.nn.Module(), graph), len(results)


def _run(gm: torch.fx.GraphModule, values: dict[str, Any]) -> tuple[Any, ...]:
    names = [str(node.target) for node in gm.graph.find_nodes(op="placeholder")]
    return torch.fx.Interpreter(gm).run(*(values[name] for name in names))


@settings(max_examples=60, deadline=None)
@given(joints(), st.sampled_from((1.0, 0.8, 0.5, 0.2, 0.0)), st.data())
def test_both_graphs_compute_what_the_joint_graph_does(
    joint: tuple[torch.fx.GraphModule, int], budget: float, data: st.DataObject
) -> None:
    gm, count = joint
    options = {rule.setting: data.draw(st.booleans(), label=rule.setting) for rule in RULES}
    chosen = Settings(memory_budget=budget, budget_solver="greedy", **options)
    generator = torch.Generator().manual_seed(0)
    inputs = {
        str(node.target): torch.rand(SIZE, SIZE, generator=generator) for node in gm.graph.find_nodes(op="placeholder")
    }
    torch.manual_seed(1)
    wanted = _run(gm, inputs)
    forward, backward = min_cut_rematerialization_partition(
        gm, None, num_fwd_outputs=count, settings=chosen, target=TARGET
    )
    torch.manual_seed(1)
    handed = _run(forward, inputs)
    names = [node.name for node in forward.graph.output_node().args[0][count:]]
    got = (*handed[:count], *_run(backward, {**inputs, **dict(zip(names, handed[count:], strict=True))}))
    torch.testing.assert_close(got, wanted, rtol=0, atol=0, equal_nan=True)
    assert [*_draws(forward), *_draws(backward)] == _draws(gm)


def _draws(gm: torch.fx.GraphModule) -> list[str]:
    return [node.name for node in gm.graph.nodes if node.op == "call_function" and has_effect(node)]


@settings(max_examples=60, deadline=None)
@given(joints(), st.data())
def test_what_is_chosen_is_feasible_and_no_larger_than_what_backward_reads(
    joint: tuple[torch.fx.GraphModule, int], data: st.DataObject
) -> None:
    gm, count = joint
    info = NodeInfo(gm.graph, count)
    options = {rule.setting: data.draw(st.booleans(), label=rule.setting) for rule in RULES}
    options["save_views"] = False
    rules = rules_for(Settings(**options))
    banned = forbidden(RuleContext(info), rules)
    saved = smallest_saved(info, banned)
    schedule = schedule_for(info, saved)  # raises where it is not feasible
    assert schedule.recomputed.isdisjoint(banned)
    assert schedule.recomputed <= info.recomputable
    assert all(node in info.savable for node in schedule.saved)
    # What eager does: the memory of everything that backward reads.
    read = {info.aliases.root(node) for node in info.read_by_backward}
    assert sum(info.nbytes[n] for n in schedule.saved if n not in info.either) <= sum(info.nbytes[n] for n in read)


@settings(max_examples=25, deadline=None)
@given(joints(), st.sampled_from(("exact", "dynamic", "greedy")))
def test_a_lower_budget_never_has_a_higher_peak(joint: tuple[torch.fx.GraphModule, int], solver: Any) -> None:
    gm, count = joint
    info = NodeInfo(gm.graph, count)
    chosen = Settings(budget_solver=solver)
    planner = Planner(info, chosen, TARGET)
    before = planner.default
    for budget in (1.0, 0.7, 0.4, 0.1, 0.0):
        plan = planner.evaluate(choose_saved_values(info, replace(chosen, memory_budget=budget), TARGET))
        assert plan.peak_bytes <= before.peak_bytes
        assert plan.saved_bytes <= before.saved_bytes
        before = plan
