"""Rewrites from two functions: what a trace burns in, symbolic sizes, registration, and order."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.fx

import torchkiln
from tests.patterns.graphs import calls, graph_of, same_numbers
from torchkiln.errors import PatternError
from torchkiln.graph.manager import registered_passes
from torchkiln.graph.tangents import after_tangents
from torchkiln.patterns import (
    Call,
    Capture,
    RewriteSet,
    fwd_only,
    gen_register_replacement,
    joint_fwd_bwd,
    register_replacement,
    registration,
    text,
)
from torchkiln.patterns.rewrites import TracedRewrite

aten = torch.ops.aten
SLOTS = ("pre", "priority_0", "priority_1", "priority_2", "post")


@pytest.fixture(autouse=True)
def _registry_as_before() -> Iterator[None]:
    from torchkiln.graph import manager

    before = {(s, n): registered_passes(s, n) for s in ("pre_grad", "joint", "post_grad") for n in SLOTS}
    files = dict(registration._from_files)
    yield
    registration._from_files.clear()
    registration._from_files.update(files)
    for key, passes in before.items():
        manager._registered[key] = passes


def fires(rewrites: RewriteSet, function: Callable[..., Any], *inputs: torch.Tensor) -> bool:
    """Whether the rewrites change the graph of ``function`` as compiling traces it for inference."""
    names = [f"input_{k}" for k in range(len(inputs))]
    graph_module = fwd_only(function, names, inputs).graph_module
    changed = rewrites.apply(graph_module)
    graph_module.graph.lint()
    return changed


def one(search: Callable[..., Any], replace: Callable[..., Any], *examples: Any, **options: Any) -> RewriteSet:
    rewrites = RewriteSet("test")
    register_replacement(search, replace, examples, fwd_only, rewrites, **options)
    return rewrites


# What the trace at the examples burns in.


def test_sizes_written_in_the_search_function_must_be_those_of_the_graph() -> None:
    rewrites = one(lambda x: x.exp().view(2, 3).sin(), lambda x: x.exp().view(2, 3).cos(), torch.empty(6))
    assert fires(rewrites, lambda x: x.exp().view(2, 3).sin(), torch.randn(6))
    assert fires(rewrites, lambda x: x.exp().view(2, 3).sin(), torch.randn(3, 2))
    assert not fires(rewrites, lambda x: x.exp().view(3, 2).sin(), torch.randn(6))
    assert not fires(rewrites, lambda x: x.exp().view(2, 4).sin(), torch.randn(8))
    assert not fires(rewrites, lambda x: x.exp().sin(), torch.randn(6))


def test_sizes_taken_from_the_arguments_follow_them() -> None:
    def search(x: torch.Tensor) -> torch.Tensor:
        return x.exp().view(x.size(0), 2, -1).sin()

    rewrites = one(search, lambda x: x.exp().view(x.size(0), 2, -1).cos(), torch.empty(3, 4))
    assert fires(rewrites, search, torch.randn(5, 8))
    assert not fires(rewrites, lambda x: x.exp().view(5, 4, 2).sin(), torch.randn(5, 8))


def test_fractions_computed_from_sizes_follow_them() -> None:
    def search(x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x / math.sqrt(x.size(-1)), -1)

    rewrites = one(search, lambda x: torch.softmax(x, -1), torch.empty(3, 4))
    assert fires(rewrites, search, torch.randn(3, 4))
    assert fires(rewrites, search, torch.randn(2, 16))
    assert fires(rewrites, lambda x: torch.softmax(x / 4.0, -1), torch.randn(2, 16))
    assert not fires(rewrites, lambda x: torch.softmax(x / 2.0, -1), torch.randn(2, 16))
    assert not fires(rewrites, lambda x: torch.softmax(x / 4.0, -1), torch.randn(3, 4))


def test_a_number_written_in_the_search_function_stays_that_number() -> None:
    rewrites = one(lambda x: (x * 0.5).exp(), lambda x: (x * 0.5).sin(), torch.empty(4))
    assert fires(rewrites, lambda x: (x * 0.5).exp(), torch.randn(3, 3))
    assert not fires(rewrites, lambda x: (x * 0.25).exp(), torch.randn(3, 3))
    assert not fires(rewrites, lambda x, y: (x * y).exp(), torch.randn(3, 3), torch.randn(3, 3))


def test_dtypes_follow_the_arguments() -> None:
    def search(x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x.float(), -1).to(x.dtype)

    rewrites = one(search, lambda x: torch.softmax(x, -1), torch.empty(3, 4, dtype=torch.bfloat16))
    assert fires(rewrites, search, torch.randn(3, 4, dtype=torch.bfloat16))
    assert fires(rewrites, search, torch.randn(3, 4, dtype=torch.float16))
    assert not fires(rewrites, lambda x: torch.softmax(x.float(), -1).half(), torch.randn(3, 4, dtype=torch.bfloat16))


def test_layouts_of_the_arguments_may_differ_from_the_example() -> None:
    def search(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (x @ y).sin()

    rewrites = one(search, lambda x, y: (x @ y).cos(), torch.empty(2, 3, 4, 4), torch.empty(2, 3, 4, 4))
    x, y = torch.randn(2, 4, 3, 4).transpose(1, 2), torch.randn(2, 3, 4, 5)
    assert fires(rewrites, search, x, y)


def test_a_search_function_that_is_another_at_other_sizes_is_asked_again() -> None:
    def search(x: torch.Tensor) -> torch.Tensor:
        return x.exp().sin() if x.size(0) > 4 else x.exp().cos()

    rewrites = one(search, lambda x: x.tan(), torch.empty(8))
    assert fires(rewrites, lambda x: x.exp().sin(), torch.randn(6))
    assert not fires(rewrites, lambda x: x.exp().sin(), torch.randn(3))


def test_gradients_that_are_one_value_are_replaced_together(compile_strictly: Callable[..., Any]) -> None:
    @torchkiln.rewrite(stage="joint", example_inputs=(torch.empty(4), torch.empty(4)))
    class SinOfSum:
        def search(x, y):
            return (x + y).sin()

        def replace(x, y):
            return (x + y).sin() * 2

    x, y = torch.randn(5, requires_grad=True), torch.randn(5, requires_grad=True)
    got = compile_strictly(lambda x, y: (x + y).sin())(x, y)
    torch.testing.assert_close(got, (x + y).sin() * 2)
    got.sum().backward()
    torch.testing.assert_close(x.grad, (x + y).cos() * 2)
    torch.testing.assert_close(y.grad, (x + y).cos() * 2)


def test_views_seen_through_that_change_the_result_are_left_alone(compile_strictly: Callable[..., Any]) -> None:
    @torchkiln.rewrite(stage="joint", through="views", example_inputs=(torch.empty(4),))
    class CosOfTan:
        def search(x):
            return x.tan().cos()

        def replace(x):
            return x.tan().cos() * 2

    x = torch.randn(6)
    got = compile_strictly(lambda x: x.tan().view(2, 3).cos())(x)
    torch.testing.assert_close(got, x.tan().view(2, 3).cos())
    torch.testing.assert_close(compile_strictly(lambda x: x.tan().cos())(x), x.tan().cos() * 2)


def test_constants_of_the_program_may_be_arguments(compile_strictly: Callable[..., Any]) -> None:
    @torchkiln.rewrite(stage="joint", example_inputs=(torch.empty(4), torch.empty(4)))
    class SinOfSum:
        def search(x, y):
            return (x + y).sin()

        def replace(x, y):
            return (x + y).cos()

    x = torch.randn(3)
    got = compile_strictly(lambda x: (x + torch.tensor([1.0, 2.0, 3.0])).sin())(x)
    torch.testing.assert_close(got, (x + torch.tensor([1.0, 2.0, 3.0])).cos())


# Symbolic sizes.


def compiled_count(function: Callable[..., Any], shapes: list[tuple[int, ...]], expected: Callable[..., Any]) -> int:
    """How often ``function`` is compiled for inputs of these shapes; every result is that of ``expected``."""
    torch._dynamo.reset()
    torchkiln.reset_stats()
    compiled = torch.compile(function, backend="kiln", dynamic=True, options={"fallback": False})
    for shape in shapes:
        x = torch.randn(shape)
        with torch.no_grad():
            torch.testing.assert_close(compiled(x), expected(x))
    return torchkiln.stats().graphs


def test_symbolic_sizes_match_and_are_compiled_once() -> None:
    @torchkiln.rewrite(stage="joint", example_inputs=(torch.empty(2, 3, 4),))
    class Weighted:
        def search(x):
            return torch.softmax(x @ x.transpose(-1, -2), -1).sin()

        def replace(x):
            return torch.softmax(x @ x.transpose(-1, -2), -1).cos()

    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x @ x.transpose(-1, -2), -1).sin()

    def expected(x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x @ x.transpose(-1, -2), -1).cos()

    assert compiled_count(function, [(2, 3, 4), (3, 5, 4), (7, 2, 8)], expected) == 1


def test_sizes_taken_from_symbolic_arguments_match() -> None:
    @torchkiln.rewrite(stage="joint", example_inputs=(torch.empty(6, 4),))
    class Flat:
        def search(x):
            return x.exp().view(x.size(0) * x.size(1)).sin()

        def replace(x):
            return x.exp().view(x.size(0) * x.size(1)).cos()

    def function(x: torch.Tensor) -> torch.Tensor:
        return x.exp().view(x.size(0) * x.size(1)).sin()

    shapes = [(6, 4), (5, 3), (8, 9)]
    assert compiled_count(function, shapes, lambda x: x.exp().view(-1).cos()) == 1


@pytest.fixture(params=["as torch refuses them", "as torch 2.11 lets us refuse them"])
def refused_guards(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "2.11" in request.param:
        monkeypatch.delattr(torch.fx.experimental.symbolic_shapes.ShapeEnv, "error_on_new_guards", raising=False)


@pytest.mark.usefixtures("refused_guards")
def test_a_search_function_that_asks_for_a_symbolic_size_adds_no_guard() -> None:
    @torchkiln.rewrite(stage="joint", example_inputs=(torch.empty(6),))
    class LongRows:
        def search(x):
            return x.exp().sin() if x.size(0) > 4 else x.exp().cos()

        def replace(x):
            return x.exp().tan()

    assert compiled_count(lambda x: x.exp().sin(), [(6,), (3,), (9,)], lambda x: x.exp().sin()) == 1


@pytest.mark.usefixtures("refused_guards")
def test_a_replacement_that_asks_for_a_symbolic_size_adds_no_guard() -> None:
    @torchkiln.rewrite(stage="joint", example_inputs=(torch.empty(6),))
    class ShortRows:
        def search(x):
            return x.exp().sin()

        def replace(x):
            return x.exp().tan() if x.size(0) > 4 else x.exp().cos()

    assert compiled_count(lambda x: x.exp().sin(), [(6,), (3,), (9,)], lambda x: x.exp().sin()) == 1


# Registration.


def search_exp(x: torch.Tensor) -> torch.Tensor:
    return x.exp().sin()


def replace_exp(x: torch.Tensor) -> torch.Tensor:
    return x.exp().cos()


def test_example_inputs_may_be_a_generator_and_are_made_once() -> None:
    made = []

    def examples() -> Iterator[torch.Tensor]:
        made.append(1)
        yield torch.empty(4, requires_grad=True)

    for given in (examples(), examples):
        made.clear()
        rewrites = RewriteSet("test")
        register_replacement(search_exp, replace_exp, given, fwd_only, rewrites)
        assert made == []  # nothing is made before it is needed
        assert fires(rewrites, search_exp, torch.randn(3))
        assert fires(rewrites, search_exp, torch.randn(5, 2))
        assert made == [1]


def test_one_rewrite_may_be_in_several_sets() -> None:
    first, second = RewriteSet("first"), RewriteSet("second")
    rewrite = register_replacement(search_exp, replace_exp, [torch.empty(4)], fwd_only, [first, second])
    assert first.rewrites == second.rewrites == [rewrite]
    assert rewrite.name == "search_exp"


def test_a_check_gets_the_match_at_the_values_found() -> None:
    seen = []

    def check(match: Any) -> bool:
        seen.append(match.value("x").shape)
        return bool(match.value("x").dim() == 2)

    rewrites = one(search_exp, replace_exp, torch.empty(4), extra_check=check)
    assert not fires(rewrites, search_exp, torch.randn(7))
    assert fires(rewrites, search_exp, torch.randn(7, 2))
    assert seen == [(7,), (7, 2)]


def test_a_number_among_the_arguments_may_have_any_value() -> None:
    def search(x: torch.Tensor, scale: float) -> torch.Tensor:
        return (x * scale).exp() * (scale * 2)

    rewrites = one(
        search, lambda x, scale: (x * scale).sin() * scale, torch.empty(4), scalar_workaround={"scale": 0.123}
    )
    graph = fwd_only(lambda x: (x * 3.0).exp() * 6.0, ["x"], [torch.randn(3)]).graph_module
    assert rewrites.apply(graph)
    same_numbers(graph, lambda x: ((x * 3.0).sin() * 3.0,), torch.randn(3))
    assert not fires(rewrites, lambda x: (x * 3.0).exp() * 5.0, torch.randn(3))


def test_arguments_that_must_be_the_match_s_own() -> None:
    rewrites = one(search_exp, replace_exp, torch.empty(4), exclusive_arg_names=["x"])
    assert fires(rewrites, lambda x: (x + 1).exp().sin(), torch.randn(3))
    assert not fires(rewrites, lambda x: ((y := x + 1).exp().sin(), y * 2), torch.randn(3))


def test_a_pattern_may_be_given_in_place_of_the_first_trace() -> None:
    traced = []

    def tracer(function: Callable[..., Any], *arguments: Any) -> Any:
        traced.append(function)
        return fwd_only(function, *arguments)

    rewrites = RewriteSet("test")
    pattern = Call(aten.sin.default, Call(aten.exp.default, Capture("x")))
    register_replacement(search_exp, replace_exp, [torch.empty(4)], tracer, rewrites, search_fn_pattern=pattern)
    assert not fires(rewrites, lambda x: x.cos(), torch.randn(3))
    assert traced == []
    assert fires(rewrites, search_exp, torch.randn(3))
    assert traced == [search_exp, replace_exp]


STORED = """needs aten.exp.default, aten.sin.default
%0 = aten.exp.default($x:1)
%1 = aten.sin.default(%0)
return %1
"""


def gen_registered(monkeypatch: pytest.MonkeyPatch, stored: str | None) -> tuple[RewriteSet, list[Any]]:
    traced: list[Any] = []

    def tracer(function: Callable[..., Any], *arguments: Any) -> Any:
        traced.append(function)
        return fwd_only(function, *arguments)

    monkeypatch.setattr(registration, "stored_patterns", lambda: {} if stored is None else {"test/exp": stored})
    rewrites = RewriteSet("test")
    gen_register_replacement("test/exp", search_exp, replace_exp, [torch.empty(4)], tracer, rewrites)
    return rewrites, traced


def test_a_stored_pattern_takes_the_place_of_the_first_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    rewrites, traced = gen_registered(monkeypatch, STORED)
    assert not fires(rewrites, lambda x: x.exp().cos(), torch.randn(3))
    assert traced == []
    assert fires(rewrites, search_exp, torch.randn(3, 2))
    assert traced == [search_exp, replace_exp]


def test_without_a_stored_pattern_for_this_torch_the_function_is_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    rewrites, traced = gen_registered(monkeypatch, None)
    assert traced == []
    assert fires(rewrites, search_exp, torch.randn(3, 2))
    assert traced == [search_exp, search_exp, replace_exp]


def test_files_hold_patterns_by_release_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    content = f"# head\n\n== a/one: 2.11 2.12\n{STORED}\n== a/one: 2.13\nnewer\n== a/two: 2.13\nother\n"
    monkeypatch.setattr(registration, "torch_release", lambda: "2.12")
    found = registration.of_this_release(content)
    assert set(found) == {"a/one"}
    assert text.needed(found["a/one"]) == (aten.exp.default, aten.sin.default)
    assert isinstance(text.read(found["a/one"]), Call)
    monkeypatch.setattr(registration, "torch_release", lambda: "2.13")
    assert registration.of_this_release(content) == {"a/one": "newer\n", "a/two": "other\n"}
    monkeypatch.setattr(registration, "torch_release", lambda: "2.14")
    assert registration.of_this_release(content) == {}


def test_a_joint_trace_has_the_gradients_of_the_arguments_that_ask() -> None:
    x, y = torch.empty(4, requires_grad=True), torch.empty(4)
    traced = joint_fwd_bwd(lambda x, y: x.sin() * y, ["x", "y"], [x, y])
    assert traced.arguments == ("x", "y", "tangents_1")
    values = torch.randn(4), torch.randn(4), torch.randn(4)
    result, gradient = _run_flat(traced.graph_module, values)
    torch.testing.assert_close(result, values[0].sin() * values[1])
    torch.testing.assert_close(gradient, values[0].cos() * values[1] * values[2])


def test_what_a_replacement_computes_from_gradients_is_tagged_as_backward() -> None:
    def search(x: torch.Tensor) -> torch.Tensor:
        return x.sin()

    example = torch.empty(4, requires_grad=True)
    checked: list[bool] = []
    rewrites = RewriteSet("test")
    register_replacement(
        search,
        lambda x: x.sin() + x.exp() - x.exp(),
        [example],
        joint_fwd_bwd,
        rewrites,
        extra_check=lambda match: not checked.append(match.trains),
    )
    graph = joint_fwd_bwd(search, ["input"], [torch.empty(6, requires_grad=True)]).graph_module.graph
    late = after_tangents(graph)
    for node in graph.nodes:
        node.meta["partitioner_tag"] = "is_backward" if node in late else "is_forward"
    assert rewrites.apply(torch.fx.GraphModule({}, graph))
    late = after_tangents(graph)
    made = [node for node in graph.nodes if "replaced" in node.meta]
    assert {node.meta["partitioner_tag"] for node in made if node in late} == {"is_backward"}
    assert {node.meta["partitioner_tag"] for node in made if node not in late} == {"is_forward"}
    assert set(checked) == {True}


def _run_flat(graph_module: torch.fx.GraphModule, values: tuple[torch.Tensor, ...]) -> Any:
    plain = torch.fx.Graph()
    plain.output(plain.graph_copy(graph_module.graph, {}))
    return torch.fx.Interpreter(torch.fx.GraphModule(graph_module, plain)).run(*values)


@pytest.mark.parametrize(
    ("search", "message"),
    [
        (lambda x: x, "return an argument unchanged"),
        (lambda x: torch.ones(4) * 2, "does not use argument 'x'"),
        (lambda x: x * torch.tensor([1.0, 2.0, 3.0, 4.0]), "a tensor of its own"),
    ],
)
def test_search_functions_that_cannot_be_patterns_are_named(search: Callable[..., Any], message: str) -> None:
    rewrites = one(search, lambda x: x.sin(), torch.empty(4), name="odd")
    with pytest.raises(PatternError, match=message):
        fires(rewrites, lambda x: x.exp() * 2, torch.randn(4))


# Order.


def test_rewrites_run_by_priority_and_then_in_the_order_they_were_added() -> None:
    rewrites = RewriteSet("test")
    for name, priority in (("c", 1), ("a", 0), ("d", 2), ("b", 0), ("e", 2)):
        register_replacement(
            search_exp, replace_exp, [torch.empty(4)], fwd_only, rewrites, name=name, priority=priority
        )
    assert [rewrite.name for rewrite in rewrites.rewrites] == ["a", "b", "c", "d", "e"]


def test_the_first_rewrite_that_matches_wins_and_later_ones_see_its_result() -> None:
    rewrites = RewriteSet("test")
    x = [torch.empty(4)]
    register_replacement(search_exp, lambda x: x.exp().tan(), x, fwd_only, rewrites, name="late", priority=1)
    register_replacement(search_exp, replace_exp, x, fwd_only, rewrites, name="early")
    register_replacement(replace_exp, lambda x: x.sqrt(), x, fwd_only, rewrites, name="next", priority=2)
    graph = fwd_only(search_exp, ["x"], [torch.randn(3)]).graph_module
    assert rewrites.apply(graph)
    assert calls(graph) == ["aten.sqrt.default"]


def test_overlapping_places_are_rewritten_once_each() -> None:
    rewrites = one(lambda x: x.exp().exp(), lambda x: x.sin(), torch.empty(4))
    graph = fwd_only(lambda x: x.exp().exp().exp().exp().exp(), ["x"], [torch.randn(3)]).graph_module
    assert rewrites.apply(graph)
    same_numbers(graph, lambda x: (x.sin().sin().exp(),), torch.randn(3))


def test_a_replacement_that_holds_what_it_replaces_is_not_replaced_again() -> None:
    rewrites = one(search_exp, lambda x: x.exp().sin() * 2, torch.empty(4), name="doubled")
    register_replacement(search_exp, lambda x: x.exp().sin() * 2, [torch.empty(4)], fwd_only, rewrites, name="doubled")
    graph = fwd_only(search_exp, ["x"], [torch.randn(3)]).graph_module
    assert rewrites.apply(graph)
    same_numbers(graph, lambda x: (x.exp().sin() * 2,), torch.randn(3))


def test_the_fingerprint_of_a_set_follows_its_rewrites_and_their_order() -> None:
    def made(*names: str, scale: float = 1.0) -> str:
        rewrites = RewriteSet("test")
        for name in names:
            register_replacement(search_exp, lambda x: x.exp() * scale, [torch.empty(4)], fwd_only, rewrites, name=name)
        return rewrites.fingerprint()

    assert made("a", "b") == made("a", "b")
    assert len({made("a", "b"), made("b", "a"), made("a"), made("a", "b", scale=2.0)}) == 4


def test_graphs_that_return_a_single_node_are_rewritten() -> None:
    rewrites = one(search_exp, replace_exp, torch.empty(4))
    graph = graph_of(search_exp, torch.randn(4))
    assert isinstance(graph.graph.output_node().args[0], torch.fx.Node)
    assert rewrites.apply(graph)
    same_numbers(graph, replace_exp, torch.randn(4))


def test_traces_are_shared_between_places_with_equal_values() -> None:
    traced = []

    def tracer(function: Callable[..., Any], *arguments: Any) -> Any:
        traced.append(function)
        return fwd_only(function, *arguments)

    rewrites = RewriteSet("test")
    register_replacement(search_exp, replace_exp, [torch.empty(4)], tracer, rewrites)

    def layers(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        for _ in range(5):
            x, y = search_exp(x) + 1, search_exp(y) + 1
        return x, y

    assert fires(rewrites, layers, torch.randn(3), torch.randn(2, 3))
    assert len(traced) == 1 + 2 * 2
    assert isinstance(rewrites.rewrites[0], TracedRewrite)


def test_patterns_from_files_are_for_the_ranks_of_their_example_first() -> None:
    from torchkiln.passes.joint.attention import ATTENTION

    assert not any(rewrite.pattern.any_rank for rewrite in ATTENTION.rewrites)


def counting_softmax(traced: list[Any], **options: Any) -> RewriteSet:
    """A rewrite of softmax over the last of three dimensions that notes what it traces."""

    def tracer(function: Callable[..., Any], *arguments: Any) -> Any:
        traced.append(function)
        return fwd_only(function, *arguments)

    rewrites = RewriteSet("test")
    register_replacement(
        lambda x: x.relu().softmax(-1), lambda x: x.relu().softmax(-1).abs(), [torch.empty(2, 3, 4)], tracer, rewrites,
        **options,
    )  # fmt: skip
    assert rewrites.rewrites[0].has_pattern()
    traced.clear()
    return rewrites


def test_another_dimension_is_refused_before_anything_is_traced() -> None:
    traced: list[Any] = []
    rewrites = counting_softmax(traced)
    assert not fires(rewrites, lambda x: x.relu().softmax(1), torch.randn(5, 6, 7))
    assert traced == []
    assert fires(rewrites, lambda x: x.relu().softmax(-1), torch.randn(5, 6, 7))


def test_a_dimension_counts_from_the_end_of_arguments_with_another_rank() -> None:
    assert fires(counting_softmax([]), lambda x: x.relu().softmax(-1), torch.randn(5, 6))
    assert not fires(counting_softmax([]), lambda x: x.relu().softmax(-2), torch.randn(5, 6))


def test_a_dimension_counts_from_the_start_where_the_search_function_says_so() -> None:
    rewrites = one(lambda x: x.relu().softmax(0), lambda x: x.relu().softmax(0).abs(), torch.empty(3, 4))
    assert fires(rewrites, lambda x: x.relu().softmax(0), torch.randn(5, 6, 7))
    assert not fires(rewrites, lambda x: x.relu().softmax(1), torch.randn(5, 6, 7))


@pytest.mark.parametrize("early", [True, False])
def test_an_early_check_spares_the_trace_of_what_it_declines(monkeypatch: pytest.MonkeyPatch, early: bool) -> None:
    traced: list[Any] = []

    def tracer(function: Callable[..., Any], *arguments: Any) -> Any:
        traced.append(function)
        return fwd_only(function, *arguments)

    def is_long(match: Any) -> bool:
        return bool(match.value("x").shape[0] > 4) or match.decline("it is short")

    monkeypatch.setattr(registration, "stored_patterns", lambda: {"test/exp": STORED})
    rewrites = RewriteSet("test")
    rewrite = gen_register_replacement(
        "test/exp", search_exp, replace_exp, [torch.empty(4)], tracer, rewrites, extra_check=is_long, early_check=early
    )
    assert not fires(rewrites, search_exp, torch.randn(3))
    assert traced == ([] if early else [search_exp])
    explanation = torchkiln.explain_match(rewrite, graph_of(search_exp, torch.randn(3)))
    assert "it is short" in str(explanation)
    assert fires(rewrites, search_exp, torch.randn(5))


def test_every_view_that_new_strides_do_not_allow_gets_its_copy() -> None:
    def search(x: torch.Tensor) -> torch.Tensor:
        return x.sin().cos()

    def replace(x: torch.Tensor) -> torch.Tensor:
        return x.sin().cos().t().contiguous().t()

    def layers(x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = torch.ops.aten.view.default(search(x), [12]).exp().view(3, 4)
        return x

    graph = graph_of(layers, torch.randn(3, 4))
    assert one(search, replace, torch.empty(3, 4)).apply(graph)
    same_numbers(graph, layers, torch.randn(3, 4))
    for node in graph.graph.nodes:
        if node.target is aten.view.default:
            assert node.args[0].meta["val"].is_contiguous()
