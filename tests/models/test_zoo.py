"""Small networks of every common kind, compiled, against eager: outputs, all gradients, buffers after the step."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.models.numerics import assert_as_accurate_as_eager
from tests.models.zoo import CASES, Case

pytestmark = pytest.mark.usefixtures("everything_compiled")

DTYPES = (torch.float32, torch.bfloat16)


def _cast(inputs: tuple[Tensor, ...], dtype: torch.dtype) -> list[Tensor]:
    return [x.detach().to(dtype).requires_grad_() if x.is_floating_point() else x for x in inputs]


def _training_step(
    model: nn.Module, call: Callable[..., Tensor], inputs: list[Tensor], seed: Tensor
) -> dict[str, Tensor]:
    """Everything a step leaves behind, by name: the output, all gradients, the buffers."""
    output = call(*inputs)
    output.backward(seed.to(output.dtype))
    left = {"output": output.detach()}
    left |= {f"gradient of input {i}": x.grad for i, x in enumerate(inputs) if x.grad is not None}
    left |= {f"gradient of {name}": p.grad for name, p in model.named_parameters() if p.grad is not None}
    left |= {f"buffer {name}": buffer for name, buffer in model.named_buffers()}
    return left


def _prepare(case: Case, dtype: torch.dtype) -> tuple[nn.Module, list[Tensor], Tensor]:
    model = case.build().to(dtype)
    inputs = _cast(case.inputs(), dtype)
    with torch.no_grad():
        seed = torch.randn_like(copy.deepcopy(model)(*inputs))
    return model, inputs, seed


@pytest.mark.parametrize("dtype", DTYPES, ids=("float32", "bfloat16"))
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_training_step_matches_eager(case: Case, dtype: torch.dtype, compile_strictly: Callable[..., Any]) -> None:
    _assert_trains_as_eager(case, dtype, compile_strictly)


def _assert_trains_as_eager(case: Case, dtype: torch.dtype, compile_model: Callable[..., Any]) -> None:
    model, inputs, seed = _prepare(case, dtype)
    models = [copy.deepcopy(model) for _ in range(2)]
    precise = copy.deepcopy(model).double()

    reference = _training_step(precise, precise, _cast(tuple(inputs), torch.float64), seed)
    eager = _training_step(models[0], models[0], _cast(tuple(inputs), dtype), seed)
    compiled = _training_step(models[1], compile_model(models[1]), _cast(tuple(inputs), dtype), seed)

    assert compiled.keys() == eager.keys()
    assert len(eager) > 1
    for name, value in eager.items():
        assert_as_accurate_as_eager(name, compiled[name], value, reference[name])
    assert compiled["output"].stride() == eager["output"].stride()


def _has_convolutions(case: Case) -> bool:
    return any(isinstance(module, nn.Conv2d) for module in case.build().modules())


@pytest.mark.parametrize("channels_last", ["always", "never"])
@pytest.mark.parametrize("case", filter(_has_convolutions, CASES), ids=lambda case: case.name)
def test_a_training_step_matches_eager_in_either_layout_of_images(
    case: Case, channels_last: str, compile_strictly: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"passes_skip": ("joint/channels_last",)} if channels_last == "never" else {}
    monkeypatch.setattr("torchkiln.passes.joint.channels_last._pays", lambda found, *_: bool(found))
    _assert_trains_as_eager(case, torch.float32, partial(compile_strictly, **options))


@pytest.mark.parametrize("dtype", DTYPES, ids=("float32", "bfloat16"))
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_inference_matches_eager(case: Case, dtype: torch.dtype, compile_strictly: Callable[..., Any]) -> None:
    model, inputs, _ = _prepare(case, dtype)
    model.eval()
    precise = copy.deepcopy(model).double()
    with torch.no_grad():
        reference = precise(*_cast(tuple(inputs), torch.float64))
        eager = model(*inputs)
        call = compile_strictly(model)
        first, second = call(*inputs), call(*inputs)

    assert_as_accurate_as_eager("output", first, eager, reference)
    assert first.stride() == eager.stride()
    assert torch.equal(first, second)
