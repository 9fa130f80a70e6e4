"""Kernels of a GPU on threads of this machine, so that tests need no card.

The threads of a block take turns, a barrier is a barrier, and values pass between the threads of a warp through memory.
Blocks run one after the other; where threads have nothing to do with each other, they do too. Wrong subscripts, masks,
missing barriers and wrong reductions show: shared memory holds nothing of use before a block writes it.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Sequence

import torch

from tests.codegen.llvm.gpu.turns import turns
from torchkiln.codegen.llvm.instructions import vector_type
from torchkiln.codegen.llvm.module import ModuleBuilder
from torchkiln.codegen.llvm.operations import ROUND_TO_BFLOAT, Instructions, Value, convert
from torchkiln.config import Settings
from torchkiln.native.host import host_processor
from torchkiln.native.jit import compile_module
from torchkiln.native.loader import load_object
from torchkiln.native.symbols import address_of
from torchkiln.schedule.kernel import GpuMapping, Kernel
from torchkiln.target import capture_target

# Of a thread: its number, that of its block, and what all threads of the block share: barriers of the block and of the
# groups of a warp, 16 bytes each, and then a word for each thread.
_SUPPORT = """
declare ptr @turns_state()
declare void @turns_wait(ptr, i32)
declare i32 @llvm.cttz.i32(i32, i1)
declare i32 @llvm.ctpop.i32(i32)
declare void @llvm.memset.p0.i64(ptr, i8, i64, i1)

