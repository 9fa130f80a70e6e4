"""Why a rewrite did not fire: each reason names the node, and the argument or check, that was in the way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.fx

import torchkiln
from torchkiln import recorder
from torchkiln.graph.manager import registered_passes
from torchkiln.patterns import Match, RewriteSet, fwd_only, register_replacement
from torchkiln.patterns.explain import Explanation
from torchkiln.patterns.rewrites import Rewrite

X, BIAS = torch.randn(3, 8), torch.randn(8)


def search(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return torch.softmax(torch.relu(x + bias) * 0.5, -1)


def replace(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return torch.softmax(torch.relu(x + bias) * 0.5, -1) * 2


def made(**options: Any) -> Rewrite:
    examples = [torch.empty(4, 8), torch.empty(8)]
    return register_replacement(search, replace, examples, fwd_only, RewriteSet("test"), name="Weights", **options)


def explained(function: Callable[..., Any], **options: Any) -> Explanation:
    graph_module = fwd_only(function, ["x", "bias"], [X, BIAS]).graph_module
    return torchkiln.explain_match(made(**options), graph_module)


def test_where_it_fires() -> None:
    explanation = explained(search)
    assert explanation.fires_at == ("_softmax",)
    assert str(explanation) == "Weights fires at _softmax"


def long_rows(match: Match) -> bool:
    return bool(match.value("x").shape[-1] > 100)


def declined(match: Match) -> bool:
    return match.decline("rows of 8 are short")


@pytest.mark.parametrize(
    ("function", "options", "node", "expected"),
    [
        pytest.param(
            lambda x, b: torch.softmax(torch.sigmoid(x + b) * 0.5, -1), {}, "_softmax",
            "2 of 4 calls match, but sigmoid is aten.sigmoid.default where the pattern has aten.relu.default",
            id="wrong target",
        ),
        pytest.param(
            lambda x, b: torch.softmax(torch.relu(x + b) * 0.25, -1), {}, "_softmax",
            "argument other of mul is 0.25 where the pattern has 0.5",
            id="wrong constant",
        ),
        pytest.param(
            lambda x, b: torch.softmax(torch.relu(x + b) * 0.5, 0), {}, "_softmax",
            "argument dim of _softmax is 0 where the pattern has 1",
            id="wrong dimension",
        ),
        pytest.param(
            lambda x, b: torch.softmax(torch.relu(x + 1) * 0.5, -1), {}, "_softmax",
            "argument other of add is 1 where the pattern has the tensor $bias",
            id="number for a tensor",
        ),
        pytest.param(
            lambda x, b: (torch.softmax((inner := torch.relu(x + b)) * 0.5, -1), inner * 2), {}, "_softmax",
            "all 4 calls match, but relu is also read by mul_1, outside of the match",
            id="outside reader",
        ),
        pytest.param(search, {"extra_check": long_rows}, "_softmax", "the check long_rows said no", id="check"),
        pytest.param(search, {"extra_check": declined}, "_softmax", "rows of 8 are short", id="check with a reason"),
        pytest.param(
            lambda x, b: (torch.relu(x + b) * 0.5).exp(), {}, "mul",
            "3 of 4 calls match, but aten._softmax.default should read it, and exp (aten.exp.default) does",
            id="missing last call",
        ),
        pytest.param(
            lambda x, b: torch.sin(x + b), {}, "add",
            "1 of 4 calls match, but aten.relu.default should read it, and sin (aten.sin.default) does",
            id="first call alone",
        ),
    ],
)  # fmt: skip
def test_the_reason_names_what_was_in_the_way(
    function: Callable[..., Any], options: dict[str, Any], node: str, expected: str
) -> None:
    explanation = explained(function, **options)
    assert explanation.fires_at == ()
    closest = explanation.candidates[0]
    assert closest.node == node
    assert expected in str(closest)
    assert str(explanation).splitlines()[0] == "Weights does not fire"


def test_an_argument_that_others_read() -> None:
    explanation = explained(
        lambda x, b: (torch.softmax(torch.relu(x + (shift := b.exp())) * 0.5, -1), shift * 2),
        exclusive_arg_names=["x", "bias"],
    )
    assert "exp must be read by the match alone and is also read by mul_1" in str(explanation)


def test_nothing_at_all() -> None:
    explanation = explained(lambda x, b: x.exp() - b)
    assert explanation.candidates == ()
    assert str(explanation) == "Weights does not fire\n  the graph has none of the calls of its pattern"


def test_the_closest_places_come_first_and_few_are_shown() -> None:
    def several(x: torch.Tensor, bias: torch.Tensor) -> tuple[torch.Tensor, ...]:
        far = [torch.softmax(x.sin() * 0.5, -1) for _ in range(5)]
        return (*far, torch.softmax(torch.relu(x + bias) * 0.25, -1))

    explanation = explained(several)
    assert explanation.candidates[0].node == "_softmax_5"
    assert len(explanation.candidates) <= 3


def test_a_place_where_it_fires_is_not_a_candidate() -> None:
    explanation = explained(lambda x, b: (search(x, b), torch.softmax(torch.relu(x + b) * 0.25, -1)))
    assert explanation.fires_at == ("_softmax",)
    assert [candidate.node for candidate in explanation.candidates] == ["_softmax_1"]


@pytest.fixture
def registered() -> Iterator[Any]:
    before = registered_passes("joint", "priority_0")
    yield torchkiln.rewrite(stage="joint", search=search, example_inputs=(torch.empty(4, 8), torch.empty(8)))(replace)
    from torchkiln.graph import manager

    manager._registered["joint", "priority_0"] = before


@pytest.mark.parametrize("training", [False, True])
def test_a_program_is_compiled_to_explain_it_and_its_lines_are_shown_once(registered: Any, *, training: bool) -> None:
    def program(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        inner = torch.relu(x + bias)
        weights = torch.softmax(inner * 0.5, -1)
        return weights + inner

    shown = str(torchkiln.explain_match(registered, program, X.clone().requires_grad_(training), BIAS))
    assert "relu is also read by" in shown
    assert shown.count("test_explain.py") == shown.count("weights = torch.softmax(inner * 0.5, -1)") == 1
    assert "/" not in shown.partition("test_explain.py")[0]
    assert all(len(line) < 200 for line in shown.splitlines())
    assert [item.name for item in registered_passes("joint", "priority_0")].count(f"explain {registered.name}") == 0


def test_a_program_that_the_cache_has_is_explained_too(
    registered: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def program(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        inner = torch.relu(x + bias)
        return torch.softmax(inner * 0.5, -1) + inner

    monkeypatch.setattr(recorder, "_listeners", ())  # they would make the stages run
    with torchkiln.settings(cache=True, cache_dir=str(tmp_path / "cache")):
        for _ in range(2):
            assert "relu is also read by" in str(torchkiln.explain_match(registered, program, X, BIAS))


def test_guards_that_would_be_needed_are_named(registered: Any) -> None:
    def by_size(x: torch.Tensor) -> torch.Tensor:
        return x.exp().sin() if x.size(0) > 4 else x.exp().cos()

    def replacement(x: torch.Tensor) -> torch.Tensor:
        return x.exp().tan()

    rewrite = torchkiln.rewrite(stage="joint", search=by_size, example_inputs=(torch.empty(6),))(replacement)
    x = torch.randn(7)
    torch._dynamo.mark_dynamic(x, 0)
    shown = str(torchkiln.explain_match(rewrite, lambda x: x.exp().sin(), x))
    assert "the search function is not the same for all sizes: it depends on" in shown


def test_a_search_function_that_writes_to_an_argument_is_explained() -> None:
    @torchkiln.rewrite(stage="joint", example_inputs=(torch.empty(4), torch.empty(4)))
    class TwiceTheSum:
        def search(x, y):
            x.add_(y)
            return x * 2

        def replace(x, y):
            x.add_(y)
            return x + x

    try:
        there = torchkiln.explain_match(TwiceTheSum, lambda x, y: x.sin().add_(y) * 2, torch.randn(4), torch.randn(4))
        not_there = torchkiln.explain_match(TwiceTheSum, lambda x, y: x.sin().add_(y), torch.randn(4), torch.randn(4))
    finally:
        TwiceTheSum.unregister()
    assert there.fires_at == ("mul",)
    assert "aten.mul.Tensor should read it" in str(not_there)


@pytest.mark.parametrize(
    ("graph", "message"),
    [
        (3, r"cannot look into 3 \(int\); pass a function, a module or a graph module"),
        ("model", r"cannot look into 'model' \(str\); pass a function"),
        (None, r"cannot look into None \(NoneType\)"),
        (torch.fx.Graph(), r"Graph\); pass graph\.owning_module"),
        (torch.sin, "'Weights' belongs to a set and to no stage.*pass the graph module"),
    ],
    ids=["number", "text", "nothing", "graph", "a program for a rewrite of a set"],
)
def test_what_is_no_program_is_named_with_what_to_pass(graph: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        torchkiln.explain_match(made(), graph)


@pytest.mark.parametrize("graph", [3, "model"])
def test_a_registered_rewrite_is_not_compiled_for_what_is_no_program(registered: Any, graph: Any) -> None:
    with pytest.raises(TypeError, match="pass a function, a module or a graph module"):
        torchkiln.explain_match(registered, graph)


def test_what_is_no_rewrite_is_named() -> None:
    with pytest.raises(TypeError, match=r"'Weights' \(str\) is none; pass what @torchkiln.rewrite gave"):
        torchkiln.explain_match("Weights", torch.sin)  # type: ignore[arg-type]
