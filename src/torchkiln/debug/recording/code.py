"""What a plan and its code are in a recording: kernels, library calls, and memory over time."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torchkiln.codegen.llvm import Generated
from torchkiln.debug.recording.model import BufferLife, Kernel, LibraryCall, Line, Memory, MemoryStep
from torchkiln.ir import index as ix
from torchkiln.ir.program import ExternCall
from torchkiln.native.host import Processor
from torchkiln.native.jit import assembly_of
from torchkiln.schedule import kernel as scheduled
from torchkiln.schedule.memory import lifetimes
from torchkiln.schedule.plan import InConstant, InDonatedInput, InInput, Launch, OwnTensor, Plan, Step
from torchkiln.schedule.traffic import traffic_of

_FUNCTION = re.compile(r"^define [^\n]*?@(\w+)\(.*?^\}", re.M | re.S)
_LABEL = re.compile(r"^([A-Za-z_]\w*):")
_DIRECTIVE = re.compile(r"^\s*\.(cfi_\w+|p2align|type|globl|size|section|text|file|ident)\b")

_BORROWED = InInput, InConstant, InDonatedInput


@dataclass(frozen=True)
class Measured:
    """Least seconds of each step of a plan over some calls; None for steps that did not run."""

    calls: int
    seconds: tuple[float | None, ...]


def kernel_names(plan: Plan) -> dict[scheduled.Kernel, str]:
    """The kernels of a plan, each once, by the names that its text and its code give them."""
    names: dict[scheduled.Kernel, str] = {}
    for step in plan.steps:
        if isinstance(step, Launch):
            names.setdefault(step.kernel, f"kernel{len(names)}")
    return names


def kernels_of(
    plan: Plan,
    code: Generated | None,
    processor: Processor,
    lines: Mapping[str, tuple[Line, ...]],
    measured: Measured | None,
) -> tuple[Kernel, ...]:
    """The kernels of a plan; ``lines`` are those of the nodes of its graph."""
    llvm = functions_in(code.kernels) if code is not None else {}
    assembly = assembly_by_name(assembly_of(code.kernels, processor)) if code is not None and code.kernels else {}
    found = []
    for kernel, name in kernel_names(plan).items():
        steps = [(k, step) for k, step in enumerate(plan.steps) if isinstance(step, Launch) and step.kernel == kernel]
        traffic = [traffic_of(step, plan) for _, step in steps]
        nodes = tuple(dict.fromkeys(node for _, step in steps for node in step.origin.nodes))
        found.append(
            Kernel(
                name=name,
                text=str(kernel),
                llvm=llvm.get(name, ""),
                assembly=assembly.get(name, ""),
                nodes=nodes,
                lines=_lines_of(nodes, lines),
                launches=len(steps),
                bytes=sum(one.bytes for one in traffic),
                operations=sum(one.operations for one in traffic),
                seconds=_total(measured, [k for k, _ in steps]),
            )
        )
    return tuple(found)


def library_calls_of(
    plan: Plan,
    reasons: Mapping[str, str],
    lines: Mapping[str, tuple[Line, ...]],
    measured: Measured | None,
) -> tuple[LibraryCall, ...]:
    """Calls of torch's operators and of libraries; ``reasons`` are those of nodes that no lowering computes."""
    found = []
    for k, step in enumerate(plan.steps):
        if isinstance(step, ExternCall):
            traffic = traffic_of(step, plan)
            nodes = step.origin.nodes
            reason = next((reasons[node] for node in nodes if node in reasons), "part of what a lowering makes of it")
            found.append(
                LibraryCall(
                    name=str(step.target),
                    arguments=", ".join(map(str, step.arguments)),
                    nodes=nodes,
                    lines=_lines_of(nodes, lines),
                    reason=reason,
                    bytes=traffic.bytes,
                    operations=traffic.operations,
                    seconds=_total(measured, [k]),
                )
            )
    return tuple(found)


def _lines_of(nodes: Iterable[str], lines: Mapping[str, tuple[Line, ...]]) -> tuple[Line, ...]:
    """The innermost line of each node, each once, in the order of the nodes."""
    return tuple(dict.fromkeys(lines[node][0] for node in nodes if lines.get(node)))


def _total(measured: Measured | None, steps: Sequence[int]) -> float | None:
    if measured is None:
        return None
    times = [seconds for k in steps if (seconds := measured.seconds[k]) is not None]
    return sum(times) if times else None


def functions_in(module: str) -> dict[str, str]:
    """The functions that an LLVM module defines, by name."""
    return {match[1]: match[0] for match in _FUNCTION.finditer(module)}


def assembly_by_name(text: str) -> dict[str, str]:
    """The instructions of each function of an assembly file; what only the linker needs is left out."""
    found: dict[str, list[str]] = {}
    current: list[str] | None = None
    for line in text.splitlines():
        label = _LABEL.match(line)
        if label:
            current = found.setdefault(label[1], [])
        elif line.startswith(".Lfunc_end"):
            current = None
        if current is not None and not _DIRECTIVE.match(line):
            current.append(line)
    return {name: "\n".join(lines) for name, lines in found.items()}


def memory_of(plan: Plan) -> Memory:
    """Buffers over the steps of a plan; symbolic sizes have typical values.

    A call holds the whole arena from its start to its end, and so do the figures of its steps.
    """
    names = kernel_names(plan)
    lives = [
        BufferLife(name, ix.hint_of(plan.program.buffers[name].nbytes), first, last, str(plan.storage[name]))
        for name, (first, last) in lifetimes(plan).items()
        if name in plan.storage and not isinstance(plan.storage[name], _BORROWED)
    ]
    change = [0] * (len(plan.steps) + 1)
    for life in lives:
        if isinstance(plan.storage[life.name], OwnTensor):
            change[life.first] += life.bytes
            change[life.last + 1] -= life.bytes
    steps, live = [], plan.arena_bytes
    for k, step in enumerate(plan.steps):
        live += change[k]
        steps.append(MemoryStep(_step_name(step, names), live))
    return Memory(plan.peak_bytes, plan.arena_bytes, tuple(steps), tuple(lives))


def _step_name(step: Step, names: Mapping[scheduled.Kernel, str]) -> str:
    if isinstance(step, Launch):
        return names[step.kernel]
    return str(step.target) if isinstance(step, ExternCall) else str(step)
