"""Backward writes into the memory of what forward saved for it, and only where nobody can see that memory."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

from tests.partition.measured import step_peak
from tests.partition.models import ConvNet, Mlp, Transformer
from torchkiln import compiler
from torchkiln.runtime import executable
from torchkiln.runtime.ownership import is_held_alone
from torchkiln.schedule.plan import Plan

ROWS, WIDTH = 256, 128  # a matrix of these is large enough to be used again


@pytest.fixture
def plans(no_cache: None, monkeypatch: pytest.MonkeyPatch) -> list[Plan]:
    """The plans made inside of a test, which compiles for them."""
    found: list[Plan] = []
    original = compiler.schedule

    def record(*arguments: Any) -> Plan:
        found.append(original(*arguments))
        return found[-1]

    monkeypatch.setattr(compiler, "schedule", record)
    return found


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """What was answered when a call asked whether an input is held by nobody else."""
    found: list[bool] = []
    original = executable.is_held_alone

    def record(inputs: list[Any], position: int) -> bool:
        found.append(original(inputs, position))
        return found[-1]

    monkeypatch.setattr(executable, "is_held_alone", record)
    return found


def _model() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return Mlp(width=WIDTH, depth=3).double(), torch.randn(ROWS, WIDTH, dtype=torch.float64)


def _compiled(function: Callable[..., Any], **options: object) -> Callable[..., Any]:
    torch._dynamo.reset()
    return torch.compile(function, backend="kiln", fullgraph=True, options={"fallback": False, **options})


def _gradients(model: nn.Module) -> list[Tensor]:
    found = [parameter.grad for parameter in model.parameters()]
    model.zero_grad(set_to_none=True)
    assert all(gradient is not None for gradient in found)
    return [gradient for gradient in found if gradient is not None]


def _same(got: Sequence[Tensor], want: Sequence[Tensor]) -> None:
    exact = got[0].dtype is torch.float64
    torch.testing.assert_close(got, want, rtol=1e-8 if exact else 1e-4, atol=1e-9 if exact else 1e-5)


def test_backward_uses_what_was_saved_again_and_computes_what_eager_does(plans: list[Plan], asked: list[bool]) -> None:
    model, x = _model()
    reference = copy.deepcopy(model)
    run = _compiled(model)
    for _ in range(3):
        run(x).pow(3).sum().backward()
        reference(x).pow(3).sum().backward()
        _same(_gradients(model), _gradients(reference))
    forward, backward = plans
    assert not forward.reused
    assert backward.reused
    assert len(asked) == 3 * len(backward.reused)
    assert all(asked)


@pytest.mark.parametrize("make", [lambda: Mlp(256, 6), lambda: Transformer(128)], ids=["mlp", "transformer"])
def test_a_step_takes_no_more_memory_than_eager(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    model = make()
    x = torch.randn(512, 256) if isinstance(model, Mlp) else torch.randint(50, (8, 64))
    run = _compiled(model)
    peaks = []
    for way in (run, model):
        way(x).sum().backward()
        model.zero_grad(set_to_none=True)
        peaks.append(step_peak(way, (x,)))
    # The arena is rounded up to whole lines, and the parts of split reductions are in it.
    assert peaks[0] <= 1.01 * peaks[1]


def test_a_graph_that_is_retained_can_be_used_again_and_again(plans: list[Plan], asked: list[bool]) -> None:
    model, x = _model()
    reference = copy.deepcopy(model)
    loss = _compiled(model)(x).pow(3).sum()
    reference(x).pow(3).sum().backward()
    want = _gradients(reference)
    for _ in range(3):
        loss.backward(retain_graph=True)
        _same(_gradients(model), want)
    assert plans[-1].reused
    assert not any(asked)
    loss.backward()
    _same(_gradients(model), want)
    assert all(asked[3 * len(plans[-1].reused) :])
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_gradients_made_with_create_graph_are_right_and_can_be_made_again(asked: list[bool]) -> None:
    model, x = _model()
    reference = copy.deepcopy(model)
    loss = _compiled(model)(x).pow(3).sum()
    parameters = list(model.parameters())
    reference(x).pow(3).sum().backward()
    want = _gradients(reference)
    for _ in range(2):
        got = torch.autograd.grad(loss, parameters, create_graph=True)
        _same([gradient.detach() for gradient in got], want)
    assert not any(asked)
    with pytest.raises(RuntimeError, match="double backward"):
        got[0].sum().backward()


def test_what_a_saved_tensor_hook_kept_stays_as_it_was(asked: list[bool]) -> None:
    model, x = _model()
    reference = copy.deepcopy(model)
    run = _compiled(model)
    run(x).pow(3).sum().backward()
    _gradients(model)
    kept: list[tuple[Tensor, Tensor]] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append((tensor.detach(), tensor.detach().clone()))
        return tensor

    asked.clear()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = run(x).pow(3).sum()
    loss.backward()
    reference(x).pow(3).sum().backward()
    _same(_gradients(model), _gradients(reference))
    assert kept
    for now, before in kept:
        assert torch.equal(now, before)
    assert asked
    assert not any(asked)


def test_a_hook_that_makes_tensors_anew_gives_them_away(asked: list[bool]) -> None:
    model, x = _model()
    reference = copy.deepcopy(model)
    run = _compiled(model)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t.clone()):
        loss = run(x).pow(3).sum()
    loss.backward()
    reference(x).pow(3).sum().backward()
    _same(_gradients(model), _gradients(reference))
    assert all(asked)


def test_parameters_inputs_and_results_stay_as_they_were() -> None:
    """Results that are saved too, views of them, and a result of which two parts are saved."""
    torch.manual_seed(0)
    weight = torch.randn(WIDTH, WIDTH, requires_grad=True)
    x = torch.randn(ROWS, WIDTH, requires_grad=True)

    def function(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        first = (x @ weight).exp()
        left, right = (first @ weight * 0.01).chunk(2, -1)
        second = (left * right).sin() @ weight[: WIDTH // 2]
        third = second.tanh() @ weight
        return first, first.t(), third, (third * third).cos() @ weight

    inputs = (x, weight)
    with torch.no_grad():
        weight *= 0.05
    before = [value.detach().clone() for value in inputs]
    got = _compiled(function)(*inputs)
    want = function(*inputs)
    values = [value.detach().clone() for value in got]
    _same(values, [value.detach() for value in want])
    gradients = torch.autograd.grad([value.sum() for value in got], inputs)
    _same(gradients, torch.autograd.grad([value.sum() for value in want], inputs))
    for now, then in zip((*inputs, *got), (*before, *values), strict=True):
        assert torch.equal(now, then)


def test_a_gradient_that_is_a_saved_value_is_not_written_to(plans: list[Plan]) -> None:
    """The gradient of each factor is the other one, which forward computed and saved."""
    torch.manual_seed(0)
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    weights = [torch.randn(WIDTH, WIDTH, requires_grad=True) for _ in range(3)]

    def function(x: Tensor, *weights: Tensor) -> Tensor:
        for weight in weights:
            x = (x @ weight * 0.1).tanh() * (x @ weight * 0.1).sigmoid()
        return (x.exp() @ weights[0]).sum()

    inputs = (x, *weights)
    got = torch.autograd.grad(_compiled(function)(*inputs), inputs)
    want = torch.autograd.grad(function(*inputs), inputs)
    _same(got, want)
    assert len(plans) == 2


def test_arguments_that_the_users_code_keeps_stay_as_they_were() -> None:
    kept: list[tuple[Tensor, Tensor]] = []

    @torch.library.custom_op("kiln_test_reused::keep", mutates_args=())
    def keep(value: Tensor, gradient: Tensor) -> Tensor:
        kept.append((value, value.clone()))
        return gradient * 2

    @keep.register_fake
    def _(value: Tensor, gradient: Tensor) -> Tensor:
        return torch.empty_like(gradient)

    class Keeping(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, value: Tensor) -> Tensor:
            ctx.save_for_backward(value)
            return value * 2

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            (value,) = ctx.saved_tensors
            return keep(value, gradient)

    torch.manual_seed(0)
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    weight = (torch.randn(WIDTH, WIDTH) * 0.1).requires_grad_()

    def function(x: Tensor) -> Tensor:
        for _ in range(3):
            x = Keeping.apply(x @ weight).tanh() @ weight
        return x.sum()

    got = torch.autograd.grad(_compiled(function)(x), x)
    assert len(kept) == 3
    for now, before in kept:
        assert torch.equal(now, before)
    _same(got, torch.autograd.grad(function(x), x))


@pytest.mark.parametrize("budget", [1.0, 0.3, 0.0])
def test_convolutions_whose_memory_is_used_again_compute_what_eager_does(budget: float, plans: list[Plan]) -> None:
    torch.manual_seed(0)
    model, x = ConvNet(16).double(), torch.randn(4, 3, 24, 24, dtype=torch.float64)
    reference = copy.deepcopy(model)
    run = _compiled(model, memory_budget=budget)
    for _ in range(2):
        run(x).pow(3).sum().backward()
        reference(x).pow(3).sum().backward()
        _same(_gradients(model), _gradients(reference))
    assert plans[-1].reused or budget < 1


def test_arrays_that_a_hook_keeps_stay_as_they_were(plans: list[Plan], asked: list[bool]) -> None:
    """Each backward gets new tensors over the memory of the arrays: nobody else holds those."""
    model, x = _model()
    reference = copy.deepcopy(model)
    run = _compiled(model)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach().numpy(), torch.from_numpy):
        loss = run(x).pow(3).sum()
    reference(x).pow(3).sum().backward()
    want = _gradients(reference)
    for _ in range(2):
        loss.backward(retain_graph=True)
        _same(_gradients(model), want)
    assert plans[-1].reused
    assert asked
    assert not any(asked)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.from_numpy(numpy.zeros(8)),
        lambda: torch.frombuffer(bytearray(8), dtype=torch.uint8),
        lambda: torch.from_dlpack(numpy.zeros(8)),
        lambda: torch.zeros(8).share_memory_(),
        lambda: torch.zeros(8, 8).to_sparse(),
    ],
    ids=["numpy", "buffer", "dlpack", "shared", "sparse"],
)
def test_memory_that_not_only_torch_sees_is_never_held_alone(make: Callable[[], Tensor]) -> None:
    assert is_held_alone([torch.zeros(8)], 0)
    assert not is_held_alone([make()], 0)
