"""Graphs that free the memory of their inputs and give it back, as FSDP does with parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.fsdp  # has the operator that fills freed parameters
from torch import Tensor

import torchkiln.runtime.executable
from torchkiln.native.tensor_layout import LayoutCheck

NBYTES = 48  # of the tensors here


def _resize(tensor: Tensor, nbytes: int) -> None:
    tensor.untyped_storage().resize_(nbytes)


def _gather(tensor: Tensor, source: Tensor) -> None:
    _resize(tensor, NBYTES)
    with torch.no_grad():
        torch.ops.fsdp.copy_(tensor, source)


def read_and_free(a: Tensor, b: Tensor, part: Tensor) -> Any:
    doubled, total = a * 2, a.sum()
    _resize(a, 0)
    return doubled + b, total


def read_a_part_and_free(a: Tensor, b: Tensor, part: Tensor) -> Any:
    doubled = part * 2
    _resize(a, 0)
    return doubled + b.sum()


def free_what_the_graph_makes(a: Tensor, b: Tensor, part: Tensor) -> Any:
    made = a * 2
    total = made.sum()
    _resize(made, 0)
    return total + b


def fill(a: Tensor, b: Tensor, part: Tensor) -> Any:
    _resize(a, NBYTES)
    a.fill_(3)
    return a * b


def fill_and_return(a: Tensor, b: Tensor, part: Tensor) -> Any:
    _gather(a, b)
    return a.view(3, 4).t(), a, part + 1


def gather_more_than_needed(a: Tensor, b: Tensor, part: Tensor) -> Any:
    _resize(a, 2 * NBYTES)
    torch.ops.fsdp.copy_(a, b)
    return a.cumsum(0) + 1


def gather_by_number_of_elements(a: Tensor, b: Tensor, part: Tensor) -> Any:
    _resize(a, b.numel() * 4)
    torch.ops.fsdp.copy_(a, b)
    return a + 1


def gather_and_free(a: Tensor, b: Tensor, part: Tensor) -> Any:
    _gather(a, b)
    product = a.view(3, 4).t() @ b.view(3, 4)
    total = (a * b).sin().sum()
    _resize(a, 0)
    return product.relu() + total


def gather_twice(a: Tensor, b: Tensor, part: Tensor) -> Any:
    _gather(a, b)
    first = (a * b).sin()
    _resize(a, 0)
    _gather(a, first)
    second = a.view(4, 3).softmax(1)
    _resize(a, 0)
    return first, second


READ = [read_and_free, read_a_part_and_free, free_what_the_graph_makes]
FILLED = [
    fill,
    fill_and_return,
    gather_more_than_needed,
    gather_by_number_of_elements,
    gather_and_free,
    gather_twice,
]


def _arguments(program: Callable[..., Any], call: int) -> tuple[Tensor, Tensor, Tensor]:
    a, b = torch.arange(12.0) + call, torch.linspace(-1, 1, 12) + call
    part = a[2:5]
    if program in FILLED:
        _resize(a, 0)
    return a, b, part


def _state(tensor: Tensor) -> tuple[int, list[float] | None]:
    nbytes = tensor.untyped_storage().nbytes()
    return nbytes, tensor.tolist() if nbytes else None


def _check_calls(compiled: Callable[..., Any], program: Callable[..., Any]) -> None:
    for call in range(3):
        given, expected = _arguments(program, call), _arguments(program, call)
        torch.testing.assert_close(compiled(*given), program(*expected))
        assert [_state(x) for x in given[:2]] == [_state(x) for x in expected[:2]]
        if call:  # torch itself does not count the first write of its operator behind a fake one
            assert [x._version for x in given] == [x._version for x in expected]


@pytest.mark.usefixtures("everything_compiled")
@pytest.mark.parametrize("dynamic", [False, True], ids=["fixed", "symbolic"])
@pytest.mark.parametrize("program", [*READ, *FILLED], ids=lambda program: program.__name__)
def test_inputs_are_read_before_they_are_freed_and_after_they_are_filled(
    program: Callable[..., Any], dynamic: bool
) -> None:
    options: Any = {"fallback": False}
    _check_calls(torch.compile(program, backend="kiln", fullgraph=True, dynamic=dynamic, options=options), program)


@pytest.mark.usefixtures("everything_compiled")
def test_inputs_without_memory_are_taken_through_handles_too(
    compile_strictly: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    unusable = LayoutCheck(usable=False, reason="not looked at")
    monkeypatch.setattr(torchkiln.runtime.executable, "check_layout", lambda: unusable)
    _check_calls(compile_strictly(gather_and_free), gather_and_free)


def free_written(a: Tensor, b: Tensor, part: Tensor) -> Any:
    _resize(a, NBYTES)
    a.fill_(3)
    result = a * b
    _resize(a, 0)
    return result


def return_resized(a: Tensor, b: Tensor, part: Tensor) -> Any:
    made = a * 2
    _resize(made, 2 * NBYTES)
    return made, made.untyped_storage().nbytes() + b


FILLED.append(free_written)


@pytest.mark.filterwarnings("ignore::torchkiln.errors.FallbackWarning")
@pytest.mark.parametrize("program", [free_written, return_resized], ids=lambda program: program.__name__)
def test_what_a_functional_graph_cannot_say_runs_as_captured(program: Callable[..., Any]) -> None:
    before = len(torchkiln.stats().fallbacks)
    _check_calls(torch.compile(program, backend="kiln"), program)
    assert len(torchkiln.stats().fallbacks) == before + 1


@pytest.mark.usefixtures("everything_compiled")
@pytest.mark.parametrize("use", ["before", "after"])
def test_memory_that_is_not_there_is_not_read(compile_strictly: Callable[..., Any], use: str) -> None:
    """Eager reads it all the same, and the process may end there."""

    def read(a: Tensor, b: Tensor) -> Tensor:
        if use == "before":
            early = a.sum()
            _resize(a, NBYTES)
            return early + b
        _resize(a, NBYTES - 4)
        return a + b

    a = torch.arange(12.0)
    _resize(a, 0)
    with pytest.raises(RuntimeError, match=r"its storage is too small for them where it is used.*test_resized"):
        compile_strictly(read)(a, torch.ones(12))


@pytest.mark.usefixtures("everything_compiled")
def test_backward_does_not_compute_again_from_freed_memory(compile_strictly: Callable[..., Any]) -> None:
    def step(weight: Tensor, x: Tensor) -> Tensor:
        _gather(weight, x)
        scale = weight.sin().exp()  # saved by eager, for the weight is freed below
        result = (scale * x).tanh()
        _resize(weight, 0)
        return result

    compiled = compile_strictly(step)
    for _ in range(3):
        gradients = []
        for run in (compiled, step):
            weight, x = torch.zeros(12), torch.linspace(-1, 1, 12, requires_grad=True)
            _resize(weight, 0)
            run(weight, x).sum().backward()
            assert weight.untyped_storage().nbytes() == 0
            gradients.append(x.grad)
        torch.testing.assert_close(*gradients)


@pytest.mark.usefixtures("everything_compiled")
def test_a_saved_weight_is_read_where_it_was_filled_again(compile_strictly: Callable[..., Any]) -> None:
    def step(weight: Tensor, x: Tensor) -> Tensor:
        _gather(weight, x)
        result = (weight * x).sin()
        _resize(weight, 0)
        return result

    compiled = compile_strictly(step)
    for _ in range(3):
        gradients = []
        for run in (compiled, step):
            weight, x = torch.zeros(12), torch.linspace(-1, 1, 12, requires_grad=True)
            _resize(weight, 0)
            result = run(weight, x)
            with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(weight):
                _gather(weight, x)
            result.sum().backward()
            gradients.append(x.grad)
        torch.testing.assert_close(*gradients)
