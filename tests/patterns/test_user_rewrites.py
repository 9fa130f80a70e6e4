"""Rewrites and passes as a user writes them, through torch.compile."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.fx

import torchkiln
from torchkiln.errors import OptionError, PatternError
from torchkiln.graph.manager import registered_passes
from torchkiln.passes.joint import JOINT
from torchkiln.patterns import Call, Capture, Match

aten = torch.ops.aten
SLOTS = ("pre", "priority_0", "priority_1", "priority_2", "post")


@pytest.fixture(autouse=True)
def _registry_as_before() -> Iterator[None]:
    before = {(s, n): registered_passes(s, n) for s in ("pre_grad", "joint", "post_grad") for n in SLOTS}
    yield
    from torchkiln.graph import manager

    for key, passes in before.items():
        manager._registered[key] = passes


def _relu_of_sum() -> Any:
    @torchkiln.rewrite(stage="joint", example_inputs=(torch.empty(4, 8), torch.empty(8)))
    class ReluOfSum:
        def search(x, bias):
            return torch.relu(x + bias)

        def replace(x, bias):
            return (x + bias).clamp(min=0) * 2  # another number on purpose: the test sees that it ran

    return ReluOfSum


def test_a_rewrite_fires_in_inference(compile_strictly: Callable[..., Any]) -> None:
    _relu_of_sum()
    x, bias = torch.randn(5, 3, 8), torch.randn(8)
    with torch.no_grad():
        got = compile_strictly(lambda x, b: torch.relu(x + b).sin())(x, bias)
    torch.testing.assert_close(got, (torch.relu(x + bias) * 2).sin())


@pytest.mark.parametrize("grads", [(True, True), (True, False), (False, True)])
def test_one_definition_serves_training(compile_strictly: Callable[..., Any], grads: tuple[bool, bool]) -> None:
    _relu_of_sum()
    x, bias = torch.randn(5, 8, requires_grad=grads[0]), torch.randn(8, requires_grad=grads[1])
    compile_strictly(lambda x, b: torch.relu(x + b).sin())(x, bias).sum().backward()
    wanted = [value.detach().clone().requires_grad_() for value in (x, bias)]
    (torch.relu(wanted[0] + wanted[1]) * 2).sin().sum().backward()
    for value, reference, asked in zip((x, bias), wanted, grads, strict=True):
        assert (value.grad is not None) == asked
        if asked:
            torch.testing.assert_close(value.grad, reference.grad)


def test_a_rewrite_does_not_fire_when_somebody_else_reads_what_it_would_remove(
    compile_strictly: Callable[..., Any],
) -> None:
    _relu_of_sum()
    x, bias = torch.randn(5, 8), torch.randn(8)
    with torch.no_grad():
        total, result = compile_strictly(lambda x, b: (x + b, torch.relu(x + b)))(x, bias)
        shared = compile_strictly(lambda x, b: (s := x + b, torch.relu(s)))(x, bias)
    torch.testing.assert_close(total, x + bias)
    torch.testing.assert_close(result, torch.relu(x + bias) * 2)  # two sums before they are merged: this one is its own
    torch.testing.assert_close(shared[1], torch.relu(x + bias))


def test_the_check_has_the_last_word(compile_strictly: Callable[..., Any]) -> None:
    def only_wide(match: Match) -> bool:
        return match.value("x").shape[-1] >= 8 or match.decline("rows are short")

    @torchkiln.rewrite(stage="joint", search=lambda x: x.exp().sin(), example_inputs=(torch.empty(4),), when=only_wide)
    def doubled(x: torch.Tensor) -> torch.Tensor:
        return x.exp().sin() * 2

    compiled = compile_strictly(lambda x: x.exp().sin())
    wide, short = torch.randn(3, 8), torch.randn(3, 4)
    torch.testing.assert_close(compiled(wide), wide.exp().sin() * 2)
    torch.testing.assert_close(compiled(short), short.exp().sin())
    text = str(torchkiln.explain_match(doubled, lambda x: x.exp().sin(), short))
    assert "rows are short" in text


def test_a_number_stands_for_any_number(compile_strictly: Callable[..., Any]) -> None:
    @torchkiln.rewrite(stage="joint", example_inputs=(torch.empty(4), 0.123))
    class ScaledExp:
        def search(x, factor):
            return torch.exp(x * factor)

        def replace(x, factor):
            return torch.exp(x * factor) + factor

    x = torch.randn(6)
    torch.testing.assert_close(compile_strictly(lambda x: torch.exp(x * 3.0))(x), torch.exp(x * 3) + 3)


def test_changing_the_source_changes_the_result(compile_strictly: Callable[..., Any]) -> None:
    """Nothing compiled with an older rewrite is served again: the pipeline's fingerprint tells them apart."""

    def register(factor: str) -> None:
        source = f"def swap(x):\n    return x.exp().sin() * {factor}\n"
        space: dict[str, Any] = {}
        exec(compile(source, "user_rewrite", "exec"), space)
        torchkiln.rewrite(stage="joint", search=lambda x: x.exp().sin(), example_inputs=(torch.empty(4),))(
            space["swap"]
        )

    x = torch.randn(8)
    prints = [JOINT.fingerprint()]
    for factor in ("2.0", "3.0", "2.0"):
        register(factor)
        prints.append(JOINT.fingerprint())
        torch._dynamo.reset()
        got = compile_strictly(lambda x: x.exp().sin())(x)
        torch.testing.assert_close(got, x.exp().sin() * float(factor))
    assert len(set(prints)) == 3
    assert prints[1] == prints[3]


