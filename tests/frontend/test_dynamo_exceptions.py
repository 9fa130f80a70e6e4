"""Exceptions that Dynamo takes from a backend: which go through, and what becomes of the rest."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._dynamo import exc
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import DataDependentOutputException

import torchkiln
from torchkiln import compiler
from torchkiln.errors import FallbackWarning
from torchkiln.frontend.dynamo_exceptions import DiscardedErrorInDynamo, OptionErrorInDynamo, is_for_dynamo

FALLBACK = pytest.mark.parametrize("fallback", [False, True])


@torch.library.custom_op("kiln_tests::scaled_groups", mutates_args=())
def scaled_groups(x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Rows up to each end, times the number of the group, as the experts of a mixture are applied."""
    out, start = torch.empty_like(x), 0
    for k, end in enumerate(ends.tolist()):
        out[start:end] = x[start:end] * (k + 1)
        start = end
    return out


@scaled_groups.register_fake
def _(x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def _backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
    (ends,) = ctx.saved_tensors
    out, start = torch.empty_like(gradient), 0
    for k, end in enumerate(ends.tolist()):  # numbers of a fake tensor: AOTAutograd cannot trace this
        out[start:end] = gradient[start:end] * (k + 1)
        start = end
    return out, None


scaled_groups.register_autograd(_backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[1]))


def _before(x: torch.Tensor) -> torch.Tensor:
    return x.sin() * 2


