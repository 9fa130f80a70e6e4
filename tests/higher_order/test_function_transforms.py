"""torch.func inside compiled functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.func import (
    functional_call,
    grad,
    grad_and_value,
    hessian,
    jacfwd,
    jacrev,
    jvp,
    stack_module_state,
    vjp,
    vmap,
)

from tests.higher_order.against_eager import check, compiled

Tensor = torch.Tensor


def _loss(x: Tensor) -> Tensor:
    return (x.sin() * x).sum()


def _values(x: Tensor) -> Tensor:
    return x.tanh() * x.sum()


def _vjp(x: Tensor) -> Any:
    value, pull = vjp(_values, x)
    return value, pull(value.cos())


CASES: dict[str, Callable[[Tensor], Any]] = {
    "grad": grad(_loss),
    "grad and value": grad_and_value(_loss),
    "grad of grad": grad(lambda x: grad(_loss)(x).square().sum()),
    "vmap": vmap(_values),
    "vmap over the second dimension": vmap(_values, in_dims=1, out_dims=1),
    "nested vmap": vmap(vmap(lambda x: x.exp() + 1)),
    "vmap of grad": vmap(grad(_loss)),
    "jvp": lambda x: jvp(_values, (x,), (x.cos(),)),
    "vjp": _vjp,
    "jacrev": lambda x: jacrev(_values)(x[0]),
    "jacfwd": lambda x: jacfwd(_values)(x[0]),
    "hessian": lambda x: hessian(_loss)(x[0]),
    "vmap of matmul": lambda x: vmap(lambda row: row @ x.t())(x),
    "vmap of jvp": vmap(lambda x: jvp(_values, (x,), (x,))[1]),
}


@pytest.mark.parametrize("name", CASES)
def test_transforms_inside_a_compiled_function(name: str) -> None:
    check(CASES[name], torch.randn(3, 5, dtype=torch.float64))


def test_per_sample_gradients_of_a_module() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1))
    parameters = {name: value.detach() for name, value in module.named_parameters()}

    def per_sample(parameters: dict[str, Tensor], batch: Tensor) -> Any:
        def loss(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
            return functional_call(module, parameters, (x,)).square().sum()

        return vmap(grad(loss), in_dims=(None, 0))(parameters, batch)

    check(per_sample, parameters, torch.randn(5, 4))


def test_an_ensemble_of_modules() -> None:
    modules = [torch.nn.Linear(4, 3) for _ in range(3)]
    parameters, buffers = stack_module_state(modules)

    def ensemble(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        return vmap(lambda p: functional_call(modules[0], (p, buffers), (x,)))(parameters)

    check(ensemble, {name: value.detach() for name, value in parameters.items()}, torch.randn(5, 4))


def test_second_derivatives_across_the_boundary_are_refused_and_inside_it_work() -> None:
    """torch's own limit: AOTAutograd differentiates a compiled function once. The way out is torch.func inside."""
    run = compiled(_loss)
    x = torch.randn(4, requires_grad=True)
    (first,) = torch.autograd.grad(run(x), x, create_graph=True)
    with pytest.raises(RuntimeError, match="double backward"):
        torch.autograd.grad(first.sum(), x)
    check(lambda x: grad(lambda x: grad(_loss)(x).sum())(x), x.detach())
