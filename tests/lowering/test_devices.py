"""Graphs with tensors on a card: which memory is whose, and what is copied between the CPU and the card."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from torchkiln.config import Settings
from torchkiln.errors import CompileError, UnsupportedError, VerificationError
from torchkiln.ir.program import Buffer, ExternCall, Program, StridedView
from torchkiln.ir.verify import verify_program
from torchkiln.lowering import lower
from torchkiln.schedule import schedule
from torchkiln.schedule.kernel import CpuMapping, GpuMapping
from torchkiln.schedule.plan import InArena, Launch, OwnTensor, Plan
from torchkiln.schedule.verify import verify_plan
from torchkiln.target import Card, Target, capture_target

HOPPER = Card(9, 0, processors=132, shared_bytes=227 << 10, bandwidth=4_800_000_000_000)
_aten = torch.ops.aten


def with_card(card: Card | None = HOPPER) -> Target:
    return replace(capture_target(Settings()), card=card)


def lowered(function: Callable[..., Any], *places: tuple[Sequence[int], str], target: Target | None = None) -> Program:
    """The program of a function of float32 tensors, each of a shape and on a device; no card is asked for them."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        inputs = [torch.empty(tuple(shape), device=device) for shape, device in places]
    program = lower(make_fx(function)(*inputs), Settings(), target or with_card())
    verify_program(program)
    return program


def plan_of(program: Program) -> Plan:
    plan = schedule(program, Settings(), with_card())
    verify_plan(plan)
    return plan


def device_of(program: Program, position: int) -> str:
    output = program.outputs[position]
    assert isinstance(output, StridedView)
    return program.buffers[output.buffer].device


def copies(program: Program) -> list[ExternCall]:
    calls = [operation for operation in program.operations if isinstance(operation, ExternCall)]
    return [call for call in calls if call.target is _aten._to_copy.default]


def test_loops_run_where_their_tensors_are() -> None:
    program = lowered(lambda x, y: (x * 2, y * 3), ((4, 8), "cuda"), ((4, 8), "cpu"))
    assert [device_of(program, k) for k in range(2)] == ["cuda", "cpu"]
    assert program.card == 0
    mappings = [type(step.kernel.mapping) for step in plan_of(program).steps if isinstance(step, Launch)]
    assert mappings == [GpuMapping, CpuMapping]


