"""``as_strided`` and its like: they address storage, also what lies between and around the elements they are given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.usefixtures("everything_compiled")

_INPUTS: dict[str, Callable[[], torch.Tensor]] = {
    "dense": lambda: torch.randn(6, 5),
    "slice": lambda: torch.randn(10, 6)[2:7, 1:5],
    "transposed": lambda: torch.randn(6, 5).t(),
    "every other": lambda: torch.randn(40)[::2][3:],
    "inside of a storage": lambda: torch.randn(60)[7:47].view(8, 5),
}

_FUNCTIONS: dict[str, Callable[[torch.Tensor], Any]] = {
    "of an input": lambda x: torch.as_strided(x, (3, 2), (2, 1)) * 2,
    "overlapping": lambda x: torch.as_strided(x, (3, 4), (1, 1)).sin(),
    "from an offset": lambda x: torch.as_strided(x, (3, 2), (2, 1), 4) * 2,
    "of a value": lambda x: torch.as_strided(x * 2, (2, 2), (3, 1), 3) + 1,
    "around a slice of a value": lambda x: torch.as_strided((x * 2)[1:], (2, 2), (3, 1), 1) + 1,
    "between the elements of a slice": lambda x: torch.as_strided((x * 2).reshape(-1)[1::2], (3, 2), (2, 1)) + 1,
    "of an expanded value": lambda x: torch.as_strided((x * 2).reshape(-1)[:1].expand(5), (3,), (1,)) + 1,
    "of a transposed value": lambda x: torch.as_strided((x * 2).t() if x.dim() == 2 else x * 2, (2, 2), (3, 1)) + 1,
    "of a copy": lambda x: torch.as_strided(x.clone(), (3, 2), (2, 1), 2) * 3,
    "stored into a value": lambda x: torch.as_strided_scatter(x * 2, torch.ones(2, 2), (2, 2), (2, 1), 1) + 1,
    "stored into a copy": lambda x: torch.as_strided_scatter(x.clone(), torch.ones(2, 2), (2, 2), (2, 1), 3),
    "written to": lambda x: (y := x * 2, torch.as_strided(y, (3, 2), (2, 1)).add_(1), y * 3)[2],
}


@pytest.mark.parametrize("given", _INPUTS)
def test_every_use_reads_the_memory_that_eager_reads(compile_strictly: Callable[..., Any], given: str) -> None:
    def fn(x: torch.Tensor) -> list[torch.Tensor]:
        return [use(x) for use in _FUNCTIONS.values()]

    x = _INPUTS[given]()
    for name, found, expected in zip(_FUNCTIONS, compile_strictly(fn)(x), fn(x), strict=True):
        torch.testing.assert_close(found, expected, msg=lambda text, name=name: f"{name}: {text}")
        assert found.stride() == expected.stride(), name


@pytest.mark.parametrize("given", ["dense", "inside of a storage"])
def test_gradients_flow_through_every_use(compile_strictly: Callable[..., Any], given: str) -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return torch.stack([use(x).pow(2).sum() for use in _FUNCTIONS.values()])

    compiled, gradients = compile_strictly(fn), []
    x = _INPUTS[given]().detach().requires_grad_()
    for run in (fn, compiled):
        x.grad = None
        run(x).sum().backward()
        gradients.append(x.grad)
    torch.testing.assert_close(gradients[1], gradients[0])


def test_an_expanded_tensor_is_stored_into_as_eager_does(compile_strictly: Callable[..., Any]) -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return torch.as_strided_scatter(x, torch.ones(3, 2), (3, 2), (2, 1)) * 2

    x = torch.randn(6, 1).expand(6, 4)
    found, expected = compile_strictly(fn)(x), fn(x)
    torch.testing.assert_close(found, expected)
    assert found.stride() == expected.stride()


@pytest.mark.parametrize("given", ["dense", "slice", "transposed"])
def test_an_input_is_written_to_through_other_strides(compile_strictly: Callable[..., Any], given: str) -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        torch.as_strided(x, (3, 2), (2, 1)).mul_(3)
        return x * 2

    x = _INPUTS[given]()
    other = x.detach().clone() if given == "dense" else _copy_with_storage(x)
    torch.testing.assert_close(compile_strictly(fn)(other), fn(x))
    torch.testing.assert_close(other, x)


def _copy_with_storage(x: torch.Tensor) -> torch.Tensor:
    storage = torch.as_strided(x, (x.untyped_storage().nbytes() // x.itemsize,), (1,), 0).clone()
    return torch.as_strided(storage, x.shape, x.stride(), x.storage_offset())
