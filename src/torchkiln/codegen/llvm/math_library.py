"""Math functions as calls: SLEEF's vector functions that torch carries, and the C library's where it has none."""

from __future__ import annotations

import ctypes
import ctypes.util
from functools import cache
from pathlib import Path

import llvmlite.binding as llvm
import torch

from torchkiln.codegen.llvm.math_body import MathBody, VectorType, join_lanes, take_lanes
from torchkiln.codegen.llvm.module import ModuleBuilder

# Pure as far as a caller can tell: what the C library does to errno and the floating-point flags nobody reads.
PURE = "nounwind willreturn memory(none)"

# Error bounds in units of the last place are part of SLEEF's names; the exact functions have none.
_SLEEF_SUFFIX = {"erfc": "_u15", "hypot": "_u05", "fmod": "", "nextafter": ""}


@cache
def _libraries() -> tuple[ctypes.CDLL, ...]:
    """Where external functions may live: torch's own library first, then the C math library."""
    found: list[ctypes.CDLL] = []
    folder = Path(torch.__file__).parent / "lib"
    names = [str(folder / n) for n in ("libtorch_cpu.so", "libtorch_cpu.dylib", "torch_cpu.dll")]
    for name in (*names, ctypes.util.find_library("m"), None):
        if name is not None and name.startswith(str(folder)) and not Path(name).exists():
            continue
        try:
            found.append(ctypes.CDLL(name))
        except (OSError, TypeError):  # no such library; Windows has no "whole process" handle
            continue
    return tuple(found)


@cache
def resolve_symbol(name: str) -> int | None:
    """The address in this process of an external function that generated code may call, or None."""
    for library in _libraries():
        try:
            function = getattr(library, name)
        except AttributeError:
            continue
        return ctypes.cast(function, ctypes.c_void_p).value
    return None


@cache
def register_bits() -> int:
    """Width of the vectors that SLEEF's functions take on this machine; 0 where it is not known."""
    features = llvm.get_host_cpu_features()
    if features.get("avx512f"):
        return 512
    if features.get("avx2") and features.get("fma"):
        return 256
    if llvm.get_process_triple().startswith(("aarch64", "arm64")):
        return 128
    return 0


def _sleef(name: str, element: str) -> tuple[str, int] | None:
    """Symbol and lanes of SLEEF's version of a function, where torch carries it."""
    lanes = register_bits() // (32 if element == "float" else 64)
    symbol = f"Sleef_{name}{'f' if element == 'float' else 'd'}{lanes}{_SLEEF_SUFFIX.get(name, '_u10')}"
    return (symbol, lanes) if lanes and resolve_symbol(symbol) is not None else None


def define_library_function(module: ModuleBuilder, name: str, type_: VectorType, arity: int) -> str:
    """Make sure ``module`` can call the library's ``name`` on ``type_``; returns the symbol with ``@``."""
    symbol = type_.symbol(f"library_{name}")
    if not module.has(symbol):
        sleef = _sleef(name, type_.element)
        if sleef is not None:
            _define_chunks(module, symbol, type_, arity, *sleef)
        else:
            define_lane_loop(module, symbol, type_, arity, _libm(module, name, type_.element, arity))
    return f"@{symbol}"


def _libm(module: ModuleBuilder, name: str, element: str, arity: int) -> str:
    callee = name + ("f" if element == "float" else "")
    module.declare(f"declare {element} @{callee}({', '.join([element] * arity)}) {PURE}")
    return f"@{callee}"


def _parameters(type_: VectorType, arity: int) -> tuple[str, ...]:
    return tuple(f"{type_.value} %{n}" for n in "xy"[:arity])


