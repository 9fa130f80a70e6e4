"""A property of the matcher: a part planted in a random graph is found wherever nobody else reads inside it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from torchkiln.graph.fake import update_fake_values
from torchkiln.patterns import RewriteSet, fwd_only
from torchkiln.patterns.rewrites import TracedRewrite

aten = torch.ops.aten

_library = torch.library.Library("kilnproperty", "FRAGMENT")
_library.define("marked(Tensor x) -> Tensor")
_library.impl("marked", lambda x: x.clone(), "CompositeExplicitAutograd")
_library.impl("marked", torch.empty_like, "Meta")
marked = torch.ops.kilnproperty.marked.default

UNARY = (aten.sin.default, aten.cos.default, aten.tanh.default)
BINARY = (aten.add.Tensor, aten.mul.Tensor, aten.maximum.default, aten.sub.Tensor)
COMMUTING = BINARY[:3]
CONSTANTS = (0.3, 0.7)
INPUTS = 2


@dataclass(frozen=True)
class Step:
    """One call; operands are earlier values by number, or constants."""

    target: Any
    operands: tuple[int | float, ...]


def value_numbers(step: Step) -> list[int]:
    return [operand for operand in step.operands if isinstance(operand, int)]


@st.composite
def steps(draw: st.DrawFn, known: int) -> Step:
    """A call of one or two of the values known so far, late ones more often, so that graphs are deep."""
    operand = st.one_of(st.integers(max(0, known - 3), known - 1), st.integers(0, known - 1))
    kind = draw(st.sampled_from(["unary", "binary", "binary", "constant"]))
    if kind == "unary":
        return Step(draw(st.sampled_from(UNARY)), (draw(operand),))
    if kind == "constant":
        return Step(aten.mul.Tensor, (draw(operand), draw(st.sampled_from(CONSTANTS))))
    return Step(draw(st.sampled_from(BINARY)), (draw(operand), draw(operand)))


@dataclass(frozen=True)
class Case:
    """A program, the steps of a part of it, and where that part lies: lists of value numbers, the result last.

    The part's operands are counted from its own arguments on.
    """

    program: tuple[Step, ...]
    part: tuple[Step, ...]
    arguments: int
    places: tuple[tuple[int, ...], ...]
    returned: frozenset[int]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    program: list[Step] = []
    for _ in range(draw(st.integers(3, 9))):
        program.append(draw(steps(INPUTS + len(program))))
    root = draw(st.integers(INPUTS, INPUTS + len(program) - 1))
    chosen = {root}
    frontier = value_numbers(program[root - INPUTS])
    while frontier and len(chosen) < 5:
        number = frontier.pop()
        if number >= INPUTS and number not in chosen and draw(st.booleans()):
            chosen.add(number)
            frontier += value_numbers(program[number - INPUTS])
    inside = sorted(chosen)
    outside = sorted({n for k in inside for n in value_numbers(program[k - INPUTS])} - chosen)
    numbering = {number: place for place, number in enumerate([*outside, *inside])}
    part = tuple(_renumbered(program[number - INPUTS], numbering) for number in inside)
    places = [tuple(inside)]
    for _ in range(draw(st.integers(0, 3))):
        if draw(st.booleans()):
            program.append(draw(steps(INPUTS + len(program))))
        known = INPUTS + len(program)
        late = st.one_of(st.just(known - 1), st.integers(0, known - 1))
        given_numbers = [draw(late) for _ in outside]
        renumbered = dict(enumerate([*given_numbers, *range(known, known + len(part))]))
        for step in part:
            made = _renumbered(step, renumbered)
            if made.target in COMMUTING and draw(st.booleans()):
                made = Step(made.target, tuple(reversed(made.operands))) if _may_swap(made) else made
            program.append(made)
        places.append(tuple(range(known, known + len(part))))
    last = INPUTS + len(program) - 1
    returned = draw(st.frozensets(st.integers(INPUTS, last), max_size=3)) | {last}
    return Case(tuple(program), part, len(outside), tuple(places), returned)


def _may_swap(step: Step) -> bool:
    return all(isinstance(operand, int) for operand in step.operands)  # numbers come second in these operators


def _renumbered(step: Step, numbering: dict[int, int]) -> Step:
    return Step(step.target, tuple(numbering[o] if isinstance(o, int) else o for o in step.operands))


def graph_of_program(case: Case) -> tuple[torch.fx.GraphModule, list[torch.fx.Node]]:
    graph = torch.fx.Graph()
    nodes = [graph.placeholder(f"input_{k}") for k in range(INPUTS)]
    with FakeTensorMode() as mode:
        for node in nodes:
            node.meta["val"] = torch.empty(3, 4)
    for step in case.program:
        operands = tuple(nodes[o] if isinstance(o, int) else o for o in step.operands)
        nodes.append(graph.call_function(step.target, operands))
    graph.output(tuple(nodes[number] for number in sorted(case.returned)))
    graph_module = torch.fx.GraphModule(torch.nn.Module(), graph)
    with mode:
        update_fake_values(graph_module)
    return graph_module, nodes


def compute(part: Sequence[Step], arguments: Sequence[torch.Tensor]) -> torch.Tensor:
    values = list(arguments)
    for step in part:
        values.append(step.target(*(values[o] if isinstance(o, int) else o for o in step.operands)))
    return values[-1]


def rewrite_of(case: Case) -> TracedRewrite:
    """The part as the search function, and the same with a mark as what goes in its place."""
    names = ", ".join(f"a{k}" for k in range(case.arguments))
    space: dict[str, Any] = {"compute": lambda *given: compute(case.part, given), "marked": marked}
    exec(f"def search({names}): return compute({names})", space)
    exec(f"def replace({names}): return marked(compute({names}))", space)
    examples = [torch.empty(3, 4) for _ in range(case.arguments)]
    return TracedRewrite("part", space["search"], space["replace"], lambda: examples, fwd_only)


@settings(max_examples=60, deadline=None)
@given(cases())
def test_planted_parts_are_found_unless_others_read_inside_and_nothing_else_changes(case: Case) -> None:
    graph_module, nodes = graph_of_program(case)
    inputs = [torch.randn(3, 4) for _ in range(INPUTS)]
    expected = torch.fx.Interpreter(graph_module).run(*inputs)
    original = {node: set(node.users) for node in nodes}
    names = {node: node.name for node in nodes}
    changed = RewriteSet("test", [rewrite_of(case)]).apply(graph_module)
    graph_module.graph.lint()

    got = torch.fx.Interpreter(graph_module).run(*inputs)
    assert all(map(torch.equal, got, expected))

    marks = graph_module.graph.find_nodes(op="call_function", target=marked)
    assert changed == bool(marks)
    replaced = {name for mark in marks for name in mark.meta["replaced"]}
    for place in case.places:
        planted = {nodes[number] for number in place}
        interior = planted - {nodes[place[-1]]}
        if all(original[node] <= planted for node in interior):
            # Touched, not only its result: another match may have taken some of its nodes first.
            assert not replaced.isdisjoint(names[node] for node in planted)
