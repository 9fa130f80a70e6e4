"""Functions compiled for a GPU and run on threads of this machine: every kernel as it is scheduled for a card."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tests.codegen.llvm.gpu.emulator import Emulated
from tests.lowering.against_eager import capture
from torchkiln.codegen.llvm.gpu import emit_gpu_kernel
from torchkiln.codegen.llvm.module import ModuleBuilder
from torchkiln.config import Settings
from torchkiln.ir import index as ix
from torchkiln.ir.index import Extent, Index, Size
from torchkiln.ir.program import (
    CheckFits,
    CheckSizes,
    ExternCall,
    Number,
    PassInput,
    PlainValue,
    ReadNumber,
    StridedView,
)
from torchkiln.lowering import lower
from torchkiln.schedule import schedule
from torchkiln.schedule.dependencies import writes
from torchkiln.schedule.kernel import GpuMapping, Kernel, Store
from torchkiln.schedule.plan import Launch, Plan, Step
from torchkiln.schedule.verify import verify_plan
from torchkiln.target import Target, gpu_target

HOPPER = gpu_target((9, 0))
_COMPARISONS = {name: getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")}


def plan_for(function: Callable[..., Any], inputs: Sequence[torch.Tensor], target: Target = HOPPER) -> Plan:
    return plan_of_graph(capture(function, inputs), target)


def plan_of_graph(
    gm: torch.fx.GraphModule, target: Target = HOPPER, kind: str = "inference", settings: Settings | None = None
) -> Plan:
    settings = settings or Settings()
    plan = schedule(lower(gm, settings, target, kind=kind), settings, target)
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
    for step in plan.steps:
        assert not isinstance(step, ExternCall) or str(step.target) in extern, f"{step} is no kernel"
    return PlanOnThreads(plan)(list(inputs))


class PlanOnThreads:
    """A plan for a card, whose kernels run on threads of this machine; operators of torch are called as they are."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        kernels = kernels_of(plan)
        self._emulated = Emulated(module_of(kernels), kernels)
        self._symbols = {kernel: symbol for symbol, kernel in kernels.items()}

    def __call__(self, inputs: Sequence[Any]) -> list[Any]:
        return _Run(self.plan, inputs).results(self._launch)

    def _launch(self, step: Launch, run: _Run) -> None:
        mapping, nest = step.kernel.mapping, step.kernel.nest
        assert isinstance(mapping, GpuMapping)
        sizes = [run.number(size) for size in step.sizes]
        here = {own: ix.as_index(given) for own, given in zip(nest.sizes, sizes, strict=True)}
        grid = ix.substitute_extent(mapping.grid, here)
        assert isinstance(grid, int)
        memory = [run.memory[name] for name in step.buffers]
        self._emulated.launch(self._symbols[step.kernel], memory, sizes, grid)


