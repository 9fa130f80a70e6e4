"""From a fused group to its kernel: which statements run in which phase, and what is kept between phases."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from torchkiln.ir import expr as ex
from torchkiln.ir import index as ix
from torchkiln.ir.expr import Expr, FlatLoad, Load, Parameter, Reduced, ScratchRow
from torchkiln.ir.index import Index, Size, Var
from torchkiln.ir.program import Buffer, Loop, reduced_dtype
from torchkiln.schedule.cpu import map_to_cpu, most_lanes
from torchkiln.schedule.dependencies import extent_product
from torchkiln.schedule.filled_lanes import fill_lanes
from torchkiln.schedule.folded_lanes import fold_lanes
from torchkiln.schedule.gpu import has_tiles, map_to_gpu
from torchkiln.schedule.group import FusedGroup
from torchkiln.schedule.interleave import interleave
from torchkiln.schedule.kernel import Accumulate, Kernel, LoopNest, Phase, Statement, Store
from torchkiln.schedule.lanes import choose_lane
from torchkiln.schedule.limits import Limits
from torchkiln.schedule.loops import arrange, fill_tiles, move_last, name_sizes
from torchkiln.schedule.pieces import in_pieces
from torchkiln.schedule.tiles import choose_tile
from torchkiln.target import Target

# Bits of the vectors from which on loads under a guard of their own in each lane cost next to nothing: AVX-512.
_CHEAP_MASKS = 512


@dataclass(frozen=True)
class BuiltKernel:
    """A kernel and the buffers and sizes its parameters stand for, in order."""

    kernel: Kernel
    buffers: tuple[str, ...]
    sizes: tuple[Size | int, ...]


@dataclass(frozen=True)
class KernelBuilder:
    """Makes kernels for ``target``; the threshold is that of :func:`torchkiln.schedule.cpu.map_to_cpu`."""

    limits: Limits
    target: Target
    parallel_threshold: int

    def build(self, group: FusedGroup, buffers: Mapping[str, Buffer], stored: set[str]) -> BuiltKernel:
        """Make the kernel of ``group``. ``stored`` names the targets that are read outside it."""
        lane = choose_lane(group, buffers, self.limits)
        statements = _Statements(group, buffers, stored, self.limits, keep_rows=lane not in group.rows)
        nest = interleave(arrange(statements.nest(lane), self.limits), self.limits)
        tile = choose_tile(nest, self.limits)
        place: int | None = None
        if self.target.is_gpu:
            if tile is not None and has_tiles(nest, tile):
                nest, place = move_last(nest, tile)
            nest, sizes = name_sizes(nest)
            gpu_mapping = map_to_gpu(nest, None if place is None else nest.rows[place])
            on_cpu = tuple(k for k, name in enumerate(statements.parameters) if buffers[name].device == "cpu")
            return BuiltKernel(Kernel(nest, replace(gpu_mapping, values=on_cpu)), tuple(statements.parameters), sizes)
        if tile is not None:
            filled = nest if nest.columns else fill_tiles(nest, tile, self.limits.tile)
            if filled is not None:
                nest, place = move_last(filled, tile)
        if place is None:
            nest = in_pieces(nest, self.limits, cheap_masks=self.target.vector_bits == _CHEAP_MASKS)
            nest = fold_lanes(nest, self.target.vector_bits, self.limits)
            nest = fill_lanes(nest, most_lanes(nest, self.target.vector_bits))
        nest, sizes = name_sizes(nest)
        tile = None if place is None else (*nest.rows, *nest.columns)[place]
        mapping = map_to_cpu(nest, self.limits, self.target.vector_bits, self.parallel_threshold, tile)
        return BuiltKernel(Kernel(nest, mapping), tuple(statements.parameters), sizes)


class _Statements:
    """The statements of a group by phase. Parameters are numbered as they come."""

    def __init__(
        self, group: FusedGroup, buffers: Mapping[str, Buffer], stored: set[str], limits: Limits, *, keep_rows: bool
    ) -> None:
        self._group, self._buffers, self._stored, self._limits = group, buffers, stored, limits
        self._keep_rows = keep_rows
        self._columns = frozenset(group.columns)
        self.parameters: dict[str, Parameter] = {}
        self._scratch: list[torch.dtype] = []
        self._before: list[list[Store]] = []
        self._inside: list[list[Statement]] = []
        self._values: dict[str, Expr] = {}  # target -> its value at the current point
        self._phase_of: dict[str, int] = {}  # reduction -> phase that computes it
        self._kept: dict[str, tuple[int, FlatLoad]] = {}  # target -> after which phase it is read back, and how
        extents = [v.extent for v in group.columns]
        self._flat_column = ix.flatten([ix.of(v) for v in group.columns], ix.contiguous_strides(extents))
        for number, member in enumerate(group.members):
            self._add(number, member)

    def nest(self, lane: Var | None) -> LoopNest:
        phases = tuple(Phase(tuple(b), tuple(i)) for b, i in zip(self._before, self._inside, strict=True))
        dtypes = tuple(self._buffers[name].dtype for name in self.parameters)
        return LoopNest(self._group.rows, self._group.columns, lane, phases, dtypes, tuple(self._scratch))

    def _add(self, number: int, member: Loop) -> None:
        value = self._resolve(member.value, None)
        phase = self._phase_for(value)
        if any(kept_in < phase for kept_in, _ in self._kept.values()):
            value = self._resolve(member.value, phase)
        self._open(phase)
        if member.reducer is not None:
            self._add_reduction(f"red{number}", member, value, phase)
            return
        self._values[member.target] = value
        per_row = bool(self._columns) and all(self._columns.isdisjoint(s.variables()) for s in member.store)
        if member.target in self._stored:
            (self._before if per_row else self._inside)[phase].append(self._store(member, value))
        if self._columns and not per_row:
            self._keep(member, value, phase, self._group.members[number + 1 :])

    def _add_reduction(self, name: str, member: Loop, value: Expr, phase: int) -> None:
        assert member.reducer is not None
        self._inside[phase].append(Accumulate(name, member.reducer, value, self._flat_column))
        self._phase_of[name] = phase
        dtype = reduced_dtype(member.reducer, value.dtype)
        reduced: Expr = Reduced(name, frozenset(self._group.rows), dtype)
        reduced = ex.cast(reduced, self._buffers[member.target].dtype)
        self._values[member.target] = reduced
        if member.target in self._stored:
            self._open(phase + 1)
            self._before[phase + 1].append(self._store(member, reduced))

    def _keep(self, member: Loop, value: Expr, phase: int, later: Sequence[Loop]) -> None:
        """Let later phases read ``value`` back where it is stored anyway, or costs enough for a row of scratch."""
        row_length = ix.hint_of(extent_product(self._group.columns))
        if member.target in self._stored and self._buffers[member.target].dtype == value.dtype:
            load = FlatLoad(self._parameter(member.target), self._offset(member.target, member.store), value.dtype)
            self._kept[member.target] = phase, load
        elif (
            self._keep_rows
            and ex.cost(value) >= self._limits.kept_cost
            and row_length * value.dtype.itemsize * (len(self._scratch) + 1) <= self._limits.scratch_bytes
            and any(load.buffer == member.target for reader in later for load in ex.loads(reader.value))
        ):
            row = ScratchRow(len(self._scratch))
            self._scratch.append(value.dtype)
            self._inside[phase].append(Store(row, self._flat_column, value))
            self._kept[member.target] = phase, FlatLoad(row, self._flat_column, value.dtype)

    def _open(self, phase: int) -> None:
        while len(self._before) <= phase:
            self._before.append([])
            self._inside.append([])

    def _store(self, member: Loop, value: Expr) -> Store:
        return Store(self._parameter(member.target), self._offset(member.target, member.store), value)

    def _parameter(self, name: str) -> Parameter:
        return self.parameters.setdefault(name, Parameter(len(self.parameters)))

    def _offset(self, name: str, subscripts: Sequence[Index]) -> Index:
        return ix.flatten(subscripts, self._buffers[name].strides)

    def _phase_for(self, value: Expr) -> int:
        return max((self._phase_of[n.name] + 1 for n in ex.walk((value,)) if isinstance(n, Reduced)), default=0)

    def _resolve(self, value: Expr, phase: int | None) -> Expr:
        """``value`` with flat loads of memory and the values of members, read back if kept before ``phase``."""

        def leaf(node: Expr) -> Expr | None:
            if not isinstance(node, Load):
                return None
            kept = self._kept.get(node.buffer)
            if kept is not None and phase is not None and kept[0] < phase:
                return kept[1]
            if node.buffer in self._values:
                return self._values[node.buffer]
            return FlatLoad(self._parameter(node.buffer), self._offset(node.buffer, node.subscripts), node.dtype)

        return ex.rewrite(value, leaf, {}, {})
