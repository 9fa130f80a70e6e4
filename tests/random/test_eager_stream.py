"""``rng="eager"``: the numbers, and the state of the generator afterwards, are eager's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import torchkiln
from torchkiln.errors import OptionError

Compile = Callable[..., Any]
X = torch.linspace(-1, 1, 3 * 4 * 6 * 8).reshape(3, 4, 6, 8)
LAYOUTS = {
    "row-major": X,
    "channels last": X.contiguous(memory_format=torch.channels_last),
    "transposed": X.reshape(24, 24).t(),
}

ANY_LAYOUT: dict[str, Callable[[torch.Tensor], Any]] = {
    "dropout": lambda x: F.dropout(x, 0.3),
    "dropout bfloat16": lambda x: F.dropout(x.bfloat16(), 0.3),
    "rand_like": torch.rand_like,
    "randn_like": torch.randn_like,
    "bernoulli p": lambda x: x.bernoulli(0.2),
    "bernoulli": lambda x: torch.bernoulli(x.abs()),
    "bernoulli_ p": lambda x: torch.empty_like(x).bernoulli_(0.2),
    "bernoulli_": lambda x: torch.empty_like(x).bernoulli_(x.abs()),
    "uniform_": lambda x: torch.empty_like(x).uniform_(-1, 2),
    "normal_": lambda x: torch.empty_like(x).normal_(-1, 2),
    "exponential_": lambda x: torch.empty_like(x).exponential_(2.0),
    "geometric_": lambda x: torch.empty_like(x).geometric_(0.2),
    "normal of tensors": lambda x: torch.normal(x, x.abs()),
    "normal of means": lambda x: torch.normal(x, 2.0),
    "randint_like": lambda x: torch.randint_like(x, 9),
    "poisson": lambda x: torch.poisson(x.abs()),
    "rrelu": lambda x: F.rrelu(x, training=True),
}
NO_LAYOUT: dict[str, Callable[[torch.Tensor], Any]] = {
    "rand": lambda x: torch.rand(3, 5),
    "randn, few": lambda x: torch.randn(7),
    "randn, many": lambda x: torch.randn(100),
    "rand of doubles": lambda x: torch.rand(9, dtype=torch.float64),
    "randint": lambda x: torch.randint(0, 9, (7,)),
    "randperm": lambda x: torch.randperm(17),
    "multinomial": lambda x: torch.multinomial(x.reshape(24, 24).abs(), 3),
    "multinomial with replacement": lambda x: torch.multinomial(x.reshape(24, 24).abs(), 30, True),
    "in order": lambda x: (torch.rand(3), torch.randperm(5), F.dropout(x, 0.5), torch.randn(4), torch.rand(3)),
    "the same call twice": lambda x: (torch.rand(3), torch.rand(3)),
    "dropout2d": lambda x: F.dropout2d(x, 0.3),
}


def _compare(function: Callable[[torch.Tensor], Any], x: torch.Tensor, compile_strictly: Compile) -> None:
    outcomes = []
    compiled = compile_strictly(function, rng="eager")
    for candidate in (function, compiled, compiled):
        torch.manual_seed(3)
        result = candidate(x)
        outcomes.append((result if isinstance(result, tuple) else (result,), torch.get_rng_state()))
    for results, state in outcomes[1:]:
        assert torch.equal(state, outcomes[0][1])
        for got, expected in zip(results, outcomes[0][0], strict=True):
            assert torch.equal(got, expected)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ANY_LAYOUT)
def test_numbers_are_eagers_in_any_layout(name: str, layout: str, compile_strictly: Compile) -> None:
    _compare(ANY_LAYOUT[name], LAYOUTS[layout], compile_strictly)


@pytest.mark.parametrize("name", NO_LAYOUT)
def test_numbers_are_eagers(name: str, compile_strictly: Compile) -> None:
    _compare(NO_LAYOUT[name], X, compile_strictly)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_training_draws_what_eager_draws(layout: str, compile_strictly: Compile) -> None:
    """Two dropouts with a matrix product between them, forward and backward, and what comes after."""

    def function(x: torch.Tensor) -> torch.Tensor:
        return F.dropout(F.dropout(x, 0.3).sin() * 2, 0.5).sum()

    outcomes = []
    for candidate in (function, compile_strictly(function, rng="eager")):
        x = LAYOUTS[layout].detach().requires_grad_()
        torch.manual_seed(3)
        candidate(x).backward()
        outcomes.append((x.grad, torch.rand(4)))
    torch.testing.assert_close(outcomes[1][0], outcomes[0][0])
    assert torch.equal(outcomes[1][0] == 0, outcomes[0][0] == 0)
    assert torch.equal(outcomes[1][1], outcomes[0][1])


def test_the_setting_is_read_from_options_context_and_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert torchkiln.config.resolve().rng == "fused"
    monkeypatch.setenv("KILN_RNG", "eager")
    assert torchkiln.config.resolve().rng == "eager"
    with torchkiln.settings(rng="fused"):
        assert torchkiln.config.resolve().rng == "fused"
        assert torchkiln.config.resolve({"rng": "eager"}).rng == "eager"
    with pytest.raises(OptionError):
        torchkiln.config.resolve({"rng": "other"})
