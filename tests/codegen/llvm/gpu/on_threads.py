"""Functions compiled for a GPU and run on threads of this machine: every kernel as it is scheduled for a card."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from tests.codegen.llvm.gpu.emulator import Emulated
from tests.lowering.against_eager import capture
from torchkiln.codegen.llvm.gpu import emit_gpu_kernel
from torchkiln.codegen.llvm.module import ModuleBuilder
from torchkiln.config import Settings
from torchkiln.ir import index as ix
from torchkiln.ir.program import ExternCall, PassInput, Program, StridedView
from torchkiln.lowering.graph import lower_graph
from torchkiln.schedule import schedule
from torchkiln.schedule.kernel import GpuMapping, Kernel
from torchkiln.schedule.plan import Launch, Plan
from torchkiln.schedule.verify import verify_plan
from torchkiln.target import Target, gpu_target

HOPPER = gpu_target((9, 0))


def plan_for(function: Callable[..., Any], inputs: Sequence[torch.Tensor], target: Target = HOPPER) -> Plan:
    plan = schedule(lower_graph(capture(function, inputs), target), Settings(), target)
    verify_plan(plan)
    return plan


def kernels_of(plan: Plan) -> dict[str, Kernel]:
    launches = (step for step in plan.steps if isinstance(step, Launch))
    return {f"kernel{n}": kernel for n, kernel in enumerate(dict.fromkeys(step.kernel for step in launches))}


def module_of(kernels: dict[str, Kernel], target: Target = HOPPER) -> str:
    module = ModuleBuilder(target)
    for symbol, kernel in kernels.items():
        emit_gpu_kernel(module, kernel, symbol)
    return module.text()


def run_on_threads(
    function: Callable[..., Any], inputs: Sequence[torch.Tensor], extern: Sequence[str] = ()
) -> list[torch.Tensor]:
    """The results of ``function``, which must become kernels alone, but for the operators named in ``extern``."""
    plan = plan_for(function, inputs)
    kernels = kernels_of(plan)
    emulated = Emulated(module_of(kernels), kernels)
    memory = _memory(plan.program, inputs)
    symbols = {kernel: symbol for symbol, kernel in kernels.items()}
    for step in plan.steps:
        if isinstance(step, ExternCall):
            assert str(step.target) in extern, f"{step} is no kernel"
            _call(step, memory)
            continue
        assert isinstance(step, Launch)
        assert isinstance(step.kernel.mapping, GpuMapping)
        sizes = [size for size in step.sizes if isinstance(size, int)]
        here = {own: ix.as_index(given) for own, given in zip(step.kernel.nest.sizes, sizes, strict=True)}
        grid = ix.substitute_extent(step.kernel.mapping.grid, here)
        assert isinstance(grid, int)
        emulated.launch(symbols[step.kernel], [memory[name] for name in step.buffers], sizes, grid)
    return [_result(output, memory, inputs) for output in plan.program.outputs]


def _memory(program: Program, inputs: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Memory of every buffer, none shared; what nobody writes is NaN, so that reading it shows."""
    memory = {}
    for name, buffer in program.buffers.items():
        assert isinstance(buffer.elements, int)
        memory[name] = _aligned(buffer.elements, buffer.dtype)
        if buffer.dtype.is_floating_point:
            memory[name].fill_(float("nan"))
    for given, tensor in zip(program.inputs, inputs, strict=True):
        if given.buffer is not None:
            copy = memory[given.buffer]
            copy.copy_(tensor.as_strided((copy.numel(),), (1,)))
    for name, constant in program.constants:
        memory[name].copy_(constant.as_strided((memory[name].numel(),), (1,)))
    return memory


def _aligned(count: int, dtype: torch.dtype) -> torch.Tensor:
    whole = torch.empty(count * dtype.itemsize + 16, dtype=torch.uint8)
    start = -whole.data_ptr() % 16
    return whole[start : start + count * dtype.itemsize].view(dtype)


def _call(step: ExternCall, memory: dict[str, torch.Tensor]) -> None:
    """Call torch's operator, and copy its results to where they belong."""
    assert isinstance(step.target, torch._ops.OpOverload)
    assert not step.mutates
    arguments = [_shown(a, memory) if isinstance(a, StridedView) else a for a in step.arguments]
    count = sum(not argument.kwarg_only for argument in step.target._schema.arguments)
    named = {a.name: v for a, v in zip(step.target._schema.arguments[count:], arguments[count:], strict=True)}
    made = step.target(*arguments[:count], **named)
    for name, result in zip(step.results, made if isinstance(made, (tuple, list)) else (made,), strict=True):
        if name is not None:
            memory[name].copy_(result.as_strided((memory[name].numel(),), (1,)))


def _result(output: Any, memory: dict[str, torch.Tensor], inputs: Sequence[torch.Tensor]) -> torch.Tensor:
    if isinstance(output, PassInput):
        return inputs[output.position]
    return _shown(output, memory)


def _shown(view: StridedView, memory: dict[str, torch.Tensor]) -> torch.Tensor:
    sizes, strides = ([n for n in numbers if isinstance(n, int)] for numbers in (view.shape, view.strides))
    assert isinstance(view.offset, int)
    return memory[view.buffer].view(view.dtype).as_strided(sizes, strides, view.offset)