def _define_chunks(
    module: ModuleBuilder, symbol: str, type_: VectorType, arity: int, callee: str, callee_lanes: int
) -> None:
    """A function that cuts its arguments into what ``callee`` takes and puts the results together."""
    chunk = type_.with_lanes(callee_lanes)
    module.declare(f"declare {chunk.value} @{callee}({', '.join([chunk.value] * arity)}) {PURE}")
    b = MathBody(module, type_)
    pieces = []
    for start in range(0, type_.lanes, callee_lanes):
        # A short vector is repeated to fill the register, so that no lane holds a value that was not asked for.
        lanes = [start + i % type_.lanes for i in range(callee_lanes)]
        arguments = [take_lanes(b, type_.element, type_.lanes, f"%{n}", lanes) for n in "xy"[:arity]]
        pieces.append(b.on(chunk).call(f"@{callee}", *arguments))
    result = join_lanes(b, type_.element, callee_lanes, pieces)
    if type_.lanes == 1:
        result = b.emit(f"extractelement {chunk.value} {result}, i32 0")
    elif type_.lanes < callee_lanes:
        result = take_lanes(b, type_.element, callee_lanes, result, range(type_.lanes))
    module.define(
        symbol,
        f"define internal {type_.value} @{symbol}({', '.join(_parameters(type_, arity))}) #1 {{\n"
        + "\n".join(b.lines)
        + f"\n  ret {type_.value} {result}\n}}",
    )


def define_lane_loop(module: ModuleBuilder, symbol: str, type_: VectorType, arity: int, callee: str) -> None:
    """A function that applies the scalar function ``callee`` to one lane after the other.

    Up to four lanes are written out; more go through a loop over a copy on the stack, which keeps the code small.
    """
    parameters = ", ".join(_parameters(type_, arity))
    scalar = type_.with_lanes(1)
    names = "xy"[:arity]
    b = MathBody(module, type_)
    one = b.on(scalar)
    if type_.lanes == 1:
        text = f"define internal {type_.value} @{symbol}({parameters}) #1 {{\n"
        result = b.call(callee, *(f"%{n}" for n in names))
    elif type_.lanes <= 4:
        text = f"define internal {type_.value} @{symbol}({parameters}) #1 {{\n"
        result = "poison"
        for lane in range(type_.lanes):
            values = [b.emit(f"extractelement {type_.value} %{n}, i32 {lane}") for n in names]
            y = one.call(callee, *values)
            result = b.emit(f"insertelement {type_.value} {result}, {type_.element} {y}, i32 {lane}")
    else:
        text = (
            f"define internal {type_.value} @{symbol}({parameters}) noinline {PURE} "
            '"prefer-vector-width"="512" "no-trapping-math"="true" {\nentry:\n'
        )
        for n in names:
            b.lines += [f"  %{n}.copy = alloca {type_.value}", f"  store {type_.value} %{n}, ptr %{n}.copy"]
        b.lines += ["  br label %lane", "lane:", "  %i = phi i64 [ 0, %entry ], [ %next, %lane ]"]
        places = [b.emit(f"getelementptr inbounds {type_.element}, ptr %{n}.copy, i64 %i") for n in names]
        values = [b.emit(f"load {type_.element}, ptr {place}") for place in places]
        y = one.call(callee, *values)
        b.lines += [
            f"  store {type_.element} {y}, ptr {places[0]}",
            "  %next = add nuw nsw i64 %i, 1",
            f"  %done = icmp eq i64 %next, {type_.lanes}",
            "  br i1 %done, label %exit, label %lane",
            "exit:",
        ]
        result = b.emit(f"load {type_.value}, ptr %x.copy")
    module.define(symbol, text + "\n".join(b.lines) + f"\n  ret {type_.value} {result}\n}}")


def define_scalar(b: MathBody, symbol: str, result: str, callees: tuple[str, ...]) -> str:
    """Define the scalar double function of ``%x`` with this body, which calls these C functions; returns its symbol."""
    for name in callees:
        b.module.declare(f"declare double @{name}(double) {PURE}")
    b.module.define(
        symbol,
        f'define internal double @{symbol}(double %x) noinline {PURE} "no-trapping-math"="true" {{\nentry:\n'
        + "\n".join(b.lines)
        + f"\n  ret double {result}\n}}",
    )
    return f"@{symbol}"
