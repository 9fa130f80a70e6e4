"""Around the steps of a graph with a card: the card is the current device, its context is there, its stream is known.

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


def _call(f: Function, table: Register, name: str, *arguments: Operand) -> Register:
    given = ", ".join(str(f.operand("ptr", argument)) if argument is None else str(argument) for argument in arguments)
    return f.result("i32", f"call i32 {table[CARD_FUNCTIONS.index(name)].name}({given})")


EXPORTS = (_enter, _arena, _leave)
