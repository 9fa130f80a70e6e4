"""From a fused group to its kernel: which statements run in which phase, and what is kept between phases."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from torchkiln.ir import expr as ex
from torchkiln.ir import index as ix
from torchkiln.ir import ops
from torchkiln.ir.expr import Expr, Load, Reduced
from torchkiln.ir.index import Index, Size, Var
from torchkiln.ir.program import Buffer, Loop
from torchkiln.schedule.dependencies import extent_product
from torchkiln.schedule.fusion import FusedGroup
from torchkiln.schedule.kernel import Accumulate, Kernel, Parameter, Phase, Scratch, Statement, Store
from torchkiln.schedule.loops import LoopNest, arrange, choose_tile, move_last, name_sizes
from torchkiln.schedule.parallel import parallelism
from torchkiln.schedule.vectors import choose_vector

# Values dearer than this are kept from one phase to the next instead of being computed again: a row of scratch
# costs about two loads and a store per element, a transcendental function ten times that.
_KEEP_COST = 10
# Longest row kept in scratch, in bytes: it stays within L2, and the few rows one kernel keeps fit the smallest stacks
# threads are given (a row whose length is known only at run time is not on the stack).
_SCRATCH_BYTES = 1 << 18


@dataclass(frozen=True)
class BuiltKernel:
    """A kernel and the buffers and sizes its parameters stand for, in order."""

    kernel: Kernel
    buffers: tuple[str, ...]
    sizes: tuple[Size, ...]


@dataclass
class _Body:
    """Statements by phase while a group is taken apart."""

    before: list[list[Store]]
    inside: list[list[Statement]]

    def phase(self, number: int) -> None:
        while len(self.before) <= number:
            self.before.append([])
            self.inside.append([])


def build_kernel(
    group: FusedGroup,
    buffers: Mapping[str, Buffer],
    stored: set[str],
    *,
    parallel_threshold: int,
) -> BuiltKernel:
    """Make the kernel of ``group``. ``stored`` names the targets that are read outside it."""
    order: dict[str, int] = {}
    vector = choose_vector(group.rows, group.columns, group.members, buffers)
    body, scratch = _statements(group, buffers, stored, order, keep_rows=vector not in group.rows)
    phases = [Phase(tuple(b), tuple(i)) for b, i in zip(body.before, body.inside, strict=True)]
    nest = arrange(LoopNest(group.rows, group.columns, vector, tuple(phases), tuple(scratch)))
    names = tuple(order)
    tile = choose_tile(nest)
    if tile is not None:
        nest = move_last(nest, tile)
        tile = nest.rows[-2]
    nest, sizes = name_sizes(nest)
    tile = None if tile is None else nest.rows[-2]
    work = parallelism(nest, tile, parallel_threshold)
    kernel = Kernel(
        tuple(Parameter(buffers[name].dtype) for name in names),
        tuple(Size(f"n{k}", *size.bounds, size.hint) for k, size in enumerate(sizes)),
        nest.rows,
        nest.columns,
        nest.vector,
        tile,
        work.rows,
        work.blocks,
        work.block,
        nest.phases,
        nest.scratch,
        work.extent,
        work.grain,
        bool(nest.scratch) and not isinstance(extent_product(nest.columns), int),
    )
    return BuiltKernel(kernel, names, sizes)


def _statements(
    group: FusedGroup, buffers: Mapping[str, Buffer], stored: set[str], order: dict[str, int], *, keep_rows: bool
) -> tuple[_Body, list[Scratch]]:
    rows = frozenset(group.rows)
    columns = frozenset(group.columns)
    column_points = ix.hint_of(extent_product(group.columns))
    body = _Body([], [])
    scratch: list[Scratch] = []
    available: dict[str, Expr] = {}  # target -> expression of its value at the current point
    phase_of: dict[str, int] = {}  # reduction name -> phase that computes it
    kept: dict[str, tuple[int, Expr]] = {}  # column-level target -> (phase, how to read it back later)
    flat_column = ix.flatten(
        [ix.of(v) for v in group.columns], ix.contiguous_strides([v.extent for v in group.columns])
    )

    def parameter(name: str) -> int:
        return order.setdefault(name, len(order))

    def offset(name: str, subscripts: Sequence[Index]) -> Index:
        return ix.flatten(subscripts, buffers[name].strides)

    def needed_phase(value: Expr) -> int:
        return max((phase_of[n.name] + 1 for n in ex.walk((value,)) if isinstance(n, Reduced)), default=0)

    def resolve(value: Expr, at_phase: int | None) -> Expr:
        """Replace loads of members by their values, and of memory by flat parameter accesses."""

        def leaf(node: Expr) -> Expr | None:
            if not isinstance(node, Load):
                return None
            if node.buffer in available:
                if at_phase is not None and node.buffer in kept and kept[node.buffer][0] < at_phase:
                    return kept[node.buffer][1]
                return available[node.buffer]
            if node.buffer.startswith("%"):
                return None
            return Load(f"%{parameter(node.buffer)}", (offset(node.buffer, node.subscripts),), node.dtype)

        return ex.rewrite(value, leaf, {}, {})

    for number, member in enumerate(group.members):
        value = resolve(member.value, None)
        phase = needed_phase(value)
        if any(k < phase for k, _ in kept.values()):
            value = resolve(member.value, phase)
        if member.reducer is not None:
            name = f"red{number}"
            body.phase(phase)
            body.inside[phase].append(Accumulate(name, member.reducer, value, flat_column))
            phase_of[name] = phase
            result: Expr = Reduced(name, rows, _result_dtype(member, value))
            result = ex.cast(result, buffers[member.target].dtype)
            available[member.target] = result
            if member.target in stored:
                body.phase(phase + 1)
                body.before[phase + 1].append(
                    Store(parameter(member.target), offset(member.target, member.store), result)
                )
            continue
        available[member.target] = value
        row_level = bool(columns) and not _varies(member, columns)  # stored once per row
        body.phase(phase)
        is_stored = member.target in stored
        if is_stored:
            store = Store(parameter(member.target), offset(member.target, member.store), value)
            if row_level:
                body.before[phase].append(store)
            else:
                body.inside[phase].append(store)
        if row_level or not columns:
            continue
        if is_stored and buffers[member.target].dtype == value.dtype:
            place = (offset(member.target, member.store),)
            kept[member.target] = (phase, Load(f"%{parameter(member.target)}", place, value.dtype))
        elif (
            keep_rows
            and ops.cost(value) >= _KEEP_COST
            and column_points * value.dtype.itemsize * (len(scratch) + 1) <= _SCRATCH_BYTES
            and _read_later(member.target, group.members[number + 1 :])
        ):
            row = Scratch(f"s{len(scratch)}", value.dtype)
            scratch.append(row)
            body.inside[phase].append(Store(row.name, flat_column, value))
            kept[member.target] = (phase, Load(row.name, (flat_column,), value.dtype))
    return body, scratch


def _result_dtype(member: Loop, value: Expr) -> torch.dtype:
    return torch.int64 if member.reducer in ("argmax", "argmin") else value.dtype


def _varies(member: Loop, columns: frozenset[Var]) -> bool:
    return bool(columns & frozenset().union(*(s.variables() for s in member.store))) if member.store else False


def _read_later(target: str, members: Sequence[Loop]) -> bool:
    return any(load.buffer == target for m in members for load in ex.loads(m.value))
