"""Object code to addresses.

On x86-64 an object is put into one stretch of memory here, so that the 32-bit distances of the small code model always
hold. LLVM's own loader maps sections apart, and stops the process with a failed assertion when two lie more than 2 GiB
apart, which happens in processes with large mappings. Loading 20 KB takes 0.5 ms, with an ORC engine 8 ms.

Elsewhere LLVM loads it, with an ORC engine for each object: a shared one leaks the size of each object's code.
"""

from __future__ import annotations

import ctypes
import mmap
import platform
import struct
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from types import MappingProxyType
from typing import Any

from torchkiln.errors import ArtifactError
from torchkiln.native.code_memory import allocate, protect, release
from torchkiln.native.elf import AARCH64, X86_64, ObjectFile, Relocation, Section, read_object

_MACHINES = {"x86_64": X86_64, "aarch64": AARCH64}

Array = ctypes.Array[Any]
_NO_ARRAYS: Mapping[str, Array] = MappingProxyType({})


class UnresolvedSymbolError(ArtifactError):
    """Object code calls functions that nothing in this process provides; compiled here, it would not."""


class LoadedObject:
    """Object code in executable memory, valid as long as this object lives.

    So are ``calls``, other code it calls, ``arrays``, which it reads, and what it ``keeps``.
    """

    def __init__(self, addresses: Mapping[str, int], unload: Callable[[], object]) -> None:
        self.addresses = addresses
        self.calls: LoadedObject | None = None
        self.arrays: Mapping[str, Array] = {}
        self.keeps: object = None
        # Not at exit: a daemon thread may still be running this code then.
        weakref.finalize(self, unload).atexit = False

    def __getitem__(self, name: str) -> int:
        return self.addresses[name]


def load_object(
    data: bytes,
    exports: Iterable[str],
    resolve: Callable[[str], int | None],
    *,
    calls: LoadedObject | None = None,
    arrays: Mapping[str, Array] = _NO_ARRAYS,
) -> LoadedObject:
    """Load object code and find the addresses of ``exports``; ``calls`` or ``resolve`` have what it calls, ``arrays``
    what it reads.

    :class:`ArtifactError` where the code is damaged, for another machine, or calls what is not there.
    """
    code = _read(data)
    own = {name: ctypes.addressof(array) for name, array in arrays.items()}
    own.update(calls.addresses if calls is not None else {})
    found = {name: own[name] if name in own else resolve(name) for name in code.undefined}
    missing = [name for name, address in found.items() if address is None]
    if missing:
        names = ", ".join(missing)
        raise UnresolvedSymbolError(f"This code calls functions this process does not have: {names}; compile it again.")
    imports = {name: address for name, address in found.items() if address is not None}
    if code.machine == X86_64:
        loaded = load_in_one_piece(code, tuple(exports), imports)
    else:
        loaded = load_with_orc(data, tuple(exports), imports)
    loaded.calls, loaded.arrays = calls, arrays
    return loaded


def _read(data: bytes) -> ObjectFile:
    try:
        code = read_object(data)
    except (struct.error, ValueError, IndexError) as error:
        raise ArtifactError(f"This object code is damaged ({error}); compile it again.") from error
    # LLVM stops the process where it is given code of another architecture.
    if code.machine != _MACHINES.get(platform.machine(), code.machine):
        raise ArtifactError(f"This code is not for {platform.machine()} processors; compile it for this machine.")
    return code


def load_with_orc(data: bytes, exports: tuple[str, ...], imports: Mapping[str, int]) -> LoadedObject:
    # Here and not above: x86-64 code is loaded without LLVM, whose import takes 50 ms.
    import llvmlite.binding as llvm

    from torchkiln.native.jit import initialize_llvm, llvm_lock

    library = llvm.JITLibraryBuilder().add_object_img(data)
    for name, address in imports.items():
        library.import_symbol(name, address)
    for name in exports:
        library.export_symbol(name)
    with llvm_lock:
        initialize_llvm()
        engine = llvm.create_lljit_compiler(suppress_errors=True)
        tracker = library.link(engine, "kiln")

    def unload() -> None:
        with llvm_lock:
            tracker.close()
            engine.close()

    return LoadedObject({name: tracker[name] for name in exports}, unload)


# How far code reaches with the small code model, less a page for the distance inside an instruction.
_REACH = 2**31 - 4096

# A jump to the address that follows it, and that address: how code calls what lies out of its reach.
_STUB = struct.Struct("<6sQ")
_JUMP = bytes.fromhex("ff2500000000")
_STUB_BYTES = 16

# x86-64 relocations, from the processor supplement of the ELF specification.
_R_64, _R_PC32, _R_PLT32, _R_GOTPCREL, _R_PC64, _R_GOTPCRELX, _R_REX_GOTPCRELX = 1, 2, 4, 9, 24, 41, 42
_TABLE_ENTRIES = frozenset({_R_GOTPCREL, _R_GOTPCRELX, _R_REX_GOTPCRELX})


