"""Kernels written in Triton as steps of compiled graphs, with functions of Python in place of Triton's code."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._higher_order_ops import triton_kernel_wrap
from torch._higher_order_ops.triton_kernel_wrap import (
    kernel_side_table,
    triton_kernel_wrapper_functional,
    triton_kernel_wrapper_mutation,
)

import torchkiln
from tests.gpu.emulated_card import emulated
from torchkiln import recorder
from torchkiln.artifact import decode, encode
from torchkiln.codegen.llvm import Generated
from torchkiln.errors import ArtifactError, PackageError
from torchkiln.graph.triton_kernels import TRITON_KERNEL
from torchkiln.ir.program import ExternCall
from torchkiln.schedule.plan import Launch, Plan


@dataclass(eq=False)
class Kernel:
    """What Triton's kernels are to torch. ``written`` are the arguments that ``code`` writes to."""

    code: Callable[..., None]
    written: tuple[str, ...]
    grids: list[Any] = field(default_factory=list)
    given: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.arg_names = list(self.code.__code__.co_varnames[: self.code.__code__.co_argcount])

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        self.grids.append(grid)
        return self._run

    def _run(self, *args: Any, **kwargs: Any) -> None:
        named = {**dict(zip(self.arg_names, args, strict=False)), **kwargs}
        self.given.append(named)
        self.code(**named)

    def launch(self, *grid: Any, constants: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """As Dynamo traces ``kernel[grid](**kwargs)``; in eager it launches the kernel."""
        triton_kernel_wrapper_mutation(
            kernel_idx=kernel_side_table.add_kernel(self),  # type: ignore[arg-type]
            constant_args_idx=kernel_side_table.add_constant_args(constants or {}),
            grid=[grid],
            tma_descriptor_metadata={},
            kwargs=kwargs,
        )


def _add(x: Tensor, y: Tensor, out: Tensor, n: int, BLOCK: int) -> None:
    out.view(-1)[:n] = x.reshape(-1)[:n] + y.reshape(-1)[:n] * BLOCK


def _double(x: Tensor) -> None:
    x.mul_(2)


def _rows(x: Tensor, out: Tensor, stride: int) -> None:
    """Reads and writes as the strides it was traced with say."""
    assert out.stride(0) == stride
    out.add_(x.sum())


ADD, DOUBLE, ROWS = Kernel(_add, ("out",)), Kernel(_double, ("x",)), Kernel(_rows, ("out",))


@torch._dynamo.allow_in_graph
def add(x: Tensor, y: Tensor, out: Tensor, n: int, blocks: int) -> Tensor:
    ADD.launch(blocks, 1, 1, constants={"BLOCK": 8}, x=x, y=y, out=out, n=n)
    return torch.ones(())


@torch._dynamo.allow_in_graph
def double(x: Tensor) -> Tensor:
    DOUBLE.launch(1, 1, 1, x=x)
    return torch.ones(())


@torch._dynamo.allow_in_graph
def rows(x: Tensor, out: Tensor) -> Tensor:
    ROWS.launch(1, 1, 1, x=x, out=out, stride=out.stride(0))
    return torch.ones(())


@pytest.fixture(autouse=True)
def _kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Triton, which may be missing, is not asked what a kernel writes to."""

    def written(kernel_idx: int, constant_args_idx: int, kwargs: Any, descriptors: Any) -> list[str]:
        kernel: Any = kernel_side_table.get_kernel(kernel_idx)
        return list(kernel.written)

    monkeypatch.setattr(triton_kernel_wrap, "get_mutated_tensors", written)
    for kernel in (ADD, DOUBLE, ROWS):
        kernel.grids.clear()
        kernel.given.clear()
    torch._dynamo.reset()
    with torchkiln.settings(cache=False, fallback=False, adaptive=False):
        yield
    torch._dynamo.reset()


def compiled(function: Callable[..., Any], **options: Any) -> Any:
    return torch.compile(function, backend="kiln", fullgraph=True, **options)


def _plans(run: Callable[[], Any]) -> list[Plan]:
    plans: list[Plan] = []
    with recorder.listen(lambda record: plans.append(record.value) if record.stage == "plan" else None):
        run()
    return plans


def _targets(plan: Plan) -> list[Any]:
    return [step.target if isinstance(step, ExternCall) else "kernel" for step in plan.steps]


@pytest.mark.parametrize("card", [False, True], ids=["cpu", "card"])
def test_a_kernel_is_a_step_between_kernels_of_ours(card: bool) -> None:
    def function(x: Tensor, y: Tensor) -> Tensor:
        before, out = x.exp() + 1, torch.empty_like(x)
        add(before, y, out, x.numel(), 4)
        return torch.softmax(out, -1) * 2

    x, y = torch.randn(8, 16), torch.randn(8, 16)
    expected = function(x, y)
    with emulated() if card else nullcontext() as driver:
        run, found = compiled(function), []
        (plan,) = _plans(lambda: found.append(run(x, y)))
    torch.testing.assert_close(found[0], expected)
    # Two kernels of ours, and none that fills what the user's writes to.
    empty = torch.ops.aten.empty_strided.default
    assert sorted(map(str, _targets(plan))) == sorted(map(str, ("kernel", empty, TRITON_KERNEL, "kernel")))
    assert isinstance(plan.steps[-1], Launch)
    assert ADD.grids == [(4, 1, 1)] * 2
    assert [given["BLOCK"] for given in ADD.given] == [8, 8]
    assert driver is None or len(driver.launches) == 2


def test_an_input_is_written_in_place() -> None:
    def function(x: Tensor) -> Tensor:
        double(x)
        return x + 1

    mine, theirs = torch.randn(4, 6), torch.empty(4, 6)
    theirs.copy_(mine)
    address, run, found = mine.data_ptr(), compiled(function), []
    _plans(lambda: found.append(run(mine)))
    torch.testing.assert_close(found[0], function(theirs))
    assert torch.equal(mine, theirs)
    assert DOUBLE.given[0]["x"].data_ptr() == address


def test_what_is_needed_later_is_cloned() -> None:
    def function(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        made = x * 3
        kept = made.sin()
        copy = made.clone()
        double(copy)
        return made, copy, kept, y + 1

    x, y = torch.randn(4, 6), torch.randn(3)
    torch.testing.assert_close(compiled(function)(x, y), function(x, y))


def test_one_tensor_may_be_read_and_written() -> None:
    def function(x: Tensor) -> Tensor:
        made = x.exp()
        add(made, made, made, x.numel(), 1)
        return made + 1

    x = torch.randn(4, 6)
    expected = function(x)
    torch.testing.assert_close(compiled(function)(x), expected)
    given = ADD.given[-1]
    assert given["x"].data_ptr() == given["out"].data_ptr()


@pytest.mark.parametrize("part", [lambda t: t[:, 1:3], lambda t: t[2], lambda t: t.t(), lambda t: t[::2, 1:]])
def test_parts_of_memory_have_the_strides_that_they_were_traced_with(part: Callable[[Tensor], Tensor]) -> None:
    def function(x: Tensor) -> tuple[Tensor, ...]:
        out = x * 2
        rows(x.cos(), part(out))
        rows(x.sin(), part(out))
        return out, out.sum(0)

    x = torch.randn(6, 6)
    torch.testing.assert_close(compiled(function)(x), function(x))


def test_a_part_of_an_input_is_written() -> None:
    def function(x: Tensor) -> Tensor:
        rows(x, x[:, 2:4])
        return x.sum()

    mine, theirs = torch.ones(4, 6), torch.ones(4, 6)
    torch.testing.assert_close(compiled(function)(mine), function(theirs))
    torch.testing.assert_close(mine, theirs)


def test_sizes_and_grids_may_be_symbolic() -> None:
    def function(x: Tensor, y: Tensor) -> Tensor:
        out = torch.empty_like(x)
        add(x.exp(), y, out, x.numel(), (x.numel() + 7) // 8)
        return out * 2

    run, before = compiled(function, dynamic=True), torchkiln.stats().graphs
    for size in (9, 33, 64):
        x, y = torch.randn(size), torch.randn(size)
        torch.testing.assert_close(run(x, y), function(x, y))
        assert ADD.grids[-2] == ((size + 7) // 8, 1, 1) == ADD.grids[-1]
        assert ADD.given[-2]["n"] == size
    assert torchkiln.stats().graphs == before + 1


class Scaled(torch.autograd.Function):
    """A kernel forward and another one backward, as those that train have them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward(x, y)
        out = torch.empty_like(x)
        add(x, y, out, x.numel(), 2)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        (gradient,) = gradients
        x, y = ctx.saved_tensors
        out = torch.empty_like(gradient)
        add(gradient, y * 0, out, x.numel(), 2)
        return out, gradient * 8


def test_kernels_take_part_in_training() -> None:
    def function(x: Tensor, y: Tensor) -> Tensor:
        return Scaled.apply(x.sin(), y.exp()).square().mean()

    x, y = (torch.randn(4, 6, requires_grad=True) for _ in range(2))
    expected = torch.autograd.grad(function(x, y), (x, y))
    run = compiled(function)
    for _ in range(2):
        torch.testing.assert_close(torch.autograd.grad(run(x, y), (x, y)), expected)


def test_an_unaligned_input_is_given_as_it_is() -> None:
    def function(x: Tensor) -> Tensor:
        double(x)
        x.add_(1)
        return x.exp()

    mine = torch.randn(33)
    theirs = mine.clone()
    with emulated():
        result = compiled(function)(mine[1:])
    torch.testing.assert_close(result, function(theirs[1:]))
    torch.testing.assert_close(mine, theirs)
    assert DOUBLE.given[0]["x"].data_ptr() == mine[1:].data_ptr()


def _functional_graph(x: Tensor, y: Tensor) -> torch.fx.GraphModule:
    """``out = kernel(x, y); x + out``, written by hand, with the kernel's own clone of an empty ``out``."""
    graph = torch.fx.Graph()
    mode = torch._subclasses.FakeTensorMode()
    given = [graph.placeholder(name) for name in ("x", "y")]
    for node, value in zip(given, (x, y), strict=True):
        node.meta["val"] = mode.from_tensor(value)
    with mode:
        out = graph.call_function(torch.ops.aten.empty_like.default, (given[0],))
        out.meta["val"] = torch.empty_like(given[0].meta["val"])
        arguments = {"x": given[0], "y": given[1], "out": out, "n": x.numel()}
        made = graph.call_function(
            triton_kernel_wrapper_functional,
            (),
            {
                "kernel_idx": kernel_side_table.add_kernel(ADD),  # type: ignore[arg-type]
                "constant_args_idx": kernel_side_table.add_constant_args({"BLOCK": 3}),
                "grid": [(5, 2, 1)],
                "tma_descriptor_metadata": {},
                "kwargs": arguments,
                "tensors_to_clone": ["out"],
            },
        )
        made.meta["val"] = {"out": torch.empty_like(out.meta["val"])}
        item = graph.call_function(operator.getitem, (made, "out"))
        item.meta["val"] = made.meta["val"]["out"]
        total = graph.call_function(torch.ops.aten.add.Tensor, (given[0], item))
        total.meta["val"] = given[0].meta["val"] + item.meta["val"]
    graph.output((total,))
    return torch.fx.GraphModule({}, graph)


def test_dynamo_traces_a_kernel_of_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    triton = pytest.importorskip("triton", reason="Triton is not installed")
    from tests.passes import kernels_in_triton

    class Driver:
        """Of a card that is not here: Triton asks it what to write code for."""

        def get_current_target(self) -> Any:
            return triton.backends.compiler.GPUTarget("cuda", 90, 32)

    def launch(x: Tensor, y: Tensor, out: Tensor, n: int, BLOCK: int) -> None:
        out[:n] = x[:n] + y[:n] * (BLOCK // 64)

    stub = Kernel(launch, ())
    monkeypatch.undo()  # Triton is asked what the kernel writes to
    monkeypatch.setattr(torch.utils._triton, "has_triton", lambda: True)
    monkeypatch.setattr(triton.runtime.driver, "_active", Driver())

    def function(x: Tensor, y: Tensor) -> Tensor:
        return kernels_in_triton.add(x.exp(), y) * 2

    def run_stub(_: Any, *args: Any, grid: Any, warmup: bool, **named: Any) -> None:
        stub[grid](*args, **named)

    monkeypatch.setattr(type(kernels_in_triton.add_kernel), "run", run_stub)
    run, plans = compiled(function, dynamic=True), []
    for size in (9, 130):
        x, y = torch.randn(size), torch.randn(size)
        plans += _plans(lambda x=x, y=y: torch.testing.assert_close(run(x, y), (x.exp() + y) * 2))
        assert stub.grids[-1] == (-(-size // 64), 1, 1)
    (plan,) = plans
    calls = [step for step in plan.steps if isinstance(step, ExternCall) and step.target is TRITON_KERNEL]
    assert [len(call.mutates) for call in calls] == [1]


def test_a_functional_graph_is_compiled_as_it_is() -> None:
    x, y = torch.randn(4, 6), torch.randn(4, 6)
    run = torchkiln.compile_fx_inner(_functional_graph(x, y), [x, y])
    for _ in range(2):
        (result,) = run([x, y])
        torch.testing.assert_close(result, x + (x + 3 * y))
        torch._dynamo.reset()  # gives the numbers of kernels away
        kernel_side_table.add_kernel(DOUBLE)  # type: ignore[arg-type]
        kernel_side_table.add_constant_args({})
    assert ADD.grids == [(5, 2, 1)] * 2


def test_code_is_for_the_process_whose_kernel_it_calls(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def function(x: Tensor) -> Tensor:
        made = x.exp()
        double(made)
        return made + 1

    generated: list[Any] = []
    x = torch.randn(6)
    with torchkiln.settings(cache=True, cache_dir=str(tmp_path)):
        for _ in range(2):
            torch._dynamo.reset()
            with recorder.listen(lambda record: generated.append(record.value)):
                torch.testing.assert_close(compiled(function)(x), x.exp() * 2 + 1)
    artifacts = [value.artifact for value in generated if isinstance(value, Generated)]
    assert len(artifacts) == 2  # nothing was found in the cache
    assert artifacts[0].entry.is_for_this_process
    run = torchkiln.runtime.executable.load(decode(encode(artifacts[0])))
    torch.testing.assert_close(run([x])[0], x.exp() * 2 + 1)
    monkeypatch.setattr(torchkiln.graph.triton_kernels, "_PROCESS", "another one")
    with pytest.raises(ArtifactError, match="a Triton kernel of the process that compiled it"):
        run([x])




def test_a_package_cannot_hold_a_kernel(tmp_path: Any) -> None:
    class Model(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            made = x.exp()
            double(made)
            return made + 1

    with pytest.raises(PackageError, match="calls a Triton kernel, which a package cannot hold"):
        torchkiln.aot_compile(Model(), (torch.randn(6),), path=tmp_path / "model.kiln")
