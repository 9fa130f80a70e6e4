"""Training calls that go straight to the compiled graphs: where they may, and never to be told from others."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

from torchkiln import compile_fx

DIRECT, WRAPPED = "CompiledGraphsBackward", "CompiledFunctionBackward"


def _compiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    torch._dynamo.reset()
    return torch.compile(function, backend="kiln", options={"fallback": False}, **options)


def _path(result: Tensor) -> str:
    assert result.grad_fn is not None
    return result.grad_fn.name()


def _step(function: Callable[..., Any], *inputs: Tensor, gradient: Tensor | None = None) -> list[Tensor | None]:
    """Result and gradients of one call."""
    leaves = [x.detach().clone().requires_grad_(x.requires_grad) for x in inputs]
    result = function(*leaves)
    result.backward(gradient)
    return [result.detach(), *(leaf.grad for leaf in leaves)]


def _layer(x: Tensor, w: Tensor) -> Tensor:
    return torch.tanh(x @ w).sin() * x


def _inputs() -> tuple[Tensor, Tensor]:
    return torch.randn(6, 6, requires_grad=True), torch.randn(6, 6, requires_grad=True)


@pytest.mark.usefixtures("no_cache")  # the first call is AOTAutograd's
def test_calls_are_direct_once_the_backward_is_compiled() -> None:
    compiled = _compiled(_layer)
    x, w = _inputs()
    first = compiled(x, w)
    assert _path(first) == WRAPPED
    first.sum().backward()
    assert _path(compiled(x, w)) == DIRECT


@pytest.mark.parametrize(
    "gradient",
    [
        torch.randn(6, 6),
        torch.randn(6, 6).T,
        torch.randn(()).expand(6, 6),
        torch.randn(12, 6)[::2],
        torch._neg_view(torch.randn(6, 6)),
    ],
    ids=["contiguous", "transposed", "expanded", "strided", "negated"],
)
def test_steps_are_those_of_eager_whatever_the_layout_of_the_gradient(gradient: Tensor) -> None:
    compiled = _compiled(_layer)
    for _ in range(3):
        inputs = _inputs()
        torch.testing.assert_close(
            _step(compiled, *inputs, gradient=gradient), _step(_layer, *inputs, gradient=gradient)
        )


def test_outputs_without_gradients_and_gradients_that_nobody_gives() -> None:
    def function(x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return x.sin(), x.argmax(), x.detach().cos(), x.exp()

    compiled = _compiled(function)
    for used in ((0, 3), (0,), (3,), (0, 3)):
        x, y = (torch.ones(5).requires_grad_() for _ in range(2))
        mine, eagers = compiled(x), function(y)
        assert [t.requires_grad for t in mine] == [t.requires_grad for t in eagers]
        for results in (mine, eagers):
            torch.stack([results[k].sum() for k in used]).sum().backward()
        torch.testing.assert_close(mine, eagers)
        torch.testing.assert_close(x.grad, y.grad)


def test_inputs_without_gradients_get_none() -> None:
    compiled = _compiled(_layer)
    for _ in range(3):
        x, w = torch.randn(6, 6), torch.randn(6, 6, requires_grad=True)
        gradient = torch.randn(6, 6)
        mine, eagers = _step(compiled, x, w, gradient=gradient), _step(_layer, x, w, gradient=gradient)
        assert mine[1] is None
        torch.testing.assert_close(mine, eagers)


def _warm(compiled: Callable[..., Any], *inputs: Tensor) -> None:
    for _ in range(2):
        compiled(*inputs).sum().backward()
    for value in inputs:
        value.grad = None


def test_a_graph_that_is_kept_can_be_run_again() -> None:
    compiled = _compiled(_layer)
    x, w = _inputs()
    _warm(compiled, x, w)
    result = compiled(x, w)
    assert _path(result) == DIRECT
    (once,) = torch.autograd.grad(result.sum(), w, retain_graph=True)
    (twice,) = torch.autograd.grad(result.sum(), w)
    assert torch.equal(once, twice)
    torch.testing.assert_close(once, torch.autograd.grad(_layer(x, w).sum(), w)[0])
    with pytest.raises(RuntimeError, match="second time"):
        result.sum().backward()


def test_a_second_derivative_is_refused_and_the_first_is_there() -> None:
    compiled = _compiled(_layer)
    x, w = _inputs()
    _warm(compiled, x, w)
    (gradient,) = torch.autograd.grad(compiled(x, w).sum(), w, create_graph=True)
    torch.testing.assert_close(gradient.detach(), torch.autograd.grad(_layer(x, w).sum(), w)[0])
    assert gradient.requires_grad
    with pytest.raises(RuntimeError, match="double backward"):
        gradient.sum().backward()


def test_an_input_that_is_written_between_forward_and_backward_is_noticed() -> None:
    compiled = _compiled(lambda x, w: (x * w).sin())
    x, w = _inputs()
    _warm(compiled, x, w)
    result = compiled(x, w)
    with torch.no_grad():
        w.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.sum().backward()


def test_hooks_on_saved_tensors_see_them() -> None:
    compiled = _compiled(_layer)
    x, w = _inputs()
    _warm(compiled, x, w)
    packed: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tensor)
        return tensor.double()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor.float()):
        result = compiled(x, w)
    assert packed
    (gradient,) = torch.autograd.grad(result.sum(), w)
    torch.testing.assert_close(gradient, torch.autograd.grad(_layer(x, w).sum(), w)[0])


def test_backward_asks_torch_nothing_about_its_class(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = _compiled(_layer)
    x, w = _inputs()
    _warm(compiled, x, w)
    expected = _step(_layer, x, w, gradient=torch.ones(6, 6))
    asked: list[Any] = []
    monkeypatch.setattr(BackwardCFunction, "apply", lambda ctx, *gradients: asked.append(ctx))
    torch.testing.assert_close(_step(compiled, x, w, gradient=torch.ones(6, 6)), expected)
    result = compiled(x, w)
    gradients = result.grad_fn.apply(torch.ones(6, 6))  # called past the engine too
    torch.testing.assert_close([result.detach(), *gradients], expected)
    assert not asked


def test_hooks_on_results_and_inputs_run() -> None:
    compiled = _compiled(_layer)
    x, w = _inputs()
    _warm(compiled, x, w)
    seen: list[str] = []
    w.register_hook(lambda gradient: seen.append("input"))
    result = compiled(x, w)
    result.register_hook(lambda gradient: seen.append("result"))
    result.sum().backward()
    assert seen == ["result", "input"]


def test_nothing_is_held_after_backward() -> None:
    compiled = _compiled(lambda x: (x.sin() @ x).exp())
    x = torch.randn(6, 6, requires_grad=True)
    _warm(compiled, x)
    packed: list[weakref.ref[Tensor]] = []

    def pack(tensor: Tensor) -> Tensor:
        kept = tensor.clone()
        packed.append(weakref.ref(kept))
        return kept

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = compiled(x)
    result.sum().backward()
    gc.collect()
    assert packed
    assert not any(reference() is not None for reference in packed)


def test_views_as_inputs_leave_nothing_behind() -> None:
    compiled = _compiled(lambda x: (x.sin() * x).cos())
    base = torch.randn(4, 6, requires_grad=True)
    gone = []
    for _ in range(4):
        middle = base * 2
        gone.append(weakref.ref(middle))
        compiled(middle[1:]).sum().backward()
        del middle
    assert not any(reference() is not None for reference in gone)


def test_checkpointed_calls_save_the_same_both_times() -> None:
    compiled = _compiled(_layer)

    def twice(run: Callable[..., Any], x: Tensor, w: Tensor) -> Tensor:
        once = checkpoint(run, x, w, use_reentrant=False)
        result: Tensor = checkpoint(run, once, w, use_reentrant=False)
        return result.sum()

    for _ in range(3):
        inputs = _inputs()
        torch.testing.assert_close(
            _step(lambda *given: twice(compiled, *given), *inputs), _step(lambda *given: twice(_layer, *given), *inputs)
        )


def test_threads_train_at_once() -> None:
    compiled = _compiled(_layer)
    _warm(compiled, *_inputs())
    failures: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(20):
                inputs = _inputs()
                torch.testing.assert_close(
                    _step(lambda *given: compiled(*given).sum(), *inputs),
                    _step(lambda *given: _layer(*given).sum(), *inputs),
                )
        except BaseException as failure:
            failures.append(failure)

    workers = [threading.Thread(target=work) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not failures


def test_transforms_of_a_compiled_function_still_work() -> None:
    compiled = _compiled(lambda x: (x.sin() * x).sum())
    x = torch.randn(5, requires_grad=True)
    _warm(compiled, x)
    torch.testing.assert_close(
        torch.func.grad(compiled)(x.detach()), torch.func.grad(lambda x: (x.sin() * x).sum())(x.detach())
    )


def _counting(x: Tensor, w: Tensor, count: Tensor) -> Tensor:
    count.add_(1)
    return (x * w).sin() * count


@pytest.mark.parametrize(
    "function",
    [
        lambda x, w: (x * w).T,
        lambda x, w: x.view(-1)[:6] * 1 if x is w else (x * w).view(36),
        lambda x, w: torch.stack(torch.unbind(x * w)[:2]).add(x[0]),
    ],
    ids=["transposed", "reshaped", "parts"],
)
def test_special_cases_are_as_in_eager(function: Callable[..., Tensor]) -> None:
    compiled = _compiled(function)
    for _ in range(3):
        inputs = _inputs()
        mine = _step(lambda *given: compiled(*given).sum(), *inputs)
        eagers = _step(lambda *given: function(*given).sum(), *inputs)
        torch.testing.assert_close(mine, eagers)


@pytest.mark.usefixtures("no_cache")  # the first call is AOTAutograd's
def test_an_input_that_is_written_to() -> None:
    compiled = _compiled(_counting)
    mine, eagers = torch.zeros(()), torch.zeros(())
    for step in range(3):
        x, w = _inputs()
        result = compiled(x, w, mine)
        assert _path(result) == (DIRECT if step else WRAPPED)
        torch.testing.assert_close(result, _counting(x, w, eagers))
        assert mine._version == eagers._version
        result.sum().backward()
    assert torch.equal(mine, eagers)


def test_symbolic_shapes() -> None:
    compiled = _compiled(_layer, dynamic=True)
    for size in (4, 5, 6, 5):
        x, w = (torch.randn(size, size, requires_grad=True) for _ in range(2))
        result = compiled(x, w)
        assert _path(result) == DIRECT  # a backward that needs sizes is compiled with the forward
        result.sum().backward()
        for gradient in (torch.randn(size, size), torch.randn(size, size).T, torch.randn(()).expand(size, size)):
            torch.testing.assert_close(_step(compiled, x, w, gradient=gradient), _step(_layer, x, w, gradient=gradient))


def _with_sizes_in_backward(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """Backward divides by a size, and one of the results needs none."""
    return (x @ w).mean(0), (x.detach() * x.shape[0]).sum(1)


def test_sizes_that_the_backward_needs_are_kept_for_it() -> None:
    compiled = _compiled(_with_sizes_in_backward, dynamic=True)
    kept = []
    for rows in (4, 7, 9):
        x, w = torch.randn(rows, 5, requires_grad=True), torch.randn(5, 3, requires_grad=True)
        result, other = compiled(x, w)
        torch.testing.assert_close(other, _with_sizes_in_backward(x, w)[1])
        kept.append((x, w, result))
        if rows == 4:
            torch.autograd.grad(result.sum(), (x, w), retain_graph=True)
        else:
            assert _path(result) == DIRECT
    for x, w, result in kept:  # each call has its own sizes, whatever was called since
        mine = torch.autograd.grad(result.square().sum(), (x, w))
        eagers = torch.autograd.grad(_with_sizes_in_backward(x, w)[0].square().sum(), (x, w))
        torch.testing.assert_close(mine, eagers)


def _marks(result: Tensor) -> dict[str, Any]:
    return {name: value for name, value in vars(result).items() if name.startswith("_dynamo_")}


def test_results_say_which_sizes_change_as_those_of_the_wrapper_do() -> None:
    x, w = _inputs()
    mine = _compiled(_layer, dynamic=True)(x, w)
    assert _path(mine) == DIRECT
    torch._dynamo.reset()
    others = torch.compile(_layer, backend="aot_eager", dynamic=True)(x, w)
    assert _marks(others)
    assert _marks(mine) == _marks(others)


def test_gradients_in_channels_last_with_symbolic_shapes() -> None:
    def scaled(x: Tensor) -> Tensor:
        return x.sin() * 2

    compiled = _compiled(scaled, dynamic=True)
    for size in (4, 5, 6):
        x = torch.randn(2, 3, size, size, requires_grad=True)
        x = x.detach().to(memory_format=torch.channels_last).requires_grad_()
        compiled(x).sum().backward()
        gradient = torch.randn(2, 3, size, size)
        torch.testing.assert_close(_step(compiled, x, gradient=gradient), _step(scaled, x, gradient=gradient))


def test_under_autocast_the_backward_is_that_of_eager() -> None:
    compiled = _compiled(_layer)
    for _ in range(3):
        inputs = _inputs()

        def step(function: Callable[..., Any], inputs: tuple[Tensor, Tensor] = inputs) -> list[Tensor | None]:
            with torch.autocast("cpu", torch.bfloat16):
                return _step(lambda *given: function(*given).float().sum(), *inputs)

        torch.testing.assert_close(step(compiled), step(_layer), rtol=2e-2, atol=2e-2)


def test_gradients_that_have_no_memory_of_their_own_are_refused() -> None:
    """Native code would read where they point, which is nowhere."""
    compiled = _compiled(_layer)
    x, w = _inputs()
    _warm(compiled, x, w)
    ones = torch.ones(6, 6)
    result = compiled(x, w)
    assert _path(result) == DIRECT
    with pytest.raises(RuntimeError, match="is a TwoTensor: native code computes with strided CPU tensors only"):
        result.backward(TwoTensor(ones, ones))
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: TwoTensor(t, t)):
        result = compiled(x, w)
    with pytest.raises(RuntimeError, match="is a TwoTensor: native code computes with strided CPU tensors only"):
        result.backward(ones)
    result = compiled(x, w)
    with pytest.raises(RuntimeError, match="inside vmap"):
        torch.func.vmap(lambda g: torch.autograd.grad(result, x, g)[0])(torch.randn(3, 6, 6))
    mine, eagers = _step(compiled, x, w, gradient=ones), _step(_layer, x, w, gradient=ones)
    torch.testing.assert_close(mine, eagers)


@pytest.mark.usefixtures("no_cache")  # the first call is AOTAutograd's
def test_autocast_is_off_inside_a_direct_call() -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        return torch.cdist(x @ w, x)  # autocast would compute the distance in another precision than it was traced in

    compiled = _compiled(function)
    x, w = _inputs()
    for path in (WRAPPED, DIRECT, DIRECT):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            mine, eagers = compiled(x, w), function(x, w)
            assert torch.is_autocast_enabled("cpu")
        assert _path(mine) == path
        assert mine.dtype == eagers.dtype
        torch.testing.assert_close(mine, eagers, rtol=2e-2, atol=2e-2)
        mine.sum().backward()


@pytest.mark.usefixtures("no_cache")  # the first call is AOTAutograd's
def test_a_result_that_is_a_view_of_a_value_inside_the_graph() -> None:
    def function(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        return (x @ w[:, :1]).squeeze(-1), torch.tanh(x)

    compiled = _compiled(function)
    for step in range(3):
        x, w = _inputs()
        mine, eagers = compiled(x, w), function(x, w)
        assert _path(mine[0]) == (WRAPPED if step == 0 else DIRECT)
        assert [r.stride() for r in mine] == [r.stride() for r in eagers]
        assert not any(r._is_view() for r in mine)
        torch.testing.assert_close(mine, eagers)
        gradients = [torch.autograd.grad(r[0].square().sum() + r[1].sum(), (x, w)) for r in (mine, eagers)]
        torch.testing.assert_close(*gradients)
        mine[0].detach().add_(1)  # writing to a result is allowed, as it is in eager


def test_a_second_backward_about_a_leaf_is_refused_and_not_taken_for_zero() -> None:
    compiled = torch.compile(lambda v: v.sin().exp(), backend="kiln", options={"fallback": False})
    x = torch.randn(4, requires_grad=True)
    for _ in range(3):
        (gradient,) = torch.autograd.grad(compiled(x).sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="double backward"):
            torch.autograd.grad(gradient.sum(), x, allow_unused=True)


@pytest.mark.parametrize("dynamic", [False, True])
def test_gradients_that_the_function_itself_switches_on(dynamic: bool) -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        with torch.enable_grad():
            return (x * w).sin().sum()

    compiled = _compiled(function, dynamic=dynamic)
    for _ in range(3):
        x = torch.arange(3.0).requires_grad_()
        with torch.no_grad():
            mine, eagers = compiled(x, torch.ones(3)), function(x, torch.ones(3))
        assert mine.requires_grad
        torch.testing.assert_close(torch.autograd.grad(mine, x), torch.autograd.grad(eagers, x))


@pytest.mark.parametrize("dynamic", [False, True])
def test_hooks_for_saved_tensors_that_are_graphs_are_applied_once(dynamic: bool) -> None:
    pack = torch.fx.symbolic_trace(lambda x: x.to(torch.bfloat16))
    unpack = torch.fx.symbolic_trace(lambda x: x.to(torch.float32))
    compiled = _compiled(lambda x: torch.softmax((x @ x) / 9, -1) @ x, dynamic=dynamic)
    gradients = []
    for _ in range(3):
        x = torch.arange(1.0, 10.0).div(4).view(3, 3).requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            result = compiled(x)
        result.sum().backward()
        gradients.append(x.grad)
    assert all(torch.equal(gradient, gradients[0]) for gradient in gradients)


def test_an_operator_that_leaves_a_result_out() -> None:
    with torch.library._scoped_library("kiln_tests", "FRAGMENT") as library:
        library.define("doubled_or_none(Tensor x) -> (Tensor, Tensor)")
        library.impl("doubled_or_none", lambda x: (x * 2, None), "CPU")
        torch.library.register_fake(
            "kiln_tests::doubled_or_none", lambda x: (torch.empty_like(x), x.new_empty(0)), lib=library
        )

        def function(x: Tensor) -> tuple[Tensor, Tensor | None]:
            doubled, left_out = torch.ops.kiln_tests.doubled_or_none(x.detach())
            return x.sin() * doubled, left_out

        compiled = _compiled(function)
        for _ in range(3):
            x = torch.randn(4, requires_grad=True)
            mine, eagers = compiled(x), function(x)
            assert mine[1] is eagers[1] is None
            torch.testing.assert_close(torch.autograd.grad(mine[0].sum(), x), torch.autograd.grad(eagers[0].sum(), x))


def test_views_that_another_compiler_returns_can_be_written_to() -> None:
    def inner(gm: torch.fx.GraphModule, inputs: Any, **_: Any) -> Callable[[list[Any]], Any]:
        def run(arguments: list[Any]) -> Any:
            return gm.forward(*arguments)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    graph = torch.fx.symbolic_trace(lambda x, w: ((x @ w).view(-1),))
    call = compile_fx(graph, list(_inputs()), inner_compile=inner)
    for _ in range(3):
        (result,) = call(*_inputs())
        result.add_(1)
        result.sum().backward()


def test_parameters_of_the_graph_and_an_input_given_twice() -> None:
    """The graph AOTAutograd traces has as many inputs as the captured one, and others."""

    class Writes(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.p = torch.nn.Parameter(torch.full((3,), 10.0), requires_grad=False)

        def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor]:
            x.add_(1)
            return (x * 100 + y + self.p,)

    module, mine, eagers = Writes(), torch.ones(3), torch.ones(3)
    call = compile_fx(torch.fx.symbolic_trace(module), [mine, mine])
    for _ in range(3):
        torch.testing.assert_close(call(mine, mine), module(eagers, eagers))
