"""Reductions within a kernel: accumulators, and folding lanes together at the end of a row."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from torchkiln.codegen.llvm.accesses import MemoryAccesses
from torchkiln.codegen.llvm.instructions import shuffle
from torchkiln.codegen.llvm.operations import Value, apply, compare, register_type
from torchkiln.ir.expr import Constant
from torchkiln.ir.program import INDEX_REDUCERS
from torchkiln.schedule.kernel import Accumulate
from torchkiln.schedule.split import identity

COMBINE = {"sum": "add", "prod": "mul", "any": "logical_or", "all": "logical_and", "max": "maximum", "min": "minimum"}
EXTREMUM = {"argmax": "max", "argmin": "min", "max": "max", "min": "min"}
_UNSET = torch.iinfo(torch.int64).max


def is_float_sum(statement: Accumulate) -> bool:
    return statement.reducer == "sum" and statement.value.dtype.is_floating_point


@dataclass(frozen=True)
class Slot:
    """Stack memory of a running reduction at one width; the names of the values are its addresses.

    ``second`` is the index of the extremum (argmax, argmin), or for float extrema the largest magnitude seen, as
    bits, which shows whether there was a NaN.
    """

    value: Value
    second: Value | None

    @property
    def lanes(self) -> int:
        return self.value.lanes


@dataclass(frozen=True)
class Accumulator:
    """A reduction while its row is walked: one slot for full vectors, one for the tail where there is one."""

    statement: Accumulate
    slots: tuple[Slot, ...]


class Reductions(MemoryAccesses):
    """Accumulates values. ``reduces_lanes`` says that the vector runs along the reduced axis.

    Where it does not, runs of ``folded`` neighbouring lanes have one result.
    """

    reduces_lanes = False
    folded = 1

    def _accumulator(self, statement: Accumulate, widths: Sequence[int]) -> Accumulator:
        f = self.f
        dtype = statement.value.dtype
        start = identity(statement.reducer, dtype)
        assert isinstance(start, Constant)
        slots = []
        for lanes in widths:
            second: Value | None = None
            if statement.reducer in INDEX_REDUCERS:
                second = self._initialized(f.constant(_UNSET, torch.int64, lanes))
            elif _is_float_extremum(statement):
                second = self._initialized(f.constant(0, _bits_dtype(dtype), lanes))
            slots.append(Slot(self._initialized(f.constant(start.value, dtype, lanes)), second))
        return Accumulator(statement, tuple(slots))

    def _initialized(self, value: Value) -> Value:
        place = Value(self._slot(value.type), value.dtype, value.lanes)
        self._write(place, value)
        return place

    def _write(self, place: Value, value: Value) -> None:
        self.f.emit(f"store {value.operand}, ptr {place.ref}")

    def _read(self, place: Value) -> Value:
        return self.f.make(f"load {place.type}, ptr {place.ref}", place.dtype, place.lanes)

    def _accumulate(self, accumulator: Accumulator, value: Value) -> None:
        f, statement = self.f, accumulator.statement
        slot = next(s for s in accumulator.slots if s.lanes == self.lanes)
        value = f.widen(value, slot.lanes)
        old = self._read(slot.value)
        mask = self._active_lanes(slot.lanes) if self.reduces_lanes else None
        live = None if mask is None else Value(mask, torch.bool, slot.lanes)
        if slot.second is not None and statement.reducer in INDEX_REDUCERS:
            self._accumulate_index(statement, slot.value, slot.second, old, value, live)
            return
        if slot.second is not None:
            new = self._accumulate_extremum(statement, slot.second, old, value, live)
        else:
            new = apply(f, COMBINE[statement.reducer], [old, value], value.dtype)
        if live is not None:
            new = f.select(live, new, old)
        self._write(slot.value, new)

    def _accumulate_extremum(
        self, statement: Accumulate, magnitudes: Value, old: Value, value: Value, live: Value | None
    ) -> Value:
        """The extremum of the numbers seen, in one instruction; NaN loses here and is remembered in the magnitudes."""
        f = self.f
        integer = magnitudes.dtype
        bits = f.make(f"bitcast {value.operand} to {magnitudes.type}", integer, value.lanes)
        magnitude = apply(f, "bitwise_and", [bits, f.constant(torch.iinfo(integer).max, integer)], integer)
        known = self._read(magnitudes)
        largest = apply(f, "maximum", [known, magnitude], integer)
        if live is not None:
            largest = f.select(live, largest, known)
        self._write(magnitudes, largest)
        return f.select(self._is_better(statement.reducer, value, old), value, old)

    def _is_better(self, reducer: str, value: Value, old: Value) -> Value:
        return compare(self.f, "gt" if EXTREMUM[reducer] == "max" else "lt", value, old)

    def _accumulate_index(
        self, statement: Accumulate, best: Value, place: Value, old: Value, value: Value, live: Value | None
    ) -> None:
        """Keep the first extremum: NaN counts as the most extreme value, as in eager."""
        f, lanes = self.f, place.lanes
        indices = f.widen(self._index_value(statement.index), lanes)
        known = self._read(place)
        better = self._is_better(statement.reducer, value, old)
        better = f.binary("or", better, compare(f, "eq", known, f.constant(_UNSET, torch.int64, lanes)))
        if value.dtype.is_floating_point:
            is_nan = apply(f, "isnan", [value], torch.bool)
            was_number = f.make(f"fcmp ord {old.operand}, {old.ref}", torch.bool, lanes)
            better = f.binary("or", better, f.binary("and", is_nan, was_number))
        if live is not None:
            better = f.binary("and", better, live)
        self._write(best, f.select(better, value, old))
        self._write(place, f.select(better, indices, known))

    def _begin_chunk(self, sums: Iterable[Accumulator]) -> list[tuple[Value, Value]]:
        """Set float sums aside and start them anew: a chunk is summed by itself and added as a whole afterwards."""
        aside = []
        for slot in (slot for accumulator in sums for slot in accumulator.slots):
            aside.append((slot.value, self._initialized(self._read(slot.value))))
            self._write(slot.value, self.f.constant(0.0, slot.value.dtype, slot.lanes))
        return aside

    def _end_chunk(self, aside: Iterable[tuple[Value, Value]]) -> None:
        for place, before in aside:
            chunk = self._read(place)
            self._write(place, apply(self.f, "add", [self._read(before), chunk], chunk.dtype))

    # -- results ------------------------------------------------------------------------------------------------

    def _finish(self, accumulator: Accumulator) -> Value:
        """The result of a reduction: lanes folded together where the vector runs along the reduced axis."""
        statement = accumulator.statement
        if statement.reducer in INDEX_REDUCERS:
            return self._finish_index(accumulator)
        if not self.reduces_lanes:
            value, second = self._read_both(accumulator.slots[0])
            value = self._fold_runs(COMBINE[statement.reducer], value)
            return value if second is None else self._with_nan(value, self._fold_runs("maximum", second))
        total, magnitude = self._folded(accumulator.slots[0], statement.reducer)
        for slot in accumulator.slots[1:]:
            value, other = self._folded(slot, statement.reducer)
            if magnitude is None or other is None:
                total = apply(self.f, COMBINE[statement.reducer], [total, value], value.dtype)
            else:
                total = self.f.select(self._is_better(statement.reducer, value, total), value, total)
                magnitude = apply(self.f, "maximum", [magnitude, other], other.dtype)
        return total if magnitude is None else self._with_nan(total, magnitude)

    def _read_both(self, slot: Slot) -> tuple[Value, Value | None]:
        value = self._read(slot.value)
        return value, None if slot.second is None else self._read(slot.second)

    def _with_nan(self, value: Value, magnitude: Value) -> Value:
        """NaN where one was seen: a NaN's bits are above those of infinity."""
        f = self.f
        infinity = 0x7FF0000000000000 if magnitude.dtype == torch.int64 else 0x7F800000
        seen = compare(f, "gt", magnitude, f.constant(infinity, magnitude.dtype, magnitude.lanes))
        return f.select(seen, f.constant(float("nan"), value.dtype), value)

    def _folded(self, slot: Slot, reducer: str) -> tuple[Value, Value | None]:
        value, magnitude = self._read_both(slot)
        folded = self._fold(reducer, value)
        return folded, None if magnitude is None else self._fold("max", magnitude)

    def _fold(self, reducer: str, value: Value) -> Value:
        """All that was reduced by lanes, into one value."""
        return self._fold_lanes(reducer, value)

    def _fold_runs(self, name: str, value: Value) -> Value:
        """In every lane of a run, what all of its lanes have reduced: the same number, since all add up one tree."""
        distance = 1
        while distance < self.folded:
            order = [lane ^ distance for lane in range(value.lanes)]
            partner = shuffle(self.f, register_type(value.dtype), value.lanes, value.ref, "poison", order)
            value = apply(self.f, name, [value, Value(partner, value.dtype, value.lanes)], value.dtype)
            distance *= 2
        return value

    def _fold_lanes(self, reducer: str, value: Value) -> Value:
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

    def _finish_index(self, accumulator: Accumulator) -> Value:
        """The smallest index that attains the extremum."""
        if not self.reduces_lanes:
            _, indices = self._read_both(accumulator.slots[0])
            assert indices is not None
            return indices
        return self._extreme_of_lanes(accumulator)[1]

    def _extreme_of_lanes(self, accumulator: Accumulator) -> tuple[Value, Value]:
        """The extremum of all lanes and the smallest index that attains it."""
        f, reducer = self.f, accumulator.statement.reducer
        candidates = []
        for slot in accumulator.slots:
            value, indices = self._read_both(slot)
            assert indices is not None
            candidates.append(self._extreme_lane(reducer, value, indices))
        best, place = candidates[0]
        for top, where in candidates[1:]:
            extreme = apply(f, COMBINE[EXTREMUM[reducer]], [best, top], best.dtype)
            places = [
                f.select(self._attains(value, extreme), at, f.constant(_UNSET, torch.int64))
                for value, at in ((best, place), (top, where))
            ]
            best, place = extreme, apply(f, "minimum", places, torch.int64)
        return best, place

    def _extreme_lane(self, reducer: str, value: Value, indices: Value) -> tuple[Value, Value]:
        f = self.f
        if value.lanes == 1:
            return value, indices
        plain = self._fold_lanes(EXTREMUM[reducer], value)
        if value.dtype.is_floating_point:
            some_nan = self._any(apply(f, "isnan", [value], torch.bool))
            plain = f.select(Value(some_nan, torch.bool, 1), f.constant(float("nan"), value.dtype), plain)
        here = self._attains(value, f.widen(plain, value.lanes))
        candidates = f.select(here, indices, f.constant(_UNSET, torch.int64, value.lanes))
        return plain, self._reduce_vector("smin", candidates)

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
