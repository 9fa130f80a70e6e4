"""The rules of kernels and plans. What breaks one raises :class:`VerificationError`."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

from torchkiln.ir import index as ix
from torchkiln.ir.expr import Expr, IndexValue, Load, Reduced, walk
from torchkiln.ir.higher_order import HigherOrder
from torchkiln.ir.index import Index, Var
from torchkiln.ir.program import ExternCall
from torchkiln.ir.verify import REDUCERS, require, verify_value
from torchkiln.schedule.dependencies import output_buffers, reads, writes
from torchkiln.schedule.kernel import Accumulate, Kernel, Statement, Store
from torchkiln.schedule.plan import InArena, InInput, InSlot, InSpareInput, Launch, OwnTensor, Plan, Step


@lru_cache(maxsize=256)
def verify_kernel(kernel: Kernel) -> None:
    """Loads and stores name parameters and scratch rows of their dtypes, and phases read what earlier ones made."""
    for loops in (kernel.rows, kernel.columns):
        require(kernel.vector not in loops[:-1], "the vector variable is not the innermost one", kernel)
    variables = (*kernel.rows, *kernel.columns)
    for chosen in (kernel.vector, kernel.tile):
        require(chosen is None or chosen in variables, f"{chosen} is no loop", kernel)
    require(kernel.tile is None or kernel.tile is not kernel.vector, "the tile variable is the vector's", kernel)
    require(0 <= kernel.parallel_rows <= len(kernel.rows), "more parallel rows than rows", kernel)
    reduced: set[str] = set()
    rows: set[str] = set()
    for phase in kernel.phases:
        for store in phase.before:
            _statement(kernel, store, kernel.rows, reduced, rows)
        made: set[str] = set()
        kept: set[str] = set()
        for statement in phase.inside:
            _statement(kernel, statement, variables, reduced, rows | kept)
            if isinstance(statement, Accumulate):
                require(statement.name not in reduced | made, f"{statement.name} is reduced twice", kernel)
                made.add(statement.name)
            elif isinstance(statement.parameter, str):
                kept.add(statement.parameter)
        reduced |= made
        rows |= kept


def _statement(
    kernel: Kernel, statement: Statement, variables: tuple[Var, ...], reduced: set[str], kept: set[str]
) -> None:
    """``reduced`` and ``kept`` are the reductions and scratch rows that earlier phases made."""
    verify_value(statement.value, variables, kernel)
    position = statement.offset if isinstance(statement, Store) else statement.position
    require(position.variables() <= frozenset(variables), lambda: f"no loop binds a variable of {position}", kernel)
    indices: list[Index] = [position]
    for node in walk((statement.value,)):
        if isinstance(node, Load):
            require(_dtype_of(kernel, node.buffer) == node.dtype, f"{node.buffer} is not of {node.dtype}", kernel)
            require(node.buffer.startswith("%") or node.buffer in kept, f"{node.buffer} is not stored yet", kernel)
            indices += node.subscripts
        elif isinstance(node, Reduced):
            require(node.name in reduced, f"{node} is not reduced yet", kernel)
        elif isinstance(node, IndexValue):
            indices.append(node.index)
    for index in indices:
        missing = ix.sizes_in(index) - frozenset(kernel.sizes)
        require(not missing, f"size {', '.join(map(str, missing))} is not given", kernel)
    if isinstance(statement, Accumulate):
        require(statement.reducer in REDUCERS, f"there is no reduction {statement.reducer}", kernel)
    else:
        name = statement.parameter if isinstance(statement.parameter, str) else f"%{statement.parameter}"
        stored = _dtype_of(kernel, name)
        require(stored == statement.value.dtype, f"{statement.value.dtype} into {name}, of {stored}", kernel)


def _dtype_of(kernel: Kernel, name: str) -> object:
    """The dtype of a parameter (``%3``) or a scratch row; None where there is none."""
    if name.startswith("%"):
        number = int(name[1:])
        return kernel.parameters[number].dtype if number < len(kernel.parameters) else None
    return next((row.dtype for row in kernel.scratch if row.name == name), None)


def verify_plan(plan: Plan) -> None:
    """What a step reads is there, and no two buffers that are needed at one time share memory."""
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
    for name, place in plan.storage.items():
        if isinstance(place, OwnTensor) and name in first:
            require((name in freed) != (name in outputs), f"{name} is never freed, or freed and returned", place)
    _places(plan, first, last, outputs)


_OURS = (InArena, InSlot, InSpareInput, OwnTensor)


def _touched(step: Step, where: object) -> tuple[set[str], set[str]]:
    """What a step reads, and what it writes."""
    if not isinstance(step, Launch):
        return reads(step) - (writes(step) - _mutated(step)), writes(step)
    kernel = step.kernel
    require(len(step.buffers) == len(kernel.parameters), f"{len(step.buffers)} buffers", where)
    loaded: set[str] = set()
    stored: set[str] = set()
    for phase in kernel.phases:
        statements = (*phase.before, *phase.inside)
        own = {
            step.buffers[s.parameter] for s in statements if isinstance(s, Store) and isinstance(s.parameter, int)
        }
        values = (statement.value for statement in statements)
        loaded |= {step.buffers[int(name[1:])] for name in _loaded(values)} - stored - own
        stored |= own
    return loaded, stored


def _mutated(step: Step) -> set[str]:
    return set(step.mutates) if isinstance(step, ExternCall) else set()


def _loaded(values: Iterable[Expr]) -> set[str]:
    nodes = walk(tuple(values))
    return {node.buffer for node in nodes if isinstance(node, Load) and node.buffer.startswith("%")}


def _launch(plan: Plan, step: Launch, where: object) -> None:
    kernel = step.kernel
    require(len(step.sizes) == len(kernel.sizes), f"{len(step.sizes)} numbers for {len(kernel.sizes)} sizes", where)
    for name, parameter in zip(step.buffers, kernel.parameters, strict=True):
        found = plan.program.buffers[name].dtype
        require(found == parameter.dtype, f"{name} is of {found}, not {parameter.dtype}", where)


def _places(plan: Plan, first: dict[str, int], last: dict[str, int], outputs: set[str]) -> None:
    """Memory that several buffers have in turn."""
    buffers, inputs = plan.program.buffers, plan.program.inputs
    taken: dict[object, list[tuple[str, int, int]]] = {}  # region: buffer, first byte, end
    for name, place in plan.storage.items():
        if name not in first or not isinstance(place, (InArena, InSlot, InSpareInput)):
            continue
        require(name not in outputs, f"{name} is returned and has no memory of its own", place)
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
            require(inputs[place.position].buffer == name, f"{name} is not that input", place)


def _disjoint(
    places: list[tuple[str, int, int]], first: dict[str, int], last: dict[str, int], region: object
) -> None:
    for k, (name, begin, end) in enumerate(places):
        for other, low, high in places[:k]:
            together = first[name] <= last[other] and first[other] <= last[name]
            require(
                not together or end <= low or high <= begin, f"{name} and {other} share memory while both live", region
            )
