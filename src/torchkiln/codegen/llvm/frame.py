"""The body of a graph's native function while it is written: its buffers, handles and failure exits.

A *slot* holds an owned tensor handle or null. Every handle the function owns is in one at all times, so that one
clean-up serves all exits. Slots of own tensors come first, then the temporaries of the current step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from torchkiln.codegen.llvm.instructions import InstructionList
from torchkiln.codegen.llvm.module import ModuleBuilder
from torchkiln.codegen.llvm.status import ALIGNED, NUMBER_SHIFT, ON_CARD, OPAQUE, TORCH_ERROR, WRONG_RESULT
from torchkiln.codegen.llvm.support import declarations
from torchkiln.codegen.llvm.texts import TextTable
from torchkiln.graph.dtypes import FLOATS
from torchkiln.ir import index as ix
from torchkiln.ir.index import Extent, Index, Quotient, Remainder, Size
from torchkiln.ir.program import EMULATED, Buffer, ExternCall, Origin, StridedView
from torchkiln.native.symbols import dtype_code, shim_constant
from torchkiln.schedule.dependencies import reads
from torchkiln.schedule.plan import InArena, InConstant, InDonatedInput, InInput, InSlot, OwnTensor, Plan

_CALLED = (
    *("aoti_torch_get_data_ptr", "aoti_torch_new_tensor_handle", "aoti_torch_empty_strided"),
    *("aoti_torch__reinterpret_tensor", "aoti_torch_create_tensor_from_blob", "aoti_torch__alloc_from_pool"),
    *("kiln_delete", "kiln_delete_all", "kiln_adopt", "kiln_store_result", "kiln_retype"),
)


def descriptor(buffer: Buffer, card: int | None, *, by_address: bool) -> tuple[Extent, ...]:
    """A tensor's dtype code and place, number of dimensions, sizes and strides; nothing is asked of an opaque one.

    ``card`` is that of the program. Kernels of a card move 16 bytes at a time, so what they read ``by_address`` is
    aligned.
    """
    if buffer.opaque:
        return OPAQUE, 0
    place = 0
    if buffer.device == "cuda":
        assert card is not None
        place = ALIGNED if by_address else 0
        if card != EMULATED:
            place |= ON_CARD | card << NUMBER_SHIFT
    return dtype_code(buffer.dtype) | place, len(buffer.shape), *buffer.shape, *buffer.strides


class Frame(InstructionList):
    """Writes instructions; knows where each buffer's handle and memory are at run time.

    The function it belongs to has the parameters ``%inputs`` and ``%constants`` (arrays of borrowed handles; an input
    that is a number is there as such), ``%objects`` (a Python tuple), ``%outs`` (handles, then numbers), ``%owned``
    (for each input its handle, where this function may free it after the last use, or null) and ``%reuse`` (a bit for
    each of ``Plan.reused``: whether nobody else holds it), and the blocks :data:`EXITS`. ``%arena`` is the arena, or
    null, ``%where`` the number of a text that says what runs. ``threads`` is the most threads a step may use, None for
    torch's own setting. Of ``aligned_inputs`` the function may have copies in ``%copied``.
    """

    def __init__(
        self,
        module: ModuleBuilder,
        plan: Plan,
        texts: TextTable,
        pointers_of: frozenset[str],
        threads: int | None = None,
        aligned_inputs: frozenset[int] = frozenset(),
    ) -> None:
        super().__init__(module)
        self.plan = plan
        self.texts = texts
        self.threads = threads
        self.lengths = {"stack": 0, "items": 0, "context": 1, "numbers": 0}  # of the arrays of these names
        self.sizes: dict[Size, str] = {}
        self.slot_offsets: list[str] = []
        self.spare_memory: dict[int, str] = {}
        self.copy_inputs = ""  # the call that copies inputs of other strides, where there may be such
        self.compared: set[int] = set()  # in a graph that resizes storages: inputs whose memory is known to be there
        self._numbers: dict[Index, str] = {}
        self._arrays: dict[tuple[Extent, ...], str] = {}
        self._pointers_of = pointers_of
        self.aligned_inputs = aligned_inputs
        self._own = {name: k for k, name in enumerate(n for n, s in plan.storage.items() if isinstance(s, OwnTensor))}
        self._live: set[str] = set()
        self._temporaries = 0
        self._most_temporaries = 0
        for name in _CALLED:
            module.declare(declarations()[name])

    # Instructions

    def call(self, function: str, arguments: str, *, failed: str = "failed") -> None:
        """A call that answers 0, or fails with torch's error and goes to the block ``failed``."""
        status = self.fresh(f"call i32 @{function}({arguments})")
        self.require(self.fresh(f"icmp eq i32 {status}, 0"), failed)

    def call_status(self, function: str, arguments: str) -> None:
        """A call of a support function that answers a status code."""
        status = self.fresh(f"call i32 @{function}({arguments})")
        next_block = self.new_label()
        self.emit(
            f"switch i32 {status}, label %raised [ i32 0, label %{next_block} "
            f"i32 {TORCH_ERROR}, label %failed i32 {WRONG_RESULT}, label %mismatched ]"
        )
        self.start_block(next_block)

    def element(self, array: str, position: int) -> str:
        """The address of an element of an array of pointers or i64."""
        return array if position == 0 else self.fresh(f"getelementptr ptr, ptr {array}, i64 {position}")

    def load(self, array: str, position: int) -> str:
        return self.fresh(f"load ptr, ptr {self.element(array, position)}")

    def reserve(self, array: str, length: int) -> None:
        """Make the array ``array`` of this function at least this long."""
        self.lengths[array] = max(self.lengths[array], length)

    def fill(self, array: str, operands: Iterable[str]) -> None:
        """Store typed operands one after the other in an array, each as soon as it is written."""
        for k, operand in enumerate(operands):
            self.reserve(array, k + 1)
            self.emit(f"store {operand}, ptr {self.element(f'%{array}', k)}")

    def new_cells(self, count: int) -> str:
        """The address of numbers that nothing else in this function uses."""
        start = self.lengths["numbers"]
        self.lengths["numbers"] += count
        return self.fresh(f"getelementptr i64, ptr %numbers, i64 {start}")

    def begin_step(self, what: str, origin: Origin) -> None:
        """Say what runs from here on, for the message of a failure."""
        self.emit(self.store_where(what, origin))

    def store_where(self, what: str, origin: Origin) -> str:
        """The instruction that notes the number of a text, with the text as a comment."""
        number = self.texts.number(what, origin)
        return f"store i64 {number}, ptr %where  ; {self.texts.text(number)!r}"

    # Numbers known at run time

    @contextmanager
    def side_branch(self) -> Iterator[None]:
        """Around instructions that do not come before all that follow: numbers computed there are not known later."""
        known = dict(self._numbers), dict(self._arrays)
        yield
        self._numbers, self._arrays = known

    def number(self, extent: Extent) -> str:
        """An i64 operand holding an extent. Blocks follow each other, so what was computed once serves to the end."""
        if isinstance(extent, int):
            return str(extent)
        found = self._numbers.get(extent)
        if found is None:
            found = str(extent.const)
            for monomial, coefficient in extent.terms.items():
                product = str(coefficient)
                for atom in monomial:
                    factor = self._atom(atom)
                    product = factor if product == "1" else self.fresh(f"mul i64 {product}, {factor}")
                found = product if found == "0" else self.fresh(f"add i64 {found}, {product}")
            self._numbers[extent] = found
        return found

    def _atom(self, atom: ix.Atom) -> str:
        if isinstance(atom, Size):
            return self.sizes[atom]
        if not isinstance(atom, (Quotient, Remainder)):
            raise ValueError(f"{atom} is not a size")
        numerator = self.number(atom.numerator)
        divisor = self.number(atom.divisor)
        some = self.fresh(f"icmp sgt i64 {divisor}, 0")
        divisor = self.fresh(f"select i1 {some}, i64 {divisor}, i64 1")  # an empty dimension divides nothing
        rest = self.fresh(f"srem i64 {numerator}, {divisor}")
        below = self.fresh(f"icmp slt i64 {rest}, 0")
        if isinstance(atom, Remainder):
            moved = self.fresh(f"add i64 {rest}, {divisor}")
            return self.fresh(f"select i1 {below}, i64 {moved}, i64 {rest}")
        quotient = self.fresh(f"sdiv i64 {numerator}, {divisor}")
        return self.fresh(f"sub i64 {quotient}, {self.fresh(f'zext i1 {below} to i64')}")

    def at_most(self, extent: Extent) -> str:
        """A double operand that the absolute value of an extent does not exceed, even where an i64 would overflow."""
        if isinstance(extent, int):
            return self._double(str(abs(extent)))
        total = self._double(str(abs(extent.const)))
        for monomial, coefficient in extent.terms.items():
            product = self._double(str(abs(coefficient)))
            for atom in monomial:
                product = self.fresh(f"fmul double {product}, {self._atom_at_most(atom)}")
            total = self.fresh(f"fadd double {total}, {product}")
        return total

    def _atom_at_most(self, atom: ix.Atom) -> str:
        if isinstance(atom, Size):
            self.module.declare("declare double @llvm.fabs.f64(double)")
            return self.fresh(f"call double @llvm.fabs.f64(double {self._double(self.sizes[atom])})")
        if not isinstance(atom, (Quotient, Remainder)):
            raise ValueError(f"{atom} is not a size")
        return self.fresh(f"fadd double {self.at_most(atom.numerator)}, {self.at_most(atom.divisor)}")

    def fits(self, index: Index) -> str:
        """An i1 operand: whether an index, and every dividend in it, is a number of 64 bits when nothing wraps."""
        total, good = str(index.const), "true"
        for monomial, coefficient in index.terms.items():
            product = str(coefficient)
            for k, atom in enumerate(monomial):
                if isinstance(atom, (Quotient, Remainder)):
                    for part in (atom.numerator, ix.as_index(atom.divisor)):
                        good = self.fresh(f"and i1 {good}, {self.fits(part)}")
                if k:  # two numbers of 64 bits make one of 128
                    good = self.fresh(f"and i1 {good}, {self._is_narrow(product)}")
                wide = self.fresh(f"sext i64 {self._atom(atom)} to i128")
                product = self.fresh(f"mul i128 {product}, {wide}")
            total = self.fresh(f"add i128 {total}, {product}")
        return self.fresh(f"and i1 {good}, {self._is_narrow(total)}")

    def _is_narrow(self, wide: str) -> str:
        narrow = self.fresh(f"trunc i128 {wide} to i64")
        return self.fresh(f"icmp eq i128 {self.fresh(f'sext i64 {narrow} to i128')}, {wide}")

    def _double(self, number: str) -> str:
        return self.fresh(f"sitofp i64 {number} to double")

    def integers(self, values: Sequence[Extent]) -> str:
        """A pointer operand to i64 values, constant where they all are."""
        constants = [v for v in values if isinstance(v, int)]
        if len(constants) == len(values):
            return self.module.integers(constants)
        key = tuple(values)
        found = self._arrays.get(key)
        if found is None:
            numbers = [self.number(v) for v in values]
            found = self._arrays[key] = self.new_cells(len(values))
            for k, number in enumerate(numbers):
                self.emit(f"store i64 {number}, ptr {self.element(found, k)}")
        return found

    @property
    def has_arena(self) -> bool:
        return bool(self.plan.slots or self.plan.reused) or self.plan.arena_bytes > 0

    # Slots

    @property
    def slots(self) -> int:
        return len(self._own) + self._most_temporaries

    @property
    def data_size(self) -> int:
        return len(self.plan.program.inputs) + len(self.plan.program.constants) + len(self._own)

    def _slot(self, position: int) -> str:
        return self.element("%slots", position)

    def temporary(self) -> str:
        """The address of a slot that :meth:`end_step` empties."""
        position = len(self._own) + self._temporaries
        self._temporaries += 1
        self._most_temporaries = max(self._most_temporaries, self._temporaries)
        return self._slot(position)

    def take(self, slot: str) -> str:
        """The handle in a slot, which is empty afterwards."""
        handle = self.fresh(f"load ptr, ptr {slot}")
        self.emit(f"store ptr null, ptr {slot}")
        return handle

    def end_step(self) -> None:
        for k in range(self._temporaries):
            self.emit(f"call void @kiln_delete(ptr {self._slot(len(self._own) + k)})")
        self._temporaries = 0

    def own_slot(self, buffer: str) -> str:
        return self._slot(self._own[buffer])

    def release(self, buffer: str) -> None:
        """Free a tensor of its own."""
        self.emit(f"call void @kiln_delete(ptr {self.own_slot(buffer)})")
        self._live.discard(buffer)

    def copy_written(self, positions: Iterable[int], *, by_address: bool, always: bool) -> None:
        """After a write to inputs: bring them and their aligned copies, where they have some, to the same values.

        ``by_address`` says whether the copies were written. There are copies ``always``, or where ``%inputs_good`` is
        false.
        """
        positions = [position for position in positions if position in self.aligned_inputs]
        if not positions:
            return
        function, after = "kiln_copy_back" if by_address else "kiln_copy_again", self.new_label()
        self.module.declare(declarations()[function])
        if not always:
            some = self.new_label()
            self.emit(f"br i1 %inputs_good, label %{after}, label %{some}")
            self.start_block(some)
        with self.side_branch():
            for position in positions:
                name = self.plan.program.inputs[position].buffer
                assert name is not None
                handle, expected = self.load("%inputs", position), self.integers(self.descriptor(name))
                self.call(function, f"ptr {self.element('%copied', position)}, ptr {handle}, ptr {expected}")
        self.branch(after)
        self.start_block(after)

    def release_input(self, position: int) -> None:
        """Let go of an input, where the caller gave it away."""
        self.emit(f"call void @kiln_delete(ptr {self.element('%owned', position)})")

    # Buffers

    def buffer(self, name: str) -> Buffer:
        return self.plan.program.buffers[name]

    def descriptor(self, name: str) -> tuple[Extent, ...]:
        place = self.plan.storage[name]
        used = name in self._pointers_of or (isinstance(place, InInput) and place.position in self.aligned_inputs)
        return descriptor(self.buffer(name), self.plan.program.card, by_address=used)

    def library_of(self, name: str) -> str:
        """The kind of device whose library of torch's computes with a buffer."""
        return "cpu" if self.plan.program.card == EMULATED else self.buffer(name).device

    def device(self, name: str | None = None) -> str:
        """Operands for the kind and number of the device of a buffer, or else of the arena."""
        card, place = self.plan.program.card, self.plan.program.device if name is None else self.buffer(name).device
        if place == "cpu" or card == EMULATED:
            return f"i32 {shim_constant('aoti_torch_device_type_cpu')}, i32 0"
        return f"i32 {shim_constant('aoti_torch_device_type_cuda')}, i32 {card}"

    def is_own(self, name: str) -> bool:
        return name in self._own

    def allocate(self, name: str) -> None:
        """Give a tensor of its own memory."""
        buffer = self.buffer(name)
        self.call(
            "aoti_torch_empty_strided",
            f"i64 {len(buffer.shape)}, ptr {self.integers(buffer.shape)}, "
            f"ptr {self.integers(buffer.strides)}, i32 {dtype_code(buffer.dtype)}, "
            f"{self.device(name)}, ptr {self.own_slot(name)}",
            failed="no_card_memory" if buffer.device == "cuda" else "failed",
        )
        self._became_live(name)

    def _became_live(self, name: str) -> None:
        self._live.add(name)
        if name in self._pointers_of:
            handle = self.fresh(f"load ptr, ptr {self.own_slot(name)}")
            self.call("aoti_torch_get_data_ptr", f"ptr {handle}, ptr {self._data_slot(name)}")

    def _data_slot(self, name: str) -> str:
        place = self.plan.storage[name]
        inputs, constants = len(self.plan.program.inputs), len(self.plan.program.constants)
        if isinstance(place, InInput):
            return self.element("%data", place.position)
        if isinstance(place, InConstant):
            return self.element("%data", inputs + place.position)
        return self.element("%data", inputs + constants + self._own[name])

    def data_pointer(self, name: str) -> str:
        """The address of a buffer's first element."""
        place = self.plan.storage[name]
        if isinstance(place, InArena):
            return self.fresh(f"getelementptr i8, ptr %arena, i64 {place.offset}") if place.offset else "%arena"
        if isinstance(place, InSlot):
            return self.fresh(f"getelementptr i8, ptr %arena, i64 {self.slot_offsets[place.number]}")
        if isinstance(place, InDonatedInput):
            return self.fresh(f"getelementptr i8, ptr {self.spare_memory[place.position]}, i64 {place.offset}")
        return self.fresh(f"load ptr, ptr {self._data_slot(name)}")

    def address(self, view: StridedView) -> str:
        """The address of the first element of a view."""
        start = self.data_pointer(view.buffer)
        offset = self.number(ix.product((view.offset, view.dtype.itemsize)))
        return start if offset == "0" else self.fresh(f"getelementptr i8, ptr {start}, i64 {offset}")

    def parallel_grain(self, count: Extent, grain: Extent) -> Extent | None:
        """The fewest iterations of a thread; None where ``count`` are for one thread, as a ``grain`` of 0 asks for."""
        if self.threads == 1:
            return None
        if isinstance(count, int) and isinstance(grain, int):
            if grain and self.threads is not None:
                grain = max(grain, -(-count // self.threads))
            return grain if 0 < grain < count else None
        return grain

    def run_loop(self, symbol: str, count: Extent, grain: Extent | None) -> None:
        """Call ``void (i64 begin, i64 end, ptr context)`` for ``count`` iterations, ``grain`` or more to a thread."""
        if grain is not None:
            least = self._least_share(count, grain)
            end = self.number(count)
            self.call("torch_parallel_for", f"i64 0, i64 {end}, i64 {least}, ptr @{symbol}, ptr %context")
        elif count != 0:
            self.emit(f"call void @{symbol}(i64 0, i64 {self.number(count)}, ptr %context)")

    def _least_share(self, count: Extent, grain: Extent) -> str:
        """``grain``, which is positive, or what the allowed threads share where that is more."""
        least = self.number(grain)
        if not isinstance(grain, int):
            some = self.fresh(f"icmp sgt i64 {least}, 0")
            least = self.fresh(f"select i1 {some}, i64 {least}, i64 1")
        if self.threads is None or isinstance(count, int):
            return least
        share = self.number(ix.ceil_divide(count, self.threads))
        more = self.fresh(f"icmp sgt i64 {share}, {least}")
        return self.fresh(f"select i1 {more}, i64 {share}, i64 {least}")

    def whole_handle(self, name: str) -> str | None:
        """The handle of the tensor that is exactly this buffer; None for memory in the arena, which has none."""
        place = self.plan.storage[name]
        if isinstance(place, InInput):
            return self.load("%inputs", place.position)
        if isinstance(place, InConstant):
            return self.load("%constants", place.position)
        if isinstance(place, OwnTensor):
            return self.fresh(f"load ptr, ptr {self.own_slot(name)}")
        return None

    def is_whole(self, view: StridedView) -> bool:
        return view == self.buffer(view.buffer).whole

    def borrow(self, view: StridedView) -> str:
        """A handle good until the end of the step."""
        if self.is_whole(view):
            handle = self.whole_handle(view.buffer)
            if handle is not None:
                return handle
        slot = self.temporary()
        self.make_view(view, slot)
        return self.fresh(f"load ptr, ptr {slot}")

    def own(self, view: StridedView) -> str:
        """The address of a temporary slot holding a handle that may be given away."""
        slot = self.temporary()
        handle = self.whole_handle(view.buffer) if self.is_whole(view) else None
        if handle is None:
            self.make_view(view, slot)
        else:
            self.call("aoti_torch_new_tensor_handle", f"ptr {handle}, ptr {slot}")
        return slot

    def make_view(self, view: StridedView, slot: str) -> None:
        """Put a new tensor over a buffer's memory in a slot."""
        if view.opaque:
            raise ValueError(f"{view} is opaque, and has no memory to take a view of")
        geometry = f"i64 {len(view.shape)}, ptr {self.integers(view.shape)}, ptr {self.integers(view.strides)}"
        handle = self.whole_handle(view.buffer)
        start = self.number(ix.product((view.offset, view.dtype.itemsize)))
        place = self.plan.storage[view.buffer]
        if isinstance(place, (InArena, InSlot)) and self.has_arena and self.plan.program.card is not None:
            # Part of the arena's tensor: a tensor of an address would ask the driver whose memory that is.
            begin = str(place.offset) if isinstance(place, InArena) else self.slot_offsets[place.number]
            offset = start if begin == "0" else self.fresh(f"add i64 {begin}, {start}")
            arena = self.load("%arena_handle", 0)
            self.call(
                "aoti_torch__alloc_from_pool",
                f"ptr {arena}, i64 {offset}, i32 {dtype_code(view.dtype)}, {geometry}, ptr {slot}",
            )
        elif handle is None:
            data = self.data_pointer(view.buffer)
            if start != "0":
                data = self.fresh(f"getelementptr i8, ptr {data}, i64 {start}")
            self.call(
                "aoti_torch_create_tensor_from_blob",
                f"ptr {data}, {geometry}, i64 0, i32 {dtype_code(view.dtype)}, {self.device(view.buffer)}, ptr {slot}",
            )
        elif view.dtype == self.buffer(view.buffer).dtype:
            offset = self.number(view.offset)
            self.call("aoti_torch__reinterpret_tensor", f"ptr {handle}, {geometry}, i64 {offset}, ptr {slot}")
        else:
            itemsize = self.buffer(view.buffer).dtype.itemsize
            self.call(
                "kiln_retype",
                f"ptr {handle}, i64 {start}, i64 {itemsize}, i32 {dtype_code(view.dtype)}, {geometry}, ptr {slot}",
            )

    # Results of extern calls

    def take_results(self, results: Iterable[tuple[str | None, str]], call: ExternCall) -> None:
        """Own what an operator returned: pairs of the buffer it is for (None: nobody's) and the handle."""
        slots: list[tuple[str | None, str]] = []
        for name, handle in results:
            slot = self.own_slot(name) if name is not None and self.lacks_memory(name) else self.temporary()
            self.emit(f"store ptr {handle}, ptr {slot}")
            slots.append((name, slot))
        for bound in call.binds:
            self.know(bound.size, self.size_of(self.fresh(f"load ptr, ptr {dict(slots)[bound.buffer]}"), bound.dim))
        for name, slot in slots:
            if name is not None and self.lacks_memory(name):
                self._adopt(name, slot, reads(call))
            elif name is not None:
                self._copy_result(name, slot)

    def lacks_memory(self, name: str) -> bool:
        """Whether a buffer is a tensor of its own that has no memory yet: a returned tensor becomes it."""
        return name in self._own and name not in self._live

    def _adopt(self, name: str, slot: str, given: Iterable[str]) -> None:
        """Make the tensor in the slot of a buffer that buffer.

        It is copied where it lies in the arena, or in an input that the operator was ``given`` and that is reused.
        """
        if self.buffer(name).opaque:
            self.require(self.fresh(f"icmp ne ptr {self.fresh(f'load ptr, ptr {slot}')}, null"), "mismatched")
        else:
            expected = self.integers(self.descriptor(name))
            self.call_status("kiln_adopt", f"ptr {slot}, ptr {expected}, ptr %arena, ptr %arena_end")
            places = (self.plan.storage[other] for other in given)
            positions = {place.position for place in places if isinstance(place, (InInput, InDonatedInput))}
            for position, used in sorted(self.plan.reused):
                if position in positions:
                    low = self.spare_memory[position]
                    high = self.fresh(f"getelementptr i8, ptr {low}, i64 {used}")
                    self.call_status("kiln_adopt", f"ptr {slot}, ptr {expected}, ptr {low}, ptr {high}")
        self._became_live(name)

    def _copy_result(self, name: str, slot: str) -> None:
        """Copy a result into the memory planned for it."""
        if self.buffer(name).opaque:
            raise ValueError(f"{name} is opaque, and cannot be copied into memory of ours")
        expected = self.integers(self.descriptor(name))
        target = self.borrow(self.buffer(name).whole)
        handle = self.fresh(f"load ptr, ptr {slot}")
        self.call_status("kiln_store_result", f"ptr {target}, ptr {handle}, ptr {expected}")

    def know(self, size: Size, value: str, otherwise: str = "mismatched") -> None:
        """From here on ``size`` is ``value``, which must be in the range that was compiled for."""
        self.require(self.in_range(size, value), otherwise)

    def in_range(self, size: Size, value: str) -> str:
        """Whether ``value``, which ``size`` is from here on, is in the range that was compiled for."""
        self.sizes[size] = value
        low, high = size.bounds
        above, below = self.fresh(f"icmp sge i64 {value}, {low}"), self.fresh(f"icmp sle i64 {value}, {high}")
        return self.fresh(f"and i1 {above}, {below}")

    def require(self, condition: str, otherwise: str) -> None:
        """Go on where ``condition`` holds, else to the block ``otherwise``."""
        next_block = self.new_label()
        self.emit(f"br i1 {condition}, label %{next_block}, label %{otherwise}")
        self.start_block(next_block)

    def size_of(self, handle: str, dim: int, *, stride: bool = False) -> str:
        """A size or stride of a tensor; -1, which no check lets pass, where it has no such dimension."""
        function = "aoti_torch_get_stride" if stride else "aoti_torch_get_size"
        self.module.declare(f"declare i32 @{function}(ptr, i64, ptr)")
        cell = self.new_cells(1)
        self.emit(f"store i64 -1, ptr {cell}")
        self.fresh(f"call i32 @{function}(ptr {handle}, i64 {dim}, ptr {cell})")
        return self.fresh(f"load i64, ptr {cell}")


def is_floating(view: StridedView) -> bool:
    """Whether ``view`` is strided memory of floating-point numbers."""
    return not view.opaque and view.dtype in FLOATS
