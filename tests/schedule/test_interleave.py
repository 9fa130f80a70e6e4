"""Results that several values share in turns: one contiguous store, with the values of eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.lowering.against_eager import DTYPES, check, difference, specimen
from tests.schedule.test_fusion import plan_of
from torchkiln.ir.expr import Interleaved
from torchkiln.schedule.kernel import Kernel
from torchkiln.schedule.plan import Launch

Function = Callable[..., Any]


def _into_every(count: int) -> Function:
    return lambda x, y: x.new_zeros(x.shape[0], x.shape[1] * count).slice_scatter(y, 1, 0, None, count)


def _shared(count: int) -> dict[str, Function]:
    return {
        "repeated": lambda x, y: x.repeat_interleave(count, -1),
        "repeated rows of a transposed one": lambda x, y: x.t().repeat_interleave(count, -1),
        "stacked": lambda x, y: torch.stack([x, y, *[x.flip(1)] * (count - 2)], -1),
        "stacked transposed": lambda x, y: torch.stack([x.t(), y.t(), *[x.t().flip(1)] * (count - 2)], -1),
        "compared": lambda x, y: torch.stack([x == y, *[x != x] * (count - 1)], -1),
        "scattered": _into_every(count),
        "shuffled": lambda x, y: F.pixel_shuffle(x.expand(count * count, *x.shape), count),
        "of two results": lambda x, y: (x.repeat_interleave(count, -1), y.repeat_interleave(count, -1)),
        "from their sizes on": lambda x, y: torch.stack([x[:, 1:], y[:, :-1]], -1),
    }


def _kernels(function: Function, *inputs: torch.Tensor) -> list[Kernel]:
    plan = plan_of(lambda *given: (function(*given),), *inputs)
    return [step.kernel for step in plan.steps if isinstance(step, Launch)]


@pytest.mark.parametrize("name", ["repeated", "stacked", "stacked transposed", "scattered"])
def test_results_that_values_share_are_interleaved(name: str) -> None:
    (kernel,) = _kernels(_shared(2)[name], torch.zeros(64, 96), torch.zeros(64, 96))
    (store,) = kernel.nest.statements
    assert isinstance(store.value, Interleaved)
    assert (kernel.mapping.tile is not None) is (name == "stacked transposed")


def test_what_is_cheaper_along_another_loop_stays() -> None:
    """Rows that are contiguous on both sides."""
    (kernel,) = _kernels(lambda x: x.transpose(0, 1).contiguous(), torch.zeros(64, 2, 96))
    assert not any(isinstance(s.value, Interleaved) for s in kernel.nest.statements)


@settings(deadline=None, max_examples=40)
@given(
    st.sampled_from(DTYPES),
    st.integers(2, 9),
    st.tuples(st.integers(1, 40), st.sampled_from([2, 3, 15, 16, 17, 31, 33, 64, 100, 131])),
    st.sampled_from([128, 256, 512]),
)
def test_shared_results_have_the_values_of_eager(
    dtype: torch.dtype, count: int, shape: tuple[int, int], bits: int
) -> None:
    check(_shared(count), [specimen(dtype, shape), specimen(dtype, shape, 1)], exact=True, vector_bits=bits)


@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.float32], ids=str)
def test_shared_results_of_symbolic_sizes_have_the_values_of_eager(dtype: torch.dtype) -> None:
    functions = _shared(3)
    names = ["repeated", "stacked", "stacked transposed", "compared"]
    torch.compiler.reset()
    options: Any = {"fallback": False}
    run = torch.compile(
        lambda x, y: [functions[name](x, y) for name in names],
        backend="kiln",
        fullgraph=True,
        dynamic=True,
        options=options,
    )
    for width in (2, 15, 16, 33, 64, 65, 130):
        x, y = specimen(dtype, (7, width)), specimen(dtype, (7, width), 1)
        for name, got in zip(names, run(x, y), strict=True):
            assert difference(got, functions[name](x, y), exact=True) is None, (name, width)


def test_an_input_written_in_turns_keeps_its_other_values() -> None:
    def turned(x: torch.Tensor) -> torch.Tensor:
        even, odd = x[:, ::2].clone(), x[:, 1::2].clone()
        x[:, ::2], x[:, 1::2] = -odd, even
        return x

    given, wanted = specimen(torch.float32, (9, 70)), specimen(torch.float32, (9, 70))
    torch.compiler.reset()
    options: Any = {"fallback": False}
    torch.compile(turned, backend="kiln", fullgraph=True, options=options)(given)
    assert difference(given, turned(wanted), exact=True) is None
