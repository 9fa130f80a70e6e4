"""IR text to object code to addresses."""

from __future__ import annotations

import ctypes
import threading

import pytest

from torchkiln.codegen.llvm.jit import UnresolvedSymbolError, compile_module, load_object, undefined_symbols
from torchkiln.runtime.symbols import address_of

_SQUARE_SUM = """
declare double @hypot(double, double)
define double @length(double %x, double %y) {
  %r = call double @hypot(double %x, double %y)
  ret double %r
}
"""


def test_object_code_is_loaded_and_run() -> None:
    code = compile_module(_SQUARE_SUM)
    assert list(undefined_symbols(code)) == ["hypot"]
    loaded = load_object(code, ("length",), address_of)
    function = ctypes.CFUNCTYPE(ctypes.c_double, ctypes.c_double, ctypes.c_double)(loaded["length"])
    assert function(3.0, 4.0) == 5.0


def test_functions_nobody_has_are_named() -> None:
    code = compile_module(_SQUARE_SUM.replace("hypot", "no_such_function"))
    with pytest.raises(UnresolvedSymbolError, match="no_such_function"):
        load_object(code, ("length",), address_of)


def test_far_addresses_can_be_called() -> None:
    callback = ctypes.CFUNCTYPE(ctypes.c_double, ctypes.c_double, ctypes.c_double)(lambda x, y: x - y)
    address = ctypes.cast(callback, ctypes.c_void_p).value
    loaded = load_object(compile_module(_SQUARE_SUM), ("length",), lambda name: address)
    function = ctypes.PYFUNCTYPE(ctypes.c_double, ctypes.c_double, ctypes.c_double)(loaded["length"])
    assert function(9.0, 2.0) == 7.0


def test_something_that_is_not_object_code_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="ELF"):
        load_object(b"not an object", ("length",), address_of)


def test_threads_compile_and_load_at_once() -> None:
    answers: list[float] = []

    def work(k: int) -> None:
        for _ in range(5):
            code = compile_module(_SQUARE_SUM.replace("ret double %r", f"%s = fadd double %r, {k}.0\n  ret double %s"))
            loaded = load_object(code, ("length",), address_of)
            function = ctypes.CFUNCTYPE(ctypes.c_double, ctypes.c_double, ctypes.c_double)(loaded["length"])
            answers.append(function(3.0, 4.0) - k)

    workers = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert answers == [5.0] * 20
