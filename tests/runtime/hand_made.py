"""Graphs put together by hand, so that the run time is tested without the stages that normally feed it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from torchkiln.artifact import Artifact
from torchkiln.artifact.artifact import EntryInfo
from torchkiln.codegen.llvm.entry import emit_entry
from torchkiln.codegen.llvm.module import ModuleBuilder
from torchkiln.codegen.llvm.texts import TextTable
from torchkiln.config import Settings
from torchkiln.ir.program import Buffer, ExternCall, Input, Origin, Program, StridedView
from torchkiln.native.host import host_processor
from torchkiln.native.jit import compile_module
from torchkiln.runtime.executable import CompiledGraph
from torchkiln.schedule.kernel import CpuMapping, Kernel, LoopNest
from torchkiln.schedule.plan import InArena, InConstant, InInput, Launch, OwnTensor, Plan, Storage
from torchkiln.target import capture_target


@dataclass(frozen=True)
class HandKernel(Kernel):
    """A kernel that computes nothing by itself: its function is that of ``KERNELS``."""

    function: str


def _hand_kernel(function: str, iterations: int, grain: int) -> HandKernel:
    nest = LoopNest((), (), None, (), (), ())
    return HandKernel(nest, CpuMapping(1, None, 0, 1, 1, iterations, grain), function)


def _elementwise(name: str, result: str) -> str:
    """``c[i] = f(a[i], b[i])`` on float32; ``result`` computes ``%z`` from ``%x`` and ``%y``."""
    return f"""define void @{name}(i64 %begin, i64 %end, ptr %ctx) #0 {{
entry:
  %a = load ptr, ptr %ctx
  %b.at = getelementptr ptr, ptr %ctx, i64 1
  %b = load ptr, ptr %b.at
  %c.at = getelementptr ptr, ptr %ctx, i64 2
  %c = load ptr, ptr %c.at
  br label %head
head:
  %i = phi i64 [ %begin, %entry ], [ %next, %body ]
  %more = icmp slt i64 %i, %end
  br i1 %more, label %body, label %done
body:
  %a.i = getelementptr float, ptr %a, i64 %i
  %b.i = getelementptr float, ptr %b, i64 %i
  %c.i = getelementptr float, ptr %c, i64 %i
  %x = load float, ptr %a.i
  %y = load float, ptr %b.i
  {result}
  store float %z, ptr %c.i
  %next = add i64 %i, 1
  br label %head
done:
  ret void
}}"""


# d[i] = a[b[i]] for a of 4 float32 and b of int64; c[0] says whether some b[i] is not in [0, 4).
_GATHER = """define void @gather4(i64 %begin, i64 %end, ptr %ctx) #0 {
entry:
  %a = load ptr, ptr %ctx
  %b.at = getelementptr ptr, ptr %ctx, i64 1
  %b = load ptr, ptr %b.at
  %c.at = getelementptr ptr, ptr %ctx, i64 2
  %c = load ptr, ptr %c.at
  %d.at = getelementptr ptr, ptr %ctx, i64 3
  %d = load ptr, ptr %d.at
  store i8 0, ptr %c
  br label %head
head:
  %i = phi i64 [ %begin, %entry ], [ %next, %advance ]
  %more = icmp slt i64 %i, %end
  br i1 %more, label %body, label %done
body:
  %b.i = getelementptr i64, ptr %b, i64 %i
  %k = load i64, ptr %b.i
  %good = icmp ult i64 %k, 4
  br i1 %good, label %copy, label %bad
copy:
  %a.k = getelementptr float, ptr %a, i64 %k
  %c.i = getelementptr float, ptr %d, i64 %i
  %x = load float, ptr %a.k
  store float %x, ptr %c.i
  br label %advance
bad:
  store i8 1, ptr %c
  br label %advance
advance:
  %next = add i64 %i, 1
  br label %head