def _add_into(out: torch.Tensor, x: torch.Tensor) -> None:
    out.add_(x)


def test_a_rewrite_of_a_mutating_operator(compile_strictly: Callable[..., Any]) -> None:
    with torch.library._scoped_library("kilntest", "FRAGMENT") as library:
        library.define("add_into(Tensor(a!) out, Tensor x) -> ()")
        library.impl("add_into", _add_into, "CompositeExplicitAutograd")
        library.impl("add_into", lambda out, x: None, "Meta")
        add_into = torch.ops.kilntest.add_into.default

        @torchkiln.rewrite(stage="joint", example_inputs=(torch.empty(4), torch.empty(4)))
        class TwiceIsOnce:
            def search(out, x):
                add_into(out, x)
                add_into(out, x)
                return out

            def replace(out, x):
                add_into(out, x * 2)
                return out

        def function(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            total = a.sin()
            add_into(total, b)
            add_into(total, b)
            return total * 1.5

        a, b = torch.randn(6), torch.randn(6)
        torchkiln.reset_stats()
        got = compile_strictly(function)(a, b)
        torch.testing.assert_close(got, (a.sin() + 2 * b) * 1.5)
        assert torchkiln.stats().extern_calls["kilntest.add_into.default"] == 1


def test_a_rewrite_of_torch_level_calls(compile_strictly: Callable[..., Any]) -> None:
    @torchkiln.rewrite(stage="pre_grad", example_inputs=(torch.empty(4, 4),))
    class Softer:
        def search(x):
            return torch.nn.functional.softmax(x, dim=-1)

        def replace(x):
            return torch.nn.functional.softmax(x / 2, dim=-1)

    x = torch.randn(3, 5, requires_grad=True)
    got = compile_strictly(lambda x: torch.nn.functional.softmax(x, dim=-1) + 1)(x)
    torch.testing.assert_close(got, torch.softmax(x / 2, -1) + 1)
    (gradient,) = torch.autograd.grad(got[:, 0].sum(), x)
    (expected,) = torch.autograd.grad((torch.softmax(x / 2, -1) + 1)[:, 0].sum(), x)
    torch.testing.assert_close(gradient, expected)


def test_a_rewrite_from_an_expression(compile_strictly: Callable[..., Any]) -> None:
    x = Capture("x")

    @torchkiln.rewrite(
        stage="post_grad", pattern=Call(aten.mul.Tensor, Call(aten.sin.default, x), Call(aten.cos.default, x))
    )
    def half_of_sin_of_twice(match: Match, x: torch.fx.Node) -> None:
        match.replace_by_example(lambda value: torch.sin(value * 2) / 2 + 1, [x])

    value = torch.randn(7)
    got = compile_strictly(lambda v: torch.cos(v) * torch.sin(v))(value)
    torch.testing.assert_close(got, torch.sin(value * 2) / 2 + 1)


def test_a_custom_pass(compile_strictly: Callable[..., Any]) -> None:
    @torchkiln.graph_pass(stage="post_grad", position="pre")
    def sin_to_cos(graph_module: torch.fx.GraphModule) -> bool:
        nodes = graph_module.graph.find_nodes(op="call_function", target=aten.sin.default)
        for node in nodes:
            node.target = aten.cos.default
        return bool(nodes)

    x = torch.randn(5)
    torch.testing.assert_close(compile_strictly(lambda v: v.sin() + 1)(x), x.cos() + 1)
    torchkiln.remove_graph_pass("sin_to_cos")
    torch._dynamo.reset()
    torch.testing.assert_close(compile_strictly(lambda v: v.sin() + 1)(x), x.sin() + 1)


def test_passes_of_users_are_skipped_by_name_and_number_from_the_environment(
    compile_strictly: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    _relu_of_sum()
    x, bias = torch.randn(5, 8), torch.randn(8)
    plain, rewritten = torch.relu(x + bias), torch.relu(x + bias) * 2

    def run() -> torch.Tensor:
        torch._dynamo.reset()
        with torch.no_grad():
            return compile_strictly(lambda x, b: torch.relu(x + b))(x, bias)

    torch.testing.assert_close(run(), rewritten)
    monkeypatch.setenv("KILN_PASSES_SKIP", "ReluOfSum")
    torch.testing.assert_close(run(), plain)
    monkeypatch.setenv("KILN_PASSES_SKIP", "joint/ReluOfSum,no_ops")
    torch.testing.assert_close(run(), plain)
    monkeypatch.delenv("KILN_PASSES_SKIP")
    torchkiln.reset_stats()
    with torchkiln.settings(record_passes=True):
        run()
    number = next(record.number for record in torchkiln.stats().passes if record.name == "ReluOfSum")
    monkeypatch.setenv("KILN_PASSES_LIMIT", str(number - 1))
    torch.testing.assert_close(run(), plain)
    monkeypatch.setenv("KILN_PASSES_LIMIT", str(number))
    torch.testing.assert_close(run(), rewritten)


def test_mistakes_are_named() -> None:
    with pytest.raises(OptionError, match=r"stage 'jiont'.*did you mean 'joint'"):
        torchkiln.rewrite(stage="jiont", example_inputs=())  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="priority"):
        torchkiln.rewrite(stage="joint", example_inputs=(), priority=3)
    with pytest.raises(PatternError, match=r"search takes .x. and replace takes .y."):
        torchkiln.rewrite(stage="joint", search=lambda x: x.sin(), example_inputs=(torch.empty(2),))(lambda y: y.cos())
    with pytest.raises(PatternError, match="2 example inputs for 1 arguments"):
        torchkiln.rewrite(stage="joint", search=lambda x: x.sin(), example_inputs=(torch.empty(2), 1))(
            lambda x: x.cos()
        )


@pytest.mark.parametrize("name", ["self", "input", "out", "end", "dim", "args"])
def test_any_argument_name_will_do(compile_strictly: Callable[..., Any], name: str) -> None:
    space: dict[str, Any] = {}
    exec(f"def search({name}): return {name}.exp().sin()\ndef replace({name}): return {name}.exp().cos()", space)
    torchkiln.rewrite(stage="joint", search=space["search"], example_inputs=(torch.empty(3),))(space["replace"])
    x = torch.randn(4)
    torch.testing.assert_close(compile_strictly(lambda v: v.exp().sin())(x), x.exp().cos())


def test_tensors_of_another_rank_than_the_example_may_come_out_of_views(compile_strictly: Callable[..., Any]) -> None:
    _relu_of_sum()
    x, bias = torch.randn(10, 8), torch.randn(8)
    with torch.no_grad():
        got = compile_strictly(lambda x, b: torch.relu(x.view(5, 2, 8) + b))(x, bias)
    torch.testing.assert_close(got, torch.relu(x + bias).view(5, 2, 8) * 2)


def test_a_gradient_that_is_expanded_is_replaced_at_any_rank(compile_strictly: Callable[..., Any]) -> None:
    _relu_of_sum()
    x, bias = torch.randn(5, 2, 8, requires_grad=True), torch.randn(8, requires_grad=True)
    # The gradient of a sum has the rank of the example before it is expanded.
    compile_strictly(lambda x, b: torch.relu(x + b).sum(-1))(x, bias).sum().backward()
    expected = torch.autograd.grad((torch.relu(x + bias) * 2).sum(), (x, bias))
    torch.testing.assert_close((x.grad, bias.grad), expected)


def test_a_failure_names_the_rewrite_it_is_in(compile_strictly: Callable[..., Any]) -> None:
    @torchkiln.rewrite(stage="joint", example_inputs=(torch.empty(4),))
    class Unfinished:
        def search(x):
            return torch.tanh(x)

        def replace(x):
            raise ValueError("not written yet")

    with pytest.raises(Exception, match="joint passes failed in 'Unfinished': ValueError: not written yet"):
        compile_strictly(torch.tanh)(torch.randn(3))
