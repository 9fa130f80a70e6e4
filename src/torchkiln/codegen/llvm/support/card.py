"""Around the steps of a graph with a card: the card is the current device, its context is there, its stream is known.

Kernels of a card read and write memory that begins at a multiple of 16 bytes. Inputs elsewhere have copies for them.

The functions that are called are in the array of :data:`torchkiln.artifact.artifact.CARD_SYMBOL`.
"""

from __future__ import annotations

from torchkiln.artifact.artifact import (
    CARD_ARENA_BYTES,
    CARD_CAPTURED,
    CARD_CONTEXT,
    CARD_FUNCTIONS,
    CARD_LENT_BYTES,
    CARD_LENT_STREAM,
    CARD_LENT_TENSOR,
)
from torchkiln.codegen.llvm.functions import Function, Operand, Register, native
from torchkiln.codegen.llvm.status import TORCH_ERROR
from torchkiln.codegen.llvm.support.handles import NOT_ALIGNED, align, compare, copy_elements, delete, fail_unless_zero


@native("i32 kiln_card_enter(ptr*, i32, ptr*, ptr*)", exported=True)
def _enter(f: Function, table: Register, number: Register, guard: Register, stream: Register) -> None:
    """Put the guard of the card in one place, which must be null before, and its current stream in another.

    A thread that has not used the card yet may have no context, which launches need. Where a CUDA graph is captured,
    the mark is set that keeps kernels and constants loaded for it.
    """
    with f.if_(_call(f, table, "aoti_torch_create_cuda_guard", number, guard).ne(0)):
        guard[0] = None
        f.ret(TORCH_ERROR)
    context = f.variable("ptr", None)
    _call(f, table, "cuCtxGetCurrent", context)
    with f.if_(context[0].eq(None)):
        _call(f, table, "cuCtxSetCurrent", table[CARD_CONTEXT])
    with f.if_(_call(f, table, "aoti_torch_get_current_cuda_stream", number, stream).ne(0)):
        f.ret(TORCH_ERROR)
    # It fails for the legacy stream while another stream is captured: nothing of this call is captured then.
    capturing = f.variable("i32", 0)
    asked = _call(f, table, "cuStreamIsCapturing", stream[0], capturing)
    with f.if_(asked.eq(0) & capturing[0].ne(0)):
        table[CARD_CAPTURED] = table[CARD_CONTEXT]
    f.ret(0)


@native("ptr kiln_card_arena(i64*, ptr, i64)", exported=True)
def _arena(f: Function, table: Register, stream: Register, size: Register) -> None:
    """The tensor that is lent for the arena of calls on this stream; null where there is none, or a smaller one."""
    table[CARD_ARENA_BYTES] = size
    addresses = table.cast("ptr*")
    with f.if_(addresses[CARD_LENT_STREAM].eq(stream) & table[CARD_LENT_BYTES].compare("uge", size)):
        f.ret(addresses[CARD_LENT_TENSOR])
    f.ret(None)


@native("void kiln_card_leave(ptr*, ptr*)", exported=True)
def _leave(f: Function, table: Register, guard: Register) -> None:
    """Make the device current again that was so before."""
    with f.if_(guard[0].ne(None)):
        _call(f, table, "aoti_torch_delete_cuda_guard", guard[0])


@native("i32 kiln_aligned_pointers(ptr*, i64, ptr*)", exported=True)
def _aligned_pointers(f: Function, copies: Register, count: Register, data: Register) -> None:
    """The data pointers of copies, in place of those of the inputs that have one."""
    with f.loop(count) as k:
        with f.if_(copies[k].eq(None)):
            f.continue_()
        fail_unless_zero(f, f.call("aoti_torch_get_data_ptr", copies[k], data.at(k)))
    f.ret(0)


@native("i32 kiln_compare_aligned(ptr, i64*, ptr*, ptr*)", exported=True)
def _compare_aligned(f: Function, handle: Register, descriptor: Register, slot: Register, data: Register) -> None:
    """Compare an input; where its memory is not aligned, the slot gets a copy. The data pointer is that of the copy."""
    f.call(delete, slot)
    status = f.call(compare, handle, descriptor)
    with f.if_(status.eq(0)):
        f.ret(f.call("aoti_torch_get_data_ptr", handle, data))
    with f.if_(status.ne(NOT_ALIGNED)):
        f.ret(status)
    fail_unless_zero(f, f.call(align, handle, descriptor, slot))
    f.ret(f.call("aoti_torch_get_data_ptr", slot[0], data))


@native("i32 kiln_copy_back(ptr*, ptr, i64*)", exported=True)
def _copy_back(f: Function, slot: Register, handle: Register, descriptor: Register) -> None:
    """What a kernel wrote to the copy of an input, where there is one, for the input itself."""
    with f.if_(slot[0].eq(None)):
        f.ret(0)
    f.ret(f.call(copy_elements, handle, slot[0], descriptor))


@native("i32 kiln_copy_again(ptr*, ptr, i64*)", exported=True)
def _copy_again(f: Function, slot: Register, handle: Register, descriptor: Register) -> None:
    """What an operator wrote to an input, for its copy, where there is one."""
    with f.if_(slot[0].eq(None)):
        f.ret(0)
    f.ret(f.call(copy_elements, slot[0], handle, descriptor))


def _call(f: Function, table: Register, name: str, *arguments: Operand) -> Register:
    given = ", ".join(str(f.operand("ptr", argument)) if argument is None else str(argument) for argument in arguments)
    return f.result("i32", f"call i32 {table[CARD_FUNCTIONS.index(name)].name}({given})")


EXPORTS = (_enter, _arena, _leave, _aligned_pointers, _compare_aligned, _copy_back, _copy_again)
