"""Reductions within a kernel: accumulators, and folding lanes together at the end of a row."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from torchkiln.codegen.llvm.evaluate import Evaluator
from torchkiln.codegen.llvm.instructions import vector_type
from torchkiln.codegen.llvm.operations import Value, apply, compare, register_type
from torchkiln.ir.expr import Constant
from torchkiln.schedule.kernel import Accumulate
from torchkiln.schedule.split import identity

_COMBINE = {
    "sum": "add",
    "prod": "mul",
    "any": "logical_or",
    "all": "logical_and",
    "max": "maximum",
    "min": "minimum",
}
_EXTREMUM = {"argmax": "max", "argmin": "min", "max": "max", "min": "min"}
_UNSET = torch.iinfo(torch.int64).max


def is_float_sum(statement: Accumulate) -> bool:
    return statement.reducer == "sum" and statement.value.dtype.is_floating_point


@dataclass(frozen=True)
class Slot:
    """Stack memory of a running reduction at one width.

    ``second`` holds what the value alone does not tell: for positions (argmax, argmin) where the extremum is, for
    float extrema the largest magnitude seen as bits, which shows afterwards whether there was a NaN.
    """

    value: str
    second: str | None
    lanes: int


@dataclass(frozen=True)
class Accumulator:
    """A reduction while its row is walked: one slot for full vectors, one for the tail where there is one."""

    statement: Accumulate
    slots: tuple[Slot, ...]


class Reductions(Evaluator):
    """Accumulates values. ``reduces_lanes`` says that the vector runs along the reduced axis."""

    reduces_lanes = False

    def _accumulator(self, statement: Accumulate, widths: Sequence[int]) -> Accumulator:
        f = self.f
        dtype = statement.value.dtype
        start = identity(statement.reducer, dtype)
        assert isinstance(start, Constant)
        slots = []
        for lanes in widths:
            second: str | None = None
            if statement.reducer in ("argmax", "argmin"):
                second = self._initialized(f.constant(_UNSET, torch.int64, lanes))
            elif _is_float_extremum(statement):
                second = self._initialized(f.constant(0, _bits_dtype(dtype), lanes))
            slots.append(Slot(self._initialized(f.constant(start.value, dtype, lanes)), second, lanes))
        return Accumulator(statement, tuple(slots))

    def _initialized(self, value: Value) -> str:
        slot = self._slot(value.type)
        self.f.emit(f"store {value.operand}, ptr {slot}")
        return slot

    def _accumulate(self, accumulator: Accumulator, value: Value) -> None:
        f, statement = self.f, accumulator.statement
        slot = next(s for s in accumulator.slots if s.lanes == self.lanes)
        value = f.widen(value, slot.lanes)
        old = f.make(f"load {value.type}, ptr {slot.value}", value.dtype, slot.lanes)
        live: Value | None = None
        mask = self._active_lanes(slot.lanes) if self.reduces_lanes else None
        if mask is not None:
            live = Value(mask, torch.bool, slot.lanes)
        if statement.reducer in ("argmax", "argmin"):
            self._accumulate_position(statement, slot, old, value, live)
            return
        if slot.second is not None:
            new = self._accumulate_extremum(statement, slot, old, value, live)
        else:
            new = apply(f, _COMBINE[statement.reducer], [old, value], value.dtype)
        if live is not None:
            new = f.select(live, new, old)
        f.emit(f"store {new.operand}, ptr {slot.value}")

    def _accumulate_extremum(
        self, statement: Accumulate, slot: Slot, old: Value, value: Value, live: Value | None
    ) -> Value:
        """The extremum of the numbers seen; NaN loses here and is remembered in the magnitude bits.

        A compare and select is one instruction, and the chain from one value to the next stays that short.
        """
        f = self.f
        bits_dtype = _bits_dtype(value.dtype)
        wide = vector_type(register_type(bits_dtype), slot.lanes)
        bits = f.make(f"bitcast {value.operand} to {wide}", bits_dtype, slot.lanes)
        magnitude = apply(f, "bitwise_and", [bits, f.constant(_all_but_sign(bits_dtype), bits_dtype)], bits_dtype)
        known = f.make(f"load {wide}, ptr {slot.second}", bits_dtype, slot.lanes)
        largest = apply(f, "maximum", [known, magnitude], bits_dtype)
        if live is not None:
            largest = f.select(live, largest, known)
        f.emit(f"store {largest.operand}, ptr {slot.second}")
        better = compare(f, "gt" if statement.reducer == "max" else "lt", value, old)
        return f.select(better, value, old)

    def _accumulate_position(
        self, statement: Accumulate, slot: Slot, old: Value, value: Value, live: Value | None
    ) -> None:
        """Keep the first extremum: NaN counts as the most extreme value, as in eager."""
        f, lanes = self.f, slot.lanes
        positions = f.widen(self._index_value(statement.position), lanes)
        known = f.make(f"load {positions.type}, ptr {slot.second}", torch.int64, lanes)
        better = compare(f, "gt" if statement.reducer == "argmax" else "lt", value, old)
        first = compare(f, "eq", known, f.constant(_UNSET, torch.int64, lanes))
        better = f.make(f"or {better.operand}, {first.ref}", torch.bool, lanes)
        if value.dtype.is_floating_point:
            is_nan = apply(f, "isnan", [value], torch.bool)
            was_number = f.make(f"fcmp ord {old.operand}, {old.ref}", torch.bool, lanes)
            fresh_nan = f.make(f"and {is_nan.operand}, {was_number.ref}", torch.bool, lanes)
            better = f.make(f"or {better.operand}, {fresh_nan.ref}", torch.bool, lanes)
        if live is not None:
            better = f.make(f"and {better.operand}, {live.ref}", torch.bool, lanes)
        f.emit(f"store {f.select(better, value, old).operand}, ptr {slot.value}")
        f.emit(f"store {f.select(better, positions, known).operand}, ptr {slot.second}")

    def _begin_chunk(self, sums: Iterable[Accumulator]) -> list[tuple[Slot, str, torch.dtype]]:
        """Set float sums aside and start them anew: a chunk is summed by itself and added as a whole afterwards."""
        f = self.f
        aside = []
        for accumulator in sums:
            dtype = accumulator.statement.value.dtype
            for slot in accumulator.slots:
                so_far, _ = self._read(slot, dtype)
                aside.append((slot, self._initialized(so_far), dtype))
                f.emit(f"store {f.constant(0.0, dtype, slot.lanes).operand}, ptr {slot.value}")
        return aside

    def _end_chunk(self, aside: Iterable[tuple[Slot, str, torch.dtype]]) -> None:
        f = self.f
        for slot, place, dtype in aside:
            chunk, _ = self._read(slot, dtype)
            so_far = f.make(f"load {chunk.type}, ptr {place}", dtype, slot.lanes)
            f.emit(f"store {apply(f, 'add', [so_far, chunk], dtype).operand}, ptr {slot.value}")

    # -- results ------------------------------------------------------------------------------------------------

    def _finish(self, accumulator: Accumulator) -> Value:
        """The result of a reduction: lanes folded together where the vector runs along the reduced axis."""
        statement = accumulator.statement
        if statement.reducer in ("argmax", "argmin"):
            return self._finish_position(accumulator)
        dtype = statement.value.dtype
        if not self.reduces_lanes:
            value, second = self._read(accumulator.slots[0], dtype)
            return value if second is None else self._with_nan(value, second)
        total, magnitude = self._folded(accumulator.slots[0], statement.reducer, dtype)
        for slot in accumulator.slots[1:]:
            value, other = self._folded(slot, statement.reducer, dtype)
            if magnitude is None or other is None:
                total = apply(self.f, _COMBINE[statement.reducer], [total, value], dtype)
            else:
                better = compare(self.f, "gt" if statement.reducer == "max" else "lt", value, total)
                total = self.f.select(better, value, total)
                magnitude = apply(self.f, "maximum", [magnitude, other], other.dtype)
        return total if magnitude is None else self._with_nan(total, magnitude)

    def _read(self, slot: Slot, dtype: torch.dtype, second: torch.dtype | None = None) -> tuple[Value, Value | None]:
        f, lanes = self.f, slot.lanes
        value = f.make(f"load {vector_type(register_type(dtype), lanes)}, ptr {slot.value}", dtype, lanes)
        if slot.second is None:
            return value, None
        kind = second or _bits_dtype(dtype)
        return value, f.make(f"load {vector_type(register_type(kind), lanes)}, ptr {slot.second}", kind, lanes)

    def _with_nan(self, value: Value, magnitude: Value) -> Value:
        """NaN where one was seen: a NaN's bits are above those of infinity."""
        f = self.f
        infinity = 0x7FF0000000000000 if magnitude.dtype == torch.int64 else 0x7F800000
        seen = compare(f, "gt", magnitude, f.constant(infinity, magnitude.dtype, magnitude.lanes))
        return f.select(seen, f.constant(float("nan"), value.dtype), value)

    def _folded(self, slot: Slot, reducer: str, dtype: torch.dtype) -> tuple[Value, Value | None]:
        value, magnitude = self._read(slot, dtype)
        folded = self._fold(reducer, value)
        return folded, None if magnitude is None else self._fold("max", magnitude)

    def _fold(self, reducer: str, value: Value) -> Value:
        if value.lanes == 1:
            return value
        dtype = value.dtype
        if dtype.is_floating_point:
            if reducer in ("sum", "prod"):
                name = "fadd" if reducer == "sum" else "fmul"
                start = self.f.constant(-0.0 if reducer == "sum" else 1.0, dtype)
                return self._reduce_vector(name, value, start)
            return self._reduce_vector(f"f{reducer}", value, flags="nnan nsz ")
        signed = "u" if dtype == torch.uint8 else "s"
        names = {"sum": "add", "prod": "mul", "max": f"{signed}max", "min": f"{signed}min", "any": "or", "all": "and"}
        return self._reduce_vector(names[reducer], value)

    def _finish_position(self, accumulator: Accumulator) -> Value:
        """The smallest position that attains the extremum."""
        f, statement = self.f, accumulator.statement
        dtype = statement.value.dtype
        if not self.reduces_lanes:
            _, position = self._read(accumulator.slots[0], dtype, torch.int64)
            assert position is not None
            return position
        best: Value | None = None
        place: Value | None = None
        for slot in accumulator.slots:
            value, positions = self._read(slot, dtype, torch.int64)
            assert positions is not None
            top, where = self._extreme_lane(statement.reducer, value, positions)
            if best is None or place is None:
                best, place = top, where
                continue
            extreme = self._extreme_of(statement.reducer, best, top)
            places = [
                f.select(self._attains(old, extreme), at, f.constant(_UNSET, torch.int64))
                for old, at in ((best, place), (top, where))
            ]
            best, place = extreme, apply(f, "minimum", places, torch.int64)
        assert place is not None
        return place

    def _extreme_lane(self, reducer: str, value: Value, positions: Value) -> tuple[Value, Value]:
        f = self.f
        if value.lanes == 1:
            return value, positions
        plain = self._fold(_EXTREMUM[reducer], value)
        if value.dtype.is_floating_point:
            some_nan = self._any(apply(f, "isnan", [value], torch.bool))
            plain = f.select(Value(some_nan, torch.bool, 1), f.constant(float("nan"), value.dtype), plain)
        here = self._attains(value, f.widen(plain, value.lanes))
        candidates = f.select(here, positions, f.constant(_UNSET, torch.int64, value.lanes))
        return plain, self._reduce_vector("smin", candidates)

    def _extreme_of(self, reducer: str, left: Value, right: Value) -> Value:
        return apply(self.f, _COMBINE[_EXTREMUM[reducer]], [left, right], left.dtype)

    def _attains(self, value: Value, best: Value) -> Value:
        """Lanes that hold the extremum; where it is NaN, the lanes that are NaN."""
        f = self.f
        here = compare(f, "eq", value, best)
        if value.dtype.is_floating_point:
            here = apply(f, "logical_or", [here, apply(f, "isnan", [value], torch.bool)], torch.bool)
        return here


def _is_float_extremum(statement: Accumulate) -> bool:
    return statement.reducer in ("max", "min") and statement.value.dtype.is_floating_point


def _bits_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.int64 if dtype == torch.float64 else torch.int32


def _all_but_sign(dtype: torch.dtype) -> int:
    return int(torch.iinfo(dtype).max)
