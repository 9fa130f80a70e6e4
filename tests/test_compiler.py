"""The flow as a whole: settings, fallback, errors, randomness, depth, double backward."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import torchkiln
from tests.interpreted import InterpretingCompiler
from torchkiln import compiler
from torchkiln.artifact import GraphSummary, decode, encode
from torchkiln.compiler import compile_fx, compile_fx_inner
from torchkiln.config import Settings
from torchkiln.errors import CompileError, FallbackWarning, OptionError, UnsupportedError
from torchkiln.recorder import Record, listen
from torchkiln.runtime.freed_memory import FreedMemory

STRICT = Settings(fallback=False)


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()
    torchkiln.reset_stats()


def _backend(inner: Callable[..., Any], settings: Settings = STRICT) -> Callable[..., Any]:
    """Compiles for every test: stages are watched and replaced here, and what a cache has does not run them."""
    compiles = dataclasses.replace(settings, cache=False)
    return lambda gm, inputs: compile_fx(gm, inputs, inner_compile=inner, settings=compiles)


def _functional(function: Callable[..., Any], *inputs: torch.Tensor) -> torch.fx.GraphModule:
    mode = FakeTensorMode()
    return make_fx(function)(*(mode.from_tensor(value) for value in inputs))


def _fail_in(monkeypatch: pytest.MonkeyPatch, stage: str, error: Exception) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(compiler, stage, fail)


# The whole flow


def test_a_training_step_matches_eager() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.LayerNorm(8), torch.nn.GELU(), torch.nn.Linear(8, 3))
    x = torch.randn(5, 6)
    model(x).pow(2).sum().backward()
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    torch.compile(model, backend=_backend(compile_fx_inner))(x).pow(2).sum().backward()
    torch.testing.assert_close([parameter.grad for parameter in model.parameters()], expected)
    counts = torchkiln.stats()
    assert counts.graphs == 2
    assert counts.kernels > 0
    assert counts.fallbacks == ()
    assert "aten.mm.default" in counts.extern_calls
    assert {"AOTAutograd", "partition", "lowering", "schedule", "codegen", "load"} <= counts.seconds.keys()
    forward, backward = counts.by_graph
    assert (forward.kind, backward.kind) == ("forward", "backward")
    assert forward.compilation == backward.compilation
    assert forward.kernels + backward.kernels == counts.kernels
    assert forward.extern_calls + backward.extern_calls == sum(counts.extern_calls.values())
    assert counts.compiled_share == 1


def test_one_functional_graph_compiles_on_its_own() -> None:
    x = torch.randn(4, 5)
    run = compile_fx_inner(_functional(lambda v: (v.sin() + 1, v.sum(0)), x), [x], is_inference=True, settings=STRICT)
    torch.testing.assert_close(list(run([x])), [x.sin() + 1, x.sum(0)])


def test_operations_are_calls_with_those_of_bodies_and_no_inputs_or_parts_of_tuples() -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        largest, positions = x.max(0)  # one call and two parts
        return torch.cond(x.sum() > 0, lambda a: (a + 1).sin(), lambda a: a - 1, (largest,)), positions

    x = torch.randn(4, 3)
    torch.testing.assert_close(torch.compile(function, backend=_backend(compile_fx_inner))(x), function(x))
    (graph,) = torchkiln.stats().by_graph
    # max, sum, gt, cond; add and sin; sub
    assert graph.operations == 7


def test_a_captured_graph_compiles_without_dynamo() -> None:
    gm = torch.fx.symbolic_trace(lambda x, y: {"sum": x + y, "parts": [x * y, x - y]})
    x, y = torch.randn(3), torch.randn(3)
    torch.testing.assert_close(compile_fx(gm, [x, y], settings=STRICT)(x, y), gm(x, y))


def test_sizes_that_change_give_the_results_of_eager() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return (x.view(-1, 2).sum(0) * x.shape[0]).exp()

    compiled = torch.compile(function, dynamic=True, backend=_backend(compile_fx_inner))
    for rows in (4, 6, 10):
        x = torch.randn(rows, 4) / 100
        torch.testing.assert_close(compiled(x), function(x))


# What the inner compiler is told


def test_the_inner_compiler_learns_which_graph_it_gets_and_the_settings() -> None:
    inner = InterpretingCompiler()
    settings = Settings(fallback=False, threads=1)
    compiled = torch.compile(
        lambda x: x.sin(), backend=lambda gm, args: compile_fx(gm, args, inner_compile=inner, settings=settings)
    )
    compiled(torch.ones(2, requires_grad=True)).sum().backward()
    with torch.no_grad():
        compiled(torch.ones(3))
    kinds = [(call.get("is_backward", False), call.get("is_inference", False)) for call in inner.calls]
    assert kinds == [(False, False), (True, False), (False, True)]
    assert all(call["settings"] is settings for call in inner.calls)


def test_settings_of_the_forward_hold_for_the_backward_compiled_later() -> None:
    inner = InterpretingCompiler()
    compiled = torch.compile(lambda x: x.sin(), backend=lambda gm, args: compile_fx(gm, args, inner_compile=inner))
    x = torch.ones(2, requires_grad=True)
    with torchkiln.settings(threads=3):
        y = compiled(x)
    y.sum().backward()
    assert [call["settings"].threads for call in inner.calls] == [3, 3]


# Failures


@pytest.mark.parametrize("stage", ["lower", "schedule", "generate", "load"])
def test_a_failing_stage_falls_back_once_with_a_warning_and_the_right_result(
    monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    _fail_in(monkeypatch, stage, RuntimeError("broken on purpose"))
    x = torch.randn(4, requires_grad=True)
    compiled = torch.compile(lambda v: v.sin(), backend=_backend(compile_fx_inner, Settings()))
    with pytest.warns(FallbackWarning, match="broken on purpose") as caught:
        out = compiled(x)
    assert len(caught) == 1
    torch.testing.assert_close(out, x.sin())
    with pytest.warns(FallbackWarning, match="backward graph"):
        out.sum().backward()
    torch.testing.assert_close(x.grad, x.detach().cos())
    with warnings.catch_warnings():
        warnings.simplefilter("error", FallbackWarning)
        compiled(x).sum().backward()
    assert [fallback.graph for fallback in torchkiln.stats().fallbacks] == ["forward graph", "backward graph"]
    assert "broken on purpose" in torchkiln.stats().fallbacks[0].reason
    assert [(graph.kind, graph.compiled) for graph in torchkiln.stats().by_graph] == [
        ("forward", False),
        ("backward", False),
    ]
    assert torchkiln.stats().compiled_share == 0
    assert str(torchkiln.stats()).startswith("0 % of ")


def test_a_cause_of_many_lines_makes_one_line_of_every_message(monkeypatch: pytest.MonkeyPatch) -> None:
    cause = RuntimeError("broken on purpose\n\nWhile executing %sin:\n  a traceback\n")
    _fail_in(monkeypatch, "lower", cause)
    x = torch.randn(4)
    with pytest.warns(FallbackWarning) as caught:
        torch.compile(lambda v: v.sin(), backend=_backend(compile_fx_inner, Settings()))(x)
    (warning,) = caught
    (fallback,) = torchkiln.stats().fallbacks
    assert fallback.reason == "lowering failed: RuntimeError: broken on purpose"
    assert len(str(warning.message).splitlines()) == 1
    with pytest.raises(CompileError) as raised:
        compile_fx_inner(_functional(lambda v: (v.sin(),), x), [x], settings=STRICT)
    assert len(str(raised.value).splitlines()) == 1
    assert raised.value.__cause__ is cause


def test_without_fallback_the_failure_names_stage_and_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    cause = UnsupportedError("quaternions")
    _fail_in(monkeypatch, "schedule", cause)
    x = torch.randn(4)
    with pytest.raises(CompileError, match="schedule failed: UnsupportedError: quaternions") as caught:
        compile_fx_inner(_functional(lambda v: (v.sin(),), x), [x], settings=STRICT)
    assert caught.value.cause is cause
    assert torchkiln.stats().fallbacks == ()


def test_a_failure_at_a_node_names_the_users_line(monkeypatch: pytest.MonkeyPatch) -> None:
    from torchkiln.graph.source import blame

    def fail(gm: torch.fx.GraphModule, settings: Settings, target: object, **_: object) -> None:
        for node in gm.graph.find_nodes(op="call_function", target=torch.ops.aten.cos.default):
            with blame(node):
                raise UnsupportedError("cosines")

    monkeypatch.setattr(compiler, "lower", fail)

    def function(x: torch.Tensor) -> torch.Tensor:
        y = x.sin()
        return y.cos()  # the line to be named

    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed) as caught:
        torch.compile(function, backend=_backend(compile_fx_inner))(torch.randn(3))
    message = str(caught.value)
    for part in ("lowering failed at node cos", "test_compiler.py", "return y.cos()"):
        assert part in message


def test_a_pass_that_fails_leaves_the_captured_graph_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    from torchkiln.graph.manager import Pass, PassPipeline

    def wreck(gm: torch.fx.GraphModule) -> bool:
        for node in gm.graph.nodes:
            if node.op == "output":
                node.args = (tuple(gm.graph.find_nodes(op="placeholder")),)
        raise RuntimeError("half done")

    monkeypatch.setattr(compiler, "PRE_GRAD", PassPipeline("pre_grad", (Pass("wreck", wreck),)))
    x = torch.randn(3)
    with pytest.warns(FallbackWarning, match="pre-grad passes failed in 'wreck': RuntimeError: half done"):
        out = torch.compile(lambda v: v.sin(), backend=_backend(compile_fx_inner, Settings()))(x)
    torch.testing.assert_close(out, x.sin())


def test_a_wrong_pass_name_is_an_error_and_not_a_fallback() -> None:
    gm = torch.fx.symbolic_trace(lambda x: x.sin())
    with pytest.raises(OptionError, match="passes_skip"):
        compile_fx(gm, [torch.ones(2)], settings=Settings(passes_skip=("nonsense",)))


def test_an_error_of_the_user_found_while_tracing_is_eagers_error() -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = (x * w).sum()
        x.add_(1)
        return y

    compiled = torch.compile(function, backend=_backend(compile_fx_inner, Settings()))
    with pytest.warns(FallbackWarning, match="AOTAutograd"):
        out = compiled(torch.ones(3), torch.ones(3, requires_grad=True))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward()


# Behaviour a user relies on


def test_compiling_draws_no_random_numbers() -> None:
    inner = InterpretingCompiler()

    def drawing(*arguments: Any, **facts: Any) -> Any:
        torch.manual_seed(123)
        torch.rand(7)
        return inner(*arguments, **facts)

    gm = torch.fx.symbolic_trace(lambda x: torch.nn.functional.dropout(x, 0.5))
    torch.manual_seed(0)
    before = torch.get_rng_state()
    compile_fx(gm, [torch.ones(4)], inner_compile=drawing, settings=STRICT)
    assert torch.equal(torch.get_rng_state(), before)


def test_dropout_draws_the_numbers_of_eager() -> None:
    x = torch.randn(64, 32)
    compiled = torch.compile(
        lambda v: torch.nn.functional.dropout(v, 0.3) + torch.rand_like(v),
        backend=_backend(InterpretingCompiler(), Settings(fallback=False, rng="eager")),
    )
    torch.manual_seed(5)
    expected = torch.nn.functional.dropout(x, 0.3) + torch.rand_like(x)
    torch.manual_seed(5)
    torch.testing.assert_close(compiled(x), expected)


def test_a_chain_of_3000_operations_compiles_and_differentiates() -> None:
    graph = torch.fx.Graph()
    x, w = graph.placeholder("x"), graph.placeholder("w")
    value = x
    for _ in range(3000):
        value = graph.call_function(torch.add, (value, w))
    graph.output((value,))
    weight = torch.full((2,), 0.5, requires_grad=True)
    gm = torch.fx.GraphModule({}, graph)
    run = compile_fx(gm, [torch.zeros(2), weight], settings=STRICT)
    (out,) = run(torch.zeros(2), weight)
    torch.testing.assert_close(out, torch.full((2,), 1500.0))
    out.sum().backward()
    torch.testing.assert_close(weight.grad, torch.full((2,), 3000.0))


def test_double_backward_says_that_it_is_not_supported() -> None:
    x = torch.randn(3, requires_grad=True)
    compiled = torch.compile(lambda v: v.sin().exp(), backend=_backend(InterpretingCompiler()))
    (gradient,) = torch.autograd.grad(compiled(x).sum(), x, create_graph=True)
    torch.testing.assert_close(gradient, x.sin().exp() * x.cos())
    with pytest.raises(RuntimeError, match="does not currently support double backward"):
        gradient.sum().backward()


# Summaries


def _summaries(function: Callable[..., Any], *inputs: torch.Tensor, dynamic: bool = False) -> list[GraphSummary | None]:
    """What the artifacts of a training step say of their graphs, once they are stored and read back."""
    found: list[Record] = []
    with listen(found.append):
        compiled = torch.compile(function, backend="kiln", dynamic=dynamic, options={"fallback": False})
        compiled(*inputs).sum().backward()
    return [decode(encode(record.value.artifact)).summary for record in found if record.stage == "code"]


@pytest.mark.parametrize("dynamic", [False, True])
def test_an_artifact_says_what_stats_count_of_its_graph(dynamic: bool) -> None:
    x = torch.randn(40, 64, requires_grad=True)
    forward, backward = _summaries(lambda x: torch.logcumsumexp((x @ x.T).exp(), 0), x, dynamic=dynamic)
    assert forward is not None
    assert backward is not None
    for summary, counted in zip((forward, backward), torchkiln.stats().by_graph, strict=True):
        for name in ("kind", "nodes", "operations", "kernels", "launches"):
            assert getattr(summary, name) == getattr(counted, name)
        assert dict(summary.extern_calls) == counted.calls
    assert (forward.kind, backward.kind) == ("forward", "backward")
    assert ("aten.logcumsumexp.default", 1) in forward.extern_calls
    assert forward.allocated_bytes >= 2 * 40 * 40 * 4  # logcumsumexp takes and gives a tensor
    assert backward.allocated_bytes >= x.nbytes


@pytest.mark.parametrize("keep_memory", [True, False])
def test_freed_memory_is_kept_for_what_the_summary_says(keep_memory: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[int] = []
    monkeypatch.setattr(FreedMemory, "keep", lambda self, nbytes: kept.append(nbytes))
    options = {"fallback": False, "keep_memory": keep_memory}
    torch.compile(lambda x: (x + 1, x.sum(0)), backend="kiln", options=options)(torch.ones(300, 7))
    assert kept == ([4 * 7 * 301] if keep_memory else [])


def test_a_graph_kept_for_a_second_backward_works_at_any_time() -> None:
    x = torch.randn(3, requires_grad=True)
    compiled = torch.compile(lambda v: v.sin().exp(), backend=_backend(InterpretingCompiler()))
    compiled(x).sum().backward()  # compiles the backward for saved tensors that are used once
    first = x.grad.clone()
    out = compiled(x).sum()
    out.backward(retain_graph=True)
    out.backward()
    torch.testing.assert_close(x.grad, 3 * first)


def test_mutated_inputs_are_written_and_their_version_moves() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        x.mul_(2)
        return x.sum()

    compiled = torch.compile(function, backend=_backend(InterpretingCompiler()))
    x = torch.ones(4)
    version = x._version
    torch.testing.assert_close(compiled(x), torch.tensor(8.0))
    torch.testing.assert_close(x, torch.full((4,), 2.0))
    assert x._version > version
