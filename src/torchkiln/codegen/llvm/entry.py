"""The native function of a whole graph: inputs, arena, every step in order, outputs.

Two functions go into the module. ``kiln_run`` works on arrays of tensor handles and does everything; ``kiln_entry``
is the function Python calls, which reads the handles out of the Python tensors, calls ``kiln_run`` and wraps what
comes back. Neither holds an address of the process that compiled it: Python objects come in a tuple.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torchkiln.artifact.artifact import ENTRY_SYMBOL, RUN_SYMBOL, EntryInfo, InputKind, OutputSource, Route
from torchkiln.artifact.calls import Call
from torchkiln.artifact.status import (
    COMPARED_LATER,
    INDEX_ERROR,
    NO_MEMORY,
    NO_NUMBER,
    NOT_READ,
    NUMBER,
    OVERFLOW,
    PYTHON_ERROR,
    TORCH_ERROR,
    VALUE_ERROR,
    WRONG_INPUT,
    WRONG_RESULT,
    ZERO_DIVISION,
)
from torchkiln.codegen.llvm.blas import has_known_sizes
from torchkiln.codegen.llvm.extern import RegisterCall, calls_blas, emit_extern, fills_planned_memory
from torchkiln.codegen.llvm.frame import REFUSED, Frame, descriptor
from torchkiln.codegen.llvm.module import ModuleBuilder
from torchkiln.codegen.llvm.support import declarations
from torchkiln.codegen.llvm.support.outputs import KINDS
from torchkiln.codegen.llvm.timing import Clock
from torchkiln.graph.effects import resizes_storage
from torchkiln.ir import index as ix
from torchkiln.ir.index import Extent, Index
from torchkiln.ir.native_calls import is_native
from torchkiln.ir.program import (
    CheckFits,
    CheckSizes,
    ExternCall,
    Number,
    PassInput,
    ReadNumber,
    Refusal,
    StridedView,
)
from torchkiln.schedule.dependencies import reads, writes
from torchkiln.schedule.plan import InArena, InConstant, InInput, InSlot, InSpareInput, Launch, OwnTensor, Plan, Step
from torchkiln.target import Target

if TYPE_CHECKING:
    from torchkiln.schedule.kernel import Kernel

# One long function of calls: optimizing it takes five times as long (2.1 s against 0.4 s for 600 steps, in one run)
# and gains nothing that shows beside the calls.
_GLUE = "optnone noinline nounwind"

# No machine has this much memory, and the slots of a graph add up without overflow.
_MOST_SLOT_BYTES = 2**50
# Below this the arena is on the stack: no pool, and the memory is warm.
_STACK_ARENA_BYTES = 16384


# What the two functions call, besides what the steps do.
_CALLED = (
    *("kiln_check_inputs", "kiln_compare", "kiln_copy_inputs", "kiln_data_pointers", "kiln_read_list"),
    *("kiln_read_tuple", "kiln_take_inputs", "kiln_wrap_outputs", "kiln_raise"),
    *("kiln_arena_acquire", "kiln_arena_release", "PyLong_AsLongLong", "PyEval_SaveThread", "PyEval_RestoreThread"),
    *("torch_parallel_for", "aoti_torch_grad_mode_is_enabled", "aoti_torch_grad_mode_set_enabled"),
    "llvm.memset.p0.i64",
)


def emit_entry(
    module: ModuleBuilder,
    plan: Plan,
    kernel_symbols: Mapping[Kernel, str],
    *,
    threads: int | None,
    profile: bool = False,
) -> EntryInfo:
    """Add the functions of a whole graph to the module that holds its kernels.

    ``threads`` is the most threads a kernel may use: 1 leaves out parallel calls altogether, None follows torch's
    own setting at run time. With ``profile`` the graph keeps the times of its steps.
    """
    for name in _CALLED:
        module.declare(declarations()[name])
    program = plan.program
    frame = Frame(module, plan, _buffers_by_address(plan, module.target), threads)
    clock = Clock(module, plan, running=profile)
    preamble = _emit_preamble(frame)
    _emit_pointers(frame)
    clock.before_steps(frame)
    python_calls, externs = _emit_steps(frame, kernel_symbols, clock)
    _emit_outputs(frame)

    outputs, values = _output_sources(plan)
    tensor_outputs = sum(source.kind == "tensor" for source in outputs)
    number_outputs = sum(source.kind in ("number", "truth") for source in outputs)
    calls_operators = any(_calls_operator(step, plan, module.target) for step in plan.steps)
    module.define(RUN_SYMBOL, _run_function(frame, preamble, tensor_outputs, clock, calls_operators=calls_operators))
    objects_before_values = len(program.constants) + len(python_calls)
    module.define(
        ENTRY_SYMBOL,
        _entry_function(
            module,
            plan,
            _input_table(plan),
            _output_table(outputs, objects_before_values),
            tensor_outputs + number_outputs,
            objects_before_values + len(values),
            clock,
        ),
    )
    return EntryInfo(
        inputs=_input_kinds(plan),
        python_calls=python_calls,
        values=values,
        outputs=outputs,
        tensor_outputs=tensor_outputs,
        number_outputs=number_outputs,
        extern_calls=externs,
        reused=tuple(position for position, _ in plan.reused),
        timed_steps=clock.steps,
        kernels=tuple(kernel_symbols.values()),
        written=_written_inputs(plan),
        opaque_constants=tuple(k for k, (name, _) in enumerate(program.constants) if program.buffers[name].opaque),
    )


def _emit_steps(
    frame: Frame, kernel_symbols: Mapping[Kernel, str], clock: Clock
) -> tuple[tuple[Call, ...], tuple[tuple[str, Route], ...]]:
    """Write every step with the memory it takes and gives back; the calls through Python, and all extern calls."""
    plan = frame.plan
    python_calls: list[Call] = []
    externs: list[tuple[str, Route]] = []

    def register(call: Call) -> int:
        python_calls.append(call)
        return len(plan.program.constants) + len(python_calls) - 1

    allocations, last_uses = _allocations(plan), _last_uses_of_inputs(plan)
    resizing = _resizes_storages(plan)
    for k, step in enumerate(plan.steps):
        if resizing and not _resizes(step):
            _emit_comparisons(frame, step)
        if allocations[k]:
            frame.begin_step("allocation", step.origin)
        for buffer in allocations[k]:
            frame.allocate(buffer)
        name, route = _emit_step(frame, step, kernel_symbols, register)
        if route is not None:
            externs.append((name, route))
        if _resizes(step):
            frame.compared.clear()  # whatever lies in that storage has other memory now, or none
        for buffer in plan.frees[k]:
            frame.release(buffer)
        for position in last_uses[k]:
            frame.release_input(position)
        clock.after_step(frame, step, name, route)
    return tuple(python_calls), tuple(externs)


def _emit_step(
    frame: Frame, step: Step, kernel_symbols: Mapping[Kernel, str], register: RegisterCall
) -> tuple[str, Route | None]:
    """Write one step; its name in a profile, and how an operator is called."""
    if isinstance(step, ExternCall):
        return str(step.target), emit_extern(frame, step, register)
    if isinstance(step, Launch):
        symbol = kernel_symbols[step.kernel]
        _emit_launch(frame, step, symbol)
        return symbol, None
    if isinstance(step, ReadNumber):
        _emit_read_number(frame, step)
    elif isinstance(step, CheckSizes):
        _emit_check(frame, step)
    else:
        _emit_fits(frame, step)
    return type(step).__name__, None


def _buffers_by_address(plan: Plan, target: Target) -> frozenset[str]:
    """What is read or written by its address, not through a handle."""
    return frozenset(name for step in plan.steps if _takes_addresses(step, plan, target) for name in _mentioned(step))


def _takes_addresses(step: Step, plan: Plan, target: Target) -> bool:
    if isinstance(step, ExternCall):
        return is_native(step) or calls_blas(step, plan.program.buffers, target)
    return isinstance(step, (Launch, ReadNumber))


def _calls_operator(step: Step, plan: Plan, target: Target) -> bool:
    """Whether a step may call an operator of torch."""
    return isinstance(step, ExternCall) and not (
        _takes_addresses(step, plan, target) and (is_native(step) or has_known_sizes(step))
    )


def _resizes(step: Step) -> bool:
    return isinstance(step, ExternCall) and resizes_storage(step.target)


def _resizes_storages(plan: Plan) -> bool:
    """Whether inputs may come without memory, or lose it: they are compared, and their addresses read, when used."""
    return any(_resizes(step) for step in plan.steps)


def _emit_comparisons(frame: Frame, step: Step) -> None:
    """Compare the inputs that a step uses with what was compiled for, the first time after a storage was resized."""
    places = (frame.plan.storage[name] for name in _mentioned(step))
    for position in sorted({place.position for place in places if isinstance(place, InInput)} - frame.compared):
        name = frame.plan.program.inputs[position].buffer
        assert name is not None
        frame.begin_step(
            f"input {position} is not a tensor of the type, sizes and strides this graph was compiled for,"
            " or its storage is too small for them where it is used",
            step.origin,
        )
        handle, expected = frame.load("%inputs", position), frame.integers(descriptor(frame.buffer(name)))
        status = frame.fresh(f"call i32 @kiln_compare(ptr {handle}, ptr {expected})")
        frame.require(frame.fresh(f"icmp eq i32 {status}, 0"), "refused")
        frame.call("aoti_torch_get_data_ptr", f"ptr {handle}, ptr {frame.element('%data', position)}")
        frame.compared.add(position)


def _mentioned(step: Step) -> set[str]:
    return set(step.buffers) if isinstance(step, Launch) else reads(step) | writes(step)


def _written_inputs(plan: Plan) -> tuple[int, ...]:
    places = (plan.storage.get(name) for operation in plan.program.operations for name in writes(operation))
    return tuple(sorted({place.position for place in places if isinstance(place, InInput)}))


def _allocations(plan: Plan) -> list[list[str]]:
    """For each step, the tensors that get their memory just before it; not those an extern call returns."""
    allocations: list[list[str]] = [[] for _ in plan.steps]
    seen: set[str] = set()
    for k, step in enumerate(plan.steps):
        returned: set[str | None] = set()
        if isinstance(step, ExternCall) and not fills_planned_memory(step):
            returned = set(step.results)
        for name in sorted(_mentioned(step) - seen):
            seen.add(name)
            if isinstance(plan.storage[name], OwnTensor) and name not in returned:
                allocations[k].append(name)
    return allocations


def _last_uses_of_inputs(plan: Plan) -> list[list[int]]:
    """For each step, the inputs no later one reads or lies in; not those of the last step, which gains nothing, and
    outputs."""
    last: dict[int, int] = {}
    for k, step in enumerate(plan.steps):
        for name in _mentioned(step):
            place = plan.storage[name]
            if isinstance(place, (InInput, InSpareInput)):
                last[place.position] = k
    kept: set[int] = set()
    for output in plan.program.outputs:
        if isinstance(output, PassInput):
            kept.add(output.position)
        elif isinstance(output, StridedView):
            place = plan.storage[output.buffer]
            if isinstance(place, InInput):
                kept.add(place.position)
    last_uses: list[list[int]] = [[] for _ in plan.steps]
    for position, k in sorted(last.items()):
        if position not in kept and k < len(plan.steps) - 1:
            last_uses[k].append(position)
    return last_uses


def _emit_launch(frame: Frame, step: Launch, symbol: str) -> None:
    kernel, threads = step.kernel, frame.threads
    frame.context_size = max(frame.context_size, len(step.buffers) + len(step.sizes) + kernel.may_fail)
    for k, name in enumerate(step.buffers):
        frame.emit(f"store ptr {frame.data_pointer(name)}, ptr {frame.element('%context', k)}")
    for k, size in enumerate(step.sizes):
        number = frame.number(ix.extent(ix.as_index(size)))
        frame.emit(f"store i64 {number}, ptr {frame.element('%context', len(step.buffers) + k)}")
    if kernel.may_fail:
        frame.emit(f"store ptr %error, ptr {frame.element('%context', len(step.buffers) + len(step.sizes))}")
    here: dict[Any, Index] = {own: ix.as_index(given) for own, given in zip(kernel.nest.sizes, step.sizes, strict=True)}
    extent, grain = (
        ix.substitute_extent(e, here) for e in (kernel.mapping.iterations, kernel.mapping.grain)
    )
    if isinstance(extent, int) and isinstance(grain, int):
        if threads is not None and grain:
            grain = max(grain, -(-extent // threads))
        parallel = bool(grain) and threads != 1 and extent > grain
    else:
        parallel = threads != 1
    if parallel or kernel.may_fail:
        frame.begin_step("a kernel", step.origin)
    if parallel:
        least = str(grain) if isinstance(grain, int) else _run_time_grain(frame, extent, grain, threads)
        count = frame.number(extent)
        frame.call("torch_parallel_for", f"i64 0, i64 {count}, i64 {least}, ptr @{symbol}, ptr %context")
    elif extent != 0:
        frame.emit(f"call void @{symbol}(i64 0, i64 {frame.number(extent)}, ptr %context)")
    if kernel.may_fail:
        frame.require(frame.fresh(f"icmp eq i64 {frame.fresh('load i64, ptr %error')}, 0"), "kernel_failed")


def _run_time_grain(frame: Frame, extent: Extent, grain: Extent, threads: int | None) -> str:
    """The least iterations for a thread where sizes decide: torch runs the loop serially when there are no more."""
    least = frame.number(grain)
    some = frame.fresh(f"icmp sgt i64 {least}, 0")
    least = frame.fresh(f"select i1 {some}, i64 {least}, i64 1")
    if threads is None:
        return least
    share = frame.number(ix.ceil_divide(extent, threads))
    more = frame.fresh(f"icmp sgt i64 {share}, {least}")
    return frame.fresh(f"select i1 {more}, i64 {share}, i64 {least}")


def _emit_read_number(frame: Frame, step: ReadNumber) -> None:
    """Read one element as a whole number."""
    view = step.view
    data = frame.data_pointer(view.buffer)
    start = frame.number(ix.product((view.offset, view.dtype.itemsize)))
    address = frame.fresh(f"getelementptr i8, ptr {data}, i64 {start}")
    raw = frame.fresh(f"load i{8 * view.dtype.itemsize}, ptr {address}, align {view.dtype.itemsize}")
    if view.dtype.itemsize < 8:
        extend = "sext" if view.dtype.is_signed else "zext"
        raw = frame.fresh(f"{extend} i{8 * view.dtype.itemsize} {raw} to i64")
    low, high = step.size.bounds
    text = f"a number read from a tensor that is not in the range from {low} to {high}"
    refusal = step.refusal or Refusal("RuntimeError", text)
    frame.begin_step(refusal.text, step.origin)
    frame.know(step.size, raw, REFUSED[refusal.error])


def _emit_fits(frame: Frame, step: CheckFits) -> None:
    frame.begin_step("a whole number of more than 64 bits", step.origin)
    frame.require(frame.fits(step.value), REFUSED["OverflowError"])


_COMPARISONS = {"lt": "slt", "le": "sle", "gt": "sgt", "ge": "sge", "eq": "eq", "ne": "ne"}


def _emit_check(frame: Frame, step: CheckSizes) -> None:
    condition = step.condition
    left, right = frame.number(condition.left), frame.number(condition.right)
    good = frame.fresh(f"icmp {_COMPARISONS[condition.name]} i64 {left}, {right}")
    frame.begin_step(step.message, step.origin)
    frame.require(good, "refused")


def _emit_preamble(frame: Frame) -> list[str]:
    """What comes before everything else: sizes, the check of the inputs, the layout of the arena.

    Leaves ``%wrong``, the number of the first input that is not as expected or -1, and ``%arena_bytes``.
    """
    plan, module = frame.plan, frame.module
    bad = "-1"
    for source in plan.program.sizes:
        given = frame.load("%inputs", source.position)
        if source.dim is None:
            value = frame.fresh(f"ptrtoint ptr {given} to i64")
        else:
            value = frame.size_of(given, source.dim, stride=source.stride)
        good = frame.in_range(source.size, value)
        bad = frame.fresh(f"select i1 {good}, i64 {bad}, i64 {source.position}")
    table = frame.integers(_input_table(plan))
    first = frame.fresh(f"call i64 @kiln_check_inputs(ptr %inputs, i64 {len(plan.program.inputs)}, ptr {table})")
    frame.emit(f"%sizes_good = icmp slt i64 {bad}, 0")
    frame.emit(f"%wrong = select i1 %sizes_good, i64 {first}, i64 {bad}")
    mask = _copied_inputs(plan)
    if mask:
        arguments = f"ptr %inputs, i64 {len(mask)}, ptr {table}, ptr {module.integers(mask)}, ptr %copied"
        frame.copy_inputs = f"call i64 @kiln_copy_inputs({arguments})"
    total = str(plan.arena_bytes)
    if plan.slots:
        module.declare("declare i64 @llvm.smax.i64(i64, i64)")
        total, fits = "0", "true"
        for slot in plan.slots:
            frame.slot_offsets.append(total)
            most = frame.number(slot[0])
            for other in slot[1:]:
                most = frame.fresh(f"call i64 @llvm.smax.i64(i64 {most}, i64 {frame.number(other)})")
            padded = frame.fresh(f"and i64 {frame.fresh(f'add i64 {most}, 127')}, -64")
            total = frame.fresh(f"add i64 {total}, {padded}")
            for size in slot:
                small = frame.fresh(f"fcmp olt double {frame.at_most(size)}, {_MOST_SLOT_BYTES:.1f}")
                fits = frame.fresh(f"and i1 {fits}, {small}")
        # A product of sizes that overflowed may look small: this much is refused by any allocator.
        total = frame.fresh(f"select i1 {fits}, i64 {total}, i64 {2**62}")
    if plan.reused:
        # Where somebody holds one of the inputs, its place is taken by memory behind the arena.
        behind = sum(_padded(used) for _, used in plan.reused)
        all_free = frame.fresh(f"icmp eq i64 %reuse, {2 ** len(plan.reused) - 1}")
        total = frame.fresh(f"add i64 {total}, {frame.fresh(f'select i1 {all_free}, i64 0, i64 {behind}')}")
    frame.emit(f"%arena_bytes = add i64 {total}, 0")
    lines = list(frame.lines)
    frame.lines.clear()
    return lines


def _input_kinds(plan: Plan) -> tuple[InputKind, ...]:
    numbers = {source.position for source in plan.program.sizes if source.dim is None}
    kinds: list[InputKind] = []
    for position, given in enumerate(plan.program.inputs):
        if given.buffer is None:
            kinds.append("number" if position in numbers else "unread")
        else:
            kinds.append("opaque" if plan.program.buffers[given.buffer].opaque else "tensor")
    return tuple(kinds)


def _output_sources(plan: Plan) -> tuple[tuple[OutputSource, ...], tuple[object, ...]]:
    sources: list[OutputSource] = []
    values: list[object] = []
    tensors = numbers = 0
    for output in plan.program.outputs:
        if isinstance(output, StridedView):
            sources.append(OutputSource("tensor", tensors))
            tensors += 1
        elif isinstance(output, Number):
            sources.append(OutputSource("truth" if output.truth else "number", numbers))
            numbers += 1
        elif isinstance(output, PassInput):
            sources.append(OutputSource("input", output.position))
        else:
            sources.append(OutputSource("value", len(values)))
            values.append(output.value)
    return tuple(sources), tuple(values)


def _output_table(outputs: tuple[OutputSource, ...], objects_before_values: int) -> tuple[int, ...]:
    """Outputs as ``kiln_wrap_outputs`` reads them."""
    tensors = sum(source.kind == "tensor" for source in outputs)
    shifts = {"value": objects_before_values, "number": tensors, "truth": tensors}
    table: list[int] = []
    for source in outputs:
        shift = shifts.get(source.kind, 0)
        table += [KINDS[source.kind], source.number + shift]
    return tuple(table)


def _input_table(plan: Plan) -> tuple[Extent, ...]:
    """Descriptors of all inputs, one after the other; a mark and 0 for one that is not compared at the start."""
    table: list[Extent] = []
    later = _resizes_storages(plan)
    for graph_input, kind in zip(plan.program.inputs, _input_kinds(plan), strict=True):
        if kind == "tensor" and later:
            table += (COMPARED_LATER, 0)
        elif graph_input.buffer is None:
            table += (NUMBER if kind == "number" else NOT_READ, 0)
        else:
            table += descriptor(plan.program.buffers[graph_input.buffer])
    return tuple(table)


def _copied_inputs(plan: Plan) -> tuple[int, ...]:
    """A mask of the inputs of which a copy with the right strides can take the place: nobody sees that it is one."""
    if _resizes_storages(plan):
        return ()
    shown = {plan.storage[o.buffer] for o in plan.program.outputs if isinstance(o, StridedView)}
    written = _written_inputs(plan)
    mask = tuple(
        int(given.any_strides and position not in written and InInput(position) not in shown)
        for position, given in enumerate(plan.program.inputs)
    )
    return mask if any(mask) else ()


def _emit_outputs(frame: Frame) -> None:
    """Put an owned handle of every tensor output in ``%outs``."""
    views = [o for o in frame.plan.program.outputs if isinstance(o, StridedView)]
    numbers = [o for o in frame.plan.program.outputs if isinstance(o, Number)]
    for k, output in enumerate(numbers):
        value = frame.number(output.value)
        frame.emit(f"store i64 {value}, ptr {frame.element('%outs', len(views) + k)}")
    if views:
        frame.emit(f"store ptr {frame.module.string('outputs')}, ptr %where")
    last_use = {view.buffer: k for k, view in enumerate(views)}
    parts: dict[StridedView, str] = {}
    for k, view in enumerate(views):
        name = view.buffer
        if isinstance(frame.plan.storage[name], (InArena, InSlot, InSpareInput)):
            raise ValueError(f"output {k} is in memory that does not outlive the call: {view}")
        if frame.is_own(name) and not frame.is_live(name):
            frame.allocate(name)
        out = frame.element("%outs", k)
        handle = frame.whole_handle(name)
        if view in parts:  # one tensor, as a whole buffer is: autograd counts who holds it
            frame.call("aoti_torch_new_tensor_handle", f"ptr {frame.fresh(f'load ptr, ptr {parts[view]}')}, ptr {out}")
        elif not frame.is_whole(view):
            frame.make_view(view, out)
            parts[view] = out
        elif last_use[name] == k and frame.is_own(name):
            frame.emit(f"store ptr {handle}, ptr {out}")
            frame.emit(f"store ptr null, ptr {frame.own_slot(name)}")
        else:
            frame.call("aoti_torch_new_tensor_handle", f"ptr {handle}, ptr {out}")


def _pointer_masks(frame: Frame) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Which inputs and constants have their data pointers read when the graph starts."""
    plan = frame.plan
    inputs, constants = [0] * len(plan.program.inputs), [0] * len(plan.program.constants)
    later = _resizes_storages(plan)
    for name in _buffers_by_address(plan, frame.module.target):
        place = plan.storage[name]
        if isinstance(place, InInput) and not later:
            inputs[place.position] = 1
        elif isinstance(place, InConstant):
            constants[place.position] = 1
    for position, _ in plan.reused:
        inputs[position] = 1
    return tuple(inputs), tuple(constants)


