"""``torchkiln.shadow`` names what went wrong first, and finds nothing where nothing is wrong."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import torchkiln
from tests.debug import nondeterministic
from tests.debug.planted import plant
from tests.debug.seeded import SEEDED, SEEDED_STRIDES, inputs
from torchkiln import compiler
from torchkiln.debug.accuracy import Expected, first_divergence
from torchkiln.debug.check import DivergenceError, judge
from torchkiln.partition import hoisting

BUGS = SEEDED | SEEDED_STRIDES


@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_found_by_pass_node_and_line(name: str) -> None:
    seeded = BUGS[name]
    undo = plant(name)
    try:
        finding = torchkiln.shadow(seeded.program, *inputs()).first
    finally:
        undo()
    assert finding is not None
    assert finding.graph_pass == seeded.graph_pass
    assert finding.node is not None
    assert finding.node.startswith(seeded.node)
    assert finding.source is not None
    assert f"seeded.py:{seeded.program.__code__.co_firstlineno + 1} in {seeded.program.__name__}" in finding.source
    assert seeded.failure in str(finding)


def test_the_same_programs_are_right_without_the_bugs() -> None:
    def all_of_them(x: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
        return [seeded.program(x, w) for seeded in BUGS.values()]

    report = torchkiln.shadow(all_of_them, *inputs())
    assert report.findings == ()
    assert report.graphs == 1
    assert any("code of the forward graph" in checked for checked in report.checked)
    assert any("code of the backward graph" in checked for checked in report.checked)


def test_a_wrong_gradient_is_found_in_the_backward_graph() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        return torch.sin(x) * 2  # of which the gradient is a cosine

    @torchkiln.graph_pass(stage="post_grad")
    def negates_cosines(graph_module: torch.fx.GraphModule) -> bool:
        cosines = graph_module.graph.find_nodes(op="call_function", target=torch.ops.aten.cos.default)
        for node in cosines:
            node.target = torch.ops.aten.sin.default
        return bool(cosines)

    try:
        finding = torchkiln.shadow(program, torch.randn(8, requires_grad=True)).first
        unread = torchkiln.shadow(program, torch.randn(8)).first
    finally:
        torchkiln.remove_graph_pass("negates_cosines")
    assert finding is not None
    assert (finding.graph_pass, finding.graph, finding.node) == ("post_grad/negates_cosines", "backward", "cos")
    assert unread is None


class _Steep(nn.Module):
    """Computes something from a weight alone."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-2, 2, 64).reshape(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ torch.sigmoid(self.weight * 200)


@pytest.mark.parametrize(
    ("bug", "graph", "graph_pass", "node"),
    [("wrong_weights", "inference", "joint/scales_weights", "mul"), ("nan", "weights", None, "sigmoid")],
)
def test_a_bug_in_what_is_prepared_of_weights_is_found(bug: str, graph: str, graph_pass: str | None, node: str) -> None:
    undo = plant(bug)
    try:
        with torch.no_grad():
            finding = torchkiln.shadow(_Steep(), torch.randn(4, 8)).first
    finally:
        undo()
    assert finding is not None
    assert (finding.graph, finding.graph_pass) == (graph, graph_pass)
    assert str(finding.node).startswith(node)


def test_a_wrong_division_into_weights_and_the_rest_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(graph_module: torch.fx.GraphModule) -> hoisting.Hoisted | None:
        hoisted = hoisting.hoist(graph_module)
        assert hoisted is not None
        (sigmoid,) = hoisted.weights.graph.find_nodes(op="call_function", target=torch.ops.aten.sigmoid.default)
        sigmoid.target = torch.ops.aten.tanh.default
        return hoisted

    monkeypatch.setattr(compiler, "hoist", wrong)
    with torch.no_grad():
        finding = torchkiln.shadow(_Steep(), torch.randn(4, 8)).first
    assert finding is not None
    assert (finding.stage, finding.graph) == ("hoisting", "inference")


def test_folded_and_packed_layers_have_no_finding() -> None:
    layers = nn.Conv2d(4, 32, 3), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 8, 1), nn.Flatten(), nn.Linear(288, 64)
    with torch.no_grad():
        report = torchkiln.shadow(nn.Sequential(*layers).eval(), torch.randn(2, 4, 8, 8))
    assert report.findings == ()
    assert "code of the weights graph" in report.checked


def test_a_network_with_dropout_normalization_and_a_graph_break_has_no_finding() -> None:
    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 4)
            self.norm = nn.BatchNorm1d(16)
            self.calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            hidden = nn.functional.dropout(self.norm(self.first(x)).relu(), 0.3)
            torch._dynamo.graph_break()
            return self.second(hidden).softmax(-1)

    network, x = Network(), torch.randn(5, 8)
    state = {name: value.clone() for name, value in network.state_dict().items()}
    random = torch.get_rng_state()
    report = torchkiln.shadow(network, x)
    assert report.findings == ()
    assert report.graphs == 2
    assert network.calls == 0
    assert torch.equal(torch.get_rng_state(), random)
    torch.testing.assert_close(network.state_dict(), state, rtol=0, atol=0)


