"""Optimizers whose step is compiled: parameters and state as eager leaves them, step after step."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch.optim import SGD, Adam, AdamW, Optimizer

import torchkiln

# Adam counts steps in a float32 tensor; compiled, torch computes the bias corrections from it in float32 too.
STEP_IN_FLOAT32 = {"rtol": 1e-5, "atol": 1e-6}
Make = Callable[[Iterable[torch.nn.Parameter]], Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda p: SGD(p, lr=0.1, foreach=False),
    "sgd, momentum, foreach": lambda p: SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01, foreach=True),
    "sgd, nesterov": lambda p: SGD(p, lr=0.1, momentum=0.9, nesterov=True, foreach=False),
    "adam": lambda p: Adam(p, lr=0.01, foreach=False),
    "adam, foreach": lambda p: Adam(p, lr=0.01, foreach=True),
    "adam, amsgrad, foreach": lambda p: Adam(p, lr=0.01, amsgrad=True, foreach=True),
    "adamw": lambda p: AdamW(p, lr=0.01, weight_decay=0.1, foreach=False),
    "adamw, foreach": lambda p: AdamW(p, lr=0.01, weight_decay=0.1, foreach=True),
}


def _module() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 3)).double()


def _train(module: torch.nn.Module, optimizer: Optimizer, step: Callable[[], Any], steps: int = 4) -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        optimizer.zero_grad()
        module(torch.randn(6, 5, generator=generator, dtype=torch.float64)).square().sum().backward()
        step()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_compiled_step_does_what_the_step_does(name: str, everything_compiled: None) -> None:
    module = _module()
    reference = copy.deepcopy(module)
    optimizer, expected = OPTIMIZERS[name](module.parameters()), OPTIMIZERS[name](reference.parameters())
    run = torch.compile(optimizer.step, backend="kiln", options={"fallback": False})
    _train(module, optimizer, lambda: run())
    _train(reference, expected, expected.step)
    tolerance = {} if name.startswith("sgd") else STEP_IN_FLOAT32
    torch.testing.assert_close(list(module.parameters()), list(reference.parameters()), **tolerance)
    got, wanted = optimizer.state_dict()["state"], expected.state_dict()["state"]
    assert got.keys() == wanted.keys()
    for key, state in wanted.items():
        torch.testing.assert_close(got[key], state, **tolerance)


def test_a_schedule_of_learning_rates() -> None:
    sides = []
    for compile_it in (False, True):
        module = _module()
        optimizer = Adam(module.parameters(), lr=torch.tensor(0.01), foreach=False, capturable=False)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
        step = torch.compile(optimizer.step, backend="kiln") if compile_it else optimizer.step

        def advance(step: Any = step, scheduler: Any = scheduler) -> None:
            step()
            scheduler.step()

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the scheduler does not see calls of a compiled step
            _train(module, optimizer, advance)
        sides.append(list(module.parameters()))
    torch.testing.assert_close(sides[1], sides[0], **STEP_IN_FLOAT32)


def test_forward_backward_and_step_compiled_apart() -> None:
    sides = []
    for compile_it in (False, True):
        module = _module()
        optimizer = SGD(module.parameters(), lr=0.1, momentum=0.9)
        call = torch.compile(module, backend="kiln") if compile_it else module
        step = torch.compile(optimizer.step, backend="kiln") if compile_it else optimizer.step
        _train(call, optimizer, lambda step=step: step())
        sides.append(list(module.parameters()))
    torch.testing.assert_close(sides[1], sides[0])


def test_gradient_accumulation() -> None:
    torchkiln.reset_stats()
    sides = []
    for compile_it in (False, True):
        module = _module()
        optimizer = AdamW(module.parameters(), lr=0.01)
        call = torch.compile(module, backend="kiln", fullgraph=True) if compile_it else module
        generator = torch.Generator().manual_seed(1)
        for batch in range(6):
            (call(torch.randn(4, 5, generator=generator, dtype=torch.float64)).square().sum() / 3).backward()
            if batch % 3 == 2:
                optimizer.step()
                optimizer.zero_grad(set_to_none=batch > 3)
        sides.append(list(module.parameters()))
    torch.testing.assert_close(sides[1], sides[0])
    assert torchkiln.stats().fallbacks == ()
