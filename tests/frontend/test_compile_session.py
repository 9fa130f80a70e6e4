"""Whatever a call compiles later, outside of Dynamo, keeps threads apart as Dynamo does."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor
from torch._dynamo.convert_frame import compile_lock
from torch.autograd import forward_ad
from torch.fx import _symbolic_trace

from torchkiln.recorder import Record, listen

_SAYS_SO = hasattr(torch.compiler, "_compile_session_context")  # torch 2.11 does not


def _taken_by_another_thread() -> bool:
    with ThreadPoolExecutor(1) as pool:
        free = pool.submit(lambda: compile_lock.acquire(blocking=False) and compile_lock.release() is None).result()
    return not free


def _backward(run: Callable[[Tensor], Tensor]) -> Callable[[], object]:
    return run(torch.randn(4, requires_grad=True)).sum().backward


def _forward_mode(run: Callable[[Tensor], Tensor]) -> Callable[[], object]:
    run(torch.randn(4))

    def differentiate() -> None:
        with forward_ad.dual_level():
            run(forward_ad.make_dual(torch.randn(4), torch.randn(4)))

    return differentiate


@pytest.mark.usefixtures("no_cache")  # code generation is watched
@pytest.mark.parametrize("prepare", [_backward, _forward_mode])
def test_what_a_call_compiles_later_holds_the_lock_of_dynamo(prepare: Callable[..., Callable[[], object]]) -> None:
    found: list[tuple[str, bool, bool]] = []

    def look(record: Record) -> None:
        found.append((record.stage, _taken_by_another_thread(), torch.compiler.is_compiling()))

    later = prepare(torch.compile(lambda x: x.sin() * x, backend="kiln", options={"fallback": False}))
    with listen(look):
        later()
    assert "code" in {stage for stage, _, _ in found}
    assert all(held for _, held, _ in found), found
    assert all(compiling for _, _, compiling in found) or not _SAYS_SO, found
    assert not torch.compiler.is_compiling()
    assert not _taken_by_another_thread()


def test_threads_that_compile_leave_no_tracer_behind() -> None:
    """One thread differentiates for the first time, so that its backward is traced, while others capture graphs."""

    def work(number: int) -> Tensor:
        run = torch.compile(
            lambda x: torch.nn.functional.layer_norm(x * number, (8,)).exp().cumsum(0),
            backend="kiln",
            options={"fallback": False},
        )
        x = torch.ones(3, 8, requires_grad=True)
        run(x).sum().backward()
        assert x.grad is not None
        return x.grad

    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(work, range(1, 7)))
    assert not _symbolic_trace._is_fx_tracing_flag
    assert len(found) == 6
    assert all(torch.allclose(gradient, torch.zeros(3, 8), atol=1e-4) for gradient in found)
