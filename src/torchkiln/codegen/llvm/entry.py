"""The native functions of a whole graph: inputs, arena, every step in order, outputs.

``kiln_run`` works on arrays of tensor handles and does everything. ``kiln_entry`` is what Python calls: it reads the
handles out of the Python tensors, calls ``kiln_run`` and wraps what comes back. Neither holds an address of the process
that compiled it, or a line of the user's program: Python objects come in a tuple, texts in an array.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from torchkiln.artifact.artifact import (
    CARD_SYMBOL,
    ENTRY_SYMBOL,
    RUN_SYMBOL,
    TEXTS_SYMBOL,
    CardInfo,
    EntryInfo,
    OutputSource,
)
from torchkiln.codegen.llvm.capture import sized_inputs, why_not_captured
from torchkiln.codegen.llvm.frame import Frame
from torchkiln.codegen.llvm.module import ModuleBuilder
from torchkiln.codegen.llvm.plan_facts import (
    aligned_inputs,
    buffers_by_address,
    calls_operator,
    copied_inputs,
    input_kinds,
    input_table,
    last_uses_of_inputs,
    output_sources,
    output_table,
    resizes_storages,
    written_inputs,
)
from torchkiln.codegen.llvm.status import EXITS, WRONG_INPUT
from torchkiln.codegen.llvm.steps import emit_steps, kernels_of_card
from torchkiln.codegen.llvm.support import declarations
from torchkiln.codegen.llvm.texts import TextTable
from torchkiln.codegen.llvm.timing import Clock
from torchkiln.ir.program import NO_ORIGIN, Number, StridedView
from torchkiln.native.symbols import dtype_code
from torchkiln.schedule.plan import InArena, InConstant, InDonatedInput, InInput, InSlot, Plan

if TYPE_CHECKING:
    from torchkiln.schedule.kernel import Kernel

# One long function of calls: optimizing it takes five times as long (2.1 s against 0.4 s for 600 steps, in one run)
# and gains nothing that shows beside the calls.
_UNOPTIMIZED = "optnone noinline nounwind"

# No machine has this much memory, and the slots of a graph add up without overflow.
_MOST_SLOT_BYTES = 2**50
# Up to this size the arena is on the stack: no pool, and the memory is warm.
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
    texts: TextTable,
    *,
    threads: int | None,
    profile: bool = False,
) -> EntryInfo:
    """Add the functions of a whole graph to a module, and what they may have to say to ``texts``.

    ``threads`` is the most threads a kernel may use, None for torch's own setting at run time. With ``profile`` the
    graph keeps the times of its steps.
    """
    for name in _CALLED:
        module.declare(declarations()[name])
    module.define(TEXTS_SYMBOL, f"@{TEXTS_SYMBOL} = external constant [0 x ptr]")
    if plan.program.card is not None:
        module.define(CARD_SYMBOL, f"@{CARD_SYMBOL} = external global [0 x ptr]")
        for name in ("kiln_card_enter", "kiln_card_arena", "kiln_card_leave"):
            module.declare(declarations()[name])
    by_address = buffers_by_address(plan, module.target)
    frame = Frame(module, plan, texts, by_address, threads, aligned_inputs(plan, by_address))
    clock = Clock(module, plan, running=profile)
    preamble = _emit_preamble(frame)
    _emit_pointers(frame)
    clock.before_steps(frame)
    python_calls, externs = emit_steps(frame, kernel_symbols, clock)
    _emit_outputs(frame)
    module.define(RUN_SYMBOL, _RunFunction(frame, clock).text(preamble))
    outputs, values = output_sources(plan)
    module.define(ENTRY_SYMBOL, _entry_function(frame, clock, outputs, len(python_calls), len(values)))
    constants, buffers = plan.program.constants, plan.program.buffers
    on_card = kernels_of_card(kernel_symbols)
    return EntryInfo(
        inputs=input_kinds(plan),
        python_calls=python_calls,
        values=values,
        outputs=outputs,
        tensor_outputs=len(_tensor_outputs(plan)),
        number_outputs=len(_number_outputs(plan)),
        extern_calls=externs,
        reused=tuple(position for position, _ in plan.reused),
        timed_steps=clock.steps,
        kernels=tuple(symbol for symbol in kernel_symbols.values() if symbol not in on_card),
        written=written_inputs(plan),
        opaque_constants=tuple(k for k, (name, _) in enumerate(constants) if buffers[name].opaque),
        card=_card(plan, on_card, timed=bool(clock.steps)),
    )


def _card(plan: Plan, kernels: tuple[str, ...], *, timed: bool) -> CardInfo | None:
    number, buffers = plan.program.card, plan.program.buffers
    if number is None:
        return None
    constants = tuple(k for k, (name, _) in enumerate(plan.program.constants) if buffers[name].device == "cuda")
    return CardInfo(
        number,
        kernels,
        constants,
        static=tuple(k for k, given in enumerate(plan.program.inputs) if given.static),
        sized=sized_inputs(plan),
        saved=plan.program.saved,
        uncapturable="its steps are timed" if timed else why_not_captured(plan),
    )


def _tensor_outputs(plan: Plan) -> list[StridedView]:
    return [output for output in plan.program.outputs if isinstance(output, StridedView)]


def _number_outputs(plan: Plan) -> list[Number]:
    return [output for output in plan.program.outputs if isinstance(output, Number)]


def _emit_preamble(frame: Frame) -> list[str]:
    """Sizes, the check of the inputs, the layout of the arena.

    Leaves ``%wrong``, the first input that is not as expected or -1, and ``%arena_bytes``.
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
    by_address = buffers_by_address(plan, module.target)
    table = frame.integers(input_table(plan, by_address))
    first = frame.fresh(f"call i64 @kiln_check_inputs(ptr %inputs, i64 {len(plan.program.inputs)}, ptr {table})")
    frame.emit(f"%sizes_good = icmp slt i64 {bad}, 0")
    frame.emit(f"%wrong = select i1 %sizes_good, i64 {first}, i64 {bad}")
    mask = copied_inputs(plan, by_address)
    if mask:
        arguments = f"ptr %inputs, i64 {len(mask)}, ptr {table}, ptr {module.integers(mask)}, ptr %copied"
        frame.copy_inputs = f"call i64 @kiln_copy_inputs({arguments})"
    total = _bytes_of_slots(frame) if plan.slots else str(plan.arena_bytes)
    if plan.reused:
        # Where somebody holds one of the inputs, its place is taken by memory behind the arena.
        behind = sum(_padded(used) for _, used in plan.reused)
        all_free = frame.fresh(f"icmp eq i64 %reuse, {2 ** len(plan.reused) - 1}")
        total = frame.fresh(f"add i64 {total}, {frame.fresh(f'select i1 {all_free}, i64 0, i64 {behind}')}")
    frame.emit(f"%arena_bytes = add i64 {total}, 0")
    lines = list(frame.lines)
    frame.lines.clear()
    return lines