define internal i32 @emulated_thread() {
  %state = call ptr @turns_state()
  %number = load i32, ptr %state
  ret i32 %number
}
define internal i32 @emulated_block() {
  %state = call ptr @turns_state()
  %at = getelementptr i32, ptr %state, i64 1
  %number = load i32, ptr %at
  ret i32 %number
}
define internal ptr @emulated_shared() {
  %state = call ptr @turns_state()
  %at = getelementptr ptr, ptr %state, i64 1
  %shared = load ptr, ptr %at
  ret ptr %shared
}
define internal void @emulated_barrier() {
  %state = call ptr @turns_state()
  %threads_at = getelementptr i64, ptr %state, i64 4
  %threads = load i32, ptr %threads_at
  %shared = call ptr @emulated_shared()
  call void @turns_wait(ptr %shared, i32 %threads)
  ret void
}
define internal i32 @emulated_exchange(i32 %mask, i32 %word, i32 %distance, i32 %clamp) {
  %shared = call ptr @emulated_shared()
  %thread = call i32 @emulated_thread()
  %words = getelementptr i8, ptr %shared, i64 32768
  %mine = getelementptr i32, ptr %words, i32 %thread
  store volatile i32 %word, ptr %mine
  %warp = and i32 %thread, -32
  %first = call i32 @llvm.cttz.i32(i32 %mask, i1 true)
  %members = call i32 @llvm.ctpop.i32(i32 %mask)
  %group = add i32 %warp, %first
  %after = add i32 %group, 1
  %barrier = getelementptr i128, ptr %shared, i32 %after
  call void @turns_wait(ptr %barrier, i32 %members)
  %partner = xor i32 %thread, %distance
  %other = getelementptr i32, ptr %words, i32 %partner
  %result = load volatile i32, ptr %other
  call void @turns_wait(ptr %barrier, i32 %members)
  ret i32 %result
}
"""
_MAIN = """
define void @emulated_{name}(ptr %state) {{
  %number_of_thread = load i32, ptr %state
  %lead = icmp eq i32 %number_of_thread, 0
  %place = getelementptr i32, ptr %state, i64 1
  %arguments_at = getelementptr ptr, ptr %state, i64 2
  %arguments = load ptr, ptr %arguments_at
  %blocks_at = getelementptr i64, ptr %state, i64 3
  %blocks = load i64, ptr %blocks_at
{loads}
  br label %head
head:
  %block = phi i64 [ 0, %0 ], [ %next, %done ]
  %number = trunc i64 %block to i32
  store i32 %number, ptr %place
  br i1 {together}, label %meet, label %run
meet:
  call void @emulated_barrier()
  br i1 %lead, label %spoil, label %spoiled
spoil:
{spoils}
  br label %spoiled
spoiled:
  call void @emulated_barrier()
  br label %run
run:
  call void @{name}({operands})
  br label %done
done:
  %next = add i64 %block, 1
  %more = icmp slt i64 %next, %blocks
  br i1 %more, label %head, label %exit
exit:
  ret void
}}
"""
_NAMES = {
    "llvm.nvvm.read.ptx.sreg.tid.x": "emulated_thread",
    "llvm.nvvm.read.ptx.sreg.ctaid.x": "emulated_block",
    "llvm.nvvm.barrier0": "emulated_barrier",
    "llvm.nvvm.shfl.sync.bfly.i32": "emulated_exchange",
}
_SHARED = re.compile(r"(@(\w+?)_shared\w+) = internal addrspace\(3\) global (\[\d+ x [^\]]+\]) undef")
_WORDS = 32768


class _State(ctypes.Structure):
    _fields_ = (
        ("thread", ctypes.c_int32),
        ("block", ctypes.c_int32),
        ("shared", ctypes.c_void_p),
        ("arguments", ctypes.c_void_p),
        ("blocks", ctypes.c_int64),
        ("threads", ctypes.c_int64),
    )


class Emulated:
    """A module of kernels, compiled for this processor; ``kernels`` are they, by symbol."""

    def __init__(self, text: str, kernels: dict[str, Kernel]) -> None:
        shared: dict[str, list[tuple[str, str]]] = {}
        for found in _SHARED.finditer(text):
            shared.setdefault(found[2], []).append((found[1], found[3]))
        text = re.sub(r"addrspacecast ptr addrspace\(3\) (@\w+) to ptr", r"getelementptr i8, ptr \1, i64 0", text)
        text = re.sub(r" addrspace\(\d\)", "", text).replace("ptx_kernel ", "")
        text = re.sub(r' "nvvm\.maxnreg"="\d+"', "", text)
        text = re.sub(r"declare [^\n]*@llvm\.nvvm\.[^\n]*\n", "", text)
        for old, new in _NAMES.items():
            text = text.replace(f"@{old}(", f"@{new}(")
        assert "nvvm" not in text, "an instruction of the card that is not emulated"
        text = re.sub(_ROUNDED, lambda found: _round_to_bfloat(int(found[1])), text, flags=re.DOTALL)
        mains = [_main(symbol, kernel, shared.get(symbol, [])) for symbol, kernel in kernels.items()]
        code = compile_module("\n".join([_SUPPORT, text, *mains]), host_processor())
        symbols = [f"emulated_{symbol}" for symbol in kernels]
        self._kernels = kernels
        self._launches = 0
        if kernels:
            self._loaded = load_object(code, symbols, address_of, calls=turns().code)

    def launch(self, symbol: str, memory: Sequence[torch.Tensor], sizes: Sequence[int], grid: int) -> None:
        """Run a kernel with the memory of these tensors."""
        mapping = self._kernels[symbol].mapping
        assert isinstance(mapping, GpuMapping)
        assert all(tensor.data_ptr() % 16 == 0 for tensor in memory if tensor.numel())
        if grid == 0:
            return
        arguments = (ctypes.c_int64 * (len(memory) + len(sizes) or 1))(*(t.data_ptr() for t in memory), *sizes)
        shared = (ctypes.c_int64 * (_WORDS // 8 + 512))()
        at, given = ctypes.addressof(shared), ctypes.addressof(arguments)
        states = [_State(number, 0, at, given, grid, mapping.threads) for number in range(mapping.threads)]
        entry = self._loaded[f"emulated_{symbol}"]
        places = [ctypes.addressof(state) for state in states]
        turns().run(entry, places, alone=not _meets(mapping), backwards=self._launches % 2 == 1)
        self._launches += 1


def _meets(mapping: GpuMapping) -> bool:
    """Whether threads of a block have to do with each other."""
    return mapping.row_threads > 1


# The processor's own rounding to bfloat16, where it has one, takes denormal numbers for zero.
_ROUNDED = rf"define [^\n]*@{ROUND_TO_BFLOAT}(\d+)\(.*?\n}}\n"


def _round_to_bfloat(lanes: int) -> str:
    f = Instructions(ModuleBuilder(capture_target(Settings())))
    rounded = convert(f, Value("%x", torch.float32, lanes), torch.bfloat16)
    lines = "\n".join(f.lines)
    head = f"define internal {rounded.type} @{ROUND_TO_BFLOAT}{lanes}({vector_type('float', lanes)} %x) #1"
    return f"{head} {{\n{lines}\n  ret {rounded.operand}\n}}\n"


def _main(symbol: str, kernel: Kernel, shared: Sequence[tuple[str, str]]) -> str:
    """The function of one thread: all blocks, one after the other. ``shared`` memory holds nothing at first."""
    assert isinstance(kernel.mapping, GpuMapping)
    sizes = [f"ptrtoint (ptr getelementptr ({type_}, ptr null, i64 1) to i64)" for _, type_ in shared]
    spoils = [
        f"  call void @llvm.memset.p0.i64(ptr {name}, i8 -1, i64 {size}, i1 false)"
        for (name, _), size in zip(shared, sizes, strict=True)
    ]
    given = ["i64" if k in kernel.mapping.values else "ptr" for k in range(len(kernel.nest.parameters))]
    types = given + ["i64"] * len(kernel.nest.sizes)
    loads = []
    for number, type_ in enumerate(types):
        loads.append(f"  %at{number} = getelementptr i64, ptr %arguments, i64 {number}")
        loads.append(f"  %a{number} = load {type_}, ptr %at{number}")
    operands = ", ".join(f"{type_} %a{number}" for number, type_ in enumerate(types))
    together = "true" if _meets(kernel.mapping) else "false"
    lines = {"loads": "\n".join(loads), "spoils": "\n".join(spoils)}
    return _MAIN.format(name=symbol, operands=operands, together=together, **lines)
