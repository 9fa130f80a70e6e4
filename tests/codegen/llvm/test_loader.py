"""Object code to addresses: what is loaded runs, wherever its parts and what it calls lie."""

from __future__ import annotations

import ctypes
import gc
import struct
import threading
from pathlib import Path

import pytest

from torchkiln.errors import ArtifactError
from torchkiln.native.elf import X86_64, ObjectFile, Section, read_object
from torchkiln.native.host import host_processor
from torchkiln.native.jit import compile_module
from torchkiln.native.loader import (
    LoadedObject,
    UnresolvedSymbolError,
    load_in_one_piece,
    load_object,
    load_with_orc,
)
from torchkiln.native.symbols import address_of

_SQUARE_SUM = """
declare double @hypot(double, double)
define double @length(double %x, double %y) {
  %r = call double @hypot(double %x, double %y)
  ret double %r
}
"""

# Code, constants, a table of addresses and variables, each of which refers to another.
_ALL_KINDS = """
@weights = private unnamed_addr constant [4 x double] [double 2.5, double 3.5, double 4.5, double 5.5]
@places = private constant [2 x ptr] [ptr getelementptr (double, ptr @weights, i64 1), ptr @weights]
@count = global i64 40
@zeros = global [1000 x i64] zeroinitializer
@environ = external global ptr
define double @weight(i64 %k) {
  %at = getelementptr ptr, ptr @places, i64 %k
  %place = load ptr, ptr %at
  %value = load double, ptr %place
  %scaled = fmul double %value, 0x3FD5555555555555
  ret double %scaled
}
define i64 @next() {
  %zero = load i64, ptr getelementptr (i64, ptr @zeros, i64 999)
  %old = load i64, ptr @count
  %some = add i64 %old, %zero
  %new = add i64 %some, 1
  store i64 %new, ptr @count
  ret i64 %new
}
define ptr @outside() {
  ret ptr @environ
}
"""


def test_object_code_is_loaded_and_run() -> None:
    code = compile_module(_SQUARE_SUM, host_processor())
    assert read_object(code).undefined == ("hypot",)
    loaded = load_object(code, ("length",), address_of)
    function = ctypes.CFUNCTYPE(ctypes.c_double, ctypes.c_double, ctypes.c_double)(loaded["length"])
    assert function(3.0, 4.0) == 5.0


def test_functions_nobody_has_are_named() -> None:
    code = compile_module(_SQUARE_SUM.replace("hypot", "no_such_function"), host_processor())
    with pytest.raises(UnresolvedSymbolError, match="no_such_function"):
        load_object(code, ("length",), address_of)


def test_far_addresses_can_be_called() -> None:
    callback = ctypes.CFUNCTYPE(ctypes.c_double, ctypes.c_double, ctypes.c_double)(lambda x, y: x - y)
    address = ctypes.cast(callback, ctypes.c_void_p).value
    loaded = load_object(compile_module(_SQUARE_SUM, host_processor()), ("length",), lambda name: address)
    function = ctypes.PYFUNCTYPE(ctypes.c_double, ctypes.c_double, ctypes.c_double)(loaded["length"])
    assert function(9.0, 2.0) == 7.0


def test_something_that_is_not_object_code_is_refused() -> None:
    with pytest.raises(ArtifactError, match="ELF"):
        load_object(b"not an object", ("length",), address_of)


def test_object_code_that_is_cut_off_is_refused() -> None:
    code = compile_module(_SQUARE_SUM, host_processor())
    for length in range(6, len(code), 7):
        with pytest.raises(ArtifactError, match=r"damaged .*; compile it again"):
            load_object(code[:length], ("length",), address_of)


def test_a_section_of_no_sensible_size_is_refused() -> None:
    code = bytearray(compile_module(_SQUARE_SUM + "@zeros = global [16 x i8] zeroinitializer", host_processor()))
    (headers,) = struct.unpack_from("<Q", code, 40)
    entry_size, count = struct.unpack_from("<HH", code, 58)
    kinds = [struct.unpack_from("<I", code, headers + k * entry_size + 4)[0] for k in range(count)]
    no_bits = 8  # a section of zeros, of which the file holds nothing but the size
    struct.pack_into("<Q", code, headers + kinds.index(no_bits) * entry_size + 32, 2**60)
    with pytest.raises(ArtifactError, match=f"a section has {2**60} bytes"):
        load_object(bytes(code), ("length",), address_of)


def test_threads_compile_and_load_at_once() -> None:
    answers: list[float] = []

    def work(k: int) -> None:
        for _ in range(5):
            text = _SQUARE_SUM.replace("ret double %r", f"%s = fadd double %r, {k}.0\n  ret double %s")
            code = compile_module(text, host_processor())
            loaded = load_object(code, ("length",), address_of)
            function = ctypes.CFUNCTYPE(ctypes.c_double, ctypes.c_double, ctypes.c_double)(loaded["length"])
            answers.append(function(3.0, 4.0) - k)

    workers = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert answers == [5.0] * 20


def _call(address: int, result: type, *arguments: type) -> ctypes._CFunctionType:
    return ctypes.CFUNCTYPE(result, *arguments)(address)


@pytest.mark.parametrize("by", ["one piece", "orc"])
def test_code_constants_and_variables_refer_to_each_other(by: str) -> None:
    data = compile_module(_ALL_KINDS, host_processor())
    code, exports = read_object(data), ("weight", "next", "outside")
    environ = address_of("environ")
    assert environ is not None
    imports = {"environ": environ}
    loaded: list[LoadedObject] = [
        load_in_one_piece(code, exports, imports) if by == "one piece" else load_with_orc(data, exports, imports)
        for _ in range(2)
    ]
    for one in loaded:
        assert _call(one["weight"], ctypes.c_double, ctypes.c_int64)(0) == 3.5 * (1 / 3)
        assert _call(one["weight"], ctypes.c_double, ctypes.c_int64)(1) == 2.5 * (1 / 3)
        assert _call(one["outside"], ctypes.c_void_p)() == environ
        assert [_call(one["next"], ctypes.c_int64)() for _ in range(3)] == [41, 42, 43], "each has its own variables"


def test_memory_is_given_back_and_never_writable_and_executable() -> None:
    def mappings(flags: str) -> int:
        return sum(line.split()[1].startswith(flags) for line in Path("/proc/self/maps").read_text().splitlines())

    code = compile_module(_SQUARE_SUM + "\n".join(f"@v{k} = global i64 {k}" for k in range(2)), host_processor())
    gc.collect()
    before = mappings("r-x"), mappings("rwx")
    kept = [load_object(code, ("length",), address_of) for _ in range(20)]
    assert mappings("rwx") == before[1]
    assert mappings("r-x") >= before[0] + 20
    del kept
    gc.collect()
    assert (mappings("r-x"), mappings("rwx")) == before


def test_an_export_that_is_not_there_leaves_nothing_behind() -> None:
    def size() -> int:
        return int(Path("/proc/self/statm").read_text().split()[0])

    code = compile_module(_SQUARE_SUM + "@much = global [10000000 x i64] zeroinitializer", host_processor())
    before = size()
    for _ in range(10):
        with pytest.raises(KeyError, match="width"):
            load_object(code, ("width",), address_of)
    assert size() - before < 10000 * 10


def test_sections_that_a_page_is_too_small_for_are_refused() -> None:
    code = ObjectFile(X86_64, (Section(1, b"\xc3", 1 << 16, writable=False, executable=True),), (), ())
    with pytest.raises(ArtifactError, match="multiples of 65536 bytes"):
        load_in_one_piece(code, (), {})
