"""Kernels of a GPU on threads of this machine, so that tests need no card.

Each thread of a block is a thread of the system, a barrier is a barrier, and values pass between the threads of a warp
through memory. Blocks run one after the other; where threads have nothing to do with each other, they do too. Wrong
subscripts, masks, missing barriers and wrong reductions show as on a card.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Sequence

import torch

from torchkiln.codegen.llvm.instructions import vector_type
from torchkiln.codegen.llvm.module import ModuleBuilder
from torchkiln.codegen.llvm.operations import ROUND_TO_BFLOAT, Instructions, Value, convert
from torchkiln.config import Settings
from torchkiln.native.host import host_processor
from torchkiln.native.jit import compile_module
from torchkiln.native.loader import load_object
from torchkiln.native.symbols import address_of
from torchkiln.schedule.gpu import WARP
from torchkiln.schedule.kernel import GpuMapping, Kernel
from torchkiln.target import capture_target

# Of a thread: its number, that of its block, and what all threads of the block share. That begins with the barrier of
# the block (64 bytes), goes on with those of up to 32 x 32 groups of threads, and ends with a word for each thread.
_SUPPORT = """
@emulated_key = global i32 0
declare i32 @pthread_key_create(ptr, ptr)
declare ptr @pthread_getspecific(i32)
declare i32 @pthread_setspecific(i32, ptr)
declare i32 @pthread_barrier_wait(ptr)
declare i32 @llvm.cttz.i32(i32, i1)