done:
  ret void
}"""

KERNELS = {
    "add": _elementwise("add", "%z = fadd float %x, %y"),
    "mul": _elementwise("mul", "%z = fmul float %x, %y"),
    "gather4": _GATHER,
}


@dataclass
class HandMade:
    """Collects a plan; arena offsets are dealt out in order, 64 bytes apart at least."""

    inputs: list[Input] = field(default_factory=list)
    constants: list[tuple[str, torch.Tensor]] = field(default_factory=list)
    buffers: dict[str, Buffer] = field(default_factory=dict)
    storage: dict[str, Storage] = field(default_factory=dict)
    steps: list[Any] = field(default_factory=list)
    frees: list[tuple[str, ...]] = field(default_factory=list)
    outputs: list[Any] = field(default_factory=list)
    arena_bytes: int = 0

    def _buffer(self, name: str, like: torch.Tensor) -> str:
        opaque = like.layout is not torch.strided
        self.buffers[name] = Buffer(name, like.dtype, tuple(like.shape), () if opaque else like.stride(), opaque)
        return name

    def input(self, name: str, like: torch.Tensor | None) -> str:
        """A graph input with the geometry of ``like``; None for one that is not a tensor."""
        if like is not None:
            self.storage[name] = InInput(len(self.inputs))
            self._buffer(name, like)
        self.inputs.append(Input(name, None if like is None else name))
        return name

    def constant(self, name: str, value: torch.Tensor) -> str:
        self.storage[name] = InConstant(len(self.constants))
        self.constants.append((name, value))
        return self._buffer(name, value)

    def arena(self, name: str, like: torch.Tensor) -> str:
        self._buffer(name, like)
        self.storage[name] = InArena(self.arena_bytes)
        self.arena_bytes += -(-self.buffers[name].nbytes // 64) * 64
        return name

    def own(self, name: str, like: torch.Tensor) -> str:
        self.storage[name] = OwnTensor()
        return self._buffer(name, like)

    def view(self, name: str) -> StridedView:
        return self.buffers[name].whole

    def launch(
        self, function: str, *names: str, frees: tuple[str, ...] = (), grain: int = 0, origin: Origin | None = None
    ) -> None:
        """Run a kernel over all elements of the last buffer."""
        extent = self.buffers[names[-1]].elements
        kernel = _hand_kernel(function, extent, grain)
        self.steps.append(Launch(kernel, names, origin=origin or Origin()))
        self.frees.append(frees)

    def extern(
        self,
        target: torch._ops.OpOverload,
        arguments: tuple[Any, ...],
        results: tuple[str | None, ...],
        *,
        mutates: tuple[str, ...] = (),
        frees: tuple[str, ...] = (),
        origin: Origin | None = None,
    ) -> None:
        """Call an operator; arguments may be left out at the end where the schema has a default. Names of buffers
        stand for the whole buffer, also in lists."""
        rest = [a.default_value for a in target._schema.arguments[len(arguments) :]]
        full = tuple(self._argument(a) for a in (*arguments, *rest))
        self.steps.append(ExternCall(target, full, results, mutates, origin or Origin()))
        self.frees.append(frees)

    def _argument(self, value: Any) -> Any:
        if isinstance(value, str) and value in self.buffers:
            return self.view(value)
        if isinstance(value, (tuple, list)):
            return tuple(self._argument(item) for item in value)
        return value

    def output(self, *values: Any) -> None:
        """Outputs: a name for a whole buffer, or an ``Output``."""
        self.outputs += [self.view(v) if isinstance(v, str) else v for v in values]

    def plan(self) -> Plan:
        program = Program(tuple(self.inputs), tuple(self.constants), self.buffers, (), tuple(self.outputs))
        return Plan(program, tuple(self.steps), self.storage, tuple(self.frees), self.arena_bytes, self.arena_bytes)

    def text(self, threads: int | None = None) -> str:
        """The whole module as IR."""
        return self._emitted(threads)[0]

    def _emitted(self, threads: int | None) -> tuple[str, EntryInfo, TextTable]:
        module = ModuleBuilder(capture_target(Settings()))
        symbols = {}
        for step in self.steps:
            if isinstance(step, Launch):
                name = step.kernel.function  # type: ignore[attr-defined]
                module.define(name, KERNELS[name])
                symbols[step.kernel] = name
        table = TextTable()
        info = emit_entry(module, self.plan(), symbols, table, threads=threads)
        return module.text(), info, table

    def artifact(self, threads: int | None = None) -> Artifact:
        text, info, table = self._emitted(threads)
        code, constants = compile_module(text, host_processor()), tuple(value for _, value in self.constants)
        return Artifact(code, b"", info, constants, table.texts, table.sources)

    def build(self, *, direct: bool | None = None, threads: int | None = None) -> CompiledGraph:
        return CompiledGraph(self.artifact(threads), direct=direct)


def resident_bytes() -> int:
    """Memory of this process that is in use now."""
    with open("/proc/self/statm") as statistics:
        return int(statistics.read().split()[1]) * 4096
