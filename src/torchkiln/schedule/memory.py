"""Where buffers live: one arena per graph, each buffer in it only while it is needed.

The arena of a graph with a card is on the card; what such a graph has on the CPU are tensors of their own.

A backward also uses the memory of what forward saved for it alone, once nothing reads that any more. All that is saved
is there when backward begins, so every byte of the arena comes on top of it.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch

from torchkiln.graph.attention_states import states_returned
from torchkiln.graph.effects import is_torchs_own, resizes_storage
from torchkiln.ir import index as ix
from torchkiln.ir.higher_order import HigherOrder
from torchkiln.ir.index import Extent
from torchkiln.ir.native_calls import is_computed, is_native
from torchkiln.ir.program import Buffer, ExternCall, PassInput, Program, StridedView
from torchkiln.schedule.dependencies import reads, sizes_decided, writes
from torchkiln.schedule.plan import (
    InArena,
    InConstant,
    InDonatedInput,
    InInput,
    InSlot,
    Launch,
    OwnTensor,
    Plan,
    Step,
    Storage,
)

_ALIGNMENT = 64
# Asking whether somebody else holds an input takes about a microsecond, as long as moving so many bytes.
_LEAST_REUSED = 1 << 15
# Bits of the ownership mask.
_MOST_REUSED = 62

# Operators that leave an input with the storage of another argument.
_SHARES_STORAGE = frozenset(getattr(torch.ops.aten.set_, name) for name in torch.ops.aten.set_.overloads())


def plan_memory(program: Program, steps: Sequence[Step]) -> Plan:
    """Assign every buffer a place, and know the peak before running."""
    # In order, as all that decides about code is: the same graph gives the same code in every process.
    outputs = dict.fromkeys(o.buffer for o in program.outputs if isinstance(o, StridedView))
    lives = _Liveness(steps)
    storage = _fixed_places(program, steps, lives, outputs)
    in_arena = [name for name in lives.first if name not in storage]
    slots: tuple[tuple[Extent, ...], ...] = ()
    reused: tuple[tuple[int, int], ...] = ()
    if all(isinstance(program.buffers[name].nbytes, int) for name in in_arena):
        donated = _donated_inputs(program, steps, lives, outputs)
        packing = _Packing(in_arena, lives, program.buffers, donated)
        storage.update(packing.places)
        arena, reused = packing.arena.used, packing.reused
    else:
        numbers, slots = _share_slots(in_arena, lives, program.buffers)
        storage.update((name, InSlot(number)) for name, number in numbers.items())
        arena = sum(max(map(ix.hint_of, slot)) for slot in slots)
    own = [name for name, place in storage.items() if isinstance(place, OwnTensor) and name in lives.first]
    frees: list[list[str]] = [[] for _ in steps]
    for name in own:
        if name not in outputs:
            frees[lives.last[name]].append(name)
    peak = arena + _peak_of_own_tensors(own, lives, program.buffers, outputs)
    return Plan(program, tuple(steps), storage, tuple(tuple(f) for f in frees), arena, peak, slots, reused)


def lifetimes(plan: Plan) -> dict[str, tuple[int, int]]:
    """The first and the last step at which each buffer of ``plan`` is alive; outputs are so to the end."""
    lives = _Liveness(plan.steps)
    outputs = {output.buffer for output in plan.program.outputs if isinstance(output, StridedView)}
    end = len(plan.steps) - 1
    return {name: (first, end if name in outputs else lives.last[name]) for name, first in lives.first.items()}


class _Liveness:
    """The first and the last step that touches each buffer, buffers in the order of their first steps."""

    def __init__(self, steps: Sequence[Step]) -> None:
        self.steps = len(steps)
        self.first: dict[str, int] = {}
        self.last: dict[str, int] = {}
        for position, step in enumerate(steps):
            for name in _touched(step):
                self.first.setdefault(name, position)
                self.last[name] = position

    def overlap(self, one: str, other: str) -> bool:
        """Whether some step finds both alive."""
        return self.first[one] <= self.last[other] and self.first[other] <= self.last[one]


def _fixed_places(
    program: Program, steps: Sequence[Step], lives: _Liveness, outputs: Collection[str]
) -> dict[str, Storage]:
    """The places of inputs and constants, and the buffers that are tensors of their own."""
    storage: dict[str, Storage] = {}
    storage.update((item.buffer, InInput(k)) for k, item in enumerate(program.inputs) if item.buffer is not None)
    storage.update((name, InConstant(k)) for k, (name, _) in enumerate(program.constants))
    for step in steps:
        if isinstance(step, ExternCall):
            storage.update((name, OwnTensor()) for name in _allocated_by(step, program))
            if _may_keep_arguments(step, program):
                for name in sorted(reads(step)):
                    storage.setdefault(name, OwnTensor())
    for name in outputs:
        storage.setdefault(name, OwnTensor())
    # The arena is taken before the first step: what depends on a size decided later has memory of its own.
    late = {size for step in steps if not isinstance(step, Launch) for size in sizes_decided(step)}
    for name in lives.first:
        buffer = program.buffers[name]
        if name in storage:
            continue
        if buffer.device != program.device or not late.isdisjoint(ix.sizes_in(buffer.nbytes)):
            storage[name] = OwnTensor()
    return storage


def _allocated_by(call: ExternCall, program: Program) -> list[str]:
    """The results whose memory the operator itself allocates."""
    if is_computed(call):
        return []
    planned = call.writes_into
    return [r for r in call.results if r is not None and (not planned or program.buffers[r].opaque)]


def _peak_of_own_tensors(
    names: Sequence[str], lives: _Liveness, buffers: Mapping[str, Buffer], outputs: Collection[str]
) -> int:
    change = [0] * (lives.steps + 1)  # bytes that come alive before a step, less those gone by then
    for name in names:
        nbytes = ix.hint_of(buffers[name].nbytes)
        change[lives.first[name]] += nbytes
        change[lives.steps if name in outputs else lives.last[name] + 1] -= nbytes
    return max(accumulate(change), default=0)


def _donated_inputs(
    program: Program, steps: Sequence[Step], lives: _Liveness, outputs: Collection[str]
) -> list[_Region]:
    """The memory of inputs that is free after their last use.

    Not that of inputs which are handed out again, or are given to code that may hold on to them.
    """
    if any(isinstance(step, ExternCall) and resizes_storage(step.target) for step in steps):
        return []  # inputs may have no memory when the graph starts
    kept = {output.position for output in program.outputs if isinstance(output, PassInput)}
    taken: set[str] = set(outputs)
    for step in steps:
        if isinstance(step, ExternCall):
            held = isinstance(step.target, HigherOrder) or _may_keep_arguments(step, program)
            taken |= reads(step) if held else set()
    found = []
    for position, given in enumerate(program.inputs):
        if not given.donated or given.buffer is None or given.buffer in taken or position in kept:
            continue
        if program.buffers[given.buffer].device != program.device:
            continue
        nbytes = program.buffers[given.buffer].nbytes
        if isinstance(nbytes, int) and nbytes >= _LEAST_REUSED and given.buffer in lives.last:
            found.append(_Region(nbytes, lives.last[given.buffer] + 1, position))
    return sorted(found, key=lambda region: -region.capacity)[:_MOST_REUSED]


def _may_keep_arguments(call: ExternCall, program: Program) -> bool:
    """Whether a tensor may be held for longer than the arena lasts: by an input, a view, the user's own code, or an
    opaque tensor, such as a sparse one by its values."""
    target = call.target
    states = states_returned(target)
    returned = (name for k, name in enumerate(call.results) if k not in states)
    if any(program.buffers[name].opaque for name in (*returned, *call.mutates) if name is not None):
        return True
    if isinstance(target, HigherOrder):
        return any(
            isinstance(step, ExternCall) and _may_keep_arguments(step, body.program)
            for body in target.bodies
            for step in body.steps
        )
    return target in _SHARES_STORAGE or _returns_view(target) or (not is_torchs_own(target) and not is_native(call))


def _returns_view(target: torch._ops.OpOverload) -> bool:
    schema = target._schema
    return not schema.is_mutable and any(result.alias_info is not None for result in schema.returns)


def _touched(step: Step) -> list[str]:
    if isinstance(step, Launch):
        return list(step.buffers)
    return sorted(reads(step) | writes(step))


@dataclass
class _Region:
    """A stretch of memory that buffers share: the arena, or an input after its last use."""

    capacity: int = sys.maxsize
    free_from: int = 0
    position: int = -1
    used: int = 0
    placed: list[tuple[int, int, int, int]] = field(default_factory=list)  # offset, end, first, last

    def gap(self, size: int, begin: int, finish: int) -> int | None:
        """The lowest offset where ``size`` bytes are free from step ``begin`` to ``finish``."""
        if begin < self.free_from:
            return None
        offset = 0
        for low, high, _start, _end in sorted(p for p in self.placed if p[2] <= finish and begin <= p[3]):
            if low - offset >= size:
                break
            offset = max(offset, high)
        return offset if offset + size <= self.capacity else None

    def place(self, offset: int, size: int, begin: int, finish: int) -> Storage:
        self.placed.append((offset, offset + size, begin, finish))
        self.used = max(self.used, offset + size)
        return InArena(offset) if self.position < 0 else InDonatedInput(self.position, offset)


class _Packing:
    """Places such that buffers alive at the same time do not overlap: in the arena, and in ``donated`` inputs.

    Large buffers are placed first, each at the lowest gap among those it lives beside. What can be in no input comes
    before all others, so that the arena is no larger than that asks for, where the others find room in it or in inputs.
    One that finds none has a tensor of its own, which is made when as many bytes of inputs have been freed: the arena
    is held from the beginning.
    """

    def __init__(
        self, names: Sequence[str], lives: _Liveness, buffers: Mapping[str, Buffer], donated: Sequence[_Region]
    ) -> None:
        self._donated = donated
        self.arena = _Region()
        self.places: dict[str, Storage] = {}
        self._own: list[tuple[int, int, int]] = []  # bytes, first, last
        size = {name: -(-max(ix.hint_of(buffers[name].nbytes), 1) // _ALIGNMENT) * _ALIGNMENT for name in names}
        movable = {
            name: [r for r in donated if r.free_from <= lives.first[name] and size[name] <= r.capacity]
            for name in names
        }
        for name in sorted(names, key=lambda n: (bool(movable[n]), -size[n], lives.first[n])):
            self.places[name] = self._place(size[name], lives.first[name], lives.last[name], movable[name])

    def _place(self, size: int, begin: int, finish: int, inputs: Sequence[_Region]) -> Storage:
        offset = self.arena.gap(size, begin, finish)
        assert offset is not None
        if offset + size > self.arena.used:
            room = [(r, gap) for r in inputs if (gap := r.gap(size, begin, finish)) is not None]
            if room:
                # One in use already, else the smallest: the others are freed early.
                region, gap = min(room, key=lambda found: (not found[0].used, found[0].capacity, found[1]))
                return region.place(gap, size, begin, finish)
            freed = sum(r.capacity for r in self._donated if r.free_from <= begin and not r.used)
            held = sum(nbytes for nbytes, start, end in self._own if start <= finish and begin <= end)
            if inputs and size + held <= freed:
                self._own.append((size, begin, finish))
                return OwnTensor()
        return self.arena.place(offset, size, begin, finish)

    @property
    def reused(self) -> tuple[tuple[int, int], ...]:
        """Inputs in whose memory buffers lie, with the bytes of each that are used."""
        return tuple((region.position, region.used) for region in self._donated if region.used)


def _share_slots(
    names: Sequence[str], lives: _Liveness, buffers: Mapping[str, Buffer]
) -> tuple[dict[str, int], tuple[tuple[Extent, ...], ...]]:
    """A slot for each buffer, and the sizes in bytes that share a slot.

    Buffers of one slot are never alive together. Which of them is the largest may depend on the sizes of the call, so
    a buffer goes to a slot that holds its very size already, else to the one nearest in typical size.
    """
    numbers: dict[str, int] = {}
    contents: list[list[str]] = []
    for name in sorted(names, key=lambda n: (-ix.hint_of(buffers[n].nbytes), lives.first[n])):
        free = [k for k, others in enumerate(contents) if not any(lives.overlap(name, other) for other in others)]
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
