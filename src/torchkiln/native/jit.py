"""LLVM in process: IR text to object code.

Object code is position independent and names everything it calls, so bytes made here load in any process on
the same kind of machine.
"""

from __future__ import annotations

import threading
from functools import cache
from typing import Any

import llvmlite.binding as llvm

from torchkiln.native.host import host_cpu, process_triple
from torchkiln.native.library_pages import release_library_pages

llvm_lock = threading.RLock()


@cache
def target_machine(level: int = 3) -> Any:
    """``level`` is how hard code is worked on, from 0 to 3."""
    with llvm_lock:
        release_library_pages()  # what its initialisers touched
        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
        name, features = host_cpu()
        target = llvm.Target.from_triple(process_triple())
        return target.create_target_machine(cpu=name, features=features, opt=level, reloc="pic", codemodel="small")


def compile_module(text: str) -> bytes:
    """Object code of one module.

    The pass list is short on purpose: kernels arrive vectorized and unrolled as they should be, and at that
    width these passes give code as fast as the full pipeline for a fraction of its time.
    """
    with llvm_lock:
        machine = target_machine()
        module = llvm.parse_assembly(text)
        module.triple = process_triple()
        module.data_layout = str(machine.target_data)
        tuning = llvm.create_pipeline_tuning_options(speed_level=2)
        tuning.loop_unrolling = False
        # A builder that is used twice writes to stderr about every function it leaves alone.
        _passes().run(module, llvm.create_pass_builder(machine, tuning))
        return bytes(machine.emit_object(module))


def compile_steps(text: str) -> bytes:
    """Object code of a module of one long function that is run through once, as a graph's entry is.

    Nothing is optimized, registers are given out as the code is read: a module of 36,000 lines, the backward of a Llama
    of 48 layers, takes 0.16 s in place of 0.73 s. A call of 80 steps takes as long as before, 72 µs.
    """
    with llvm_lock:
        machine = target_machine(0)
        module = llvm.parse_assembly(text)
        module.triple = process_triple()
        module.data_layout = str(machine.target_data)
        return bytes(machine.emit_object(module))


@cache
def _passes() -> Any:
    """The pass list, made once: a new one each time is never freed (9 KB for each module, measured)."""
    passes = llvm.create_new_module_pass_manager()
    passes.add_always_inliner_pass()
    passes.add_sroa_pass()
    passes.add_instruction_combine_pass()
    passes.add_new_gvn_pass()
    passes.add_simplify_cfg_pass()
    passes.add_aggressive_dce_pass()
    passes.add_global_dead_code_eliminate_pass()
    return passes
