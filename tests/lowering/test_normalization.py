"""Layer, group and batch normalization against eager: outputs, gradients, running statistics, mixed precision."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import torchkiln
from tests.lowering.against_eager import check, difference, specimen
from tests.lowering.test_pointwise import name_of

Compile = Callable[..., Any]


def _same_training_step(
    compile_strictly: Compile,
    function: Callable[..., torch.Tensor],
    make: Callable[[], list[torch.Tensor | None]],
    slack: float,
) -> None:
    """Outputs, gradients of everything that is float, and inputs written in place."""
    outcomes = []
    for run in (function, compile_strictly(function)):
        inputs = make()
        leaves = [t.requires_grad_() for t in inputs if t is not None and t.dtype.is_floating_point]
        fixed = getattr(function, "statistics", 0)
        leaves = leaves[: len(leaves) - fixed]
        for t in inputs[len(inputs) - fixed :]:
            assert t is not None
            t.requires_grad_(False)
        result = run(*inputs)
        seed = torch.linspace(-1, 1, result.numel()).reshape(result.shape).to(result.dtype)
        gradients = torch.autograd.grad(result, leaves, seed) if leaves else ()
        outcomes.append(
            [result.detach(), *gradients, *(t.detach() for t in inputs[len(inputs) - fixed :] if t is not None)]
        )
    for position, (wanted, got) in enumerate(zip(*outcomes, strict=True)):
        complaint = difference(got.contiguous(), wanted.contiguous(), slack=slack)
        assert complaint is None, f"value {position}: {complaint}"


FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
SLACK = {torch.float32: 50, torch.float64: 50, torch.bfloat16: 8, torch.float16: 16}


@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("shape", [(6, 40), (2, 3, 17)], ids=name_of)
def test_layer_norm(compile_strictly: Compile, dtype: torch.dtype, shape: tuple[int, ...], affine: bool) -> None:
    width = shape[-1]

    def function(x: torch.Tensor, w: torch.Tensor | None, b: torch.Tensor | None) -> torch.Tensor:
        return F.layer_norm(x, (width,), w, b)

    def make() -> list[torch.Tensor | None]:
        x, w, b = (specimen(dtype, s, k, tame=True) for k, s in enumerate((shape, (width,), (width,))))
        return [x, w, b] if affine else [x, None, None]

    torchkiln.reset_stats()
    _same_training_step(compile_strictly, function, make, SLACK[dtype])
    assert not torchkiln.stats().extern_calls


def test_layer_norm_over_several_dimensions(compile_strictly: Compile) -> None:
    _same_training_step(
        compile_strictly,
        lambda x, w, b: F.layer_norm(x, (5, 9), w, b),
        lambda: [specimen(torch.float32, s, k, tame=True) for k, s in enumerate(((4, 5, 9), (5, 9), (5, 9)))],
        50,
    )


def test_layer_norm_of_a_large_mean_does_not_cancel() -> None:
    x = specimen(torch.float32, (4, 64), tame=True) + 1e4
    check({"layer_norm": lambda x: F.layer_norm(x, (64,))}, [x.double().float()], slack=2000)


def test_layer_norm_of_half_input_with_float32_weights() -> None:
    x, w = specimen(torch.bfloat16, (5, 24), tame=True), specimen(torch.float32, (24,), 1, tame=True)
    check({"mixed": lambda x, w: torch.native_layer_norm(x, (24,), w, w, 1e-5)[0]}, [x, w], slack=4)


def test_norms_of_nothing() -> None:
    x = torch.zeros(0, 6)
    check({"layer": lambda x: F.layer_norm(x, (6,)), "rms": lambda x: F.rms_norm(x, (6,))}, [x])


def test_layer_norm_backward_over_nothing_compiles(compile_strictly: Compile) -> None:
    x = torch.zeros(3, 0, requires_grad=True)
    compile_strictly(lambda x: F.layer_norm(x, (0,)))(x).sum().backward()
    assert x.grad is not None
    assert x.grad.shape == (3, 0)


@pytest.mark.parametrize("dtype", FLOATS[:3], ids=name_of)
@pytest.mark.parametrize("groups", [1, 2, 6])
def test_group_norm(compile_strictly: Compile, dtype: torch.dtype, groups: int) -> None:
    _same_training_step(
        compile_strictly,
        lambda x, w, b: F.group_norm(x, groups, w, b),
        lambda: [specimen(dtype, s, k, tame=True) for k, s in enumerate(((3, 6, 4, 5), (6,), (6,)))],
        SLACK[dtype],
    )


@pytest.mark.parametrize("dtype", FLOATS[:3], ids=name_of)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("channels_last", [False, True])
def test_batch_norm(compile_strictly: Compile, dtype: torch.dtype, training: bool, channels_last: bool) -> None:
    def function(
        x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, mean: torch.Tensor, var: torch.Tensor
    ) -> torch.Tensor:
        return F.batch_norm(x, mean, var, w, b, training=training, momentum=0.2)

    function.statistics = 2  # type: ignore[attr-defined]

    def make() -> list[torch.Tensor | None]:
        x = specimen(dtype, (4, 5, 3, 7), tame=True)
        if channels_last:
            x = x.contiguous(memory_format=torch.channels_last)
        w, b = specimen(dtype, (5,), 1, tame=True), specimen(dtype, (5,), 2, tame=True)
        return [x, w, b, torch.linspace(-1, 1, 5).to(dtype), torch.linspace(0.5, 2, 5).to(dtype)]

    _same_training_step(compile_strictly, function, make, SLACK[dtype])


@pytest.mark.parametrize("shape", [(8, 3), (2, 3, 50)], ids=name_of)
def test_batch_norm_of_other_ranks(compile_strictly: Compile, shape: tuple[int, ...]) -> None:
    def function(x: torch.Tensor, mean: torch.Tensor, var: torch.Tensor) -> torch.Tensor:
        return F.batch_norm(x, mean, var, training=True)

    function.statistics = 2  # type: ignore[attr-defined]
    _same_training_step(
        compile_strictly,
        function,
        lambda: [specimen(torch.float32, shape, tame=True), torch.zeros(3), torch.ones(3)],
        50,
    )


def test_instance_norm(compile_strictly: Compile) -> None:
    _same_training_step(
        compile_strictly,
        lambda x, w: F.instance_norm(x, weight=w, bias=w),
        lambda: [specimen(torch.float32, (2, 3, 20), tame=True), specimen(torch.float32, (3,), 1, tame=True)],
        50,
    )


@pytest.mark.parametrize("dtype", FLOATS[:3], ids=name_of)
def test_rms_norm(compile_strictly: Compile, dtype: torch.dtype) -> None:
    _same_training_step(
        compile_strictly,
        lambda x, w: F.rms_norm(x, (33,), w, eps=1e-5),
        lambda: [specimen(dtype, (4, 33), tame=True), specimen(dtype, (33,), 1, tame=True)],
        SLACK[dtype],
    )


def test_running_statistics_follow_three_steps(compile_strictly: Compile) -> None:
    eager, fast = torch.nn.BatchNorm2d(3), torch.nn.BatchNorm2d(3)
    run = compile_strictly(fast)
    for seed in range(3):
        x = specimen(torch.float32, (2, 3, 4, 4), seed, tame=True)
        torch.testing.assert_close(run(x), eager(x))
    torch.testing.assert_close(fast.running_mean, eager.running_mean)
    torch.testing.assert_close(fast.running_var, eager.running_var)
    assert int(fast.num_batches_tracked) == 3


@pytest.mark.parametrize("training", [True, False])
def test_batch_norm_of_bfloat16_keeps_statistics_as_eager_does(
    compile_strictly: Callable[..., Any], training: bool
) -> None:
    x = torch.randn(3, 2, 4).bfloat16()

    def normalize(x: torch.Tensor, mean: torch.Tensor, variance: torch.Tensor) -> Any:
        weight = torch.ones_like(mean)
        return torch.ops.aten._native_batch_norm_legit(x, weight, weight, mean, variance, training, 0.5, 1e-3)

    eager = [torch.zeros(2).bfloat16(), torch.ones(2).bfloat16()]
    ours = [t.clone() for t in eager]
    torch.testing.assert_close(compile_strictly(normalize)(x, *ours), normalize(x, *eager))
    torch.testing.assert_close(ours, eager)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.bfloat16, torch.float32], ids=str)
def test_the_gradient_of_dropout_is_promoted_as_eager_does(
    compile_strictly: Callable[..., Any], dtype: torch.dtype
) -> None:
    gradient, mask = torch.tensor([1, 0, 1, 1]).to(dtype), torch.tensor([True, True, False, True])
    function = torch.ops.aten.native_dropout_backward
    torch.testing.assert_close(
        compile_strictly(lambda g, m: function(g, m, 1.25))(gradient, mask), function(gradient, mask, 1.25)
    )
