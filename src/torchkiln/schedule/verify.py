"""The rules of kernels and plans. What breaks one raises :class:`VerificationError`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache, partial

from torchkiln.ir import index as ix
from torchkiln.ir.expr import (
    Expr,
    FlatLoad,
    IndexValue,
    Interleaved,
    KernelMemory,
    Load,
    Masked,
    Parameter,
    Reduced,
    ScratchRow,
    walk,
)
from torchkiln.ir.higher_order import HigherOrder
from torchkiln.ir.index import Extent, Index, Remainder, Var
from torchkiln.ir.program import INDEX_REDUCERS, REDUCERS, ExternCall
from torchkiln.ir.verify import require, verify_value
from torchkiln.schedule.dependencies import extent_product, output_buffers, reads, writes
from torchkiln.schedule.gpu import MOST_THREADS, WARP
from torchkiln.schedule.kernel import Accumulate, CpuMapping, GpuMapping, Kernel, LoopNest, Statement, Store
from torchkiln.schedule.plan import InArena, InConstant, InDonatedInput, InInput, InSlot, Launch, OwnTensor, Plan, Step


@lru_cache(maxsize=256)
def verify_kernel(kernel: Kernel) -> None:
    """Loads and stores name parameters and scratch rows of their dtypes, and phases read what earlier ones made.

    How long parameters are is known where the kernel is launched.
    """
    nest, mapping = kernel.nest, kernel.mapping
    for loops in (nest.rows, nest.columns):
        require(nest.lane not in loops[:-1], "the lane variable is not the innermost one", kernel)
    variables = (*nest.rows, *nest.columns)
    for chosen in (nest.lane, mapping.tile):
        require(chosen is None or chosen in variables, f"{chosen} is no loop", kernel)
    require(mapping.tile is None or mapping.tile is not nest.lane, "the tile variable is the lane's", kernel)
    require(0 <= mapping.parallel_rows <= len(nest.rows), "more parallel rows than rows", kernel)
    if isinstance(mapping, GpuMapping):
        _verify_threads(kernel, mapping)
    if nest.folded > 1:
        _verify_folded(kernel)
    reduced: set[str] = set()
    rows: set[ScratchRow] = set()
    for phase in nest.phases:
        for store in phase.before:
            _statement(kernel, store, nest.rows, reduced, rows)
        made: set[str] = set()
        kept: set[ScratchRow] = set()
        for statement in phase.inside:
            _statement(kernel, statement, variables, reduced, rows | kept)
            if isinstance(statement, Accumulate):
                require(statement.name not in reduced | made, f"{statement.name} is reduced twice", kernel)
                made.add(statement.name)
            elif isinstance(statement.memory, ScratchRow):
                kept.add(statement.memory)
        reduced |= made
        rows |= kept
    length = extent_product(nest.columns)
    for memory, offset in _accesses(nest):
        if isinstance(memory, ScratchRow):
            _inside(offset, length, memory, kernel)


def _verify_folded(kernel: Kernel) -> None:
    """Runs of lanes that have one result lie in one vector."""
    nest, lanes = kernel.nest, kernel.mapping.lanes
    require(nest.folded & (nest.folded - 1) == 0, "runs of lanes are no power of two", kernel)
    of_rows = isinstance(kernel.mapping, CpuMapping) and nest.lane in nest.rows
    require(of_rows, "the lanes are not those of rows", kernel)
    whole = nest.lane is not None and isinstance(nest.lane.extent, int) and nest.lane.extent % lanes == 0
    require(whole and lanes % nest.folded == 0, "a run of lanes is in two vectors", kernel)
    reducers = {s.reducer for s in nest.statements if isinstance(s, Accumulate)}
    require(reducers.isdisjoint(INDEX_REDUCERS), "places of runs of lanes", kernel)


def _verify_threads(kernel: Kernel, mapping: GpuMapping) -> None:
    """Threads of a row meet in one warp or are the whole block, and what they keep of the row is all of it."""
    nest, shared = kernel.nest, mapping.row_threads
    require(mapping.threads % WARP == 0 and 0 < mapping.threads <= MOST_THREADS, "no block has so many threads", kernel)
    require(shared & (shared - 1) == 0, "the threads of a row are no power of two", kernel)
    if mapping.tile is not None:
        require(shared == mapping.threads, "a square is shared by parts of a block", kernel)
        require(nest.rows[-2:] == (mapping.tile, nest.lane), "tile and lane are not the last rows", kernel)
        require(mapping.block % (mapping.lanes * WARP) == 0, "a square is no whole number of warps", kernel)
        return
    require(shared == 1 or bool(nest.columns), "threads share a row that has no columns", kernel)
    require(mapping.items == 1 or shared == 1, "threads share several rows", kernel)
    require(mapping.groups == 1 or len(nest.columns) > 1, "groups share one column", kernel)
    if nest.lane in nest.columns:
        require(shared <= WARP or shared == mapping.threads, "a row is shared by parts of a block", kernel)
    elif shared > 1:
        require(mapping.rows_per_block % WARP == 0, "a warp has iterations of several rows", kernel)
        require(_has_whole_lanes(nest, mapping), "some threads of a block have lanes that others do not have", kernel)
    require(not nest.scratch, "there are no scratch rows on a GPU", kernel)
    if mapping.parts:
        kept = mapping.parts * mapping.lanes * shared
        whole = nest.lane is not None and isinstance(nest.lane.extent, int) and nest.lane.extent <= kept
        require(whole and nest.columns == (nest.lane,), "threads keep a part of a row", kernel)


def _has_whole_lanes(nest: LoopNest, mapping: GpuMapping) -> bool:
    extent = 1 if nest.lane is None else nest.lane.extent
    return mapping.lanes == 1 or (isinstance(extent, int) and extent % mapping.lanes == 0)


def _statement(
    kernel: Kernel, statement: Statement, variables: tuple[Var, ...], reduced: set[str], kept: set[ScratchRow]
) -> None:
    """``reduced`` and ``kept`` are the reductions and scratch rows that earlier phases made."""
    verify_value(statement.value, variables, kernel)
    index = statement.offset if isinstance(statement, Store) else statement.index
    require(index.variables() <= frozenset(variables), lambda: f"no loop binds a variable of {index}", kernel)
    indices: list[Index] = [index]
    for node in walk((statement.value,)):
        require(not isinstance(node, Load), "a load of a program's buffer", kernel)
        if isinstance(node, FlatLoad):
            memory = node.memory
            require(_dtype_of(kernel.nest, memory) == node.dtype, f"{memory} is not of {node.dtype}", kernel)
            require(isinstance(memory, Parameter) or memory in kept, f"{memory} is not stored yet", kernel)
            indices.append(node.offset)
        elif isinstance(node, Reduced):
            require(node.name in reduced, f"{node} is not reduced yet", kernel)
        elif isinstance(node, Interleaved):
            _interleaved(kernel, statement, node)
        elif isinstance(node, IndexValue):
            indices.append(node.index)
    for index in indices:
        missing = ix.sizes_in(index) - frozenset(kernel.nest.sizes)
        require(not missing, f"size {', '.join(map(str, missing))} is not given", kernel)
    if isinstance(statement, Accumulate):
        require(statement.reducer in REDUCERS, f"there is no reduction {statement.reducer}", kernel)
    else:
        stored = _dtype_of(kernel.nest, statement.memory)
        given = statement.value.dtype
        require(stored == given, f"{given} into {statement.memory}, of {stored}", kernel)


def _interleaved(kernel: Kernel, statement: Statement, value: Interleaved) -> None:
    """It is what a kernel without columns stores, and the stores of neighbouring lanes leave no gaps."""
    stored = isinstance(statement, Store) and statement.value is value and not kernel.nest.columns
    require(stored, "interleaved values that are not stored by a kernel without columns", kernel)
    lane = kernel.nest.lane
    apart = lane is not None and isinstance(statement, Store) and statement.offset.coefficient(lane)
    require(apart == len(value.parts), f"{len(value.parts)} interleaved values {apart} apart", kernel)


def _dtype_of(nest: LoopNest, memory: KernelMemory) -> object:
    """None where there is no such parameter or scratch row."""
    dtypes = nest.parameters if isinstance(memory, Parameter) else nest.scratch
    return dtypes[memory.number] if memory.number < len(dtypes) else None


def verify_plan(plan: Plan) -> None:
    """What a step reads and the graph returns is there, inside its memory, which no two buffers have at one time."""
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    there = {name for name, place in plan.storage.items() if not isinstance(place, _OURS)}
    require(len(plan.frees) == len(plan.steps), "frees of another number of steps", plan.frees)
    freed: set[str] = set()
    for number, step in enumerate(plan.steps):
        where = step.kernel if isinstance(step, Launch) else step
        read, written = _touched(step, where)
        for name in sorted(read | written):
            require(name in plan.storage, f"{name} has no place", where)
            require(name not in freed, f"{name} was freed before", where)
            first.setdefault(name, number)
            last[name] = number
        for name in sorted(read):
            filled = name in there or 0 in plan.program.buffers[name].shape
            require(filled, f"{name} is read before it is written", where)
        there |= written
        for name in plan.frees[number]:
            require(isinstance(plan.storage[name], OwnTensor), f"{name} is freed and has no memory of its own", where)
            freed.add(name)
        if isinstance(step, ExternCall) and isinstance(step.target, HigherOrder):
            for body in step.target.bodies:
                verify_plan(body)
        if isinstance(step, Launch):
            verify_kernel(step.kernel)
            _launch(plan, step, where)
    outputs = output_buffers(plan.program)
    for name in sorted(outputs - there):
        require(0 in plan.program.buffers[name].shape, f"{name} is returned and never written", plan.program.outputs)
    for name, place in plan.storage.items():
        if isinstance(place, OwnTensor) and name in first:
            require((name in freed) != (name in outputs), f"{name} is never freed, or freed and returned", place)
    _places(plan, first, last, outputs)


_OURS = (InArena, InSlot, InDonatedInput, OwnTensor)


def _touched(step: Step, where: object) -> tuple[set[str], set[str]]:
    """What a step reads, and what it writes."""
    if not isinstance(step, Launch):
        return reads(step) - (writes(step) - _mutated(step)), writes(step)
    nest = step.kernel.nest
    require(len(step.buffers) == len(nest.parameters), f"{len(step.buffers)} buffers", where)
    loaded: set[str] = set()
    stored: set[str] = set()
    for phase in nest.phases:
        statements = (*phase.before, *phase.inside)
        own = _buffers(step, (s.memory for s in statements if isinstance(s, Store)))
        nodes = walk(tuple(statement.value for statement in statements))
        loaded |= _buffers(step, (node.memory for node in nodes if isinstance(node, FlatLoad))) - stored - own
        stored |= own
    return loaded, stored


def _buffers(step: Launch, memories: Iterable[KernelMemory]) -> set[str]:
    return {step.buffers[memory.number] for memory in memories if isinstance(memory, Parameter)}


def _mutated(step: Step) -> set[str]:
    return set(step.mutates) if isinstance(step, ExternCall) else set()


def _launch(plan: Plan, step: Launch, where: object) -> None:
    nest = step.kernel.nest
    require(len(step.sizes) == len(nest.sizes), f"{len(step.sizes)} numbers for {len(nest.sizes)} sizes", where)
    buffers = [plan.program.buffers[name] for name in step.buffers]
    for buffer, dtype in zip(buffers, nest.parameters, strict=True):
        require(buffer.dtype == dtype, f"{buffer.name} is of {buffer.dtype}, not {dtype}", where)
    mapping = step.kernel.mapping
    device, values = ("cuda", mapping.values) if isinstance(mapping, GpuMapping) else ("cpu", ())
    for number, buffer in enumerate(buffers):
        wanted = "cpu" if number in values else device
        require(buffer.device == wanted, f"{buffer.name} is not memory of {wanted}", where)
        require(number not in values or not buffer.shape, f"{buffer.name} is no number", where)
    stored = {s.memory for s in nest.statements if isinstance(s, Store) and isinstance(s.memory, Parameter)}
    require(all(memory.number not in values for memory in stored), "a number on the CPU is stored", where)
    for memory, offset in _accesses(nest):
        if isinstance(memory, Parameter):
            buffer = buffers[memory.number]
            _inside(offset, buffer.elements, buffer.name, where)


def _accesses(nest: LoopNest) -> Iterator[tuple[KernelMemory, Index]]:
    """What a nest reads and writes at every point: the memory and the offset; no loads under a mask."""
    for phase in nest.phases:
        for statements, loops in ((phase.before, nest.rows), (phase.inside, (*nest.rows, *nest.columns))):
            if any(ix.bounds_of(variable.extent)[1] <= 0 for variable in loops):
                continue  # no point is computed
            for statement in statements:
                if isinstance(statement, Store):
                    yield statement.memory, statement.offset
                    if isinstance(statement.value, Interleaved):
                        yield statement.memory, statement.offset + (len(statement.value.parts) - 1)
                guards = [node for node in walk((statement.value,)) if isinstance(node, Masked)]
                guarded = {load for guard in guards for load in _flat_loads(guard.body)}
                yield from ((o.memory, o.offset) for o in _flat_loads(statement.value) if o not in guarded)


def _flat_loads(value: Expr) -> Iterator[FlatLoad]:
    return (node for node in walk((value,)) if isinstance(node, FlatLoad))


def _inside(offset: Index, elements: Extent, memory: object, where: object) -> None:
    if isinstance(elements, int) and _has_exact_bounds(offset):
        low, high = offset.bounds
        said = partial("offset {} of {} is not in {}".format, offset, memory, elements)
        require(low >= 0 and high < elements, said, where)


def _has_exact_bounds(index: Index) -> bool:
    """Whether some point has the least value that is known of ``index``, and some the largest.

    Not where it depends on sizes, where a variable is in several terms, nor for remainders.
    """
    atoms = list(index.atoms())
    used = [variable for atom in atoms for variable in ix.atom_variables(atom)]
    plain = not any(isinstance(atom, Remainder) for atom in atoms)
    return plain and len(set(used)) == len(used) and not ix.sizes_in(index)


def _places(plan: Plan, first: dict[str, int], last: dict[str, int], outputs: set[str]) -> None:
    """Memory that several buffers have in turn."""
    buffers, inputs = plan.program.buffers, plan.program.inputs
    taken: dict[object, list[tuple[str, int, int]]] = {}  # region: buffer, first byte, end
    for name, place in plan.storage.items():
        if name not in first or not isinstance(place, (InArena, InSlot, InDonatedInput)):
            continue
        require(name not in outputs, f"{name} is returned and has no memory of its own", place)
        require(buffers[name].device == plan.program.device, f"{name} is not memory of {plan.program.device}", place)
        if isinstance(place, InSlot):
            taken.setdefault(place, []).append((name, 0, 1))
            continue
        nbytes = buffers[name].nbytes
        assert isinstance(nbytes, int)
        require(place.offset % 64 == 0, f"{name} is not aligned", place)
        end = place.offset + nbytes
        if isinstance(place, InArena):
            require(end <= plan.arena_bytes, f"{name} ends at {end} of {plan.arena_bytes} bytes", place)
            taken.setdefault("arena", []).append((name, place.offset, end))
            continue
        given = inputs[place.position].buffer
        assert given is not None
        size = buffers[given].nbytes
        require(isinstance(size, int) and end <= size, f"{name} ends at {end} of {size} bytes", place)
        require(last.get(given, -1) < first[name], f"{name} is written while {given} is read", place)
        taken.setdefault(place.position, []).append((name, place.offset, end))
    for region, places in taken.items():
        _disjoint(places, first, last, region)
    for name, place in plan.storage.items():
        if isinstance(place, InInput):
            require(name in _at(place.position, [i.buffer for i in inputs]), f"{name} is not that input", place)
        elif isinstance(place, InConstant):
            constants = [constant for constant, _ in plan.program.constants]
            require(name in _at(place.position, constants), f"{name} is not that constant", place)


def _at(position: int, names: Sequence[str | None]) -> Sequence[str | None]:
    """The name at ``position``, if there is one."""
    return names[position : position + 1]


def _disjoint(places: list[tuple[str, int, int]], first: dict[str, int], last: dict[str, int], region: object) -> None:
    for k, (name, begin, end) in enumerate(places):
        for other, low, high in places[:k]:
            together = first[name] <= last[other] and first[other] <= last[name]
            require(
                not together or end <= low or high <= begin, f"{name} and {other} share memory while both live", region
            )
