"""Loads and stores of a kernel: elements, and lanes side by side, a stride apart, in runs, interleaved or anywhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from torchkiln.codegen.llvm.evaluate import Evaluator, fits_int32
from torchkiln.codegen.llvm.instructions import (
    Register,
    join_lanes,
    shuffle,
    splat_literal,
    suffix,
    take_lanes,
    vector_type,
)
from torchkiln.codegen.llvm.operations import Value, memory_type
from torchkiln.codegen.llvm.strided import interleaved, load_places, places_of_lanes
from torchkiln.ir import expr as ex
from torchkiln.ir import index as ix
from torchkiln.ir.expr import FlatLoad, KernelMemory
from torchkiln.ir.index import DataIndex, Index, Quotient, Remainder
from torchkiln.schedule.kernel import Store
from torchkiln.schedule.limits import LIMITS

_WORD = 4  # bytes of what processors gather at the least
_FEWEST_GATHERED = 8  # lanes
_MOST_ONE_BY_ONE = 2  # loads of a kernel
_BYTES = {"i8": 1, "i16": 2, "half": 2, "i32": 4, "float": 4, "i64": 8, "double": 8}  # of elements in memory


@dataclass(frozen=True)
class Runs:
    """Lanes in runs of ``length`` neighbours, or of one element where it does not move, ``apart`` from each other."""

    length: int
    apart: int
    moves: bool


class MemoryAccesses(Evaluator):
    """Evaluates what memory holds, and writes it. ``gathers`` are the loads of the kernel at computed indices."""

    gathers = 0

    def _address(self, memory: KernelMemory, element: str, offset: Index) -> str:
        """The address of an element, in lane 0."""
        index = self._scalar_index(offset)
        return self.f.fresh(f"getelementptr inbounds {element}, ptr {self.pointers[memory]}, i64 {index}")

    def _lane_access(self, memory: KernelMemory, element: str, offset: Index) -> tuple[str, str, str | None]:
        """The pointer type and the address of what the lanes access, and their mask, None for all.

        One pointer where they lie side by side, else one for each: a common base and 32-bit offsets where they fit.
        Where they lie side by side in reverse, the pointer is that of the last lane, and the mask is in the order of
        memory.
        """
        assert self.vector is not None
        stride = offset.coefficient(self.vector)
        mask = self._reversed_mask() if stride == -1 else self._mask(self.lanes)
        if stride in (1, -1):
            address = self._address(memory, element, offset)
            if stride == -1:
                address = self.f.fresh(f"getelementptr {element}, ptr {address}, i64 {1 - self.lanes}")
            return "ptr", address, mask
        offsets = self._index_value(offset, torch.int32 if fits_int32(offset) else torch.int64)
        addresses = self.f.fresh(f"getelementptr inbounds {element}, ptr {self.pointers[memory]}, {offsets.operand}")
        return vector_type("ptr", self.lanes), addresses, mask or splat_literal("i1", "true", self.lanes)

    def _reversed_mask(self) -> str | None:
        """The lanes that may touch memory, the last one first; None for all."""
        lanes, active = self.lanes, self.active
        if not self.guards and isinstance(active, str):
            return self._once(("last", active, lanes), lambda: self._lanes_below(active, lanes, reverse=True)).ref
        mask = self._mask(lanes)
        return None if mask is None else self._reversed("i1", mask)

    def _reversed(self, element: str, value: str) -> str:
        return shuffle(self.f, element, self.lanes, value, "poison", range(self.lanes)[::-1])

    def _load(self, node: FlatLoad) -> Value:
        lanes, align = self.lanes, node.dtype.itemsize
        element = memory_type(node.dtype)
        if not self._varies(node.variables):
            address = self._address(node.memory, element, node.offset)
            return self._from_memory(self._load_scalar(element, address, align), node.dtype, 1)
        assert self.vector is not None
        stride = node.offset.coefficient(self.vector)
        if isinstance(stride, int) and self._picks_lanes(stride, align):
            return self._from_memory(self._load_picked(node, stride), node.dtype, lanes)
        runs = self._runs(node.offset) if stride is None else None
        if runs is not None and (not self.guards or (runs.moves and runs.apart)):
            return self._from_memory(self._load_runs(node, runs), node.dtype, lanes)
        if stride is None and self._loads_each_lane(node):
            return self._from_memory(self._load_each_lane(node), node.dtype, lanes)
        if stride not in (1, -1) and self._gathers_words(node.offset, align):
            return self._from_memory(self._gather_parts_of_words(node), node.dtype, lanes)
        pointer, address, mask = self._lane_access(node.memory, element, node.offset)
        if pointer == "ptr":
            raw = self._load_vector(element, lanes, address, mask, self._alignment(node.offset, align))
            return self._from_memory(raw if stride == 1 else self._reversed(element, raw), node.dtype, lanes)
        assert mask is not None
        return self._from_memory(self._gather(element, address, mask, align), node.dtype, lanes)

    def _runs(self, offset: Index) -> Runs | None:
        """How all lanes lie in runs, as :mod:`torchkiln.schedule.filled_lanes` makes them, None where they do not."""
        lengths: set[int] = set()
        apart, within = 0, 0
        for monomial, factor in offset.terms.items():
            if not any(self.vector in ix.atom_variables(atom) for atom in monomial):
                continue
            (atom, *others) = monomial
            if others or not isinstance(atom, Quotient | Remainder) or not isinstance(atom.divisor, int):
                return None
            if ix.single_atom(atom.numerator) is not self.vector:
                return None
            lengths.add(atom.divisor)
            apart, within = (factor, within) if isinstance(atom, Quotient) else (apart, factor)
        if len(lengths) != 1 or within not in (0, 1):
            return None
        (length,) = lengths
        known = self.active == self.lanes and self.lanes % length == 0 and self.alignment % length == 0
        known = known and not self.module.target.is_gpu
        return Runs(length, apart, within == 1) if known else None

    def _load_runs(self, node: FlatLoad, runs: Runs) -> str:
        """Each run by a load of its own; where a run is one element, that in all of its lanes."""
        f, lanes, length, element, align = self.f, self.lanes, runs.length, memory_type(node.dtype), node.dtype.itemsize
        base, guard = self._address(node.memory, element, node.offset), self._mask(lanes)
        count = lanes // length if runs.apart else 1
        pieces = []
        for number in range(count):
            start = number * runs.apart
            address = base if start == 0 else f.fresh(f"getelementptr {element}, ptr {base}, i64 {start}")
            if not runs.moves:
                pieces.append(f.fresh(f"load {element}, ptr {address}, align {align}"))
                continue
            mask = None
            if guard is not None and runs.apart:
                mask = shuffle(f, "i1", lanes, guard, "poison", range(number * length, (number + 1) * length))
            pieces.append(self._load_vector(element, length, address, mask, align))
        if not runs.moves:
            pieces = [self._repeated(element, piece, length) for piece in pieces]
        if not runs.apart:
            return take_lanes(f, element, length, pieces[0], [k % length for k in range(lanes)])
        return join_lanes(f, element, length, pieces)

    def _repeated(self, element: str, scalar: str, lanes: int) -> str:
        wide = vector_type(element, lanes)
        first = self.f.fresh(f"insertelement {wide} poison, {element} {scalar}, i64 0")
        return self.f.fresh(f"shufflevector {wide} {first}, {wide} poison, <{lanes} x i32> zeroinitializer")

    def _loads_each_lane(self, node: FlatLoad) -> bool:
        """Whether the lanes are loaded one by one, at indices that are read from memory one by one too.

        On AMD's processors a gather takes longer than that. (Columns of 768 x 1024 float32 by an index of int64, one
        thread of a Zen 5: 271 µs gathered, 147 one by one, eager 212.) It is more code, so not for many loads.
        """
        if not self.module.target.is_amd or self.gathers > _MOST_ONE_BY_ONE:
            return False
        if self.guards or self.active != self.lanes:
            return False
        computed = [atom for atom in node.offset.atoms() if self._varies(ix.atom_variables(atom))]
        return all(
            isinstance(atom, DataIndex)
            and isinstance(atom.value, FlatLoad)
            and not ex.index_operands(atom.value.offset)
            for atom in computed
        )

    def _load_each_lane(self, node: FlatLoad) -> str:
        f, lanes, element = self.f, self.lanes, memory_type(node.dtype)
        vector, wide, result = self.vector, vector_type(element, lanes), "poison"
        assert vector is not None
        for lane in range(lanes):
            there = ex.rewrite(node, lambda _: None, {vector: ix.of(vector) + lane}, {})
            assert isinstance(there, FlatLoad)
            with self._scope(), self._open_lanes(1, 1, self.variables[vector]):
                address = self._address(there.memory, element, there.offset)
                value = self._load_scalar(element, address, node.dtype.itemsize)
            result = f.fresh(f"insertelement {wide} {result}, {element} {value}, i64 {lane}")
        return result

    def _gather(self, element: str, addresses: str, mask: str, align: int) -> str:
        """Elements anywhere, 0 where the mask does not hold."""
        lanes = self.lanes
        wide, masks, pointers = (vector_type(type_, lanes) for type_ in (element, "i1", "ptr"))
        symbol = f"@llvm.masked.gather.{suffix(element, lanes)}.v{lanes}p0"
        self.module.declare(f"declare {wide} {symbol}({pointers}, {masks}, {wide})")
        operands = f"{pointers} align {align} {addresses}, {masks} {mask}, {wide} zeroinitializer"
        return self.f.fresh(f"call {wide} {symbol}({operands})")

    def _gathers_words(self, offset: Index, itemsize: int) -> bool:
        """Whether elements of one or two bytes are gathered as parts of words, which processors have no gathers of.

        LLVM loads each lane by itself then, under guards with a branch for each. (48 x 1024 elements, AVX-512 of a
        Xeon with AMX, one thread, in whole calls, of which 10 µs are the call: 16 bits at computed indices 56 -> 30 µs,
        under a guard 62 -> 33, 9 apart 52 -> 27; 8 bits 58 -> 26, 62 -> 32, 51 -> 23.)
        """
        narrow = itemsize < _WORD and self.lanes >= _FEWEST_GATHERED
        return narrow and self.module.target.vector_bits == 512 and fits_int32(offset + _WORD)

    def _gather_parts_of_words(self, node: FlatLoad) -> str:
        """Elements out of the words around them, which are aligned where elements are: no page ends within."""
        f, lanes, itemsize, element = self.f, self.lanes, node.dtype.itemsize, memory_type(node.dtype)
        parts, words = _WORD // itemsize, vector_type("i32", lanes)
        base = self.pointers[node.memory]
        # Elements of the first word before the memory begins. Memory may begin inside of an element.
        start = Register(f, "i64", f.fresh(f"ptrtoint ptr {base} to i64"))
        before = (start >> (itemsize.bit_length() - 1)) & (parts - 1)
        aligned = f.fresh(f"getelementptr i8, ptr {base}, {before * -itemsize}")
        first = f.widen(Value(before.convert("trunc", "i32").name, torch.int32, 1), lanes)
        places = f.register(f.binary("add", self._index_value(node.offset, torch.int32), first))
        numbers = places >> (parts.bit_length() - 1)
        addresses = f.fresh(f"getelementptr i32, ptr {aligned}, {words} {numbers.name}")
        mask = self._mask(lanes) or splat_literal("i1", "true", lanes)
        gathered = Register(f, words, self._gather("i32", addresses, mask, 1))
        shifted = gathered >> ((places & (parts - 1)) * (8 * itemsize))
        narrow = f.fresh(f"trunc {words} {shifted.name} to {vector_type(f'i{8 * itemsize}', lanes)}")
        if element == "half":
            narrow = f.fresh(f"bitcast {vector_type('i16', lanes)} {narrow} to {vector_type('half', lanes)}")
        return narrow

    def _alignment(self, _offset: Index, itemsize: int) -> int:
        """Of an access of all lanes side by side, in bytes: on CPUs more than that of an element buys nothing."""
        return itemsize

    def _load_scalar(self, element: str, address: str, align: int) -> str:
        return self.f.fresh(f"load {element}, ptr {self._guarded_address(address)}, align {align}")

    def _load_vector(self, element: str, lanes: int, address: str, mask: str | None, align: int) -> str:
        """Elements side by side, 0 where the mask does not hold."""
        wide, masks = vector_type(element, lanes), vector_type("i1", lanes)
        if mask is None:
            return self.f.fresh(f"load {wide}, ptr {address}, align {align}")
        symbol = f"@llvm.masked.load.{suffix(element, lanes)}.p0"
        self.module.declare(f"declare {wide} {symbol}(ptr, {masks}, {wide})")
        operands = f"ptr align {align} {address}, {masks} {mask}, {wide} zeroinitializer"
        return self.f.fresh(f"call {wide} {symbol}({operands})")

    def _picks_lanes(self, stride: int, itemsize: int) -> bool:
        """Whether lanes this far apart are picked out of contiguous loads.

        Masks that are known only at run time, such as those of guards, are cheap where vectors have 512 bits. (Padding
        8 x 64 x 56 x 56 bfloat16 in every second element by 3, one thread of a Zen 5: 1190 µs gathered, 180 picked.)
        """
        target = self.module.target
        if not LIMITS[target.device].picks_lanes(stride, itemsize):
            return False
        if self.guards:
            return stride != -1 and target.vector_bits == 512
        return isinstance(self.active, int) or (stride != -1 and target.vector_bits == 512)

    def _load_picked(self, node: FlatLoad, stride: int) -> str:
        """Lanes that are a constant stride apart: contiguous loads, from which shuffles pick them."""
        f, element, itemsize = self.f, memory_type(node.dtype), node.dtype.itemsize
        lanes, active = self.lanes, self.active
        guard = self._mask(lanes) if self.guards else None
        known = active if guard is None and isinstance(active, int) else lanes
        places = places_of_lanes(lanes, known, stride)
        lowest = self._address(node.memory, element, node.offset)
        if places[0]:
            lowest = f.fresh(f"getelementptr {element}, ptr {lowest}, i64 {-places[0]}")

        def load(start: int, count: int) -> str:
            address = lowest if start == 0 else f.fresh(f"getelementptr {element}, ptr {lowest}, i64 {start}")
            mask = None
            if guard is not None:
                mask = self._lanes_at(guard, places, start, count)
            elif isinstance(active, str):
                mask = self._spanned(active, stride, start, count)
            return self._load_vector(element, count, address, mask, itemsize)

        register = max(1, self.module.target.vector_bits // (8 * itemsize))
        return load_places(f, element, places, register, load)

    def _lanes_at(self, mask: str, places: Sequence[int], start: int, count: int) -> str:
        """Of ``count`` elements from ``start`` on, those where a lane lies that ``mask`` has."""
        lane_at = {place: lane for lane, place in enumerate(places)}
        none = len(places)
        wanted = [lane_at.get(start + k, none) for k in range(count)]

        def spread() -> Value:
            return Value(shuffle(self.f, "i1", none, mask, "zeroinitializer", wanted), torch.bool, count)

        return self._once(("lanes at", mask, *wanted), spread).ref

    def _spanned(self, active: str, stride: int, start: int, count: int) -> str:
        """Of ``count`` elements, the first ``start`` above the lowest lane, those between the ``active`` lanes."""
        return self._once(
            ("spanned", active, self.lanes, stride, start, count),
            lambda: self._elements_between(active, stride, start, count),
        ).ref

    def _elements_between(self, active: str, stride: int, start: int, count: int) -> Value:
        steps = f"<{', '.join(f'i16 {start + k}' for k in range(count))}>"
        if stride > 0:  # up to lane active - 1
            last = self.f.fresh(f"mul i64 {self.f.fresh(f'sub i64 {active}, 1')}, {stride}")
            compared = "uge"
        else:  # lane active - 1 is the lowest that is read
            last = self.f.fresh(f"mul i64 {self.f.fresh(f'sub i64 {self.lanes}, {active}')}, {-stride}")
            compared = "ule"
        limit = self.f.widen(Value(self.f.fresh(f"trunc i64 {last} to i16"), torch.int16, 1), count)
        return self.f.make(f"icmp {compared} {limit.operand}, {steps}", torch.bool, count)

    def _guarded_address(self, address: str) -> str:
        """A scalar load under a guard reads a spare cell where no active lane passes every guard."""
        if not self.guards:
            return address
        mask = self._mask(self.lanes)
        assert mask is not None
        needed = self._any(Value(mask, torch.bool, self.lanes))
        return self.f.fresh(f"select i1 {needed}, ptr {address}, ptr {self.spare}")

    def _from_memory(self, raw: str, dtype: torch.dtype, lanes: int) -> Value:
        if dtype != torch.bool:
            return Value(raw, dtype, lanes)
        type_ = vector_type("i8", lanes)
        return self.f.make(f"icmp ne {type_} {raw}, {splat_literal('i8', '0', lanes)}", torch.bool, lanes)

    def _store_interleaved(self, store: Store, parts: Sequence[Value]) -> None:
        """At every lane a value of each part, one after the other: registers of all parts are interleaved."""
        f, lanes, count, dtype = self.f, self.lanes, len(parts), parts[0].dtype
        element, align = memory_type(dtype), dtype.itemsize
        raws = []
        for part in parts:
            value = f.widen(part, lanes)
            bits = f"zext {value.operand} to {vector_type(element, lanes)}"
            raws.append(f.fresh(bits) if dtype == torch.bool else value.ref)
        address = self._address(store.memory, element, store.offset)
        size = min(lanes, max(1, self.module.target.vector_bits // (8 * dtype.itemsize)))
        for first in range(0, lanes, size):
            within = range(first, first + size)
            pieces = [take_lanes(f, element, lanes, raw, within) for raw in raws] if size > 1 else raws
            for number, piece in enumerate(interleaved(f, element, size, pieces) if size > 1 else pieces):
                start = first * count + number * size
                place = address if start == 0 else f.fresh(f"getelementptr {element}, ptr {address}, i64 {start}")
                self._store_active(element, size, piece, place, align, [(start + k) // count for k in range(size)])

    def _store_active(
        self, element: str, size: int, piece: str, address: str, align: int, lane_of: Sequence[int]
    ) -> None:
        """The elements of a vector that come from active lanes; ``lane_of`` never falls."""
        f, active = self.f, self.active
        if isinstance(active, str):
            mask = self._active_lanes(self.lanes) if self.lanes > 1 else None
            if mask is not None:
                mask = shuffle(f, "i1", self.lanes, mask, "poison", lane_of) if size > 1 else mask
                self._store_masked(element, size, piece, address, mask, align)
                return
            count = size
        else:
            count = sum(lane < active for lane in lane_of)
        if count == size:
            f.emit(f"store {vector_type(element, size)} {piece}, ptr {address}, align {align}")
        elif count == 1:  # a mask known to be of one lane: see _lanes_below
            first = f.fresh(f"extractelement {vector_type(element, size)} {piece}, i64 0")
            f.emit(f"store {element} {first}, ptr {address}, align {align}")
        elif count:
            flags = ", ".join("i1 true" if k < count else "i1 false" for k in range(size))
            self._store_masked(element, size, piece, address, f"<{flags}>", align)

    def _store_masked(self, element: str, lanes: int, value: str, address: str, mask: str, align: int) -> None:
        """Elements side by side, of which those are written that the mask has."""
        wide, masks = vector_type(element, lanes), vector_type("i1", lanes)
        symbol = f"@llvm.masked.store.{suffix(element, lanes)}.p0"
        self.module.declare(f"declare void {symbol}({wide}, ptr, {masks})")
        self.f.emit(f"call void {symbol}({wide} {value}, ptr align {align} {address}, {masks} {mask})")

    def _store(self, store: Store, value: Value) -> None:
        f, dtype = self.f, value.dtype
        element, align = memory_type(dtype), dtype.itemsize
        moves = self._varies(store.offset.variables())
        lanes = self.lanes if moves else 1
        if not moves and value.lanes > 1:
            value = Value(f.fresh(f"extractelement {value.operand}, i64 0"), dtype, 1)
        value = f.widen(value, lanes)
        wide, masks = vector_type(element, lanes), vector_type("i1", lanes)
        raw = f.fresh(f"zext {value.operand} to {wide}") if dtype == torch.bool else value.ref
        runs = self._runs(store.offset) if moves and not self.guards else None
        if runs is not None and runs.moves and runs.apart:
            for number in range(lanes // runs.length):
                first = number * runs.length
                part = shuffle(f, element, lanes, raw, "poison", range(first, first + runs.length))
                place = self._address(store.memory, element, store.offset + number * runs.apart)
                f.emit(f"store {vector_type(element, runs.length)} {part}, ptr {place}, align {align}")
            return
        if moves:
            assert self.vector is not None
            pointer, address, mask = self._lane_access(store.memory, element, store.offset)
            if store.offset.coefficient(self.vector) == -1:
                raw = self._reversed(element, raw)
        else:
            pointer, address, mask = "ptr", self._address(store.memory, element, store.offset), None
        if pointer == "ptr" and moves:
            align = self._alignment(store.offset, align)
        if mask is None:
            self._store_vector(element, lanes, raw, address, align)
            return
        if pointer == "ptr":
            self._store_masked(element, lanes, raw, address, mask, align)
            return
        symbol = f"@llvm.masked.scatter.{suffix(element, lanes)}.v{lanes}p0"
        self.module.declare(f"declare void {symbol}({wide}, {pointer}, {masks})")
        f.emit(f"call void {symbol}({wide} {raw}, {pointer} align {align} {address}, {masks} {mask})")

    def _store_vector(self, element: str, lanes: int, value: str, address: str, align: int) -> None:
        """Elements side by side: on CPUs a register after the other, in the order of memory.

        LLVM writes the registers of a longer vector in an order of its own. (x + 1 of 6 MiB of float32, one thread of a
        Zen 5: 106 µs so, 96 in order; of 3 MiB 55 and 52.)
        """
        f, target = self.f, self.module.target
        register = max(1, target.vector_bits // (8 * _BYTES[element]))
        if target.is_gpu or lanes <= register:
            f.emit(f"store {vector_type(element, lanes)} {value}, ptr {address}, align {align}")
            return
        for start in range(0, lanes, register):
            part = shuffle(f, element, lanes, value, "poison", range(start, start + register))
            place = address if start == 0 else f.fresh(f"getelementptr {element}, ptr {address}, i64 {start}")
            f.emit(f"store {vector_type(element, register)} {part}, ptr {place}, align {align}")
