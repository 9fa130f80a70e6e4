"""What a plan says of its inputs, outputs and steps, in the form the native function of a graph needs."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from itertools import chain, count

from torchkiln.artifact.artifact import InputKind, OutputSource
from torchkiln.codegen.llvm.blas import has_known_sizes
from torchkiln.codegen.llvm.extern import calls_blas, fills_planned_memory
from torchkiln.codegen.llvm.frame import descriptor
from torchkiln.codegen.llvm.status import COMPARED_LATER, NUMBER, UNUSED
from torchkiln.codegen.llvm.support.outputs import KINDS
from torchkiln.graph.effects import resizes_storage
from torchkiln.ir.index import Extent
from torchkiln.ir.native_calls import is_native
from torchkiln.ir.program import Buffer, ExternCall, Number, PassInput, ReadNumber, StridedView
from torchkiln.schedule.dependencies import reads, writes
from torchkiln.schedule.plan import InDonatedInput, InInput, Launch, OwnTensor, Plan, Step, Storage
from torchkiln.target import Target


def resizes(step: Step) -> bool:
    return isinstance(step, ExternCall) and resizes_storage(step.target)


def resizes_storages(plan: Plan) -> bool:
    """Whether inputs may come without memory, or lose it: they are compared, and their addresses read, when used."""
    return any(resizes(step) for step in plan.steps)


def mentioned(step: Step) -> set[str]:
    return set(step.buffers) if isinstance(step, Launch) else reads(step) | writes(step)


def _takes_addresses(step: Step, plan: Plan, target: Target) -> bool:
    if isinstance(step, ExternCall):
        return is_native(step) or calls_blas(step, plan.program.buffers, target)
    return isinstance(step, (Launch, ReadNumber))


def buffers_by_address(plan: Plan, target: Target) -> frozenset[str]:
    """What is read or written by its address, not through a handle; and the inputs that buffers lie in later."""
    taken = (name for step in plan.steps if _takes_addresses(step, plan, target) for name in mentioned(step))
    reused = (plan.program.inputs[position].buffer for position, _ in plan.reused)
    return frozenset(name for name in (*taken, *reused) if name is not None)


def calls_operator(step: Step, plan: Plan, target: Target) -> bool:
    """Whether a step may call an operator of torch."""
    return isinstance(step, ExternCall) and not (
        _takes_addresses(step, plan, target) and (is_native(step) or has_known_sizes(step))
    )


def written_inputs(plan: Plan) -> tuple[int, ...]:
    places = (plan.storage.get(name) for operation in plan.program.operations for name in writes(operation))
    return tuple(sorted({place.position for place in places if isinstance(place, InInput)}))


def allocations(plan: Plan) -> list[list[str]]:
    """For each step, the tensors that get their memory just before it; not those an extern call returns."""
    found: list[list[str]] = [[] for _ in plan.steps]
    seen: set[str] = set()
    for k, step in enumerate(plan.steps):
        returned: set[str | None] = set()
        if isinstance(step, ExternCall) and not fills_planned_memory(step):
            returned = set(step.results)
        for name in sorted(mentioned(step) - seen):
            seen.add(name)
            if isinstance(plan.storage[name], OwnTensor) and name not in returned:
                found[k].append(name)
    return found


def last_uses_of_inputs(plan: Plan) -> list[list[int]]:
    """For each step, the inputs no later one reads or lies in.

    Not those whose memory would not be freed earlier: of the last step, static ones, and outputs.
    """
    last: dict[int, int] = {}
    for k, step in enumerate(plan.steps):
        for name in mentioned(step):
            place = plan.storage[name]
            if isinstance(place, (InInput, InDonatedInput)):
                last[place.position] = k
    kept = {position for position, given in enumerate(plan.program.inputs) if given.static}
    kept.update(output.position for output in plan.program.outputs if isinstance(output, PassInput))
    shown = _storage_of_outputs(plan)
    last_uses: list[list[int]] = [[] for _ in plan.steps]
    for position, k in sorted(last.items()):
        if position not in kept and InInput(position) not in shown and k < len(plan.steps) - 1:
            last_uses[k].append(position)
    return last_uses


def _storage_of_outputs(plan: Plan) -> set[Storage]:
    return {plan.storage[o.buffer] for o in plan.program.outputs if isinstance(o, StridedView)}


def input_kinds(plan: Plan) -> tuple[InputKind, ...]:
    numbers = {source.position for source in plan.program.sizes if source.dim is None}
    kinds: list[InputKind] = []
    for position, given in enumerate(plan.program.inputs):
        if given.buffer is None:
            kinds.append("number" if position in numbers else "unused")
        else:
            kinds.append("opaque" if plan.program.buffers[given.buffer].opaque else "tensor")
    return tuple(kinds)


def output_sources(plan: Plan) -> tuple[tuple[OutputSource, ...], tuple[object, ...]]:
    sources: list[OutputSource] = []
    values: list[object] = []
    tensors, numbers = count(), count()
    for output in plan.program.outputs:
        if isinstance(output, StridedView):
            sources.append(OutputSource("tensor", next(tensors)))
        elif isinstance(output, Number):
            sources.append(OutputSource("boolean" if output.is_bool else "number", next(numbers)))
        elif isinstance(output, PassInput):
            sources.append(OutputSource("input", output.position))
        else:
            sources.append(OutputSource("value", len(values)))
            values.append(output.value)
    return tuple(sources), tuple(values)


def output_table(outputs: tuple[OutputSource, ...], objects_before_values: int) -> tuple[int, ...]:
    """Outputs as ``kiln_wrap_outputs`` reads them."""
    tensors = sum(source.kind == "tensor" for source in outputs)
    shifts = {"value": objects_before_values, "number": tensors, "boolean": tensors}
    pairs = ((KINDS[source.kind], source.number + shifts.get(source.kind, 0)) for source in outputs)
    return tuple(chain.from_iterable(pairs))


def input_table(plan: Plan, by_address: Collection[str]) -> tuple[Extent, ...]:
    """Descriptors of all inputs, one after the other; a mark and 0 for one that is not compared at the start.

    ``by_address`` are the buffers of :func:`buffers_by_address`.
    """
    table: list[Extent] = []
    later = resizes_storages(plan)
    for graph_input, kind in zip(plan.program.inputs, input_kinds(plan), strict=True):
        if kind == "tensor" and later:
            table += (COMPARED_LATER, 0)
        elif graph_input.buffer is None:
            table += (NUMBER if kind == "number" else UNUSED, 0)
        else:
            name = graph_input.buffer
            table += descriptor(plan.program.buffers[name], plan.program.card, by_address=name in by_address)
    return tuple(table)


def copied_inputs(plan: Plan) -> tuple[int, ...]:
    """A mask of the inputs that a copy with the right strides can replace, because nobody sees that it is one."""
    if resizes_storages(plan):
        return ()
    shown, written = _storage_of_outputs(plan), written_inputs(plan)
    buffers = plan.program.buffers
    mask = tuple(
        int(
            (given.any_strides or _needs_alignment(buffers, given.buffer))
            and position not in written
            and InInput(position) not in shown
        )
        for position, given in enumerate(plan.program.inputs)
    )
    return mask if any(mask) else ()


def _needs_alignment(buffers: Mapping[str, Buffer], name: str | None) -> bool:
    return name is not None and buffers[name].device == "cuda" and not buffers[name].opaque