def test_gradients_that_autograd_lays_out_otherwise_while_it_traces_are_right() -> None:
    def program(x: torch.Tensor, images: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x.t() * 2, x.expand(3, 4, 6), torch.cat([images, images], 1).relu(), x.t()[::2].cumsum(0)

    images = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last).requires_grad_()
    assert torchkiln.shadow(program, torch.randn(4, 6, requires_grad=True), images).findings == ()


def test_strides_of_values_that_are_saved_for_backward_are_free() -> None:
    results = {"output 0": torch.ones(2, 3), "output 1": torch.ones(3, 2).t()}
    eager = {name: torch.ones(2, 3) for name in results}
    assert first_divergence(results, Expected(eager, strides={"output 0"})) is None
    found = first_divergence(results, Expected(eager, strides=eager.keys()))
    assert found is not None
    assert (found.what, found.kind) == ("output 1", "other strides")


def test_a_sum_that_cancels_is_as_right_as_eagers_is_by_luck() -> None:
    # The gradient of a bias in front of a batch norm is zero: all that is left of it is rounding.
    torch.manual_seed(1)
    normalized = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
    network = nn.Sequential(normalized, nn.Conv2d(8, 4, 3), nn.AdaptiveAvgPool2d(1))
    assert torchkiln.shadow(network, torch.randn(2, 3, 16, 16)).findings == ()


def test_a_graph_with_tokens_of_effects_has_no_finding() -> None:
    given = torch.eye(4).mul(3).requires_grad_(), torch.randn(4, 2)
    report = torchkiln.shadow(torch.linalg.solve, *given)
    assert report.findings == ()
    assert "post_grad/effect_tokens on the forward graph" in report.checked


def test_half_precision_is_judged_by_the_error_that_eager_has() -> None:
    def program(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.layer_norm(x @ w, (32,)).sigmoid()

    x, w = torch.randn(16, 64, dtype=torch.bfloat16), torch.randn(64, 32, dtype=torch.bfloat16, requires_grad=True)
    assert torchkiln.shadow(program, x, w).findings == ()


def test_symbolic_sizes_are_shadowed_too() -> None:
    undo = plant("wrong_constant")
    try:
        finding = torchkiln.shadow(SEEDED["wrong_constant"].program, *inputs(), dynamic=True).first
    finally:
        undo()
    assert finding is not None
    assert finding.node == "exp"


@pytest.mark.parametrize(
    ("program", "node"), [(nondeterministic.counted_up, "counted"), (nondeterministic.unwritten, "add")]
)
def test_a_program_that_differs_from_itself_in_eager_is_noted_and_not_judged(
    program: Callable[[torch.Tensor], torch.Tensor], node: str
) -> None:
    report = torchkiln.shadow(program, torch.randn(4, requires_grad=True))
    assert report.findings == ()
    (note,) = report.notes
    assert note.startswith(f"captured graph 1: eager differs from itself, first at node {node}")
    assert "nondeterministic.py:" in note
    assert "no result diverges" not in str(report)
    assert note in str(report)


def test_memory_that_is_written_before_it_is_read_differs_from_nothing() -> None:
    report = torchkiln.shadow(nondeterministic.written_first, torch.randn(4, requires_grad=True))
    assert report.findings == ()
    assert report.notes == ()


def _overwrites(x: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        kept.add_(torch.exp(x))
    return x * 2


@pytest.mark.parametrize("training", [False, True])
def test_a_wrong_number_that_is_written_to_an_input_is_found(training: bool) -> None:
    given = torch.randn(8, requires_grad=training), torch.zeros(8)
    assert torchkiln.shadow(_overwrites, *given).findings == ()
    undo = plant("wrong_constant")
    try:
        finding = torchkiln.shadow(_overwrites, *given).first
        blamed = torchkiln.bisect(_overwrites, *given).action
    finally:
        undo()
    assert finding is not None
    assert finding.node == "exp"
    assert "after the call: wrong result" in str(finding)
    assert blamed is not None
    assert blamed.name.startswith("aten.exp.default")


def test_a_write_to_an_input_that_eager_leaves_alone_is_a_failure() -> None:
    graph = torch.fx.symbolic_trace(lambda x: (x + 1,))

    def writes(x: torch.Tensor) -> tuple[torch.Tensor]:
        return (x.add_(1).clone(),)

    x = torch.zeros(3)
    judge(graph, graph, (x,))
    with pytest.raises(DivergenceError, match="input 0 after the call"):
        judge(graph, writes, (x,))
