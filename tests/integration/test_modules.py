"""Compiled modules among the features of nn.Module: hooks, parametrizations, tying, copies, saving, modes."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
import torch._dynamo.config
from torch import nn
from torch.nn.utils import parametrizations, parametrize

from tests.higher_order.against_eager import compiled

Tensor = torch.Tensor


def _network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.GELU(), nn.Linear(6, 3))


def _compare(module: nn.Module, *inputs: Tensor, reference: nn.Module | None = None, strictly: bool = True) -> None:
    """Results and gradients of the compiled module against those of ``reference``, a copy of it."""
    reference = copy.deepcopy(module) if reference is None else reference
    run = compiled(module) if strictly else torch.compile(module, backend="kiln", options={"fallback": False})
    results = []
    for call, owner in ((reference, reference), (run, module)):
        arguments = [x.detach().clone().requires_grad_() for x in inputs]
        out = call(*arguments)
        out.square().sum().backward()
        results.append((out, [x.grad for x in arguments], [p.grad for p in owner.parameters()], list(owner.buffers())))
    torch.testing.assert_close(results[1], results[0])


def test_forward_hooks_and_pre_hooks() -> None:
    module = _network()
    module[0].register_forward_pre_hook(lambda _module, args: (args[0] * 2,))
    module[1].register_forward_hook(lambda _module, _args, output: output + 1)
    module.register_forward_hook(lambda _module, args, output: output * args[0].sum())
    _compare(module, torch.randn(5, 4))


def test_hooks_that_record_what_they_see() -> None:
    module = _network()
    seen: list[Tensor] = []
    module[0].register_forward_hook(lambda _module, _args, output: seen.append(output.detach()))
    x = torch.randn(5, 4)
    torch.compile(module, backend="kiln", options={"fallback": False})(x)
    recorded = list(seen)
    torch.testing.assert_close(recorded, [module[0](x)])


@torch._dynamo.config.patch(skip_nnmodule_hook_guards=False)  # torch looks for new hooks only when told to
def test_a_hook_added_after_compiling_runs() -> None:
    module = _network()
    run = compiled(module)
    x = torch.randn(5, 4)
    before = run(x)
    handle = module[2].register_forward_hook(lambda _module, _args, output: output + 10)
    torch.testing.assert_close(run(x), before + 10)
    handle.remove()
    torch.testing.assert_close(run(x), before)


def test_full_backward_hooks() -> None:
    sides = []
    for compile_it in (False, True):
        module = _network()
        seen: list[Tensor] = []

        def record(_module: nn.Module, _inputs: Any, outputs: Any, seen: list[Tensor] = seen) -> None:
            seen.append(outputs[0].detach().clone())

        module.register_full_backward_hook(record)
        call = torch.compile(module, backend="kiln", options={"fallback": False}) if compile_it else module
        x = torch.linspace(-1, 1, 20).view(5, 4).requires_grad_()
        call(x).square().sum().backward()
        sides.append((seen, x.grad))
    assert len(sides[0][0]) == 1
    torch.testing.assert_close(sides[1], sides[0])


def test_tensor_hooks_on_inputs_and_parameters() -> None:
    sides = []
    for compile_it in (False, True):
        module = _network()
        module[0].weight.register_hook(lambda grad: grad * 2)
        x = torch.linspace(-1, 1, 20).view(5, 4).requires_grad_()
        x.register_hook(lambda grad: grad + 1)
        (compiled(module) if compile_it else module)(x).sum().backward()
        sides.append((x.grad, module[0].weight.grad))
    torch.testing.assert_close(sides[1], sides[0])


class _Symmetric(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.triu() + x.triu(1).transpose(-1, -2)


@pytest.mark.parametrize("kind", ["weight norm", "spectral norm", "orthogonal", "own"])
def test_parametrizations(kind: str) -> None:
    layer: nn.Module = nn.Linear(4, 4)
    if kind == "weight norm":
        layer = parametrizations.weight_norm(layer)
    elif kind == "spectral norm":
        layer = parametrizations.spectral_norm(layer)
    elif kind == "orthogonal":
        layer = parametrizations.orthogonal(layer, orthogonal_map="cayley")
    else:
        parametrize.register_parametrization(layer, "weight", _Symmetric())
    module = nn.Sequential(layer, nn.Tanh())
    module(torch.randn(2, 4))
    _compare(module, torch.randn(5, 4))


def test_tied_weights() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.out = nn.Embedding(10, 4), nn.Linear(4, 10, bias=False)
            self.out.weight = self.embed.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.embed((x.abs() * 3).long().clamp(max=9)).tanh() + x.unsqueeze(-1))

    module = Tied()
    _compare(module, torch.randn(5))
    assert len(list(module.parameters())) == 1


def test_batch_norm_in_training_and_evaluation() -> None:
    module = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Dropout(0.5))
    reference = copy.deepcopy(module)
    run = compiled(module)
    x = torch.randn(2, 2, 6, 6)
    for training in (True, True, False, True, False):
        module.train(training)
        reference.train(training)
        torch.manual_seed(3)
        got = run(x)
        torch.manual_seed(3)
        torch.testing.assert_close(got, reference(x), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(dict(module.named_buffers()), dict(reference.named_buffers()))


def test_weights_can_be_saved_and_loaded() -> None:
    module, other = _network(), nn.Sequential(nn.Linear(4, 6), nn.GELU(), nn.Linear(6, 3))
    run, other_run = compiled(module), compiled(other)
    x = torch.randn(5, 4)
    expected = run(x)
    other_run(x)
    file = io.BytesIO()
    torch.save(run.state_dict(), file)
    file.seek(0)
    other_run.load_state_dict(torch.load(file, weights_only=True))
    torch.testing.assert_close(other_run(x), expected)
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=True))
    torch.testing.assert_close(other(x), expected)


def test_a_deep_copy_has_weights_of_its_own() -> None:
    module = _network()
    run = compiled(module)
    x = torch.randn(5, 4)
    first = run(x)
    twin = copy.deepcopy(run)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.mul_(2)
    torch.testing.assert_close(run(x), first)
    torch.testing.assert_close(twin(x), copy.deepcopy(twin._orig_mod)(x))
    assert not torch.allclose(twin(x), first)


def test_compiled_modules_inside_a_module() -> None:
    inner = _network()
    module = nn.Sequential(nn.Linear(4, 4), torch.compile(inner, backend="kiln"), nn.Linear(3, 2))
    reference = nn.Sequential(copy.deepcopy(module[0]), copy.deepcopy(inner), copy.deepcopy(module[2]))
    x = torch.randn(5, 4)
    torch.testing.assert_close(module(x), reference(x))
    module(x).sum().backward()
    reference(x).sum().backward()
    torch.testing.assert_close([p.grad for p in module.parameters()], [p.grad for p in reference.parameters()])
    module.zero_grad()
    reference.zero_grad()
    _compare(module, x, reference=reference)


def test_parameters_replaced_and_changed_in_place() -> None:
    module = _network()
    run = compiled(module)
    x = torch.randn(5, 4)
    run(x)
    with torch.no_grad():
        module[0].weight.zero_()
    torch.testing.assert_close(run(x), module(x))
    module[0].weight = nn.Parameter(torch.randn(6, 4))
    torch.testing.assert_close(run(x), module(x))
    module.double()
    torch.testing.assert_close(run(x.double()), module(x.double()))


def test_gradients_turned_off_and_on() -> None:
    module = _network()
    run = compiled(module)
    x = torch.randn(5, 4)
    with torch.no_grad():
        assert not run(x).requires_grad
    assert run(x).requires_grad
    with torch.inference_mode():
        result = run(x)
        assert result.is_inference()
    torch.testing.assert_close(result.clone(), module(x).detach())
    module.requires_grad_(False)
    assert not run(x).requires_grad
    module[2].weight.requires_grad_(True)
    run(x).square().sum().backward()
    reference = copy.deepcopy(module)
    reference.zero_grad()
    reference(x).square().sum().backward()
    torch.testing.assert_close(module[2].weight.grad, reference[2].weight.grad)
    assert module[0].weight.grad is None


def test_grad_modes_inside() -> None:
    class Mixed(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            with torch.no_grad():
                scale = x.abs().max()
            return x / scale, (x * 2).detach()

    module = Mixed()
    x = torch.randn(4, requires_grad=True)
    (scaled, kept), (expected, _) = compiled(module)(x), module(x)
    assert scaled.requires_grad
    assert not kept.requires_grad
    torch.testing.assert_close(scaled, expected)
    got, wanted = torch.autograd.grad(scaled.sum(), x), torch.autograd.grad(expected.sum(), x)
    torch.testing.assert_close(got, wanted)


def test_an_autograd_function_of_the_user() -> None:
    class Clip(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x.clamp(-1, 1)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad * 0.5 + ctx.saved_tensors[0]

    class Module(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return Clip.apply(x * 2).exp()

    _compare(Module(), torch.randn(6))


def test_backward_inside_the_compiled_function() -> None:
    module = _network()
    reference = copy.deepcopy(module)

    def step(module: nn.Module, x: Tensor) -> Tensor:
        loss = module(x).square().sum()
        loss.backward()
        return loss.detach()

    x = torch.randn(5, 4)
    run = torch.compile(step, backend="kiln", options={"fallback": False})
    torch.testing.assert_close(run(module, x), step(reference, x))
    torch.testing.assert_close([p.grad for p in module.parameters()], [p.grad for p in reference.parameters()])


def test_two_backwards_through_one_forward() -> None:
    run = compiled(lambda x: (x.sin() * x).sum())
    x = torch.randn(5, requires_grad=True)
    loss = run(x)
    first = torch.autograd.grad(loss, x, retain_graph=True)
    torch.testing.assert_close(torch.autograd.grad(loss, x), first)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(loss, x)