def _bytes_of_slots(frame: Frame) -> str:
    """An i64 operand: the length of an arena that is laid out in each call; notes where each slot begins."""
    frame.module.declare("declare i64 @llvm.smax.i64(i64, i64)")
    total, fits = "0", "true"
    for slot in frame.plan.slots:
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
    return frame.fresh(f"select i1 {fits}, i64 {total}, i64 {2**62}")


def _emit_outputs(frame: Frame) -> None:
    """Put an owned handle of every tensor output in ``%outs``."""
    views = _tensor_outputs(frame.plan)
    for k, output in enumerate(_number_outputs(frame.plan)):
        value = frame.number(output.value)
        frame.emit(f"store i64 {value}, ptr {frame.element('%outs', len(views) + k)}")
    if views:
        frame.begin_step("outputs", NO_ORIGIN)
    last_use = {view.buffer: k for k, view in enumerate(views)}
    parts: dict[StridedView, str] = {}
    for k, view in enumerate(views):
        name = view.buffer
        if isinstance(frame.plan.storage[name], (InArena, InSlot, InDonatedInput)):
            raise ValueError(f"output {k} is in memory that does not outlive the call: {view}")
        if frame.lacks_memory(name):
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


def _padded(nbytes: int) -> int:
    return -(-nbytes // 64) * 64


def _emit_pointers(frame: Frame) -> None:
    """Read the data pointers of the inputs and constants that kernels use."""
    plan, module = frame.plan, frame.module
    read = {plan.storage[name] for name in buffers_by_address(plan, module.target)}
    later, reused = resizes_storages(plan), dict(plan.reused)
    inputs = [(InInput(k) in read and not later) or k in reused for k in range(len(plan.program.inputs))]
    constants = [InConstant(k) in read for k in range(len(plan.program.constants))]
    for array, mask, start in (("inputs", inputs, 0), ("constants", constants, len(inputs))):
        if any(mask):
            flags, data = module.integers([int(flag) for flag in mask]), frame.element("%data", start)
            frame.call("kiln_data_pointers", f"ptr %{array}, i64 {len(mask)}, ptr {flags}, ptr {data}")
    if frame.aligned_inputs and not later:
        _emit_aligned_pointers(frame)
    offset = frame.plan.arena_bytes
    for k, (position, used) in enumerate(frame.plan.reused):
        free = frame.fresh(f"icmp ne i64 {frame.fresh(f'and i64 %reuse, {2**k}')}, 0")
        instead = frame.fresh(f"getelementptr i8, ptr %arena, i64 {offset}")
        given = frame.load("%data", position)
        frame.spare_memory[position] = frame.fresh(f"select i1 {free}, ptr {given}, ptr {instead}")
        offset += _padded(used)


def _emit_aligned_pointers(frame: Frame) -> None:
    """Put the addresses of copies in place of those of inputs that are not aligned."""
    frame.module.declare(declarations()["kiln_aligned_pointers"])
    some, after = frame.new_label(), frame.new_label()
    frame.emit(f"br i1 %inputs_good, label %{after}, label %{some}")
    frame.start_block(some)
    with frame.side_branch():
        frame.call("kiln_aligned_pointers", f"ptr %copied, i64 {len(frame.plan.program.inputs)}, ptr %data")
    frame.branch(after)
    frame.start_block(after)


class _RunFunction:
    """The text of ``kiln_run`` around the steps that ``frame`` holds.

    Inputs that are not as expected are copied where that helps, or refused. Then the GIL is released, the arena taken,
    and every step runs. All exits lead through ``finish``, which gives back what the run holds.
    """

    def __init__(self, frame: Frame, clock: Clock) -> None:
        self._frame, self._plan, self._clock = frame, frame.plan, clock
        self._tensor_outputs = len(_tensor_outputs(frame.plan))
        self._calls_operators = any(calls_operator(s, frame.plan, frame.module.target) for s in frame.plan.steps)
        self._copied = len(self._plan.program.inputs) if frame.copy_inputs else 0
        # In a graph that resizes storages, inputs that are not aligned are copied when they are used.
        later = bool(frame.aligned_inputs) and resizes_storages(frame.plan)
        self._copied_later = len(self._plan.program.inputs) if later else 0
        movable = self._plan.slots or self._plan.reused
        self._card = self._plan.program.card
        small = not movable and self._plan.arena_bytes <= _STACK_ARENA_BYTES
        self._arena_on_stack = small and self._card is None

    def text(self, preamble: list[str]) -> str:
        lines = [*self._stack(), *preamble, *self._refuse_inputs(), "start:", *self._enter()]
        lines += ["  %arena_end = getelementptr i8, ptr %arena, i64 %arena_bytes", *self._frame.lines]
        lines += ["  br label %finish", *self._failures(), *self._finish()]
        body = "\n".join(lines)
        parameters = "ptr %inputs, ptr %constants, ptr %objects, ptr %outs, ptr %owned, i64 %reuse"
        return f"define i32 @{RUN_SYMBOL}({parameters}) {_UNOPTIMIZED} {{\n{body}\n}}"

    def _stack(self) -> list[str]:
        frame = self._frame
        arrays = {"slots": frame.slots, "data": frame.data_size, **frame.lengths}
        lines = [_array(name, length) for name, length in arrays.items()]
        lines += self._clock.begin()
        lines += [
            "  %where = alloca i64",
            "  %status = alloca i32",
            "  %error = alloca i64",
            "  store i64 0, ptr %error",
            "  store i32 0, ptr %status",
            f"  {frame.store_where('the start of the graph', NO_ORIGIN)}",
        ]
        if self._copied or self._copied_later:
            lines.append(_array("copied", self._copied or self._copied_later))
        if self._copied_later:
            lines.append(_clear("copied", self._copied_later))
        for name, count in (("slots", frame.slots), ("outs", self._tensor_outputs)):
            if count:
                lines.append(_clear(name, count))
        if self._card is not None:
            lines += [_array("cells", frame.lengths["context"]), *_null("card_guard", "card_stream", "arena_handle")]
        if self._arena_on_stack:
            lines.append(f"  %arena = alloca [{max(self._plan.arena_bytes, 1)} x i8], align 64")
        return lines

    def _refuse_inputs(self) -> list[str]:
        lines = [
            "  %inputs_good = icmp slt i64 %wrong, 0",
            "  br i1 %inputs_good, label %start, label %wrong_input",
            "wrong_input:",
        ]
        wrong = "%wrong"
        if self._copied:
            lines += [
                _clear("copied", self._copied),
                "  br i1 %sizes_good, label %copy_inputs, label %refuse_input",
                "copy_inputs:",
                f"  %still_wrong = {self._frame.copy_inputs}",
                "  %all_copied = icmp slt i64 %still_wrong, 0",
                "  br i1 %all_copied, label %start, label %refuse_input",
                "refuse_input:",
                "  %refused_input = phi i64 [ %wrong, %wrong_input ], [ %still_wrong, %copy_inputs ]",
                _delete_all("copied", self._copied),
            ]
            wrong = "%refused_input"
        return [*lines, f"  call void @kiln_raise(i32 {WRONG_INPUT}, ptr null, i64 {wrong})", "  ret i32 1"]

    def _enter(self) -> list[str]:
        lines = []
        if self._plan.steps:
            lines.append("  %thread = call ptr @PyEval_SaveThread()")
        if self._calls_operators:
            # Operators would otherwise record a graph for tensors that require gradients.
            lines += [
                "  %grad = call zeroext i1 @aoti_torch_grad_mode_is_enabled()",
                "  call void @aoti_torch_grad_mode_set_enabled(i1 zeroext false)",
            ]
        if self._card is not None:
            lines += self._enter_card(self._card)
        elif not self._arena_on_stack:
            lines += [
                "  %arena = call ptr @kiln_arena_acquire(i64 %arena_bytes)",
                "  %arena_missing = icmp eq ptr %arena, null",
                "  br i1 %arena_missing, label %no_memory, label %with_arena",
                "with_arena:",
            ]
        return lines

    def _enter_card(self, number: int) -> list[str]:
        """The card's stream, the addresses of what kernels are given, and the arena: lent, or a tensor of the card."""
        called = f"call i32 @kiln_card_enter(ptr @{CARD_SYMBOL}, i32 {number}, ptr %card_guard, ptr %card_stream)"
        lines = _checked("card_entered", called)
        lines.append("  %stream = load ptr, ptr %card_stream")
        for k in range(self._frame.lengths["context"]):
            lines.append(f"  %cell{k} = getelementptr ptr, ptr %context, i64 {k}")
            lines.append(f"  %cell_at{k} = getelementptr ptr, ptr %cells, i64 {k}")
            lines.append(f"  store ptr %cell{k}, ptr %cell_at{k}")
        if not self._frame.has_arena:
            return [*lines, "  %arena = inttoptr i64 0 to ptr"]
        length, one = "%arena_length", self._frame.module.integers([1])
        kind = f"i32 {dtype_code(torch.uint8)}, {self._frame.device()}, ptr %arena_handle"
        lines += [
            f"  {length} = alloca i64",
            f"  store i64 %arena_bytes, ptr {length}",
            f"  %lent = call ptr @kiln_card_arena(ptr @{CARD_SYMBOL}, ptr %stream, i64 %arena_bytes)",
            "  %is_lent = icmp ne ptr %lent, null",
            "  br i1 %is_lent, label %take_lent, label %make_arena",
            "take_lent:",
            *_checked("lent_taken", "call i32 @aoti_torch_new_tensor_handle(ptr %lent, ptr %arena_handle)"),
            "  br label %with_arena",
            "make_arena:",
        ]
        made = f"call i32 @aoti_torch_empty_strided(i64 1, ptr {length}, ptr {one}, {kind})"
        lines += _checked("arena_made", made, "no_card_memory")
        lines += ["  br label %with_arena", "with_arena:"]
        lines += ["  %arena_tensor = load ptr, ptr %arena_handle", "  %arena_address = alloca ptr"]
        lines += _checked("arena_known", "call i32 @aoti_torch_get_data_ptr(ptr %arena_tensor, ptr %arena_address)")
        return [*lines, "  %arena = load ptr, ptr %arena_address"]

    def _failures(self) -> list[str]:
        lines = []
        for name, kind in EXITS.items():
            after = "without_arena" if name == "no_memory" else "give_up"
            lines += [f"{name}:", f"  store i32 {kind}, ptr %status", f"  br label %{after}"]
        return [*lines, "give_up:", _delete_all("outs", self._tensor_outputs), "  br label %finish"]

    def _finish(self) -> list[str]:
        lines = ["finish:", _delete_all("slots", self._frame.slots)]
        if self._card is not None:
            lines.append("  call void @kiln_delete(ptr %arena_handle)")
            lines.append(f"  call void @kiln_card_leave(ptr @{CARD_SYMBOL}, ptr %card_guard)")
        elif not self._arena_on_stack:
            lines.append("  call void @kiln_arena_release(ptr %arena)")
        lines += ["  br label %without_arena", "without_arena:"]
        if self._calls_operators:
            lines.append("  call void @aoti_torch_grad_mode_set_enabled(i1 zeroext %grad)")
        if self._copied_later:
            lines.append(_delete_all("copied", self._copied_later))
        if self._copied:
            lines += [
                "  br i1 %inputs_good, label %none_copied, label %some_copied",
                "some_copied:",
                _delete_all("copied", self._copied),
                "  br label %none_copied",
                "none_copied:",
            ]
        if self._plan.steps:
            lines.append("  call void @PyEval_RestoreThread(ptr %thread)")
        return [
            *lines,
            "  %outcome = load i32, ptr %status",
            "  %good = icmp eq i32 %outcome, 0",
            "  br i1 %good, label %done, label %raise",
            "raise:",
            "  %number = load i64, ptr %where",
            f"  %text_at = getelementptr ptr, ptr @{TEXTS_SYMBOL}, i64 %number",
            "  %text = load ptr, ptr %text_at",
            "  %error_number = load i64, ptr %error",
            "  call void @kiln_raise(i32 %outcome, ptr %text, i64 %error_number)",
            "  ret i32 1",
            "done:",
            *self._clock.end_of_run(),
            "  ret i32 0",
        ]


def _array(name: str, length: int) -> str:
    return f"  %{name} = alloca [{max(length, 1)} x ptr], align 16"


def _null(*names: str) -> list[str]:
    """Pointers on the stack that are null at first."""
    return [line for name in names for line in (f"  %{name} = alloca ptr", f"  store ptr null, ptr %{name}")]


def _checked(label: str, call: str, failed: str = "failed") -> list[str]:
    """A call that answers 0, from where it goes on at ``label``, or goes to the exit ``failed``."""
    return [
        f"  %{label}_status = {call}",
        f"  %{label}_good = icmp eq i32 %{label}_status, 0",
        f"  br i1 %{label}_good, label %{label}, label %{failed}",
        f"{label}:",
    ]


def _clear(array: str, count: int) -> str:
    return f"  call void @llvm.memset.p0.i64(ptr %{array}, i8 0, i64 {8 * count}, i1 false)"


def _delete_all(array: str, count: int) -> str:
    return f"  call void @kiln_delete_all(ptr %{array}, i64 {count})"


def _entry_function(
    frame: Frame, clock: Clock, outputs: tuple[OutputSource, ...], python_calls: int, values: int
) -> str:
    """The text of ``kiln_entry``.

    Its tuple holds what the graph uses (constants, calls, values), the tensor type, and what makes inputs plain.
    """
    plan, module = frame.plan, frame.module
    inputs, constants = len(plan.program.inputs), len(plan.program.constants)
    arrays = {
        "inputs": inputs,
        "constants": constants,
        "outs": len(_tensor_outputs(plan)) + len(_number_outputs(plan)),
        "owned": inputs,
    }
    table = module.integers(output_table(outputs, constants + python_calls))
    # Sizes are not looked at.
    described = input_table(plan, buffers_by_address(plan, module.target))
    kinds = module.integers([entry if isinstance(entry, int) else 0 for entry in described])
    objects = constants + python_calls + values
    take, drop = _giving_away(frame)
    start, before, after, end = clock.around_run()
    allocas = "\n".join(_array(name, length) for name, length in arrays.items())
    return f"""define ptr @{ENTRY_SYMBOL}(ptr %self, ptr %arguments, i64 %count) {_UNOPTIMIZED} {{{start}
{allocas}
  %list = load ptr, ptr %arguments
  {_READ_REUSE if plan.reused else "%reuse = add i64 0, 0"}
  %status = call i32 @kiln_read_list(ptr %list, i64 {inputs}, ptr {kinds}, ptr %self, i64 {objects}, ptr %inputs)
  %readable = icmp eq i32 %status, 0
  br i1 %readable, label %run, label %raised
run:
  call void @kiln_read_tuple(ptr %self, i64 {constants}, ptr %constants)
  {take}{before}
  %failed = call i32 @{RUN_SYMBOL}(ptr %inputs, ptr %constants, ptr %self, ptr %outs, ptr %owned, i64 %reuse){after}
  {drop}
  %good = icmp eq i32 %failed, 0
  br i1 %good, label %wrap, label %raised
wrap:
  %results = call ptr @kiln_wrap_outputs(i64 {len(outputs)}, ptr {table}, ptr %outs, ptr %list, ptr %self){end}
  ret ptr %results
raised:
  ret ptr null
}}"""


_READ_REUSE = """%reuse_at = getelementptr ptr, ptr %arguments, i64 1
  %reuse_object = load ptr, ptr %reuse_at
  %reuse = call i64 @PyLong_AsLongLong(ptr %reuse_object)"""


def _giving_away(frame: Frame) -> tuple[str, str]:
    """Calls that take the inputs the graph may free early out of the caller's list, and free those left; or nothing."""
    plan, inputs = frame.plan, len(frame.plan.program.inputs)
    given_away = {position for step in last_uses_of_inputs(plan) for position in step}
    given_away.update(position for position, _ in plan.reused)
    if not given_away:
        return "", ""
    mask = frame.module.integers([int(position in given_away) for position in range(inputs)])
    take = f"call void @kiln_take_inputs(ptr %list, i64 {inputs}, ptr {mask}, ptr %inputs, ptr %owned)"
    return take, _delete_all("owned", inputs).strip()
