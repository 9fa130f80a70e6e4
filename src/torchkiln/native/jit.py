"""LLVM in process: IR text to position-independent object code that names everything it calls."""

from __future__ import annotations

import threading
from functools import cache
from typing import Any

import llvmlite.binding as llvm

from torchkiln.native.host import Processor
from torchkiln.native.library_pages import release_library_pages

llvm_lock = threading.RLock()


@cache
def initialize_llvm() -> None:
    """Make the host's kind of machine known to LLVM."""
    with llvm_lock:
        release_library_pages()  # what its initialisers touched
        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()


@cache
def _initialize_all_architectures() -> None:
    """Make other kinds of machines known too, for code that runs elsewhere."""
    initialize_llvm()
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()


@cache
def _target_machine(processor: Processor, level: int) -> Any:
    """``level`` is how hard code is worked on, from 0 to 3."""
    initialize_llvm()
    if processor.architecture != str(llvm.get_process_triple()).partition("-")[0]:
        _initialize_all_architectures()
    target = llvm.Target.from_triple(processor.triple)
    return target.create_target_machine(
        cpu=processor.name, features=processor.features, opt=level, reloc="pic", codemodel="small"
    )


def _parsed(text: str, processor: Processor, machine: Any) -> Any:
    module = llvm.parse_assembly(text)
    module.triple = processor.triple
    module.data_layout = str(machine.target_data)
    return module


def compile_module(text: str, processor: Processor) -> bytes:
    """Object code of one module.

    The pass list is short: kernels arrive vectorized and unrolled, and these passes give code as fast as the full
    pipeline for a fraction of its time. The pass "newgvn" is not among them: LLVM 22 fails an assertion in it on some
    of our kernels, which ends the process, and without it steps take as long (22 cells of five
    models: 1.00 in the mean).
    """
    with llvm_lock:
        machine = _target_machine(processor, 3)
        return bytes(machine.emit_object(_optimized(text, processor, machine)))


def assembly_of(text: str, processor: Processor) -> str:
    """What :func:`compile_module` makes of a module, for people to read."""
    with llvm_lock:
        machine = _target_machine(processor, 3)
        return str(machine.emit_assembly(_optimized(text, processor, machine)))


def _optimized(text: str, processor: Processor, machine: Any) -> Any:
    module = _parsed(text, processor, machine)
    tuning = llvm.create_pipeline_tuning_options(speed_level=2)
    tuning.loop_unrolling = False
    # A builder that is used twice writes to stderr about every function it leaves alone.
    _passes().run(module, llvm.create_pass_builder(machine, tuning))
    return module


def compile_steps(text: str, processor: Processor) -> bytes:
    """Object code of a module of one long function that runs once per call, as a graph's entry does.

    Nothing is optimized: 36,000 lines, the backward of a Llama of 48 layers, take 0.16 s in place of 0.73 s. A call of
    80 steps takes as long as before, 72 µs.
    """
    with llvm_lock:
        machine = _target_machine(processor, 0)
        return bytes(machine.emit_object(_parsed(text, processor, machine)))


@cache
def _passes() -> Any:
    """The pass list, made once: a new one each time is never freed (9 KB for each module, measured)."""
    passes = llvm.create_new_module_pass_manager()
    passes.add_always_inliner_pass()
    passes.add_sroa_pass()
    passes.add_instruction_combine_pass()
    passes.add_simplify_cfg_pass()
    passes.add_aggressive_dce_pass()
    passes.add_global_dead_code_eliminate_pass()
    return passes
