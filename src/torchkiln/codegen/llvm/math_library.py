"""Math functions as calls: SLEEF's vector functions that torch carries, and the C library's where it has none."""

from __future__ import annotations

from torchkiln.codegen.llvm.instructions import join_lanes, take_lanes
from torchkiln.codegen.llvm.math_body import MathBody, VectorType
from torchkiln.codegen.llvm.module import ModuleBuilder

# Pure as far as a caller can tell: what the C library does to errno and the floating-point flags nobody reads.
PURE = "nounwind willreturn memory(none)"


def define_library_function(module: ModuleBuilder, name: str, type_: VectorType, arity: int) -> str:
    """Make sure ``module`` can call the library's ``name`` on ``type_``; returns the symbol with ``@``."""
    symbol = type_.symbol(f"library_{name}")
    if not module.has(symbol):
        sleef = module.target.vector_function(name, type_.element)
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
        result = b.fresh(f"extractelement {chunk.value} {result}, i32 0")
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
            values = [b.fresh(f"extractelement {type_.value} %{n}, i32 {lane}") for n in names]
            y = one.call(callee, *values)
            result = b.fresh(f"insertelement {type_.value} {result}, {type_.element} {y}, i32 {lane}")
    else:
        text = (
            f"define internal {type_.value} @{symbol}({parameters}) noinline {PURE} "
            '"prefer-vector-width"="512" "no-trapping-math"="true" {\nentry:\n'
        )
        for n in names:
            b.lines += [f"  %{n}.copy = alloca {type_.value}", f"  store {type_.value} %{n}, ptr %{n}.copy"]
        b.lines += ["  br label %lane", "lane:", "  %i = phi i64 [ 0, %entry ], [ %next, %lane ]"]
        places = [b.fresh(f"getelementptr inbounds {type_.element}, ptr %{n}.copy, i64 %i") for n in names]
        values = [b.fresh(f"load {type_.element}, ptr {place}") for place in places]
        y = one.call(callee, *values)
        b.lines += [
            f"  store {type_.element} {y}, ptr {places[0]}",
            "  %next = add nuw nsw i64 %i, 1",
            f"  %done = icmp eq i64 %next, {type_.lanes}",
            "  br i1 %done, label %exit, label %lane",
            "exit:",
        ]
        result = b.fresh(f"load {type_.value}, ptr %x.copy")
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
