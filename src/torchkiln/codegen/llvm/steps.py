"""The steps of a graph as instructions of its native function: launches of kernels, calls, checks of sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import torch

from torchkiln.artifact.artifact import CARD_FUNCTIONS, CARD_SYMBOL, FIRST_CARD_KERNEL, Route
from torchkiln.artifact.calls import Call
from torchkiln.codegen.llvm.extern import RegisterCall, emit_extern
from torchkiln.codegen.llvm.frame import Frame
from torchkiln.codegen.llvm.operations import integer_predicate
from torchkiln.codegen.llvm.plan_facts import (
    allocations,
    inputs_written_by,
    last_uses_of_inputs,
    mentioned,
    resizes,
    resizes_storages,
    takes_addresses,
)
from torchkiln.codegen.llvm.status import REFUSED
from torchkiln.codegen.llvm.support import declarations
from torchkiln.codegen.llvm.timing import Clock
from torchkiln.ir import index as ix
from torchkiln.ir.index import Index
from torchkiln.ir.program import TOO_LARGE, CheckFits, CheckSizes, ExternCall, ReadNumber, Refusal
from torchkiln.schedule.gpu import MOST_BLOCKS
from torchkiln.schedule.kernel import CpuMapping, GpuMapping, Kernel
from torchkiln.schedule.plan import InInput, Launch, Step


def emit_steps(
    frame: Frame, kernel_symbols: Mapping[Kernel, str], clock: Clock
) -> tuple[tuple[Call, ...], tuple[tuple[str, Route], ...]]:
    """Write every step with the memory it takes and gives back; the calls through Python, and all extern calls."""
    plan = frame.plan
    python_calls: list[Call] = []
    externs: list[tuple[str, Route]] = []

    def register(call: Call) -> int:
        python_calls.append(call)
        return len(plan.program.constants) + len(python_calls) - 1

    card_kernels = kernels_of_card(kernel_symbols)
    allocated, last_uses = allocations(plan), last_uses_of_inputs(plan)
    resizing = resizes_storages(plan)
    for k, step in enumerate(plan.steps):
        if resizing and not resizes(step):
            _emit_comparisons(frame, step)
        if allocated[k]:
            frame.begin_step("allocation", step.origin)
        for buffer in allocated[k]:
            frame.allocate(buffer)
        name, route = _emit_step(frame, step, kernel_symbols, card_kernels, register)
        if route is not None:
            externs.append((name, route))
        if resizes(step):
            frame.compared.clear()  # whatever lies in that storage has other memory now, or none
        elif frame.aligned_inputs:
            by_address = takes_addresses(step, plan, frame.module.target)
            frame.copy_written(inputs_written_by(step, plan), by_address=by_address, always=resizing)
        for buffer in plan.frees[k]:
            frame.release(buffer)
        for position in last_uses[k]:
            frame.release_input(position)
        clock.after_step(frame, step, name, route)
    return tuple(python_calls), tuple(externs)


def kernels_of_card(kernel_symbols: Mapping[Kernel, str]) -> tuple[str, ...]:
    """The symbols of the kernels that a card runs, in the order in which the graph gets them."""
    return tuple(symbol for kernel, symbol in kernel_symbols.items() if isinstance(kernel.mapping, GpuMapping))


def _emit_step(
    frame: Frame,
    step: Step,
    kernel_symbols: Mapping[Kernel, str],
    card_kernels: Sequence[str],
    register: RegisterCall,
) -> tuple[str, Route | None]:
    """Write one step; its name in a profile, and how an operator is called."""
    if isinstance(step, ExternCall):
        return str(step.target), emit_extern(frame, step, register)
    if isinstance(step, Launch):
        symbol = kernel_symbols[step.kernel]
        mapping = step.kernel.mapping
        if isinstance(mapping, GpuMapping):
            _emit_launch_on_card(frame, step, mapping, card_kernels.index(symbol))
        else:
            _emit_launch(frame, step, mapping, symbol)
        return symbol, None
    if isinstance(step, ReadNumber):
        _emit_read_number(frame, step)
    elif isinstance(step, CheckSizes):
        _emit_check(frame, step)
    else:
        _emit_fits(frame, step)
    return type(step).__name__, None


def _emit_comparisons(frame: Frame, step: Step) -> None:
    """Compare the inputs that a step uses with what was compiled for, the first time after a storage was resized."""
    places = (frame.plan.storage[name] for name in mentioned(step))
    for position in sorted({place.position for place in places if isinstance(place, InInput)} - frame.compared):
        name = frame.plan.program.inputs[position].buffer
        assert name is not None
        frame.begin_step(
            f"input {position} is not a tensor of the type, sizes and strides this graph was compiled for,"
            " or its storage is too small for them where it is used",
            step.origin,
        )
        handle, expected = frame.load("%inputs", position), frame.integers(frame.descriptor(name))
        data = frame.element("%data", position)
        if position in frame.aligned_inputs:
            frame.module.declare(declarations()["kiln_compare_aligned"])
            results = f"ptr {frame.element('%copied', position)}, ptr {data}"
            status = frame.fresh(f"call i32 @kiln_compare_aligned(ptr {handle}, ptr {expected}, {results})")
            frame.require(frame.fresh(f"icmp eq i32 {status}, 0"), "refused")
        else:
            status = frame.fresh(f"call i32 @kiln_compare(ptr {handle}, ptr {expected})")
            frame.require(frame.fresh(f"icmp eq i32 {status}, 0"), "refused")
            frame.call("aoti_torch_get_data_ptr", f"ptr {handle}, ptr {data}")
        frame.compared.add(position)


def _emit_launch(frame: Frame, step: Launch, mapping: CpuMapping, symbol: str) -> None:
    kernel = step.kernel
    pointers = (f"ptr {frame.data_pointer(name)}" for name in step.buffers)
    sizes = (f"i64 {frame.number(ix.extent(ix.as_index(size)))}" for size in step.sizes)
    frame.fill("context", chain(pointers, sizes, ["ptr %error"] if kernel.may_fail else ()))
    here: dict[Any, Index] = {own: ix.as_index(given) for own, given in zip(kernel.nest.sizes, step.sizes, strict=True)}
    extent, grain = (ix.substitute_extent(e, here) for e in (mapping.iterations, mapping.grain))
    least = frame.parallel_grain(extent, grain)
    if least is not None or kernel.may_fail:
        frame.begin_step("a kernel", step.origin)
    frame.run_loop(symbol, extent, least)
    if kernel.may_fail:
        frame.require(frame.fresh(f"icmp eq i64 {frame.fresh('load i64, ptr %error')}, 0"), "kernel_failed")


def _emit_launch_on_card(frame: Frame, step: Launch, mapping: GpuMapping, position: int) -> None:
    """Queue a kernel, the one at ``position`` of the card's, on the stream. Nothing is launched for no iterations."""
    given = (
        f"i64 {_bytes_of(frame, name)}" if number in mapping.values else f"ptr {frame.data_pointer(name)}"
        for number, name in enumerate(step.buffers)
    )
    sizes = (f"i64 {frame.number(ix.extent(ix.as_index(size)))}" for size in step.sizes)
    frame.fill("context", chain(given, sizes))
    here: dict[Any, Index] = {
        own: ix.as_index(given) for own, given in zip(step.kernel.nest.sizes, step.sizes, strict=True)
    }
    grid = ix.substitute_extent(mapping.grid, here)
    frame.begin_step("a kernel", step.origin)
    launched = frame.new_label()
    blocks = frame.number(grid)
    if not isinstance(grid, int):
        some = frame.new_label()
        frame.emit(f"br i1 {frame.fresh(f'icmp sgt i64 {blocks}, 0')}, label %{some}, label %{launched}")
        frame.start_block(some)
    with frame.side_branch():
        frame.require(frame.fresh(f"icmp sle i64 {blocks}, {MOST_BLOCKS}"), "not_launched")
        launch = frame.load(f"@{CARD_SYMBOL}", CARD_FUNCTIONS.index("cuLaunchKernel"))
        function = frame.load(f"@{CARD_SYMBOL}", FIRST_CARD_KERNEL + position)
        extents = f"i32 {frame.fresh(f'trunc i64 {blocks} to i32')}, i32 1, i32 1, i32 {mapping.threads}, i32 1, i32 1"
        arguments = f"ptr {function}, {extents}, i32 0, ptr %stream, ptr %cells, ptr null"
        status = frame.fresh(f"call i32 {launch}({arguments})")
        frame.emit(f"store i64 {frame.fresh(f'zext i32 {status} to i64')}, ptr %error")
        frame.require(frame.fresh(f"icmp eq i32 {status}, 0"), "not_launched")
    frame.branch(launched)
    frame.start_block(launched)


def _bytes_of(frame: Frame, name: str) -> str:
    """The bytes of a number on the CPU as an i64 operand."""
    bits = 8 * frame.buffer(name).dtype.itemsize
    value = frame.fresh(f"load i{bits}, ptr {frame.data_pointer(name)}")
    return value if bits == 64 else frame.fresh(f"zext i{bits} {value} to i64")


def _emit_read_number(frame: Frame, step: ReadNumber) -> None:
    """Read one element as an integer."""
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
    frame.begin_step(TOO_LARGE.text, step.origin)
    frame.require(frame.fits(step.value), REFUSED[TOO_LARGE.error])


def _emit_check(frame: Frame, step: CheckSizes) -> None:
    left, right = frame.number(step.left), frame.number(step.right)
    good = frame.fresh(f"icmp {integer_predicate(step.comparison, torch.int64)} i64 {left}, {right}")
    frame.begin_step(step.message, step.origin)
    frame.require(good, "refused")