def _padded(nbytes: int) -> int:
    return -(-nbytes // 64) * 64


def _emit_pointers(frame: Frame) -> None:
    """Read the data pointers of the inputs and constants that kernels use."""
    inputs, constants = _pointer_masks(frame)
    module = frame.module
    if any(inputs):
        frame.call("kiln_data_pointers", f"ptr %inputs, i64 {len(inputs)}, ptr {module.integers(inputs)}, ptr %data")
    if any(constants):
        data = frame.element("%data", len(inputs))
        frame.call(
            "kiln_data_pointers", f"ptr %constants, i64 {len(constants)}, ptr {module.integers(constants)}, ptr {data}"
        )
    offset = frame.plan.arena_bytes
    for k, (position, used) in enumerate(frame.plan.reused):
        free = frame.fresh(f"icmp ne i64 {frame.fresh(f'and i64 %reuse, {2**k}')}, 0")
        instead = frame.fresh(f"getelementptr i8, ptr %arena, i64 {offset}")
        given = frame.load("%data", position)
        frame.spare_memory[position] = frame.fresh(f"select i1 {free}, ptr {given}, ptr {instead}")
        offset += _padded(used)


# Every failing step goes to one of these blocks, with each handle it owns in a slot.
_FAILURES = {
    "failed": TORCH_ERROR,
    "mismatched": WRONG_RESULT,
    "raised": PYTHON_ERROR,
    "refused_index": INDEX_ERROR,
    "refused": VALUE_ERROR,
    "refused_zero": ZERO_DIVISION,
    "refused_overflow": OVERFLOW,
    "refused_nan": NO_NUMBER,
    "no_memory": NO_MEMORY,
}


def _run_function(
    frame: Frame, preamble: list[str], tensor_outputs: int, clock: Clock, *, calls_operators: bool
) -> str:
    module, plan = frame.module, frame.plan
    arrays = {
        "slots": frame.slots,
        "data": frame.data_size,
        "stack": frame.stack_size,
        "items": frame.items_size,
        "context": frame.context_size,
        "numbers": frame.numbers_size,
    }
    lines = [f"  %{name} = alloca [{max(size, 1)} x ptr], align 16" for name, size in arrays.items()]
    lines += clock.begin()
    lines += [
        "  %where = alloca ptr",
        "  %status = alloca i32",
        "  %error = alloca i64",
        "  store i64 0, ptr %error",
        "  store i32 0, ptr %status",
        f"  store ptr {module.string('the start of the graph')}, ptr %where",
    ]
    copied = len(plan.program.inputs) if frame.copy_inputs else 0
    if copied:
        lines.append(f"  %copied = alloca [{copied} x ptr], align 16")
    for name, count in (("slots", frame.slots), ("outs", tensor_outputs)):
        if count:
            lines.append(f"  call void @llvm.memset.p0.i64(ptr %{name}, i8 0, i64 {8 * count}, i1 false)")
    on_stack = plan.arena_bytes <= _STACK_ARENA_BYTES and not plan.slots and not plan.reused
    if on_stack:
        lines.append(f"  %arena = alloca [{max(plan.arena_bytes, 1)} x i8], align 64")
    lines += preamble
    lines += [
        "  %inputs_good = icmp slt i64 %wrong, 0",
        "  br i1 %inputs_good, label %start, label %wrong_input",
        "wrong_input:",
    ]
    wrong, finish = "%wrong", list[str]()
    if copied:
        drop = f"  call void @kiln_delete_all(ptr %copied, i64 {copied})"
        lines += [
            f"  call void @llvm.memset.p0.i64(ptr %copied, i8 0, i64 {8 * copied}, i1 false)",
            "  br i1 %sizes_good, label %copy_inputs, label %refuse_input",
            "copy_inputs:",
            f"  %still_wrong = {frame.copy_inputs}",
            "  %all_copied = icmp slt i64 %still_wrong, 0",
            "  br i1 %all_copied, label %start, label %refuse_input",
            "refuse_input:",
            "  %refused_input = phi i64 [ %wrong, %wrong_input ], [ %still_wrong, %copy_inputs ]",
            drop,
        ]
        wrong = "%refused_input"
        finish += [
            "  br i1 %inputs_good, label %none_copied, label %some_copied",
            "some_copied:",
            drop,
            "  br label %none_copied",
            "none_copied:",
        ]
    lines += [f"  call void @kiln_raise(i32 {WRONG_INPUT}, ptr null, i64 {wrong})", "  ret i32 1", "start:"]
    if plan.steps:
        lines.append("  %thread = call ptr @PyEval_SaveThread()")
        finish.append("  call void @PyEval_RestoreThread(ptr %thread)")
    if calls_operators:
        # Operators would otherwise record a graph for tensors that require gradients.
        lines += [
            "  %grad = call zeroext i1 @aoti_torch_grad_mode_is_enabled()",
            "  call void @aoti_torch_grad_mode_set_enabled(i1 zeroext false)",
        ]
        finish.insert(0, "  call void @aoti_torch_grad_mode_set_enabled(i1 zeroext %grad)")
    if not on_stack:
        lines += [
            "  %arena = call ptr @kiln_arena_acquire(i64 %arena_bytes)",
            "  %arena_missing = icmp eq ptr %arena, null",
            "  br i1 %arena_missing, label %no_memory, label %with_arena",
            "with_arena:",
        ]
        finish = ["  call void @kiln_arena_release(ptr %arena)", *finish]
    lines.append("  %arena_end = getelementptr i8, ptr %arena, i64 %arena_bytes")
    lines += frame.lines
    lines.append("  br label %finish")
    for name, kind in _FAILURES.items():
        after = "without_arena" if name == "no_memory" else "give_up"
        lines += [f"{name}:", f"  store i32 {kind}, ptr %status", f"  br label %{after}"]
    lines += [
        "kernel_failed:",
        f"  store i32 {NO_MEMORY}, ptr %status",
        "  br label %give_up",
    ]
    lines += ["give_up:", f"  call void @kiln_delete_all(ptr %outs, i64 {tensor_outputs})", "  br label %finish"]
    lines += ["finish:", f"  call void @kiln_delete_all(ptr %slots, i64 {frame.slots})"]
    if not on_stack:
        lines.append(finish.pop(0))
    lines += ["  br label %without_arena", "without_arena:", *finish]
    lines += [
        "  %outcome = load i32, ptr %status",
        "  %good = icmp eq i32 %outcome, 0",
        "  br i1 %good, label %done, label %raise",
        "raise:",
        "  %place = load ptr, ptr %where",
        "  call void @kiln_raise(i32 %outcome, ptr %place, i64 0)",
        "  ret i32 1",
        "done:",
        *clock.end_of_run(),
        "  ret i32 0",
    ]
    body = "\n".join(lines)
    parameters = "ptr %inputs, ptr %constants, ptr %objects, ptr %outs, ptr %owned, i64 %reuse"
    return f"define i32 @{RUN_SYMBOL}({parameters}) {_GLUE} {{\n{body}\n}}"


def _entry_function(
    module: ModuleBuilder,
    plan: Plan,
    table: tuple[Extent, ...],
    outputs: tuple[int, ...],
    outs: int,
    objects: int,
    clock: Clock,
) -> str:
    """``objects`` is the place of the tensor type in the tuple, after everything the graph itself uses; then comes the
    function that makes inputs plain."""
    inputs, constants = len(plan.program.inputs), len(plan.program.constants)
    output_table = module.integers(outputs)
    count = len(outputs) // 2
    kinds = module.integers([entry if isinstance(entry, int) else 0 for entry in table])  # sizes are not looked at
    given_away = {position for step in _last_uses_of_inputs(plan) for position in step}
    given_away.update(position for position, _ in plan.reused)
    reuse = "%reuse = add i64 0, 0"
    if plan.reused:
        reuse = """%reuse_at = getelementptr ptr, ptr %arguments, i64 1
  %reuse_object = load ptr, ptr %reuse_at
  %reuse = call i64 @PyLong_AsLongLong(ptr %reuse_object)"""
    take = ""
    if given_away:
        mask = module.integers(tuple(int(k in given_away) for k in range(inputs)))
        take = f"call void @kiln_take_inputs(ptr %list, i64 {inputs}, ptr {mask}, ptr %inputs, ptr %owned)"
    drop = f"call void @kiln_delete_all(ptr %owned, i64 {inputs})" if given_away else ""
    start, before, after, end = clock.around_run()
    return f"""define ptr @{ENTRY_SYMBOL}(ptr %self, ptr %arguments, i64 %count) {_GLUE} {{{start}
  %inputs = alloca [{max(inputs, 1)} x ptr], align 16
  %constants = alloca [{max(constants, 1)} x ptr], align 16
  %outs = alloca [{max(outs, 1)} x ptr], align 16
  %owned = alloca [{max(inputs, 1)} x ptr], align 16
  %list = load ptr, ptr %arguments
  {reuse}
  %unread = call i32 @kiln_read_list(ptr %list, i64 {inputs}, ptr {kinds}, ptr %self, i64 {objects}, ptr %inputs)
  %readable = icmp eq i32 %unread, 0
  br i1 %readable, label %run, label %raised
run:
  call void @kiln_read_tuple(ptr %self, i64 {constants}, ptr %constants)
  {take}{before}
  %failed = call i32 @{RUN_SYMBOL}(ptr %inputs, ptr %constants, ptr %self, ptr %outs, ptr %owned, i64 %reuse){after}
  {drop}
  %good = icmp eq i32 %failed, 0
  br i1 %good, label %wrap, label %raised
wrap:
  %results = call ptr @kiln_wrap_outputs(i64 {count}, ptr {output_table}, ptr %outs, ptr %list, ptr %self){end}
  ret ptr %results
raised:
  ret ptr null
}}"""
