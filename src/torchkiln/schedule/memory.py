"""Where buffers live: one arena per graph, each buffer in it only while it is needed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate

from torchkiln.graph.effects import is_torchs_own
from torchkiln.ir import index as ix
from torchkiln.ir.checks import is_check
from torchkiln.ir.higher_order import HigherOrder
from torchkiln.ir.index import Extent
from torchkiln.ir.program import WRITES_INTO, Buffer, ExternCall, Program, StridedView
from torchkiln.schedule.dependencies import reads, sizes_decided, writes
from torchkiln.schedule.plan import InArena, InConstant, InInput, InSlot, Launch, OwnTensor, Plan, Step, Storage

_ALIGNMENT = 64


def plan_memory(program: Program, steps: Sequence[Step]) -> Plan:
    """Assign every buffer a place, and know the peak before running."""
    outputs = {o.buffer for o in program.outputs if isinstance(o, StridedView)}
    storage: dict[str, Storage] = {}
    for position, item in enumerate(program.inputs):
        if item.buffer is not None:
            storage[item.buffer] = InInput(position)
    for position, (name, _) in enumerate(program.constants):
        storage[name] = InConstant(position)
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    for position, step in enumerate(steps):
        for name in _touched(step):
            first.setdefault(name, position)
            last[name] = position
        if isinstance(step, ExternCall) and step.target not in WRITES_INTO:
            for result in step.results:
                if result is not None:
                    storage[result] = OwnTensor()
        if isinstance(step, ExternCall) and _may_keep_arguments(step):
            for name in sorted(reads(step)):
                storage.setdefault(name, OwnTensor())
    for name in outputs:
        storage.setdefault(name, OwnTensor())
    # The arena is taken before the first step: what depends on a size decided later has memory of its own.
    late = {size for step in steps if not isinstance(step, Launch) for size in sizes_decided(step)}
    for name in first:
        if name not in storage and not late.isdisjoint(ix.sizes_in(program.buffers[name].nbytes)):
            storage[name] = OwnTensor()
    in_arena = [name for name in first if name not in storage]
    slots: tuple[tuple[Extent, ...], ...] = ()
    if all(isinstance(program.buffers[name].nbytes, int) for name in in_arena):
        offsets, arena = _pack(in_arena, first, last, program.buffers)
        storage.update((name, InArena(offset)) for name, offset in offsets.items())
    else:
        numbers, slots = _share_slots(in_arena, first, last, program.buffers)
        storage.update((name, InSlot(number)) for name, number in numbers.items())
        arena = sum(max(map(ix.hint_of, slot)) for slot in slots)
    frees: list[list[str]] = [[] for _ in steps]
    change = [0] * (len(steps) + 1)  # bytes that come alive before a step, less those gone by then
    for name, place in storage.items():
        if not isinstance(place, OwnTensor) or name not in first:
            continue
        end = len(steps) if name in outputs else last[name] + 1
        nbytes = ix.hint_of(program.buffers[name].nbytes)
        change[first[name]] += nbytes
        change[end] -= nbytes
        if name not in outputs:
            frees[last[name]].append(name)
    owned = max(accumulate(change), default=0)
    return Plan(program, tuple(steps), storage, tuple(tuple(f) for f in frees), arena, arena + owned, slots)


def _may_keep_arguments(call: ExternCall) -> bool:
    """Whether the user's own code runs, which may hold on to a tensor for longer than the arena lasts."""
    target = call.target
    if isinstance(target, HigherOrder):
        steps = [step for body in target.bodies for step in body.steps]
        return any(isinstance(step, ExternCall) and _may_keep_arguments(step) for step in steps)
    return not is_torchs_own(target) and not is_check(call)


def _touched(step: Step) -> list[str]:
    if isinstance(step, Launch):
        return list(step.buffers)
    return sorted(reads(step) | writes(step))


def _pack(
    names: Sequence[str], first: Mapping[str, int], last: Mapping[str, int], buffers: Mapping[str, Buffer]
) -> tuple[dict[str, int], int]:
    """Offsets such that buffers alive at the same time do not overlap, and the bytes needed in all.

    Large buffers are placed first, each at the lowest gap among those it lives beside.
    """
    placed: list[tuple[int, int, int, int]] = []  # offset, end, first, last
    offsets: dict[str, int] = {}
    total = 0
    nbytes = {name: ix.hint_of(buffers[name].nbytes) for name in names}
    for name in sorted(names, key=lambda n: (-nbytes[n], first[n])):
        size = -(-max(nbytes[name], 1) // _ALIGNMENT) * _ALIGNMENT
        begin, finish = first[name], last[name]
        offset = 0
        for low, high, _start, _end in sorted(p for p in placed if p[2] <= finish and begin <= p[3]):
            if low - offset >= size:
                break
            offset = max(offset, high)
        placed.append((offset, offset + size, begin, finish))
        offsets[name] = offset
        total = max(total, offset + size)
    return offsets, total


def _share_slots(
    names: Sequence[str], first: Mapping[str, int], last: Mapping[str, int], buffers: Mapping[str, Buffer]
) -> tuple[dict[str, int], tuple[tuple[Extent, ...], ...]]:
    """A slot for each buffer, and the sizes in bytes that share a slot.

    Buffers of one slot are never alive together. Which of them is the largest may depend on the sizes of the call, so
    a buffer goes to a slot that holds its very size already, else to the one nearest in typical size.
    """
    numbers: dict[str, int] = {}
    contents: list[list[str]] = []
    for name in sorted(names, key=lambda n: (-ix.hint_of(buffers[n].nbytes), first[n])):
        free = [
            k
            for k, others in enumerate(contents)
            if all(last[other] < first[name] or last[name] < first[other] for other in others)
        ]
        nbytes = buffers[name].nbytes

        def mismatch(k: int, nbytes: Extent = nbytes) -> tuple[bool, int]:
            held = [buffers[other].nbytes for other in contents[k]]
            return nbytes not in held, abs(max(map(ix.hint_of, held)) - ix.hint_of(nbytes))

        if free:
            number = min(free, key=mismatch)
            contents[number].append(name)
        else:
            number = len(contents)
            contents.append([name])
        numbers[name] = number
    return numbers, tuple(tuple(dict.fromkeys(buffers[n].nbytes for n in held)) for held in contents)
