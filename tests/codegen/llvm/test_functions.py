"""The builder of native functions: what is written with it runs as Python would run it."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchkiln.codegen.llvm.functions import Function, NativeFunction, Register, Variable, native
from torchkiln.codegen.llvm.module import ModuleBuilder
from torchkiln.config import Settings
from torchkiln.native.host import host_processor
from torchkiln.native.jit import compile_module
from torchkiln.native.loader import LoadedObject, load_object
from torchkiln.native.symbols import address_of
from torchkiln.target import capture_target


def _text(function: NativeFunction) -> str:
    module = ModuleBuilder(capture_target(Settings()))
    function.define(module)
    return module.text()


def _load(function: NativeFunction, *exports: str) -> LoadedObject:
    names = (function.prototype.name, *exports)
    return load_object(compile_module(_text(function), host_processor()), names, address_of)


def _called(loaded: LoadedObject, name: str, *arguments: int) -> int:
    prototype = ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * len(arguments))
    return int(prototype(loaded[name])(*arguments))


_ARITHMETIC = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
    "less": lambda a, b: a < b,
    "at most": lambda a, b: a <= b,
    "more": lambda a, b: a > b,
    "at least": lambda a, b: a >= b,
}


@native("void results(i64, i64, i64*)", exported=True)
def _results(f: Function, a: Register, b: Register, out: Register) -> None:
    for k, operation in enumerate(_ARITHMETIC.values()):
        value = operation(a, b)
        out[k] = value.convert("zext", "i64") if value.type == "i1" else value
    out[len(_ARITHMETIC)] = a.min(b)
    out[len(_ARITHMETIC) + 1] = a.max(b)
    with f.if_(~a.eq(b)):
        out[len(_ARITHMETIC) + 3] = ~a
    out[len(_ARITHMETIC) + 2] = a.eq(b).select(a << 1, b >> 1)


_RESULTS = _load(_results)


@given(st.integers(-(2**20), 2**20), st.integers(-(2**20), 2**20))
def test_operators_compute_what_they_do_in_python(a: int, b: int) -> None:
    out = (ctypes.c_int64 * (len(_ARITHMETIC) + 4))()
    _called(_RESULTS, "results", a, b, ctypes.addressof(out))
    last = a << 1 if a == b else (b % 2**64) >> 1
    assert list(out) == [*(int(f(a, b)) for f in _ARITHMETIC.values()), min(a, b), max(a, b), last, ~a if a != b else 0]


@native("i64 steps(i64, i64)", exported=True)
def _steps(f: Function, begin: Register, end: Register) -> None:
    """Odd numbers from ``begin`` to ``end``, summed until one that 7 divides; inner loops leave the outer one alone."""
    total = f.variable("i64", 0)
    with f.loop(end, begin) as i:
        with f.if_((i & 1).eq(0)):
            f.continue_()
        with f.loop(None) as j:
            with f.if_(j.eq(3)):
                f.break_()
            total[0] += 1000
        with f.if_(i.urem(7).eq(0)):
            f.break_()
        with f.if_(i.eq(55)):
            f.ret(-1)
        total[0] += i
    f.ret(total[0])


def _expected_steps(begin: int, end: int) -> int:
    total = 0
    for i in range(begin, end):
        if i % 2 == 0:
            continue
        total += 3000
        if i % 7 == 0:
            break
        if i == 55:
            return -1
        total += i
    return total


@pytest.mark.parametrize(("begin", "end"), [(0, 0), (5, 3), (0, 4), (0, 20), (8, 13), (8, 30), (50, 60), (57, 60)])
def test_loops_continue_break_and_return(begin: int, end: int) -> None:
    assert _called(_load(_steps), "steps", begin, end) == _expected_steps(begin, end)


def test_a_loop_goes_in_steps_up_to_its_end() -> None:
    @native("i64 count()", exported=True)
    def count(f: Function) -> None:
        total = f.variable("i64", 0)
        with f.loop(10, 1, step=4) as i:
            total[0] = total[0] * 10 + i
        f.ret(total[0])

    assert _called(_load(count), "count") == 159


def test_a_function_that_is_called_is_part_of_the_module_once() -> None:
    @native("i64 twice(i64)")
    def twice(f: Function, x: Register) -> None:
        f.ret(x * 2)

    @native("i64 eight_times(i64)", exported=True)
    def eight_times(f: Function, x: Register) -> None:
        f.ret(f.call(twice, f.call(twice, f.call(twice, x))))

    assert _text(eight_times).count("define internal i64 @twice") == 1
    assert _called(_load(eight_times), "eight_times", 5) == 40


def test_a_variable_of_the_module_keeps_its_value() -> None:
    counter = Variable("i64", "counter")

    @native("i64 count()", exported=True)
    def count(f: Function) -> None:
        f.ret(f.atomic("add", f.address(counter), 5))

    loaded = _load(count, "counter")
    assert [_called(loaded, "count") for _ in range(3)] == [0, 5, 10]
    assert ctypes.c_int64.from_address(loaded["counter"]).value == 15


def test_texts_and_further_arguments_reach_a_function_of_c() -> None:
    @native("ptr format(i64)", exported=True)
    def format_(f: Function, x: Register) -> None:
        f.ret(f.call("PyUnicode_FromFormat", 'a "text"\n of %zd, %s', x, "done"))

    loaded, prototype = _load(format_), ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_int64)
    assert prototype(loaded["format"])(7) == 'a "text"\n of 7, done'


def test_pointers_know_their_elements() -> None:
    @native("void reverse(i32*, i32*, i64)", exported=True)
    def reverse(f: Function, source: Register, target: Register, count: Register) -> None:
        with f.loop(count) as i:
            target.at(count - 1 - i)[0] = source[i]

    def reversed_(numbers: Sequence[int]) -> list[int]:
        source, target = (ctypes.c_int32 * 5)(*numbers), (ctypes.c_int32 * 5)()
        _called(_load(reverse), "reverse", ctypes.addressof(source), ctypes.addressof(target), 5)
        return list(target)

    assert reversed_([1, -2, 3, -4, 5]) == [5, -4, 3, -2, 1]


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (lambda f, a, b, p: f.ret(a + b), "i32 %p1 where i64 belongs"),
        (lambda f, a, b, p: f.ret(b), "i32 %p1 where i64 belongs"),
        (lambda f, a, b, p: f.call("PyList_New", p), "ptr %p2 where i64 belongs"),
        (lambda f, a, b, p: f.call("PyList_New"), r"PyList_New takes \('i64',\), got 0 arguments"),
        (lambda f, a, b, p: f.call("PyList_New", a, a), r"PyList_New takes \('i64',\), got 2 arguments"),
        (lambda f, a, b, p: f.ret(1 if a < 2 else 0), r"i1 %v1 is known only at run time: write if_\(...\)"),
        (lambda f, a, b, p: f.ret(a == 2), r"i64 %p0 is known only at run time: write eq\(...\)"),
        (lambda f, a, b, p: list(p), r"ptr %p2 has no known length: write loop\(...\)"),
        (lambda f, a, b, p: p[0], "no pointer with a known type of elements"),
    ],
)
def test_mistakes_are_refused_while_a_function_is_written(write: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        _text(native("i64 f(i64, i32, ptr)")(write))
