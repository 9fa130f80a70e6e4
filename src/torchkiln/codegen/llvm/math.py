"""Math functions for generated code: which exist, and how each is made for an element type and a vector width."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torchkiln.codegen.llvm import math_card, math_error, math_hyperbolic
from torchkiln.codegen.llvm.math_body import MathBody, VectorType
from torchkiln.codegen.llvm.math_digamma import define_digamma
from torchkiln.codegen.llvm.math_error import erf, erfc, erfinv
from torchkiln.codegen.llvm.math_error_table import LANES as TABLE_LANES
from torchkiln.codegen.llvm.math_error_table import erf_by_table
from torchkiln.codegen.llvm.math_exponential import exp, exp2, expm1, log, log1p, log2, log10, sigmoid, sigmoid_from_exp
from torchkiln.codegen.llvm.math_hyperbolic import acosh, asinh, cosh, sinh, tanh
from torchkiln.codegen.llvm.math_library import (
    OUT_OF_LINE,
    define_chunks,
    define_lane_loop,
    define_library_function,
    library,
)
from torchkiln.codegen.llvm.math_pow import pow_
from torchkiln.codegen.llvm.math_trigonometric import (
    REDUCTION_LIMIT,
    acos,
    asin,
    atan,
    atan2,
    cos,
    far_quadrant,
    sin,
    tan,
)
from torchkiln.codegen.llvm.module import ModuleBuilder
from torchkiln.ir import ops

__all__ = ["SUPPORTED", "math_function"]


def _by_name(*functions: Callable[..., str]) -> dict[str, Callable[..., str]]:
    return {function.__name__.rstrip("_"): function for function in functions}


# Written as vector instructions for float32 only.
_INLINE_FLOAT = _by_name(
    *(exp, exp2, expm1, log, log2, log10, log1p, sigmoid, pow_, erf, erfc, erfinv),
    *(asin, acos, atan, atan2, sinh, cosh, tanh, asinh, acosh),
)
# The same up to a limit of the argument; where any lane is beyond it by the library, or on GPUs by integers.
_INLINE_TO_LIMIT = _by_name(sin, cos, tan)
# The same on cards, which have no library.
_INLINE_ON_CARDS = _by_name(math_card.fmod, math_card.hypot, math_card.atanh)
# Of float32 with AVX-512: a function of one register, which fewer and more lanes call.
_BY_TABLE: dict[str, Callable[..., str]] = {"erf": erf_by_table}
# The library's for double, with repairs at the ends of its range or refinement around it.
_REPAIRED_DOUBLE: dict[str, Callable[..., str]] = {
    "sinh": math_hyperbolic.sinh_double,
    "cosh": partial(math_hyperbolic.growing_double, "cosh"),
    "asinh": math_hyperbolic.asinh_double,
    "acosh": partial(math_hyperbolic.inverse_double, "acosh"),
    "erfinv": math_error.erfinv_double,
}
SUPPORTED = ops.MATH | {"fmod"}
"""Names that :func:`math_function` takes."""


def math_function(module: ModuleBuilder, name: str, element: str, lanes: int) -> str:
    """Make sure ``module`` holds the function ``name`` on ``lanes`` values of ``element``; returns its symbol.

    ``element`` is ``float`` or ``double``; ``lanes`` is 1 (the scalar type) or a power of two up to 64. The function is
    pure, and inlined where that pays. Its arguments and its result are of one type.
    """
    if name not in SUPPORTED:
        raise ValueError(f"no math function {name!r}; there are {', '.join(sorted(SUPPORTED))}")
    if element not in ("float", "double"):
        raise ValueError(f"math functions work on float and double, not on {element!r}")
    if lanes not in (1, 2, 4, 8, 16, 32, 64):
        raise ValueError(f"a vector has a power of two up to 64 lanes, not {lanes}")
    type_ = VectorType(element, lanes)
    symbol = type_.symbol(name)
    if not module.has(symbol):
        _define(module, name, type_, symbol)
    return f"@{symbol}"


def _define(module: ModuleBuilder, name: str, type_: VectorType, symbol: str) -> None:
    if name == "digamma":  # one lane at a time
        define_lane_loop(module, symbol, type_, 1, define_digamma(module, type_.element))
        return
    is_float = type_.element == "float"
    arity = ops.OPS[name].arity
    by_table = _BY_TABLE.get(name) if is_float and module.target.sleef_bits == 512 else None
    if by_table is not None and type_.lanes != TABLE_LANES:
        of_table = math_function(module, name, type_.element, TABLE_LANES)
        define_chunks(module, symbol, type_, arity, of_table, TABLE_LANES)
        return
    arguments = ("%x", "%y")[:arity]
    body = MathBody(module, type_)
    body.start_block("entry")
    inline = by_table or (_INLINE_FLOAT if is_float else _REPAIRED_DOUBLE).get(name)
    if inline is None and is_float and module.target.is_gpu:
        inline = _INLINE_ON_CARDS.get(name)
    if inline is not None:
        result = inline(body, *arguments)
    elif name == "nextafter":
        result = _nextafter(body, *arguments)
    elif name in _INLINE_TO_LIMIT and is_float:
        result = _with_limit(body, name)
    elif name == "sigmoid":
        result = sigmoid_from_exp(body, math_function(module, "exp", type_.element, type_.lanes))
    else:
        result = library(body, name, *arguments)
    body.define(symbol, result, arity)


def _with_limit(body: MathBody, name: str) -> str:
    """The inline function, and in lanes beyond its limit the one for any argument, called only when there are any."""
    type_ = body.type
    # Lanes that a masked load left undefined must not make the branch undefined.
    x = body.fresh(f"freeze {type_.value} %x")
    beyond = body.compare("ogt", body.fabs(x), REDUCTION_LIMIT)
    if type_.lanes == 1:
        any_beyond = beyond
    else:
        bits = body.fresh(f"bitcast {type_.mask} {beyond} to i{type_.lanes}")
        any_beyond = body.fresh(f"icmp ne i{type_.lanes} {bits}, 0")
    near = _INLINE_TO_LIMIT[name](body, x)
    body.emit(f'br i1 {any_beyond}, label %far, label %exit, !prof !{{!"branch_weights", i32 1, i32 100000}}')
    body.start_block("far")
    far = body.select(beyond, body.call(_define_cold(body.module, name, type_), x), near)
    body.branch("exit")
    body.start_block("exit")
    return body.fresh(f"phi {type_.value} [ {near}, %entry ], [ {far}, %far ]")


def _define_cold(module: ModuleBuilder, name: str, type_: VectorType) -> str:
    """The library's function behind a call of our own, so that its code is not repeated at every use.

    On a GPU it is ours, one lane at a time.
    """
    if module.target.is_gpu:
        one, symbol = VectorType(type_.element, 1), type_.symbol(f"far_{name}")
        body = MathBody(module, one)
        value = _INLINE_TO_LIMIT[name](body, "%x", far_quadrant)
        callee = body.define(one.symbol(f"any_{name}"), value, attributes=OUT_OF_LINE)
        define_lane_loop(module, symbol, type_, 1, callee)
        return f"@{symbol}"
    body = MathBody(module, type_)
    body.emit(f"%result = call {type_.value} {define_library_function(module, name, type_, 1)}({type_.value} %x)")
    return body.define(type_.symbol(f"cold_{name}"), "%result", attributes=f"cold {OUT_OF_LINE}")


def _nextafter(b: MathBody, x: str, y: str) -> str:
    """One step on the integer line of the bits, on any element type."""
    bits = b.bits(x)
    # Away from zero is one more, towards zero one less.
    outward = b.fresh(f"xor {b.type.mask} {b.compare('olt', x, y)}, {b.compare('olt', x, 0.0)}")
    step = b.fresh(
        f"select {b.type.mask} {outward}, {b.type.integer} {b.int_operand(1)}, {b.type.integer} {b.int_operand(-1)}"
    )
    moved = b.from_bits(b.integer("add", bits, step))
    smallest = 2.0**-149 if b.type.element == "float" else 5e-324
    moved = b.select(b.compare("oeq", x, 0.0), b.copysign(smallest, y), moved)
    moved = b.select(b.compare("oeq", x, y), y, moved)
    return b.select(b.compare("uno", x, y), b.add(x, y), moved)
