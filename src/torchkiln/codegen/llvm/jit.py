"""LLVM in process: IR text to object code, and object code to addresses.

Object code is position independent and names everything it calls, so bytes made here load in any process on
the same kind of machine. Every loaded object has an ORC engine of its own, which goes with it: an engine shared by
all keeps the size of each object's code after the object is dropped.
"""

from __future__ import annotations

import struct
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from typing import Any

import llvmlite.binding as llvm

from torchkiln.errors import KilnError

_lock = threading.RLock()


class UnresolvedSymbolError(KilnError):
    """Object code calls functions that nothing in this process provides."""


def host_cpu() -> tuple[str, str]:
    """The processor's name and its features as LLVM spells them: object code is good for this pair only."""
    return llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten()


@cache
def _target_machine() -> Any:
    with _lock:
        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
        name, features = host_cpu()
        target = llvm.Target.from_triple(llvm.get_process_triple())
        return target.create_target_machine(cpu=name, features=features, opt=3, reloc="pic", codemodel="small")


def compile_module(text: str) -> bytes:
    """Object code of one module.

    The pass list is short on purpose: kernels arrive vectorized and unrolled as they should be, and at that
    width these passes give code as fast as the full pipeline for a fraction of its time.
    """
    with _lock:
        machine = _target_machine()
        module = llvm.parse_assembly(text)
        module.triple = llvm.get_process_triple()
        module.data_layout = str(machine.target_data)
        tuning = llvm.create_pipeline_tuning_options(speed_level=2)
        tuning.loop_unrolling = False
        # A builder that is used twice writes to stderr about every function it leaves alone.
        _passes().run(module, llvm.create_pass_builder(machine, tuning))
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


class LoadedObject:
    """Object code in executable memory. The addresses are good for as long as this object lives."""

    def __init__(self, engine: Any, tracker: Any, names: Iterable[str]) -> None:
        self.addresses: Mapping[str, int] = {name: tracker[name] for name in names}
        # Not at exit: a daemon thread may still be running this code then.
        weakref.finalize(self, _unload, engine, tracker).atexit = False

    def __getitem__(self, name: str) -> int:
        return self.addresses[name]


def _unload(engine: Any, tracker: Any) -> None:
    with _lock:
        tracker.close()
        engine.close()


def load_object(data: bytes, exports: Iterable[str], resolve: Callable[[str], int | None]) -> LoadedObject:
    """Load object code and find the addresses of ``exports``; ``resolve`` gives the address of what it calls."""
    exports = tuple(exports)
    library = llvm.JITLibraryBuilder().add_object_img(data)
    missing = []
    for name in undefined_symbols(data):
        address = resolve(name)
        if address is None:
            missing.append(name)
        else:
            library.import_symbol(name, address)
    if missing:
        raise UnresolvedSymbolError(f"object code needs functions this process does not have: {', '.join(missing)}")
    for name in exports:
        library.export_symbol(name)
    with _lock:
        _target_machine()
        engine = llvm.create_lljit_compiler(suppress_errors=True)
        tracker = library.link(engine, "kiln")
    return LoadedObject(engine, tracker, exports)


# What the linker makes itself where code addresses its own tables.
_LINKER_SYMBOLS = frozenset({"", "_GLOBAL_OFFSET_TABLE_"})
_SECTION_SYMBOL_TABLE = 2


def undefined_symbols(data: bytes) -> Iterator[str]:
    """Names an ELF object refers to and does not define."""
    if data[:6] != b"\x7fELF\x02\x01":
        raise NotImplementedError("only 64-bit little-endian ELF object code is supported")
    (section_offset,) = struct.unpack_from("<Q", data, 0x28)
    entry_size, count = struct.unpack_from("<HH", data, 0x3A)
    headers = [struct.unpack_from("<IIQQQQIIQQ", data, section_offset + k * entry_size) for k in range(count)]
    for _, kind, _, _, offset, size, link, _, _, _ in headers:
        if kind != _SECTION_SYMBOL_TABLE:
            continue
        names_at = headers[link][4]
        for at in range(offset, offset + size, 24):
            name_offset, _, _, section = struct.unpack_from("<IBBH", data, at)
            if section:
                continue
            start = names_at + name_offset
            name = data[start : data.index(b"\0", start)].decode()
            if name not in _LINKER_SYMBOLS:
                yield name