def _after(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (x.tanh() * y.exp()).sum()


def _mixture(x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    return _after(scaled_groups(_before(x), ends), x)


def _gradient(function: Callable[..., torch.Tensor]) -> torch.Tensor:
    x = torch.linspace(-1, 1, 24).reshape(6, 4).requires_grad_()
    return torch.autograd.grad(function(x, torch.tensor([2, 5, 6])), x)[0]


@FALLBACK
def test_graphs_around_a_data_dependent_operator_are_compiled(fallback: bool) -> None:
    before = torchkiln.stats()
    compiled = torch.compile(_mixture, backend="kiln", options={"fallback": fallback, "adaptive": False})
    expected = _gradient(_mixture)
    for _ in range(2):
        torch.testing.assert_close(_gradient(compiled), expected)
    after = torchkiln.stats()
    assert after.fallbacks == before.fallbacks
    assert after.graphs - before.graphs == 4  # forward and backward, before the operator and after it
    (broken,) = after.breaks[len(before.breaks) :]
    assert broken.graph.startswith("captured graph of")
    assert "\n" not in broken.reason


def test_a_function_that_is_left_to_eager_as_a_whole_is_seen() -> None:
    torchkiln.reset_stats()
    function = lambda x, ends: scaled_groups(x * 2, ends).sum()  # noqa: E731
    torch.testing.assert_close(_gradient(torch.compile(function, backend="kiln")), _gradient(function))
    assert str(torchkiln.stats()).startswith("nothing runs compiled: Dynamo left 1 captured graph to eager")


def _raised(kind: type[BaseException]) -> BaseException:
    names = list(inspect.signature(kind.__init__).parameters)[1:]
    wanted = {"func": torch.ops.aten.nonzero.default, "first_useful_frame": None}
    try:
        return kind(*(wanted[name] for name in names if name in wanted))
    except TypeError:
        return kind("cannot be traced")


def _fail_at_cosines(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    """AOTAutograd raises ``error`` for graphs with a cosine."""
    trace = compiler.trace_with_autograd

    def trace_or_fail(gm: torch.fx.GraphModule, *arguments: Any, **options: Any) -> Any:
        if any(node.target in ("cos", torch.cos) for node in gm.graph.nodes):
            raise error
        return trace(gm, *arguments, **options)

    monkeypatch.setattr(compiler, "trace_with_autograd", trace_or_fail)


def _cosine_between(x: torch.Tensor) -> torch.Tensor:
    return _after(_before(x).cos(), x)


@FALLBACK
@pytest.mark.parametrize("kind", exc.exceptions_allowed_to_be_fallback)
def test_dynamo_breaks_the_graph_at_what_it_says_it_can(
    kind: type[BaseException], fallback: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    _fail_at_cosines(monkeypatch, _raised(kind))
    x, before = torch.randn(4), torchkiln.stats()
    compiled = torch.compile(_cosine_between, backend="kiln", options={"fallback": fallback, "adaptive": False})
    torch.testing.assert_close(compiled(x), _cosine_between(x))
    after = torchkiln.stats()
    assert after.graphs - before.graphs == 2
    assert after.fallbacks == before.fallbacks


def test_where_the_user_asked_for_one_graph_they_are_a_failure_like_any_other(monkeypatch: pytest.MonkeyPatch) -> None:
    _fail_at_cosines(monkeypatch, _raised(DataDependentOutputException))
    x = torch.randn(4)
    with pytest.warns(FallbackWarning, match="DataDependentOutputException"):
        result = torch.compile(_cosine_between, backend="kiln", fullgraph=True)(x)
    torch.testing.assert_close(result, _cosine_between(x))
    torch._dynamo.reset()
    strict = torch.compile(_cosine_between, backend="kiln", fullgraph=True, options={"fallback": False})
    with pytest.raises(exc.BackendCompilerFailed, match="CompileError: AOTAutograd failed: DataDependentOutput"):
        strict(x)


@pytest.mark.parametrize("kind", [exc.Unsupported, exc.UserError, exc.TorchRuntimeError, IndexError, ValueError])
def test_what_dynamo_would_wrap_is_a_failure_of_the_graph(
    kind: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    error = exc.UserError(exc.UserErrorType.ANTI_PATTERN, "no") if kind is exc.UserError else kind("no")
    _fail_at_cosines(monkeypatch, error)
    x = torch.randn(4)
    with pytest.warns(FallbackWarning, match=f"AOTAutograd failed: {kind.__name__}"):
        result = torch.compile(_cosine_between, backend="kiln")(x)
    torch.testing.assert_close(result, _cosine_between(x))
    torch._dynamo.reset()
    with pytest.raises(exc.BackendCompilerFailed, match=f"AOTAutograd failed: {kind.__name__}"):
        torch.compile(_cosine_between, backend="kiln", options={"fallback": False})(x)


def test_nobody_hears_of_a_backward_that_is_compiled_when_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    lower = compiler.lower

    def fail_backward(gm: torch.fx.GraphModule, settings: Any, target: Any, **facts: Any) -> Any:
        if any(str(node.target).startswith("tangents") for node in gm.graph.find_nodes(op="placeholder")):
            raise DataDependentOutputException(torch.ops.aten.nonzero.default)
        return lower(gm, settings, target, **facts)

    monkeypatch.setattr(compiler, "lower", fail_backward)
    x = torch.randn(4, requires_grad=True)
    loss = torch.compile(lambda v: v.sin().sum(), backend="kiln")(x)
    with pytest.warns(FallbackWarning, match="backward graph"):
        loss.backward()
    torch.testing.assert_close(x.grad, x.detach().cos())


def test_outside_of_dynamo_only_another_attempt_is_asked_for() -> None:
    assert is_for_dynamo(exc.TensorifyScalarRestartAnalysis())
    assert is_for_dynamo(exc.SkipFrame())
    assert not is_for_dynamo(DataDependentOutputException(torch.ops.aten.nonzero.default))
    assert not is_for_dynamo(exc.Unsupported("no"))


@pytest.mark.parametrize("kind", [OptionErrorInDynamo, DiscardedErrorInDynamo])
def test_an_error_of_ours_keeps_its_sentence(kind: type[Exception]) -> None:
    error = kind("No such option.")
    error.args = ("No such option. Report a bug to PyTorch.",)
    assert str(error) == "No such option."


def test_dynamos_counters_tell_how_often_aot_autograd_was_called(monkeypatch: pytest.MonkeyPatch) -> None:
    counters["aot_autograd"].clear()
    torch.compile(torch.sin, backend="kiln")(torch.ones(3))
    assert counters["aot_autograd"] == {"total": 1, "ok": 1}
