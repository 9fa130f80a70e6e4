"""Gradients as they arrive at a compiled backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch


@pytest.mark.parametrize("function", [torch.linalg.eig, torch.linalg.eigvals], ids=["eig", "eigvals"])
def test_operators_with_effects_have_a_backward(function: Callable[..., object]) -> None:
    """torch hands the backward of such an operator a token, which has no gradient."""

    def program(x: torch.Tensor) -> torch.Tensor:
        found = function(x)
        values = found if isinstance(found, torch.Tensor) else found[0]  # type: ignore[index]
        return values.abs().sum()

    torch._dynamo.reset()
    compiled = torch.compile(program, backend="kiln", options={"fallback": False})
    x = torch.tensor([[4.0, 1.0, 0.0], [1.0, 3.0, 0.5], [0.2, 0.0, 1.0]], dtype=torch.float64)
    for _ in range(2):
        mine, eagers = x.clone().requires_grad_(), x.clone().requires_grad_()
        result, expected = compiled(mine), program(eagers)
        torch.testing.assert_close(result, expected)
        result.backward()
        expected.backward()
        torch.testing.assert_close(mine.grad, eagers.grad)


Program = Callable[..., tuple[torch.Tensor, ...]]


def _counted(x: torch.Tensor, calls: torch.Tensor) -> tuple[torch.Tensor, ...]:
    calls.add_(1)
    return ((x * x).unfold(0, 2, 1) * 1, x.neg().unfold(1, 2, 1))


# Outputs of which several elements are one place in memory. All values and gradients are small whole numbers.
OVERLAPPING: dict[str, Program] = {
    "unfold": lambda x: (x.neg().unfold(0, 2, 1),),
    "unfold twice": lambda x: ((x * x).unfold(0, 3, 1).unfold(1, 2, 1),),
    "expand": lambda x: ((x * 2).unsqueeze(1).expand(-1, 3, -1),),
    "expand a transposed one": lambda x: (x.t().neg().expand(2, -1, -1),),
    "expand images": lambda x: ((x * x)[None, :, :, None].expand(2, -1, -1, 3),),
    "as_strided": lambda x: (x.neg().as_strided((3, 2, 2), (2, 1, 1), 1),),
    "as_strided of it": lambda x: (x.neg().unfold(0, 2, 1).as_strided((2, 3), (1, 1)),),
    "diagonal": lambda x: ((x * x).unfold(0, 2, 1).unfold(1, 2, 1).diagonal(0, 0, 2),),
    "permuted": lambda x: (x.neg().unfold(0, 2, 1).permute(2, 0, 1),),
    "part of one": lambda x: (x.neg().unfold(0, 3, 1)[:, ::2],),
    "beside others": lambda x: (x.neg().unfold(0, 2, 1), (x * x).t(), x.sum(0), (x * 3).expand(2, -1, -1)),
    "a write to an input": _counted,
}


def _arguments(program: Program, rows: int) -> tuple[torch.Tensor, ...]:
    x = (torch.arange(rows * 4.0).reshape(rows, 4) % 7 - 3).requires_grad_()
    return (x, torch.zeros(2)) if program is _counted else (x,)


def _contiguous(output: torch.Tensor) -> torch.Tensor:
    return (torch.arange(output.numel()) % 7 - 3.0).reshape(output.shape)


def _expanded(output: torch.Tensor) -> torch.Tensor:
    return (torch.arange(output.shape[-1]) + 1.0).expand(output.shape)


def _transposed(output: torch.Tensor) -> torch.Tensor:
    return (torch.arange(output.numel()) % 5 - 1.0).reshape(output.shape[::-1]).permute(*reversed(range(output.dim())))


def _overlapping(output: torch.Tensor) -> torch.Tensor:
    """As the output is: elements that share a place there share one here."""
    room = sum((size - 1) * stride for size, stride in zip(output.shape, output.stride(), strict=True)) + 1
    return (torch.arange(room) % 5 - 2.0).as_strided(output.shape, output.stride())


LAYOUTS = (_contiguous, _expanded, _transposed, _overlapping)


def _step(program: Program, arguments: Sequence[torch.Tensor], layout: Callable[..., torch.Tensor]) -> torch.Tensor:
    """The gradient of the first argument, which is added to its ``grad`` as well."""
    x = arguments[0]
    outputs = program(*arguments)
    seeds = [layout(output) for output in outputs]
    (gradient,) = torch.autograd.grad(outputs, x, seeds, retain_graph=True)
    torch.autograd.backward([output * 1 for output in outputs], seeds)
    assert x.grad is not None
    return gradient


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", OVERLAPPING)
def test_elements_of_an_output_that_share_a_place_have_gradients_of_their_own(name: str, dynamic: bool) -> None:
    program = OVERLAPPING[name]
    for first in (2, 3):  # the first call goes through AOTAutograd's wrapper, later ones past it
        torch._dynamo.reset()
        compiled = torch.compile(program, backend="kiln", fullgraph=True, dynamic=dynamic, options={"fallback": False})
        for rows in (5, 6) if dynamic else (5,):
            mine, eagers = _arguments(program, rows), _arguments(program, rows)
            for layout in (*LAYOUTS[first:], *LAYOUTS[:first]):
                gradient, expected = _step(compiled, mine, layout), _step(program, eagers, layout)
                torch.testing.assert_close(gradient, expected, rtol=0, atol=0)
                torch.testing.assert_close(mine, eagers, rtol=0, atol=0)
                torch.testing.assert_close(mine[0].grad, eagers[0].grad, rtol=0, atol=0)
                mine[0].grad.mul_(2)  # type: ignore[union-attr]
                eagers[0].grad.mul_(2)  # type: ignore[union-attr]


@pytest.mark.usefixtures("no_cache")  # the first call is AOTAutograd's
def test_several_gradients_at_once_of_elements_that_share_a_place_are_kept_apart() -> None:
    program = OVERLAPPING["unfold"]
    compiled = torch.compile(program, backend="kiln", fullgraph=True, dynamic=False, options={"fallback": False})
    (x,) = _arguments(program, 5)
    for wrapper in ("CompiledFunctionBackward", "CompiledGraphsBackward"):  # AOTAutograd's, then ours
        result, expected = compiled(x)[0], program(x)[0]
        assert type(result.grad_fn).__name__ == wrapper
        seeds = torch.stack([_contiguous(expected), _transposed(expected), _expanded(expected)])
        gradients = [torch.autograd.grad(end, x, seeds, is_grads_batched=True) for end in (result, expected)]
        torch.testing.assert_close(*gradients, rtol=0, atol=0)