def test_numbers_on_the_cpu_are_parameters_of_kernels() -> None:
    def function(x: torch.Tensor, s: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.softmax(x * s + y[0], -1), torch.zeros_like(x) + s, s * 2

    program = lowered(function, ((4, 8), "cuda"), ((), "cpu"), ((3,), "cpu"))
    assert copies(program) == []
    assert [device_of(program, k) for k in range(3)] == ["cuda", "cuda", "cpu"]
    launches = [step for step in plan_of(program).steps if isinstance(step, Launch)]
    on_card = [step for step in launches if isinstance(step.kernel.mapping, GpuMapping)]
    given = [program.buffers[name] for step in on_card for name in step.buffers]
    assert {buffer.shape for buffer in given if buffer.device == "cpu"} == {()}
    assert all(step.kernel.mapping.values for step in on_card)


def test_a_number_computed_on_the_cpu_is_not_computed_on_the_card() -> None:
    """What it is computed from is the CPU's."""
    program = lowered(lambda x, y: x + (y[1] * 2 + y[2]).exp(), ((4, 8), "cuda"), ((3,), "cpu"))
    mappings = [type(step.kernel.mapping) for step in plan_of(program).steps if isinstance(step, Launch)]
    assert sorted(mapping.__name__ for mapping in mappings) == ["CpuMapping", "GpuMapping"]


def test_copies_between_devices_are_torchs() -> None:
    program = lowered(lambda x, y: (x.sum().cpu() + 1, y), ((4, 8), "cuda"), ((4, 8), "cpu"))
    (copy,) = copies(program)
    assert torch.device("cpu") in copy.arguments
    assert device_of(program, 0) == "cpu"


def test_a_filled_tensor_is_stored_where_it_is_returned() -> None:
    program = lowered(lambda x: torch.ones_like(x), ((4, 8), "cuda"))
    assert device_of(program, 0) == "cuda"


def test_the_arena_is_the_cards_and_tensors_on_the_cpu_are_their_own() -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.mm(torch.mm(x, x) + 1, x), torch.mm(torch.mm(y, y) + 1, y)

    program = lowered(function, ((8, 8), "cuda"), ((8, 8), "cpu"))
    plan = plan_of(program)
    places = {program.buffers[name].device: set[type]() for name in plan.storage}
    for name, place in plan.storage.items():
        places[program.buffers[name].device].add(type(place))
    assert InArena in places["cuda"]
    assert InArena not in places["cpu"]
    assert OwnTensor in places["cpu"]


def test_graphs_of_two_cards_are_refused() -> None:
    with pytest.raises((UnsupportedError, CompileError), match="the cards 0 and 1: a graph is compiled for one"):
        lowered(lambda x, y: (x + 1, y + 1), ((4,), "cuda:0"), ((4,), "cuda:1"))


def test_a_card_that_torch_does_not_use_is_refused() -> None:
    with pytest.raises((UnsupportedError, CompileError), match="uses no NVIDIA card"):
        lowered(lambda x: x + 1, ((4,), "cuda"), target=with_card(None))


def test_loops_over_two_devices_break_a_rule() -> None:
    program = lowered(lambda x: (x + 1) * 2, ((4,), "cuda"))
    given = program.inputs[0].buffer
    assert given is not None
    elsewhere: dict[str, Buffer] = {**program.buffers, given: replace(program.buffers[given], device="cpu")}
    with pytest.raises(VerificationError, match="cpu memory is read on cuda"):
        verify_program(replace(program, buffers=elsewhere))


def test_programs_say_which_buffers_are_on_the_card() -> None:
    program = lowered(lambda x, y: (x + 1, y + 1), ((4,), "cuda"), ((4,), "cpu"))
    lines = [line for line in str(program).splitlines() if line.startswith("buffer a")]
    assert [line.endswith("on cuda") for line in lines] == [True, False]


def test_statistics_of_an_inference_are_those_of_the_cards_operator() -> None:
    """On the CPU it returns none."""

    def function(x: torch.Tensor, mean: torch.Tensor, variance: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(_aten._native_batch_norm_legit_no_training(x, None, None, mean, variance, 0.1, 1e-5))

    shapes: dict[str, list[tuple[object, ...]]] = {}
    for device in ("cuda", "cpu"):
        program = lowered(function, ((2, 3, 4, 4), device), ((3,), device), ((3,), device))
        assert not any(isinstance(operation, ExternCall) for operation in program.operations)
        shapes[device] = [output.shape for output in program.outputs if isinstance(output, StridedView)]
    assert shapes == {"cuda": [(2, 3, 4, 4), (3,), (3,)], "cpu": [(2, 3, 4, 4), (0,), (0,)]}


_SAVED = ("output", "logsumexp", "log_sumexp", "philox_seed", "philox_offset", "rng_state", "unused")


def _forward(name: str) -> Callable[..., Any]:
    """Attention that drops weights, and what its backward is given of it."""
    operator = getattr(_aten, name).default
    given = (None, True, 0.1) if "flash" not in name else (0.1,)

    def function(*inputs: torch.Tensor) -> list[torch.Tensor]:
        results = zip(operator._schema.returns, operator(*inputs, *given), strict=True)
        return [result for declared, result in results if declared.name in _SAVED]

    return function


_EFFICIENT = "_scaled_dot_product_efficient_attention"
_ATTENTION = (_EFFICIENT, "_scaled_dot_product_flash_attention", "_scaled_dot_product_cudnn_attention")


@pytest.mark.parametrize("name", _ATTENTION)
def test_random_state_of_attention_is_torchs_alone(name: str) -> None:
    """It may be on the CPU, whatever fake tensors say, and statistics of cuDNN in another order than they say."""
    program = lowered(_forward(name), *(((2, 4, 24, 16), "cuda"),) * 3)
    opaque = [program.buffers[o.buffer].opaque for o in program.outputs if isinstance(o, StridedView)]
    assert opaque == [False, "cudnn" in name, True, True]


def test_arguments_of_attention_that_keeps_random_state_may_be_in_the_arena() -> None:
    program = lowered(lambda q, k, v: _forward(_EFFICIENT)(q * 2, k * 3, v * 4), *(((2, 4, 24, 16), "cuda"),) * 3)
    places = [type(place) for name, place in plan_of(program).storage.items() if name.startswith("b")]
    assert places == [InArena] * 3


@pytest.mark.parametrize("reads", [False, True])
def test_random_state_that_is_given_to_attention_alone_is_not_looked_at(reads: bool) -> None:
    def backward(*given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        gradient, q, k, v, out, sums, seed, offset = given
        mask = [True, True, True, False]
        operator = getattr(_aten, f"{_EFFICIENT}_backward")
        results = operator(gradient, q, k, v, None, out, sums, seed, offset, 0.1, mask)
        return (*results[:3], seed + 1) if reads else tuple(results[:3])

    tensors = (((2, 4, 24, 16), "cuda"),) * 5
    program = lowered(backward, *tensors, ((2, 4, 32), "cuda"), ((), "cuda"), ((), "cuda"))
    opaque = [given.buffer is not None and program.buffers[given.buffer].opaque for given in program.inputs]
    assert opaque == [False] * 6 + [not reads, True]