@dataclass(frozen=True)
class _Layout:
    """Where everything of an object lies, in bytes from the start of its memory.

    ``stubs`` are by the names they jump to, ``table`` is the table of addresses by symbol, ``spans`` are begin, end and
    protection of the pages.
    """

    sections: Mapping[int, int]
    stubs: Mapping[str, int]
    table: Mapping[int, int]
    spans: Sequence[tuple[int, int, int]]
    size: int


def load_in_one_piece(code: ObjectFile, exports: tuple[str, ...], imports: Mapping[str, int]) -> LoadedObject:
    """Put the object of an x86-64 program into memory of its own and bind it to ``imports``."""
    layout = _lay_out(code, imports)
    base = allocate(layout.size)
    try:
        image = _Image(code, layout, base, imports)
        image.fill()
        for relocation in code.relocations:
            image.relocate(relocation)
        defined = {s.name: k for k, s in enumerate(code.symbols) if s.section is not None}
        addresses = {name: image.address(defined[name]) for name in exports}
        for begin, end, protection in layout.spans:
            protect(base + begin, end - begin, protection)
    except BaseException:
        release(base, layout.size)
        raise
    return LoadedObject(addresses, lambda: release(base, layout.size))


def _lay_out(code: ObjectFile, imports: Mapping[str, int]) -> _Layout:
    """Executable, constant, writable sections, each kind from a page on; stubs and the table follow the code."""
    coarsest = max((section.alignment for section in code.sections), default=1)
    if coarsest > mmap.PAGESIZE:
        raise ArtifactError(f"Object code with sections at multiples of {coarsest} bytes is not supported.")
    in_table = sorted({r.symbol for r in code.relocations if r.kind in _TABLE_ENTRIES})
    sections: dict[int, int] = {}
    stubs: dict[str, int] = {}
    table: dict[int, int] = {}
    spans: list[tuple[int, int, int]] = []
    end = 0

    def take(amount: int, alignment: int) -> int:
        nonlocal end
        begin = -(-end // alignment) * alignment
        end = begin + amount
        return begin

    kinds = sorted(code.sections, key=lambda s: (not s.executable, s.writable))
    for protection, alike in groupby(kinds, _protection):
        begin = take(0, mmap.PAGESIZE)
        for section in alike:
            sections[section.number] = take(len(section.data), section.alignment)
        if protection & mmap.PROT_EXEC:
            stubs = {name: take(_STUB_BYTES, _STUB_BYTES) for name in imports}
            table = {symbol: take(8, 8) for symbol in in_table}
        spans.append((begin, end, protection))
    if end > _REACH:
        raise ArtifactError(f"Object code of {end} bytes is too large to load; compile a smaller graph.")
    return _Layout(sections, stubs, table, spans, end)


class _Image:
    """The memory of an object while it is filled."""

    def __init__(self, code: ObjectFile, layout: _Layout, base: int, imports: Mapping[str, int]) -> None:
        self._code = code
        self._layout = layout
        self._base = base
        self._imports = imports
        self._memory = (ctypes.c_char * layout.size).from_address(base)

    def address(self, number: int) -> int:
        """The address of a symbol."""
        symbol = self._code.symbols[number]
        if symbol.section is None:
            return self._imports[symbol.name]
        return symbol.value if symbol.absolute else self._base + self._layout.sections[symbol.section] + symbol.value

    def fill(self) -> None:
        """Write sections, stubs and the table of addresses."""
        for section in self._code.sections:
            ctypes.memmove(self._base + self._layout.sections[section.number], section.data, len(section.data))
        for name, at in self._layout.stubs.items():
            _STUB.pack_into(self._memory, at, _JUMP, self._imports[name])
        for symbol, at in self._layout.table.items():
            struct.pack_into("<Q", self._memory, at, self.address(symbol))

    def relocate(self, r: Relocation) -> None:
        """Write what an instruction or a constant says of the place of a symbol."""
        at = self._layout.sections[r.section] + r.offset
        if r.kind in (_R_PC32, _R_PLT32):
            symbol = self._code.symbols[r.symbol]
            is_near = symbol.section is not None
            near = self.address(r.symbol) - self._base if is_near else self._layout.stubs[symbol.name]
            struct.pack_into("<i", self._memory, at, near + r.addend - at)
        elif r.kind in _TABLE_ENTRIES:
            struct.pack_into("<i", self._memory, at, self._layout.table[r.symbol] + r.addend - at)
        elif r.kind == _R_64:
            struct.pack_into("<Q", self._memory, at, (self.address(r.symbol) + r.addend) % 2**64)
        elif r.kind == _R_PC64:
            struct.pack_into("<q", self._memory, at, self.address(r.symbol) + r.addend - (self._base + at))
        else:
            raise ArtifactError(f"Object code with a relocation of kind {r.kind} is not supported; compile it again.")


def _protection(section: Section) -> int:
    if section.executable:
        return mmap.PROT_READ | mmap.PROT_EXEC
    return mmap.PROT_READ | (mmap.PROT_WRITE if section.writable else 0)