define void @emulated_start() { %r = call i32 @pthread_key_create(ptr @emulated_key, ptr null) ret void }
define internal ptr @emulated_state() {
  %key = load i32, ptr @emulated_key
  %state = call ptr @pthread_getspecific(i32 %key)
  ret ptr %state
}
define internal i32 @emulated_thread() {
  %state = call ptr @emulated_state()
  %number = load i32, ptr %state
  ret i32 %number
}
define internal i32 @emulated_block() {
  %state = call ptr @emulated_state()
  %at = getelementptr i32, ptr %state, i64 1
  %number = load i32, ptr %at
  ret i32 %number
}
define internal ptr @emulated_shared() {
  %state = call ptr @emulated_state()
  %at = getelementptr ptr, ptr %state, i64 1
  %shared = load ptr, ptr %at
  ret ptr %shared
}
define internal void @emulated_barrier() {
  %shared = call ptr @emulated_shared()
  %r = call i32 @pthread_barrier_wait(ptr %shared)
  ret void
}
define internal i32 @emulated_exchange(i32 %mask, i32 %word, i32 %distance, i32 %clamp) {
  %shared = call ptr @emulated_shared()
  %thread = call i32 @emulated_thread()
  %words = getelementptr i8, ptr %shared, i64 65600
  %mine = getelementptr i32, ptr %words, i32 %thread
  store volatile i32 %word, ptr %mine
  %warp = and i32 %thread, -32
  %first = call i32 @llvm.cttz.i32(i32 %mask, i1 true)
  %group = add i32 %warp, %first
  %offset = mul i32 %group, 64
  %from = add i32 %offset, 64
  %barrier = getelementptr i8, ptr %shared, i32 %from
  %r = call i32 @pthread_barrier_wait(ptr %barrier)
  %partner = xor i32 %thread, %distance
  %other = getelementptr i32, ptr %words, i32 %partner
  %result = load volatile i32, ptr %other
  %q = call i32 @pthread_barrier_wait(ptr %barrier)
  ret i32 %result
}
"""
_MAIN = """
define ptr @emulated_{name}(ptr %state) {{
  %key = load i32, ptr @emulated_key
  %r = call i32 @pthread_setspecific(i32 %key, ptr %state)
  %place = getelementptr i32, ptr %state, i64 1
  %shared_at = getelementptr ptr, ptr %state, i64 1
  %shared = load ptr, ptr %shared_at
  %arguments_at = getelementptr ptr, ptr %state, i64 2
  %arguments = load ptr, ptr %arguments_at
  %blocks_at = getelementptr i64, ptr %state, i64 3
  %blocks = load i64, ptr %blocks_at
  %together_at = getelementptr i64, ptr %state, i64 4
  %together = load i64, ptr %together_at
  %wait = icmp ne i64 %together, 0
{loads}
  br label %head
head:
  %block = phi i64 [ 0, %0 ], [ %next, %done ]
  %number = trunc i64 %block to i32
  store i32 %number, ptr %place
  call void @{name}({operands})
  br i1 %wait, label %together.wait, label %done
together.wait:
  %w = call i32 @pthread_barrier_wait(ptr %shared)
  br label %done
done:
  %next = add i64 %block, 1
  %more = icmp slt i64 %next, %blocks
  br i1 %more, label %head, label %exit
exit:
  ret ptr null
}}
"""
_NAMES = {
    "llvm.nvvm.read.ptx.sreg.tid.x": "emulated_thread",
    "llvm.nvvm.read.ptx.sreg.ctaid.x": "emulated_block",
    "llvm.nvvm.barrier0": "emulated_barrier",
    "llvm.nvvm.shfl.sync.bfly.i32": "emulated_exchange",
}
_LIBC = ctypes.CDLL(None)
_WORDS = 64 + 64 * 1024


class _State(ctypes.Structure):
    _fields_ = (
        ("thread", ctypes.c_int32),
        ("block", ctypes.c_int32),
        ("shared", ctypes.c_void_p),
        ("arguments", ctypes.c_void_p),
        ("blocks", ctypes.c_int64),
        ("together", ctypes.c_int64),
    )


class Emulated:
    """A module of kernels, compiled for this processor; ``kernels`` are they, by symbol."""

    def __init__(self, text: str, kernels: dict[str, Kernel]) -> None:
        text = re.sub(r" addrspace\(\d\)", "", text).replace("ptx_kernel ", "")
        text = re.sub(r"declare [^\n]*@llvm\.nvvm\.[^\n]*\n", "", text)
        for old, new in _NAMES.items():
            text = text.replace(f"@{old}(", f"@{new}(")
        assert "nvvm" not in text, "an instruction of the card that is not emulated"
        text = re.sub(_ROUNDED, lambda found: _round_to_bfloat(int(found[1])), text, flags=re.DOTALL)
        mains = [_main(symbol, kernel) for symbol, kernel in kernels.items()]
        code = compile_module("\n".join([_SUPPORT, text, *mains]), host_processor())
        symbols = ["emulated_start", *(f"emulated_{symbol}" for symbol in kernels)]
        self._loaded = load_object(code, symbols, address_of)
        self._kernels = kernels
        ctypes.CFUNCTYPE(None)(self._loaded["emulated_start"])()

    def launch(self, symbol: str, memory: Sequence[torch.Tensor], sizes: Sequence[int], grid: int) -> None:
        """Run a kernel with the memory of these tensors."""
        mapping = self._kernels[symbol].mapping
        assert isinstance(mapping, GpuMapping)
        assert all(tensor.data_ptr() % 16 == 0 for tensor in memory if tensor.numel())
        arguments = (ctypes.c_int64 * (len(memory) + len(sizes) or 1))(*(t.data_ptr() for t in memory), *sizes)
        shared = (ctypes.c_char * (_WORDS + 4 * 1024 + 64))()
        start = -(-ctypes.addressof(shared) // 64) * 64
        together = mapping.row_threads > 1
        states = [
            _State(number, 0, start, ctypes.addressof(arguments), grid, together) for number in range(mapping.threads)
        ]
        main = ctypes.c_void_p(self._loaded[f"emulated_{symbol}"])
        if grid == 0:
            return
        if not together:
            run = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(main.value)
            for state in states:
                run(ctypes.addressof(state))
            return
        _LIBC.pthread_barrier_init(ctypes.c_void_p(start), None, mapping.threads)
        group = min(mapping.row_threads, WARP)
        for first in range(0, mapping.threads, group):
            _LIBC.pthread_barrier_init(ctypes.c_void_p(start + 64 + 64 * first), None, group)
        threads = [ctypes.c_ulong() for _ in states]
        for thread, state in zip(threads, states, strict=True):
            assert _LIBC.pthread_create(ctypes.byref(thread), None, main, ctypes.byref(state)) == 0
        for thread in threads:
            assert _LIBC.pthread_join(thread, None) == 0


# The processor's own rounding to bfloat16, where it has one, takes denormal numbers for zero.
_ROUNDED = rf"define [^\n]*@{ROUND_TO_BFLOAT}(\d+)\(.*?\n}}\n"


def _round_to_bfloat(lanes: int) -> str:
    f = Instructions(ModuleBuilder(capture_target(Settings())))
    rounded = convert(f, Value("%x", torch.float32, lanes), torch.bfloat16)
    lines = "\n".join(f.lines)
    head = f"define internal {rounded.type} @{ROUND_TO_BFLOAT}{lanes}({vector_type('float', lanes)} %x) #1"
    return f"{head} {{\n{lines}\n  ret {rounded.operand}\n}}\n"


def _main(symbol: str, kernel: Kernel) -> str:
    """The function of one thread: all blocks, one after the other."""
    types = ["ptr"] * len(kernel.nest.parameters) + ["i64"] * len(kernel.nest.sizes)
    loads = []
    for number, type_ in enumerate(types):
        loads.append(f"  %at{number} = getelementptr i64, ptr %arguments, i64 {number}")
        loads.append(f"  %a{number} = load {type_}, ptr %at{number}")
    operands = ", ".join(f"{type_} %a{number}" for number, type_ in enumerate(types))
    return _MAIN.format(name=symbol, loads="\n".join(loads), operands=operands)
