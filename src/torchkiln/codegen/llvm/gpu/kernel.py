"""Kernels of a GPU as LLVM functions.

The parameters of a kernel's function are its pointers, aligned to 16 bytes, then its sizes. A thread runs at most one
iteration, alone or with those that share its row; ``Kernel.mapping`` says with how many blocks of how many threads it
is launched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import islice

import torch

from torchkiln.codegen.llvm.gpu.threads import (
    barrier,
    exchange,
    from_lane_words,
    from_words,
    lane_words,
    special_register,
    to_words,
)
from torchkiln.codegen.llvm.instructions import vector_type
from torchkiln.codegen.llvm.module import ModuleBuilder
from torchkiln.codegen.llvm.operations import Value, apply, compare
from torchkiln.codegen.llvm.reduce import COMBINE, EXTREMUM, Accumulator
from torchkiln.codegen.llvm.rows import Body, RowWriter, Split, Sums, Walk
from torchkiln.ir import expr as ex
from torchkiln.ir import index as ix
from torchkiln.ir.expr import Expr, FlatLoad, KernelMemory, Parameter
from torchkiln.ir.index import Index, Var
from torchkiln.ir.program import INDEX_REDUCERS
from torchkiln.schedule.gpu import (
    ACCESS_BYTES,
    PROCESSOR_REGISTERS,
    SHARED_BYTES,
    WARP,
    alignment_of,
    shared_column,
)
from torchkiln.schedule.kernel import GpuMapping, Kernel, Store


class GpuWriter(RowWriter):
    """Writes the function of one kernel.

    ``present`` is a condition on the run of lanes that is computed: whether the row has it.
    """

    def __init__(self, module: ModuleBuilder, kernel: Kernel, symbol: str) -> None:
        assert isinstance(kernel.mapping, GpuMapping)
        self.mapping = kernel.mapping
        super().__init__(module, kernel.nest, kernel.mapping.lanes)
        self.symbol = symbol
        self.alignment = kernel.mapping.lanes
        self.present: str | None = None
        self.thread = self.member = "0"  # its number in the block, and among those that share its row
        # Those of a reduction over lanes are not neighbours.
        self.across = kernel.mapping.row_threads > 1 and bool(kernel.nest.columns) and not self.reduces_lanes
        self.unchanged = False  # whether what is loaded is memory that the kernel only reads
        self.may_store: str | None = None  # None: the thread has an iteration of its own
        self.exchanged = 0  # words that threads across a block pass to each other at a time
        self.parts: list[dict[object, Value]] = [{} for _ in range(kernel.mapping.parts)]
        self.shared = 0

    def function(self) -> str:
        f, nest, mapping = self.f, self.nest, self.mapping
        pointers = [
            f"i64 %given{number}" if number in mapping.values else f"ptr align {ACCESS_BYTES} %p{number}"
            for number in range(len(nest.parameters))
        ]
        self.pointers = {Parameter(number): f"%p{number}" for number in range(len(nest.parameters))}
        for number in mapping.values:  # in memory of the thread, which LLVM makes registers of
            self.slots.append(f"%p{number} = alloca i64, align {ACCESS_BYTES}")
            f.emit(f"store i64 %given{number}, ptr %p{number}")
        self.sizes = {size: f"%s{number}" for number, size in enumerate(nest.sizes)}
        self.thread = special_register(f, "thread")
        block = special_register(f, "block")
        self._compute_extents()
        iteration = f.fresh(f"zext i32 {block} to i64")
        if mapping.rows_per_block > 1:
            own = self.thread
            if self.across:
                own = f.fresh(f"and i32 {own}, {mapping.rows_per_block - 1}")
            elif mapping.row_threads > 1:
                own = f.fresh(f"udiv i32 {own}, {mapping.row_threads}")
            first = f.fresh(f"mul nuw nsw i64 {iteration}, {mapping.rows_per_block * mapping.items}")
            iteration = f.fresh(f"add nuw nsw i64 {first}, {f.fresh(f'zext i32 {own} to i64')}")
        if self.across:
            self.member = f.fresh(f"udiv i32 {self.thread}, {mapping.rows_per_block}")
        elif mapping.row_threads > 1:
            self.member = f.fresh(f"and i32 {self.thread}, {mapping.row_threads - 1}")
        count = self._extent(mapping.iterations)
        if mapping.rows_per_block == 1:  # as many blocks as rows
            self._iteration(iteration)
        elif self.across:
            self._iteration(self._last_or(iteration, count))
        elif mapping.items > 1:
            self._several(first, iteration, count)
        else:
            self._if(f.fresh(f"icmp slt i64 {iteration}, {count}"), partial(self._iteration, iteration))
        f.emit("ret void")
        if self.exchanged:
            words = f"[{mapping.threads * self.exchanged} x i32]"
            self.module.declare(f"{self._exchanges} = internal addrspace(3) global {words} undef, align 16")
        parameters = ", ".join([*pointers, *(f"i64 {name}" for name in self.sizes.values())])
        lines = "\n".join([*(f"  {line}" for line in self.slots), *f.lines])
        # A thread may have 255 registers, and a block all that its processor has: more would not be launched. Told the
        # threads themselves, the driver takes nearly twice the registers (layer norm and gelu: 70 in place of 40).
        registers = PROCESSOR_REGISTERS // mapping.threads
        limit = f'"nvvm.maxnreg"="{registers}" ' if registers < 255 else ""
        return f"define ptx_kernel void @{self.symbol}({parameters}) #0 {limit}{{\nentry:\n{lines}\n}}\n"

    def _several(self, first: str, iteration: str, count: str) -> None:
        """Iterations ``rows_per_block`` apart; where the block has all its own, nothing comes between their reads."""
        f, apart, items = self.f, self.mapping.rows_per_block, self.mapping.items
        numbers = [f.fresh(f"add nuw nsw i64 {iteration}, {k * apart}") if k else iteration for k in range(items)]

        def whole() -> None:
            for number in numbers:
                with self._scope():
                    self._iteration(number)

        def some() -> None:
            for number in numbers:
                self._if(f.fresh(f"icmp slt i64 {number}, {count}"), partial(self._iteration, number))

        last = f.fresh(f"add nuw nsw i64 {first}, {items * apart}")
        self._if(f.fresh(f"icmp sle i64 {last}, {count}"), whole, some)

    def _last_or(self, iteration: str, count: str) -> str:
        """``iteration``, or where there is none so far, the last one, of which the thread stores nothing.

        Threads that meet at barriers all have to come there.
        """
        f, mapping = self.f, self.mapping
        if isinstance(mapping.iterations, int) and mapping.iterations % mapping.rows_per_block == 0:
            return iteration
        self.may_store = f.fresh(f"icmp slt i64 {iteration}, {count}")
        last = f.fresh(f"add nsw i64 {count}, -1")
        return f.fresh(f"select i1 {self.may_store}, i64 {iteration}, i64 {last}")

    def _iteration(self, iteration: str) -> None:
        nest, mapping = self.nest, self.mapping
        parallel = nest.rows[: mapping.parallel_rows]
        extents = [var.extent for var in parallel]
        if mapping.blocks != 1:
            *places, block = self._decoded(iteration, [*extents, mapping.blocks])
        else:
            places, block = self._decoded(iteration, extents), "0"
        self.variables.update(zip(parallel, places, strict=True))
        self.reduced = {}  # those of another iteration are not this one's
        self._hoist(self.statements, {*nest.rows[mapping.parallel_rows :], *nest.columns})
        if mapping.parallel_rows < len(nest.rows):
            self._lanes_of_rows(block)
        else:
            self._row()

    def _decoded(self, number: str, extents: Sequence[ix.Extent]) -> list[str]:
        """``number`` as one of so many, of each so many, and so on. It is divided in 32 bits where it fits them."""
        f = self.f
        small = ix.bounds_of(self.mapping.iterations)[1] < 1 << 31
        type_ = "i32" if small else "i64"
        if small and extents:
            number = f.fresh(f"trunc i64 {number} to i32")

        def wide(digit: str) -> str:
            return f.fresh(f"zext i32 {digit} to i64") if small else digit

        digits = []
        for extent in reversed(extents[1:]):
            count = self._extent(extent)
            if small and not isinstance(extent, int):
                count = f.fresh(f"trunc i64 {count} to i32")
            digits.append(wide(f.fresh(f"urem {type_} {number}, {count}")))
            number = f.fresh(f"udiv {type_} {number}, {count}")
        return [*([wide(number)] if extents else []), *reversed(digits)]

    def _lanes_of_rows(self, block: str) -> None:
        """Neighbouring rows, computed together."""
        f, lanes = self.f, self.mapping.lanes
        assert self.nest.lane is not None
        extent = self.nest.lane.extent
        position = f.fresh(f"mul nuw nsw i64 {block}, {lanes}") if lanes > 1 else block

        def rows(active: int | str) -> None:
            with self._open_lanes(lanes, active, position):
                self._row()

        if lanes == 1 or (isinstance(extent, int) and extent % lanes == 0):
            rows(lanes)
            return
        rest = f.fresh(f"sub nsw i64 {self._extent(extent)}, {position}")
        whole = f.fresh(f"icmp sge i64 {rest}, {lanes}")
        self._if(whole, partial(rows, lanes), partial(rows, extent % lanes if isinstance(extent, int) else rest))

    def _lanes_below(self, count: str, lanes: int, *, reverse: bool = False) -> Value:
        steps = ", ".join(f"i64 {k}" for k in (reversed(range(lanes)) if reverse else range(lanes)))
        limit = self.f.widen(Value(count, torch.int64, 1), lanes)
        return self.f.make(f"icmp sgt {limit.operand}, <{steps}>", torch.bool, lanes)

    # -- columns ------------------------------------------------------------------------------------------------

    def _row(self) -> None:
        self.reduced = {}
        for phase in self.nest.phases:
            if phase.before:
                self._once_a_row(partial(self._run, phase.before))
            if phase.inside:
                self._columns(phase)

    def _once_a_row(self, body: Callable[[], None]) -> None:
        if self.mapping.row_threads == 1:
            body()
        else:
            self._if(self.f.fresh(f"icmp eq i32 {self.member}, 0"), body)

    def _turns(self, column: Var) -> tuple[str, int]:
        mapping, member = self.mapping, self.member
        if not (self.across or mapping.groups > 1) or column is not shared_column(self.nest):
            return super()._turns(column)
        if not self.across:
            member = self.f.fresh(f"udiv i32 {member}, {mapping.lane_threads}")
        return self.f.fresh(f"zext i32 {member} to i64"), mapping.row_threads if self.across else mapping.groups

    def _step(self, lanes: int) -> int:
        return lanes * self.mapping.lane_threads

    def _vector_columns(
        self, lanes: int, split: Split, chunks: Sequence[int], sums: Sums, body: Callable[[], None], *, short: bool
    ) -> None:
        f, mapping = self.f, self.mapping
        assert self.nest.lane is not None
        extent = self.nest.lane.extent
        member = self.member
        if mapping.groups > 1:
            member = f.fresh(f"and i32 {member}, {mapping.lane_threads - 1}")
        first = f.fresh(f"zext i32 {f.fresh(f'mul nuw nsw i32 {member}, {lanes}')} to i64")

        def run(position: str) -> None:
            with self._open_lanes(lanes, lanes, position):
                body()

        if not mapping.parts:
            loop = Walk(first, self._extent(extent), self._step(lanes), innermost=True)
            self._chunks(loop, chunks if sums else (), sums, run)
            return
        assert isinstance(extent, int)
        for part, known in enumerate(self.parts):
            start = part * self._step(lanes)
            position = f.fresh(f"add nuw nsw i64 {first}, {start}") if start else first
            with self._part(known):
                if start + self._step(lanes) > extent:
                    self.present = f.fresh(f"icmp slt i64 {position}, {extent}")
                run(position)
                self.present = None

    def _walk(self, loop: Walk, body: Body) -> None:
        """Several steps at a time, so that what they read is under way together, then those that are left."""
        f, count = self.f, self.mapping.steps
        if not loop.innermost or count == 1:
            super()._walk(loop, body)
            return
        last = (count - 1) * loop.step
        place = self._slot("i64")
        f.emit(f"store i64 {loop.start}, ptr {place}")
        with self._loop(loop.start, f.fresh(f"sub nsw i64 {loop.end}, {last}"), count * loop.step) as position:
            for number in range(count):
                with self._scope():
                    body(f.fresh(f"add nsw i64 {position}, {number * loop.step}") if number else position)
            f.emit(f"store i64 {f.fresh(f'add nsw i64 {position}, {count * loop.step}')}, ptr {place}")
        rest = f.fresh(f"load i64, ptr {place}")
        super()._walk(replace(loop, start=rest), body)

    @contextmanager
    def _part(self, known: dict[object, Value]) -> Iterator[None]:
        """A scope whose values stay known in later phases."""
        self.frames.append(known)
        yield
        self.frames.pop()

    # -- memory -------------------------------------------------------------------------------------------------

    def _alignment(self, offset: Index, itemsize: int) -> int:
        return alignment_of(offset, itemsize, self.lanes, self.vector)

    def _active_lanes(self, lanes: int) -> str | None:
        if self.present is None:
            return super()._active_lanes(lanes)
        return self.f.widen(Value(self.present, torch.bool, 1), lanes).ref

    def _load(self, node: FlatLoad) -> Value:
        """Memory that the kernel only reads is known not to change: such loads may go before any store."""
        read_only = isinstance(node.memory, Parameter) and node.memory not in self.stored
        before, self.unchanged = self.unchanged, read_only and node.memory.number not in self.mapping.values
        value = super()._load(node)
        self.unchanged = before
        return value

    def _loaded(self, type_: str, address: str, align: int) -> str:
        kind = ", !invariant.load !{}" if self.unchanged else ""
        return self.f.fresh(f"load {type_}, ptr {address}, align {align}{kind}")

    def _load_scalar(self, element: str, address: str, align: int) -> str:
        conditions = [Value(self.present, torch.bool, 1)] if self.present is not None else []
        if self.guards:
            mask = self._mask(self.lanes)
            assert mask is not None
            conditions.append(Value(self._any(Value(mask, torch.bool, self.lanes)), torch.bool, 1))
        if not conditions:
            return self._loaded(element, address, align)
        needed = conditions[0]
        for condition in conditions[1:]:
            needed = self.f.binary("and", needed, condition)
        return self._load_where(needed.ref, element, address, align)

    def _load_where(self, condition: str, type_: str, address: str, align: int) -> str:
        """What memory holds where the condition does, else zero."""
        f = self.f
        start, inside, done = f.new_label("from"), f.new_label("load"), f.new_label("loaded")
        f.branch(start)
        f.start_block(start)
        f.emit(f"br i1 {condition}, label %{inside}, label %{done}")
        f.start_block(inside)
        loaded = self._loaded(type_, address, align)
        f.branch(done)
        f.start_block(done)
        zero = "zeroinitializer" if type_[0] == "<" else "0.0" if type_ in ("float", "double", "half") else "0"
        return f.fresh(f"phi {type_} [ {loaded}, %{inside} ], [ {zero}, %{start} ]")

    def _load_vector(self, element: str, lanes: int, address: str, mask: str | None, align: int) -> str:
        if mask is None and not self.guards:
            return self._loaded(vector_type(element, lanes), address, align)
        if self.present is None or self.guards:
            return super()._load_vector(element, lanes, address, mask, align)
        return self._load_where(self.present, vector_type(element, lanes), address, align)

    def _store(self, store: Store, value: Value) -> None:
        condition = self.present or self.may_store
        if condition is None:
            super()._store(store, value)
        else:
            present, self.present = self.present, None
            self._if(condition, partial(super()._store, store, value))
            self.present = present
        if store.memory in self.loaded:
            self._forget(store.memory)
            written = FlatLoad(store.memory, store.offset, value.dtype)
            if any(self.frames[-1] is known for known in self.parts):
                self.frames[-1][written] = value

    def _forget(self, memory: KernelMemory) -> None:
        """Values that were read from memory which is written now, for later phases."""
        for known in self.parts:
            for key in list(known):
                if not isinstance(key, Expr) or any(
                    isinstance(n, FlatLoad) and n.memory == memory for n in ex.walk((key,))
                ):
                    del known[key]

    # -- reductions over threads ----------------------------------------------------------------------------------

    def _fold(self, reducer: str, value: Value) -> Value:
        value = super()._fold(reducer, value)

        def combined(mine: Sequence[Value], other: Sequence[Value]) -> list[Value]:
            return [apply(self.f, COMBINE[reducer], [mine[0], other[0]], value.dtype)]

        return self._over_threads([value], combined)[0]

    def _finish(self, accumulator: Accumulator) -> Value:
        if not self.across:
            return super()._finish(accumulator)
        reducer = accumulator.statement.reducer
        value, second = self._read_both(accumulator.slots[0])
        if second is None:
            combined = COMBINE[reducer]
            return self._over_block([value], lambda a, b: [apply(self.f, combined, [a[0], b[0]], value.dtype)])[0]
        if reducer in INDEX_REDUCERS:
            return self._over_block([value, second], partial(self._more_extreme, reducer))[1]
        return self._with_nan(*self._over_block([value, second], partial(self._larger_magnitude, reducer)))

    def _larger_magnitude(self, reducer: str, mine: Sequence[Value], other: Sequence[Value]) -> list[Value]:
        """Of two extrema the more extreme one, and the larger of the magnitudes seen."""
        value = self.f.select(self._is_better(reducer, other[0], mine[0]), other[0], mine[0])
        return [value, apply(self.f, "maximum", [mine[1], other[1]], mine[1].dtype)]

    @property
    def _exchanges(self) -> str:
        return f"@{self.symbol}_shared_words"

    def _over_block(
        self, values: Sequence[Value], combined: Callable[[Sequence[Value], Sequence[Value]], list[Value]]
    ) -> list[Value]:
        """The values of threads that share an iteration across a block, combined; each of them has the result.

        Neighbouring threads have neighbouring words, so that each access takes every bank once.
        """
        f = self.f
        found, distance = list(values), self.mapping.row_threads // 2
        while distance:
            words = [lane_words(f, value) for value in found]
            partner = f.fresh(f"xor i32 {self.thread}, {distance * self.mapping.rows_per_block}")
            read = iter(self._from_partner(partner, [word for group in words for word in group]))
            other = [
                from_lane_words(f, list(islice(read, len(group))), value.dtype, value.lanes)
                for value, group in zip(found, words, strict=True)
            ]
            found = combined(found, other)
            distance //= 2
        return found

    def _from_partner(self, partner: str, words: Sequence[Value]) -> list[Value]:
        """What another thread of the block has where this one has ``words``, as many at a time as there is room for."""
        f, threads = self.f, self.mapping.threads
        most, found = SHARED_BYTES // (4 * threads), list[Value]()
        for start in range(0, len(words), most):
            part = words[start : start + most]
            self.exchanged = max(self.exchanged, len(part))
            for place, word in enumerate(part):
                f.emit(f"store i32 {word.ref}, ptr addrspace(3) {self._word_of(self.thread, place * threads)}")
            barrier(f)
            cells = [self._word_of(partner, place * threads) for place in range(len(part))]
            found += [f.make(f"load i32, ptr addrspace(3) {cell}", torch.int32, 1) for cell in cells]
            barrier(f)  # before the words are written again
        return found

    def _word_of(self, thread: str, start: int) -> str:
        at = self.f.fresh(f"add i32 {thread}, {start}") if start else thread
        return self.f.fresh(f"getelementptr i32, ptr addrspace(3) {self._exchanges}, i32 {at}")

    def _finish_index(self, accumulator: Accumulator) -> Value:
        if not self.reduces_lanes:
            return super()._finish_index(accumulator)
        reducer = accumulator.statement.reducer
        return self._over_threads(self._extreme_of_lanes(accumulator), partial(self._more_extreme, reducer))[1]

    def _more_extreme(self, reducer: str, mine: Sequence[Value], other: Sequence[Value]) -> list[Value]:
        """Of two extrema and their indices the more extreme one, of equal ones the first. NaN is the most extreme."""
        f = self.f
        (value, index), (rival, at) = mine, other
        better = compare(f, "gt" if EXTREMUM[reducer] == "max" else "lt", rival, value)
        same = compare(f, "eq", rival, value)
        if value.dtype.is_floating_point:
            nan, rival_nan = (apply(f, "isnan", [v], torch.bool) for v in (value, rival))
            number = apply(f, "logical_not", [nan], torch.bool)
            better = f.binary("or", better, f.binary("and", rival_nan, number))
            same = f.binary("or", same, f.binary("and", nan, rival_nan))
        better = f.binary("or", better, f.binary("and", same, compare(f, "lt", at, index)))
        return [f.select(better, rival, value), f.select(better, at, index)]

    def _over_threads(
        self, values: Sequence[Value], combined: Callable[[Sequence[Value], Sequence[Value]], list[Value]]
    ) -> list[Value]:
        """The values of all threads that share a row, combined; each of them has the result."""
        f, row_threads = self.f, self.mapping.row_threads
        found = list(values)
        distance = min(row_threads, WARP) // 2
        mask = self._row_mask(min(row_threads, WARP)) if distance else ""
        while distance:
            found = combined(found, [exchange(f, value, distance, mask) for value in found])
            distance //= 2
        return self._over_warps(found, combined) if row_threads > WARP else found

    def _row_mask(self, threads: int) -> str:
        """Who takes part in exchanges: threads of another row may have ended."""
        if threads == WARP:
            return "-1"
        first = self.f.fresh(f"and i32 {self.thread}, {WARP - threads}")
        return self.f.fresh(f"shl i32 {(1 << threads) - 1}, {first}")

    def _over_warps(
        self, values: Sequence[Value], combined: Callable[[Sequence[Value], Sequence[Value]], list[Value]]
    ) -> list[Value]:
        """One value of each warp, through shared memory; every thread combines all of them in the same order."""
        f, warps = self.f, self.mapping.threads // WARP
        words = [to_words(f, value) for value in values]
        width = sum(map(len, words))
        array = f"@{self.symbol}_shared{self.shared}"
        self.shared += 1
        self.module.declare(f"{array} = internal addrspace(3) global [{warps * width} x i32] undef, align 16")

        def cell(warp: str | int, place: int) -> str:
            at = f.fresh(f"mul i32 {warp}, {width}") if isinstance(warp, str) else str(warp * width)
            at = f.fresh(f"add i32 {at}, {place}")
            return f.fresh(f"getelementptr i32, ptr addrspace(3) {array}, i32 {at}")

        warp = f.fresh(f"lshr i32 {self.thread}, {WARP.bit_length() - 1}")
        for place, word in enumerate(word for group in words for word in group):
            f.emit(f"store i32 {word.ref}, ptr addrspace(3) {cell(warp, place)}")
        barrier(f)

        def of_warp(number: int) -> list[Value]:
            found, place = [], 0
            for value, group in zip(values, words, strict=True):
                read = [
                    f.make(f"load i32, ptr addrspace(3) {cell(number, place + k)}", torch.int32, 1)
                    for k in range(len(group))
                ]
                found.append(from_words(f, read, value.dtype))
                place += len(group)
            return found

        result = of_warp(0)
        for number in range(1, warps):
            result = combined(result, of_warp(number))
        return result
