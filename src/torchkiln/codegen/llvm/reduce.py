"""Reductions within a kernel: accumulators, and folding lanes together at the end of a row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from torchkiln.codegen.llvm.evaluate import Evaluator
from torchkiln.codegen.llvm.operations import Value, apply, compare, register_type, vector_type
from torchkiln.ir.expr import Constant
from torchkiln.schedule.kernel import Accumulate
from torchkiln.schedule.split import identity

_ORDERED_REDUCERS = {"argmax": "max", "argmin": "min"}


@dataclass
class Accumulator:
    """Where a reduction is kept while its row is walked: a value slot, a position slot and the lanes, per width."""

    statement: Accumulate
    slots: list[tuple[str, str | None, int]]


class Reductions(Evaluator):
    """Accumulates values. ``reduces_lanes`` says that the vector runs along the reduced axis."""

    reduces_lanes = False

    def _accumulator(self, statement: Accumulate, widths: Sequence[int]) -> Accumulator:
        f = self.f
        slots: list[tuple[str, str | None, int]] = []
        dtype = statement.value.dtype
        start = identity(statement.reducer, dtype)
        assert isinstance(start, Constant)
        for lanes in widths:
            initial = f.constant(start.value, dtype, lanes)
            slot = self._slot(initial.type)
            f.emit(f"store {initial.operand}, ptr {slot}")
            position: str | None = None
            if statement.reducer in _ORDERED_REDUCERS:
                unset = f.constant(torch.iinfo(torch.int64).max, torch.int64, lanes)
                position = self._slot(unset.type)
                f.emit(f"store {unset.operand}, ptr {position}")
            slots.append((slot, position, lanes))
        return Accumulator(statement, slots)

    def _accumulate(self, accumulator: Accumulator, value: Value) -> None:
        f, statement = self.f, accumulator.statement
        slot, position_slot, lanes = next(s for s in accumulator.slots if s[2] == self.lanes)
        value = f.widen(value, lanes)
        old = f.make(f"load {value.type}, ptr {slot}", value.dtype, lanes)
        inactive = lanes > 1 and self.active < lanes and self.reduces_lanes
        if position_slot is not None:
            self._accumulate_position(statement, value, old, slot, position_slot, inactive)
            return
        new = self._combine(statement.reducer, old, value)
        if inactive:
            flags = ", ".join("i1 true" if k < self.active else "i1 false" for k in range(lanes))
            new = f.select(Value(f"<{flags}>", torch.bool, lanes), new, old)
        f.emit(f"store {new.operand}, ptr {slot}")

    def _combine(self, reducer: str, left: Value, right: Value) -> Value:
        if reducer in ("max", "min"):
            if left.dtype.is_floating_point:
                # NaN must win, but which zero is kept does not matter: three instructions instead of six.
                return self.f.call(f"{reducer}imum", [left, right], left.dtype, flags="nsz ")
            return apply(self.f, f"{reducer}imum", [left, right], left.dtype)
        name = {
            "sum": "add",
            "prod": "mul",
            "any": "logical_or",
            "all": "logical_and",
        }[reducer]
        return apply(self.f, name, [left, right], left.dtype)

    def _accumulate_position(
        self, statement: Accumulate, value: Value, old: Value, slot: str, position_slot: str, inactive: bool
    ) -> None:
        """Keep the first extremum: NaN counts as the most extreme value, as in eager."""
        f, lanes = self.f, value.lanes
        positions = f.widen(self._index_value(statement.position), lanes)
        known = f.make(f"load {positions.type}, ptr {position_slot}", torch.int64, lanes)
        unset = f.constant(torch.iinfo(torch.int64).max, torch.int64, lanes)
        better = compare(f, "gt" if statement.reducer == "argmax" else "lt", value, old)
        first = compare(f, "eq", known, unset)
        better = f.make(f"or {better.operand}, {first.ref}", torch.bool, lanes)
        if value.dtype.is_floating_point:
            is_nan = apply(f, "isnan", [value], torch.bool)
            was_number = f.make(f"fcmp ord {old.operand}, {old.ref}", torch.bool, lanes)
            fresh_nan = f.make(f"and {is_nan.operand}, {was_number.ref}", torch.bool, lanes)
            better = f.make(f"or {better.operand}, {fresh_nan.ref}", torch.bool, lanes)
        if inactive:
            flags = ", ".join("i1 true" if k < self.active else "i1 false" for k in range(lanes))
            better = f.make(f"and {better.operand}, <{flags}>", torch.bool, lanes)
        f.emit(f"store {f.select(better, value, old).operand}, ptr {slot}")
        f.emit(f"store {f.select(better, positions, known).operand}, ptr {position_slot}")

    def _finish(self, accumulator: Accumulator) -> Value:
        """The result of a reduction: lanes folded together where the vector runs along the reduced axis."""
        f, statement = self.f, accumulator.statement
        dtype = statement.value.dtype
        if not self.reduces_lanes:
            slot, position_slot, lanes = accumulator.slots[0]
            if position_slot is not None:
                return f.make(f"load {vector_type('i64', lanes)}, ptr {position_slot}", torch.int64, lanes)
            return f.make(f"load {vector_type(register_type(dtype), lanes)}, ptr {slot}", dtype, lanes)
        results: list[tuple[Value, Value | None]] = []
        for slot, position_slot, lanes in accumulator.slots:
            value = f.make(f"load {vector_type(register_type(dtype), lanes)}, ptr {slot}", dtype, lanes)
            if position_slot is None:
                results.append((self._fold(statement.reducer, value), None))
                continue
            positions = f.make(f"load {vector_type('i64', lanes)}, ptr {position_slot}", torch.int64, lanes)
            results.append(self._fold_position(statement.reducer, value, positions))
        total, place = results[0]
        for value, position in results[1:]:
            if place is None or position is None:
                total = self._combine(statement.reducer, total, value)
            else:
                total, place = self._fold_pair(statement.reducer, (total, place), (value, position))
        return total if place is None else place

    def _fold(self, reducer: str, value: Value) -> Value:
        if value.lanes == 1:
            return value
        dtype = value.dtype
        if dtype.is_floating_point:
            if reducer in ("sum", "prod"):
                name = "fadd" if reducer == "sum" else "fmul"
                start = self.f.constant(-0.0 if reducer == "sum" else 1.0, dtype)
                return self._reduce_vector(name, value, start)
            # Folding with NaN handling at every step is slow; one test for NaN beside a plain fold is not.
            plain = self._reduce_vector("fmax" if reducer == "max" else "fmin", value, flags="nnan nsz ")
            some_nan = self._any(apply(self.f, "isnan", [value], torch.bool))
            return self.f.select(Value(some_nan, torch.bool, 1), self.f.constant(float("nan"), dtype), plain)
        signed = "u" if dtype == torch.uint8 else "s"
        name = {"sum": "add", "prod": "mul", "max": f"{signed}max", "min": f"{signed}min", "any": "or", "all": "and"}[
            reducer
        ]
        return self._reduce_vector(name, value)

    def _fold_position(self, reducer: str, value: Value, positions: Value) -> tuple[Value, Value]:
        """Best value over the lanes and the smallest position that attains it."""
        if value.lanes == 1:
            return value, positions
        f = self.f
        unset = f.constant(torch.iinfo(torch.int64).max, torch.int64, value.lanes)
        # Lanes that saw nothing hold the identity, which may equal a real value: they must not count.
        best = self._fold(_ORDERED_REDUCERS[reducer], value)
        wide = f.widen(best, value.lanes)
        here = compare(f, "eq", value, wide)
        if value.dtype.is_floating_point:
            both = f.make(f"fcmp uno {value.operand}, {value.ref}", torch.bool, value.lanes)
            here = f.make(f"or {here.operand}, {both.ref}", torch.bool, value.lanes)
        candidates = f.select(here, positions, unset)
        return best, self._reduce_vector("smin", candidates)

    def _fold_pair(self, reducer: str, left: tuple[Value, Value], right: tuple[Value, Value]) -> tuple[Value, Value]:
        f = self.f
        best = self._combine(_ORDERED_REDUCERS[reducer], left[0], right[0])
        places = []
        for value, position in (left, right):
            here = compare(f, "eq", value, best)
            if value.dtype.is_floating_point:
                here = f.make(f"or {here.operand}, {apply(f, 'isnan', [value], torch.bool).ref}", torch.bool, 1)
            places.append(f.select(here, position, f.constant(torch.iinfo(torch.int64).max, torch.int64)))
        return best, apply(f, "minimum", places, torch.int64)
