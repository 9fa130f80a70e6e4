"""Math functions as calls: SLEEF's vector functions that torch carries, and the C library's where it has none."""

from __future__ import annotations

from torchkiln.codegen.llvm.instructions import join_lanes, take_lanes
from torchkiln.codegen.llvm.math_body import MathBody, VectorType
from torchkiln.codegen.llvm.module import ModuleBuilder
from torchkiln.errors import UnsupportedError

# Pure as far as a caller can tell: what the C library does to errno and the floating-point flags nobody reads.
PURE = "nounwind willreturn memory(none)"
OUT_OF_LINE = f'noinline {PURE} "prefer-vector-width"="512" "no-trapping-math"="true"'


def library(b: MathBody, name: str, *arguments: str) -> str:
    """A call of the library's function ``name`` on the body's type."""
    return b.call(define_library_function(b.module, name, b.type, len(arguments)), *arguments)


def define_library_function(module: ModuleBuilder, name: str, type_: VectorType, arity: int) -> str:
    """Make sure ``module`` can call the library's ``name`` on ``type_``; returns the symbol with ``@``."""
    if module.target.is_gpu:
        raise UnsupportedError(f"No {name} of {type_.element} is written for GPUs yet; torch's own operator has it.")
    symbol = type_.symbol(f"library_{name}")
    if not module.has(symbol):
        sleef = module.target.vector_function(name, type_.element)
        if sleef is not None:
            callee, lanes = sleef
            of_chunk = VectorType(type_.element, lanes).value
            module.declare(f"declare {of_chunk} @{callee}({', '.join([of_chunk] * arity)}) {PURE}")
            define_chunks(module, symbol, type_, arity, f"@{callee}", lanes)
        else:
            callee = name + ("f" if type_.element == "float" else "")
            module.declare(f"declare {type_.element} @{callee}({', '.join([type_.element] * arity)}) {PURE}")
            define_lane_loop(module, symbol, type_, arity, f"@{callee}")
    return f"@{symbol}"


def define_chunks(
    module: ModuleBuilder, symbol: str, type_: VectorType, arity: int, callee: str, callee_lanes: int
) -> None:
    """A function that splits its arguments into what ``callee`` takes and puts the results together."""
    chunk = VectorType(type_.element, callee_lanes)
    b = MathBody(module, type_)
    pieces = []
    for start in range(0, type_.lanes, callee_lanes):
        # A short vector is repeated to fill the register, so that no lane holds a value that was not asked for.
        lanes = [start + i % type_.lanes for i in range(callee_lanes)]
        arguments = [take_lanes(b, type_.element, type_.lanes, f"%{n}", lanes) for n in "xy"[:arity]]
        pieces.append(b.on(chunk).call(callee, *arguments))
    result = join_lanes(b, type_.element, callee_lanes, pieces)
    if type_.lanes == 1:
        result = b.fresh(f"extractelement {chunk.value} {result}, i32 0")
    elif type_.lanes < callee_lanes:
        result = take_lanes(b, type_.element, callee_lanes, result, range(type_.lanes))
    b.define(symbol, result, arity)


def define_lane_loop(module: ModuleBuilder, symbol: str, type_: VectorType, arity: int, callee: str) -> None:
    """A function that applies the scalar function ``callee`` to one lane after the other.

    Up to four lanes are written out; more go through a loop over a copy on the stack, which keeps the code small.
    """
    names = "xy"[:arity]
    b = MathBody(module, type_)
    one = b.on(VectorType(type_.element, 1))
    if type_.lanes == 1:
        b.define(symbol, b.call(callee, *(f"%{n}" for n in names)), arity)
    elif type_.lanes <= 4:
        result = "poison"
        for lane in range(type_.lanes):
            values = [b.fresh(f"extractelement {type_.value} %{n}, i32 {lane}") for n in names]
            y = one.call(callee, *values)
            result = b.fresh(f"insertelement {type_.value} {result}, {type_.element} {y}, i32 {lane}")
        b.define(symbol, result, arity)
    else:
        b.define(symbol, _loop_over_lanes(b, one, names, callee), arity, attributes=OUT_OF_LINE)


def _loop_over_lanes(b: MathBody, one: MathBody, names: str, callee: str) -> str:
    element, vector = b.type.element, b.type.value
    b.start_block("entry")
    for n in names:
        b.lines += [f"  %{n}.copy = alloca {vector}", f"  store {vector} %{n}, ptr %{n}.copy"]
    b.lines += ["  br label %lane", "lane:", "  %i = phi i64 [ 0, %entry ], [ %next, %lane ]"]
    places = [b.fresh(f"getelementptr inbounds {element}, ptr %{n}.copy, i64 %i") for n in names]
    values = [b.fresh(f"load {element}, ptr {place}") for place in places]
    b.lines += [
        f"  store {element} {one.call(callee, *values)}, ptr {places[0]}",
        "  %next = add nuw nsw i64 %i, 1",
        f"  %done = icmp eq i64 %next, {b.type.lanes}",
        "  br i1 %done, label %exit, label %lane",
        "exit:",
    ]
    return b.fresh(f"load {vector}, ptr %x.copy")
