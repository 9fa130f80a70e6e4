"""What threads of a GPU do together: their numbers, and values passed between them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from torchkiln.codegen.llvm.operations import Instructions, Value, convert
from torchkiln.schedule.gpu import WARP

_SPECIAL = {"thread": "tid.x", "block": "ctaid.x"}
_BITS = {4: torch.int32, 8: torch.int64}


def special_register(f: Instructions, name: str) -> str:
    """The number of this "thread" in its block, or of its "block", as i32."""
    symbol = f"@llvm.nvvm.read.ptx.sreg.{_SPECIAL[name]}"
    f.module.declare(f"declare i32 {symbol}()")
    return f.fresh(f"call i32 {symbol}()")


def barrier(f: Instructions) -> None:
    """Waits for all threads of the block, and for what they wrote."""
    f.module.declare("declare void @llvm.nvvm.barrier0()")
    f.emit("call void @llvm.nvvm.barrier0()")


def to_words(f: Instructions, value: Value) -> list[Value]:
    """The bits of a value as one or two int32: what threads pass to each other."""
    if value.dtype in (torch.bool, torch.uint8):
        return [convert(f, value, torch.int32)]
    if value.dtype.itemsize == 8:
        bits = _bits(f, value)
        low = f.make(f"trunc i64 {bits} to i32", torch.int32, 1)
        return [low, f.make(f"trunc i64 {f.fresh(f'lshr i64 {bits}, 32')} to i32", torch.int32, 1)]
    if value.dtype.itemsize == 4:
        return [Value(_bits(f, value), torch.int32, 1)]
    return [f.make(f"zext i{8 * value.dtype.itemsize} {_bits(f, value)} to i32", torch.int32, 1)]


def from_words(f: Instructions, words: Sequence[Value], dtype: torch.dtype) -> Value:
    """The value of which :func:`to_words` made these."""
    if dtype in (torch.bool, torch.uint8):
        return convert(f, words[0], dtype)
    if dtype.itemsize == 8:
        low, high = (f.fresh(f"zext i32 {word.ref} to i64") for word in words)
        return _from_bits(f, f.fresh(f"or i64 {f.fresh(f'shl i64 {high}, 32')}, {low}"), dtype)
    if dtype.itemsize == 4:
        return _from_bits(f, words[0].ref, dtype)
    return _from_bits(f, f.fresh(f"trunc i32 {words[0].ref} to i{8 * dtype.itemsize}"), dtype)


def lane_words(f: Instructions, value: Value) -> list[Value]:
    """The words of every lane, one lane after the other."""
    if value.lanes == 1:
        return to_words(f, value)
    lanes = [f.make(f"extractelement {value.operand}, i64 {k}", value.dtype, 1) for k in range(value.lanes)]
    return [word for lane in lanes for word in to_words(f, lane)]


def from_lane_words(f: Instructions, words: Sequence[Value], dtype: torch.dtype, lanes: int) -> Value:
    """The value of which :func:`lane_words` made these."""
    if lanes == 1:
        return from_words(f, words, dtype)
    each = len(words) // lanes
    made = Value("poison", dtype, lanes)
    for k in range(lanes):
        lane = from_words(f, words[k * each : (k + 1) * each], dtype)
        made = f.make(f"insertelement {made.operand}, {lane.operand}, i64 {k}", dtype, lanes)
    return made


def exchange(f: Instructions, value: Value, distance: int, mask: str) -> Value:
    """The value of the thread whose number in the warp differs in the bit ``distance``; ``mask`` has who takes part."""
    symbol = "@llvm.nvvm.shfl.sync.bfly.i32"
    f.module.declare(f"declare i32 {symbol}(i32, i32, i32, i32)")
    words = [
        f.make(f"call i32 {symbol}(i32 {mask}, i32 {word.ref}, i32 {distance}, i32 {WARP - 1})", torch.int32, 1)
        for word in to_words(f, value)
    ]
    return from_words(f, words, value.dtype)


def _bits(f: Instructions, value: Value) -> str:
    bits = f"i{8 * value.dtype.itemsize}"
    return value.ref if value.type == bits else f.fresh(f"bitcast {value.operand} to {bits}")


def _from_bits(f: Instructions, bits: str, dtype: torch.dtype) -> Value:
    value = Value(bits, dtype, 1)
    if value.type == f"i{8 * dtype.itemsize}":
        return value
    return f.make(f"bitcast i{8 * dtype.itemsize} {bits} to {value.type}", dtype, 1)
