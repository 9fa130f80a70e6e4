"""What a loader must know of an ELF object file: sections, symbols and relocations."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from torchkiln.errors import ArtifactError

X86_64, AARCH64 = 62, 183

_PROGBITS, _SYMBOLS, _RELA, _NOBITS = 1, 2, 4, 8
_WRITE, _ALLOC, _EXEC, _THREAD = 1, 2, 4, 0x400
_UNDEFINED, _ABSOLUTE, _COMMON = 0, 0xFFF1, 0xFFF2

# What the small code model reaches.
_LARGEST_SECTION = 2**31

# What the linker makes itself where code addresses its own tables.
_LINKER_SYMBOLS = frozenset({"", "_GLOBAL_OFFSET_TABLE_"})


# Named tuples: an object has hundreds of these. The support functions are read in 0.2 ms so, in 0.4 as dataclasses.


class Section(NamedTuple):
    """``data`` is as long as the section is in memory, zeros where the file holds none of it."""

    number: int
    data: bytes
    alignment: int
    writable: bool
    executable: bool


class Symbol(NamedTuple):
    """``section`` is None where another object must define it; the value of an ``absolute`` one is in no section."""

    name: str
    section: int | None
    value: int
    absolute: bool = False


class Relocation(NamedTuple):
    """``section`` at ``offset`` is where something of a symbol is to be written."""

    section: int
    offset: int
    kind: int
    symbol: int
    addend: int


@dataclass(frozen=True)
class ObjectFile:
    """The parts of an object file that end up in memory."""

    machine: int
    sections: tuple[Section, ...]
    symbols: tuple[Symbol, ...]
    relocations: tuple[Relocation, ...]

    @cached_property
    def undefined(self) -> tuple[str, ...]:
        """Names the object refers to and does not define."""
        return tuple(s.name for s in self.symbols if s.section is None and s.name not in _LINKER_SYMBOLS)


def read_object(data: bytes) -> ObjectFile:
    if data[:6] != b"\x7fELF\x02\x01":
        raise ArtifactError("These bytes are no 64-bit little-endian ELF object code; compile it again.")
    (machine,) = struct.unpack_from("<H", data, 18)
    (headers_at,) = struct.unpack_from("<Q", data, 40)
    entry_size, count = struct.unpack_from("<HH", data, 58)
    headers = [struct.unpack_from("<IIQQQQIIQQ", data, headers_at + k * entry_size) for k in range(count)]
    sections = []
    symbols: tuple[Symbol, ...] = ()
    for number, (_, kind, flags, _, offset, size, link, _, alignment, _) in enumerate(headers):
        if kind == _SYMBOLS:
            symbols = _symbols(data, offset, size, names_at=headers[link][4])
        elif kind in (_PROGBITS, _NOBITS) and flags & _ALLOC:
            if flags & _THREAD:
                raise ArtifactError("Object code with thread-local variables is not supported; compile it again.")
            if kind == _PROGBITS and offset + size > len(data):
                raise ValueError("it is cut off")
            if size > _LARGEST_SECTION:
                raise ValueError(f"a section has {size} bytes")
            content = data[offset : offset + size] if kind == _PROGBITS else bytes(size)
            sections.append(Section(number, content, max(1, alignment), bool(flags & _WRITE), bool(flags & _EXEC)))
    kept = {section.number for section in sections}
    relocations = [
        Relocation(target, at, info & 0xFFFFFFFF, info >> 32, addend)
        for _, kind, _, _, offset, size, _, target, _, _ in headers
        if kind == _RELA and target in kept
        for at, info, addend in struct.iter_unpack("<QQq", data[offset : offset + size])
    ]
    return ObjectFile(machine, tuple(sections), symbols, tuple(relocations))


def _symbols(data: bytes, offset: int, size: int, names_at: int) -> tuple[Symbol, ...]:
    found = []
    for name_offset, _, _, section, value, _ in struct.iter_unpack("<IBBHQQ", data[offset : offset + size]):
        if section == _COMMON:
            raise ArtifactError("Object code with common symbols is not supported; compile it again.")
        start = names_at + name_offset
        name = data[start : data.index(b"\0", start)].decode()
        absolute = section == _ABSOLUTE
        found.append(Symbol(name, None if section == _UNDEFINED else section, value, absolute))
    return tuple(found)