class _Run:
    """One call: ``sizes`` are those known so far. Every buffer has memory of its own, ``memory``, once it has sizes.

    What nobody writes is NaN, so that reading it shows.
    """

    def __init__(self, plan: Plan, inputs: Sequence[Any]) -> None:
        self.plan, self.inputs = plan, inputs
        self.memory: dict[str, torch.Tensor] = {}
        self.sizes: dict[Size, Index] = {}
        program = plan.program
        for source in program.sizes:
            given = inputs[source.position]
            if source.dim is not None:
                given = given.stride(source.dim) if source.stride else given.size(source.dim)
            self.sizes[source.size] = ix.as_index(int(given))
        self._allocate()
        for known, tensor in zip(program.inputs, inputs, strict=True):
            if known.buffer is not None:
                self.memory[known.buffer].copy_(self._flat(known.buffer, tensor.detach()))
        for name, constant in program.constants:
            self.memory[name].copy_(self._flat(name, constant.detach()))

    def results(self, launch: Callable[[Launch, _Run], None]) -> list[Any]:
        for step in self.plan.steps:
            if isinstance(step, Launch):
                launch(step, self)
            elif isinstance(step, ExternCall):
                self._call(step)
            elif isinstance(step, ReadNumber):
                self.sizes[step.size] = ix.as_index(int(self._shown(step.view).item()))
                self._allocate()
            elif isinstance(step, CheckSizes):
                holds = _COMPARISONS[step.comparison](self.number(step.left), self.number(step.right))
                assert holds, step.message
            else:
                assert isinstance(step, CheckFits)
        self._give_back()
        outputs = self.plan.program.outputs
        # Autograd notices a write to what is saved for it only where that is the same tensor.
        tensors = {output: self._result(output) for output in outputs if isinstance(output, StridedView)}
        return [tensors.get(o) if isinstance(o, StridedView) else self._result(o) for o in outputs]

    def number(self, extent: Extent) -> int:
        known = ix.substitute_extent(ix.as_index(extent), self.sizes)
        assert isinstance(known, int), f"{extent} is not known"
        return known

    def _allocate(self) -> None:
        for name, buffer in self.plan.program.buffers.items():
            elements = ix.substitute_extent(buffer.elements, self.sizes)
            if name in self.memory or not isinstance(elements, int):
                continue
            assert not buffer.opaque
            self.memory[name] = _aligned(max(elements, 0), buffer.dtype)
            if buffer.dtype.is_floating_point:
                self.memory[name].fill_(float("nan"))

    def _flat(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """The memory of ``tensor`` as that of the buffer, or it in the buffer's layout where it came in another."""
        buffer = self.plan.program.buffers[name]
        strides = zip(buffer.strides, tensor.stride(), tensor.shape, strict=True)
        if all(self.number(expected) == found for expected, found, size in strides if size > 1):
            return tensor.as_strided((self.memory[name].numel(),), (1,))
        strides = [self.number(stride) for stride in buffer.strides]
        laid_out = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype)  # strides of 0 come as they are
        return laid_out.copy_(tensor).as_strided((self.memory[name].numel(),), (1,))

    def _give_back(self) -> None:
        """Inputs that the graph writes."""
        written = {name for step in self.plan.steps for name in _written(step)}
        for known, tensor in zip(self.plan.program.inputs, self.inputs, strict=True):
            if known.buffer in written:
                memory = self.memory[known.buffer]
                with torch.no_grad():
                    tensor.detach().as_strided((memory.numel(),), (1,)).copy_(memory)

    def _call(self, step: ExternCall) -> None:
        """Call torch's operator, and copy its results to where they belong."""
        assert isinstance(step.target, torch._ops.OpOverload)
        arguments = [self._argument(argument) for argument in step.arguments]
        count = sum(not argument.kwarg_only for argument in step.target._schema.arguments)
        named = {a.name: v for a, v in zip(step.target._schema.arguments[count:], arguments[count:], strict=True)}
        made = step.target(*arguments[:count], **named)
        made = [x for part in (made if isinstance(made, (tuple, list)) else (made,))
                for x in (part if isinstance(part, (tuple, list)) else (part,))]  # fmt: skip
        for bound in step.binds:
            result = next(r for name, r in zip(step.results, made, strict=True) if name == bound.buffer)
            self.sizes[bound.size] = ix.as_index(result.size(bound.dim))
        self._allocate()
        if not step.results:
            return
        for name, result in zip(step.results, made, strict=True):
            if name is not None:
                self.memory[name].copy_(self._flat(name, result))

    def _argument(self, given: Any) -> Any:
        if isinstance(given, StridedView):
            return self._shown(given)
        if isinstance(given, Index):
            return self.number(given)
        return [self._argument(one) for one in given] if isinstance(given, tuple) else given

    def _result(self, output: Any) -> Any:
        if isinstance(output, PassInput):
            return self.inputs[output.position]
        if isinstance(output, PlainValue):
            return output.value
        if isinstance(output, Number):
            value = self.number(output.value)
            return bool(value) if output.is_bool else value
        for known, tensor in zip(self.plan.program.inputs, self.inputs, strict=True):
            if known.buffer == output.buffer and output.dtype == tensor.dtype:  # a view of what the caller gave
                return tensor.as_strided(*self._layout(output, tensor.storage_offset()))
        return self._shown(output)

    def _layout(self, view: StridedView, start: int) -> tuple[list[int], list[int], int]:
        sizes, strides = ([self.number(n) for n in numbers] for numbers in (view.shape, view.strides))
        return sizes, strides, start + self.number(view.offset)

    def _shown(self, view: StridedView) -> torch.Tensor:
        memory = self.memory[view.buffer].view(view.dtype)
        sizes, strides, start = self._layout(view, memory.storage_offset())
        # A tensor of its own: autograd would refuse writes to a view.
        return torch.empty(0, dtype=view.dtype).set_(memory.untyped_storage(), start, sizes, strides)


def _written(step: Step) -> set[str]:
    if not isinstance(step, Launch):
        return writes(step)
    stores = (s for s in step.kernel.nest.statements if isinstance(s, Store))
    return {step.buffers[store.memory.number] for store in stores}


def _aligned(count: int, dtype: torch.dtype) -> torch.Tensor:
    if count == 0:
        return torch.empty(0, dtype=dtype)
    whole = torch.empty(count * dtype.itemsize + 16, dtype=torch.uint8)
    start = -whole.data_ptr() % 16
    return whole[start : start + count * dtype.itemsize].view(dtype)
