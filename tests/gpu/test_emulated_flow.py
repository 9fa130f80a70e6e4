"""The flow of graphs with a card, from ``torch.compile`` to launches, on a card that is emulated."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torchkiln
from tests.gpu.emulated_card import CONTEXT, EmulatedDriver, emulated
from torchkiln.artifact.codec import decode, encode
from torchkiln.codegen.llvm import Generated
from torchkiln.codegen.llvm.plan_facts import aligned_inputs, buffers_by_address
from torchkiln.recorder import Record, listen
from torchkiln.schedule.plan import Launch, Plan
from torchkiln.target import capture_target


@pytest.fixture(autouse=True)
def driver() -> Iterator[EmulatedDriver]:
    with emulated() as found, torchkiln.settings(cache=False, fallback=False):
        yield found
    assert found.guards == []
    torch._dynamo.reset()


def compiled(function: Callable[..., Any], **options: Any) -> Any:
    return torch.compile(function, backend="kiln", fullgraph=True, **options)


def test_an_inference_is_kernels_and_calls_of_torch(driver: EmulatedDriver) -> None:
    x, w, b = torch.randn(32, 64), torch.randn(64, 128), torch.randn(128)

    def function(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x @ w + b, -1)

    torch.testing.assert_close(compiled(function)(x, w, b), function(x, w, b))
    assert [launch.symbol for launch in driver.launches] == ["kernel0"]
    assert driver.launches[0].grid * driver.launches[0].threads >= 32 * 32  # a warp for each row at the least
    assert driver.context_here == CONTEXT


def test_a_model_trains(driver: EmulatedDriver) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(24, 40), nn.LayerNorm(40), nn.GELU(), nn.Linear(40, 8))
    x, target = torch.randn(16, 24), torch.randint(0, 8, (16,))

    def loss(x: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(x), target)

    loss(x).backward()
    expected = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    compiled(loss)(x).backward()
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-5)
    assert driver.entered == 2
    assert len(driver.launches) > 2


def test_one_kernel_serves_symbolic_sizes(driver: EmulatedDriver) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x.exp() + 1, -1) * 2

    run = compiled(function, dynamic=True)
    before = torchkiln.stats().graphs
    for rows, columns in ((40, 130), (7, 33), (3, 512)):
        x = torch.randn(rows, columns)
        torch.testing.assert_close(run(x), function(x))
    assert torchkiln.stats().graphs == before + 1
    assert len({launch.grid for launch in driver.launches}) > 1


def test_nothing_is_launched_for_no_elements(driver: EmulatedDriver) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return x[x.shape[0] // 2 :] * 2 + 1

    run = compiled(function, dynamic=True)
    x = torch.randn(8, 6)
    torch.testing.assert_close(run(x), function(x))
    launched = len(driver.launches)
    torch._dynamo.mark_dynamic(empty := torch.randn(8, 6)[:0].clone(), 1)
    assert run(empty).shape == (0, 6)
    assert len(driver.launches) == launched


def test_memory_of_an_input_that_a_kernel_writes_to_later_is_aligned() -> None:
    """Backward lays what a kernel computes in what forward saved for a matmul alone."""
    plans: list[Plan] = []

    def keep(record: Record) -> None:
        if isinstance(record.value, Plan):
            plans.append(record.value)

    def function(x: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        wide = (x @ first).cos()
        y = wide.view(-1)[1 : 1 + 128 * 128].view(128, 128) @ second
        return (y.sin() * y).sum()

    sizes = (129, 64), (64, 128), (128, 128)
    with listen(keep):
        compiled(function)(*(torch.randn(size, requires_grad=True) for size in sizes)).backward()
    plan = plans[-1]
    inputs = {plan.program.inputs[position].buffer for position, _ in plan.reused}
    launched = {name for step in plan.steps if isinstance(step, Launch) for name in step.buffers}
    assert inputs
    assert not launched.issuperset(inputs)
    by_address = buffers_by_address(plan, capture_target(torchkiln.Settings()))
    assert aligned_inputs(plan, by_address).issuperset(position for position, _ in plan.reused)


def test_inputs_are_written_to() -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.mul_(y.sigmoid())
        return x.sum(-1)

    x, y = torch.randn(8, 64), torch.randn(8, 64)
    again = x.clone()
    torch.testing.assert_close(compiled(function)(x, y), function(again, y))
    torch.testing.assert_close(x, again)


def test_numbers_are_read_after_the_card_has_computed_them() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        count = (x > 0).sum().item()
        torch._check(count >= 0)
        torch._check(count <= x.numel())
        return torch.zeros(count) + x.sum()

    x = torch.randn(50)
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        torch.testing.assert_close(compiled(function)(x), function(x))


def test_indices_out_of_range_read_element_0() -> None:
    def function(x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
        return x[i] * 2

    x, run = torch.randn(10, 4), compiled(function)
    inside = torch.tensor([3, -1, 9])
    torch.testing.assert_close(run(x, inside), function(x, inside))
    torch.testing.assert_close(run(x, torch.tensor([3, 10, 9]))[1], x[0] * 2)


def test_tables_of_the_compiler_are_on_the_card() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return F.interpolate(x, size=(9, 11), mode="bilinear", antialias=True)

    x = torch.randn(1, 3, 6, 7, requires_grad=True)
    function(x).square().sum().backward()
    assert x.grad is not None
    expected, x.grad = x.grad.clone(), None
    compiled(function)(x).square().sum().backward()
    torch.testing.assert_close(x.grad, expected)


def test_a_launch_that_fails_raises_and_leaves_all_as_it_was(driver: EmulatedDriver) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x @ x, -1)

    run, x = compiled(function), torch.randn(64, 64)
    run(x)
    driver.failing = 700
    with pytest.raises(RuntimeError, match="could not be launched: error 700 of CUDA's driver"):
        run(x)
    assert driver.guards == []
    driver.failing = 0
    torch.testing.assert_close(run(x), function(x))


def test_an_artifact_keeps_the_code_of_the_card() -> None:
    found: list[Any] = []

    def keep(record: Record) -> None:
        if record.stage == "code":
            found.append(record.value.artifact)

    with listen(keep):
        compiled(lambda x: x.exp())(torch.randn(8))
    (artifact,) = found
    again = decode(encode(artifact))
    assert again.card_code == artifact.card_code
    assert b"kernel0" in again.card_code
    assert again.entry.card == artifact.entry.card
    assert again.entry.kernels == ()


def test_intermediate_values_are_in_one_arena_of_the_card() -> None:
    plans: list[Plan] = []

    def keep(record: Record) -> None:
        if record.stage == "plan":
            plans.append(record.value)

    def function(x: torch.Tensor) -> torch.Tensor:
        return ((x @ x).exp() @ x).sigmoid() @ x

    x = torch.randn(48, 48) / 8
    with listen(keep):
        torch.testing.assert_close(compiled(function)(x), function(x))
    (plan,) = plans
    assert plan.arena_bytes > 0
    assert plan.program.device == "cuda"


def test_no_step_waits_and_every_kernel_is_the_cards() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, (64,)).sum(0).cos() + x.amax()

    plans: list[Plan] = []
    with listen(lambda record: plans.append(record.value) if record.stage == "plan" else None):
        x = torch.randn(32, 64)
        torch.testing.assert_close(compiled(function)(x), function(x), rtol=1e-4, atol=1e-4)
    (plan,) = plans
    assert {buffer.device for buffer in plan.program.buffers.values()} == {"cuda"}


def test_a_card_without_memory_raises_torchs_error_and_stays_usable(driver: EmulatedDriver) -> None:
    def outer(x: torch.Tensor) -> torch.Tensor:
        return x[:, None] - x[None]

    def inner(x: torch.Tensor) -> torch.Tensor:
        return torch.mm((x[:, None] - x[None]).cos(), x[:, None]).sum()

    x = torch.zeros(1).expand(100_000_000)
    for function in (outer, inner):
        with pytest.raises(torch.OutOfMemoryError):
            compiled(function)(x)
        assert driver.guards == []
    y = torch.randn(20)
    torch.testing.assert_close(compiled(inner)(y), inner(y))


def test_a_backward_reuses_the_memory_of_what_forward_saved() -> None:
    torch.manual_seed(0)
    weights = [torch.randn(128, 128).div_(11).requires_grad_() for _ in range(3)]
    x = torch.randn(128, 128)

    def function(x: torch.Tensor) -> torch.Tensor:
        for weight in weights:
            x = torch.sigmoid(x @ weight).cumsum(0) / 128
        return x.square().sum()

    expected = torch.autograd.grad(function(x), weights)
    plans: list[Plan] = []
    with listen(lambda record: plans.append(record.value) if record.stage == "plan" else None):
        run = compiled(function)
        for _ in range(2):
            found = torch.autograd.grad(run(x), weights)
            torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5)
    assert any(plan.reused for plan in plans)


def test_sizes_that_the_data_decides_have_memory_of_their_own() -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        found = x.nonzero().squeeze(1)
        return x[found].exp().sum(), (found * 2).sort().values

    run = compiled(function)
    for x in (torch.tensor([0.0, 1.0, 2.0, 0.0, 3.0]), torch.ones(5), torch.tensor([0.0, 0.0, 0.5, 0.0, 0.0])):
        with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
            torch.testing.assert_close(run(x), function(x))


def test_a_captured_graph_stays_loaded(driver: EmulatedDriver) -> None:
    x = torch.randn(32, 64)
    for driver.capturing in (False, True):
        compiled(lambda x: torch.softmax(x, -1))(x)
        torch._dynamo.reset()
        gc.collect()
    assert len(driver.launches) == 2
    assert driver.unloaded == [("kernel0",)]


def test_operators_of_torch_are_given_parts_of_the_arenas_tensor() -> None:
    """For memory behind an address torch asks the driver which card has it, at each call."""
    texts: list[str] = []

    def keep(record: Record) -> None:
        if isinstance(record.value, Generated):
            texts.append(record.value.text)

    x, w = torch.randn(16, 24), torch.randn(24, 8)
    with listen(keep):
        torch.testing.assert_close(compiled(lambda x, w: x.exp() @ w + 1)(x, w), x.exp() @ w + 1)
    (text,) = texts
    assert "call i32 @aoti_torch__alloc_from_pool" in text
    assert "call i32 @aoti_torch_create_tensor_from_blob" not in text
