"""Math functions for generated code: which exist, and how each is made for an element type and a vector width."""

from __future__ import annotations

from collections.abc import Callable

from torchkiln.codegen.llvm import (
    math_digamma,
    math_error,
    math_exact,
    math_exponential,
    math_hyperbolic,
    math_pow,
    math_trigonometric,
)
from torchkiln.codegen.llvm.math_body import MathBody, VectorType
from torchkiln.codegen.llvm.math_library import define_lane_loop, define_library_function
from torchkiln.codegen.llvm.module import ModuleBuilder
from torchkiln.native.vector_math import FUNCTIONS

__all__ = ["SUPPORTED", "math_function"]

_BINARY = frozenset({"pow", "atan2", "fmod", "hypot", "nextafter"})

# Written as vector instructions for float32 only.
_INLINE_FLOAT: dict[str, Callable[..., str]] = {
    "exp": math_exponential.exp,
    "exp2": math_exponential.exp2,
    "expm1": math_exponential.expm1,
    "log": math_exponential.log,
    "log2": math_exponential.log2,
    "log10": math_exponential.log10,
    "log1p": math_exponential.log1p,
    "sigmoid": math_exponential.sigmoid,
    "asin": math_trigonometric.asin,
    "acos": math_trigonometric.acos,
    "atan": math_trigonometric.atan,
    "atan2": math_trigonometric.atan2,
    "sinh": math_hyperbolic.sinh,
    "cosh": math_hyperbolic.cosh,
    "tanh": math_hyperbolic.tanh,
    "asinh": math_hyperbolic.asinh,
    "acosh": math_hyperbolic.acosh,
    "erf": math_error.erf,
    "erfc": math_error.erfc,
    "erfinv": math_error.erfinv,
    "pow": math_pow.power,
}
# The library's for double, with repairs at the ends of its range or refinement around it.
_REPAIRED_DOUBLE: dict[str, Callable[..., str]] = {
    "sinh": math_hyperbolic.sinh_double,
    "cosh": math_hyperbolic.cosh_double,
    "asinh": math_hyperbolic.asinh_double,
    "acosh": math_hyperbolic.acosh_double,
    "erfinv": math_error.erfinv_double,
}
# Written as vector instructions for both element types.
_INLINE_ANY: dict[str, Callable[..., str]] = {
    "sqrt": math_exact.sqrt,
    "rsqrt": math_exact.rsqrt,
    "nextafter": math_exact.nextafter,
}
# Inline up to a limit of the argument, by the library where any lane is beyond it.
_INLINE_TO_LIMIT: dict[str, Callable[..., str]] = {
    "sin": math_trigonometric.sin,
    "cos": math_trigonometric.cos,
    "tan": math_trigonometric.tan,
}
# One lane at a time, in double precision.
_SCALAR: dict[str, Callable[[ModuleBuilder], str]] = {
    "digamma": math_digamma.define_digamma,
}
SUPPORTED: frozenset[str] = frozenset((*FUNCTIONS, *_INLINE_FLOAT, *_INLINE_ANY, *_SCALAR))
"""Names that :func:`math_function` takes."""


def math_function(module: ModuleBuilder, name: str, element: str, lanes: int) -> str:
    """Make sure ``module`` holds the function ``name`` on ``lanes`` values of ``element``; returns its symbol.

    ``element`` is ``float`` or ``double``; ``lanes`` is 1 (the scalar type) or a power of two up to 64. The function
    takes one value, or two for the binary names, and returns one, all of the same type. It is pure, and inlined where
    that pays. What it calls outside the module is found by :func:`torchkiln.native.symbols.address_of`.
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
    arity = 2 if name in _BINARY else 1
    by_element = _INLINE_FLOAT if type_.element == "float" else _REPAIRED_DOUBLE
    inline = _INLINE_ANY.get(name) or by_element.get(name)
    body = MathBody(module, type_)
    arguments = ["%x", "%y"][:arity]
    if inline is not None:
        result = inline(body, *arguments)
    elif name in _INLINE_TO_LIMIT and type_.element == "float":
        result = _define_with_limit(body, name)
    elif name == "sigmoid":
        result = math_exponential.sigmoid_from_exp(body, math_function(module, "exp", type_.element, type_.lanes))
    elif name in _SCALAR:
        define_lane_loop(module, symbol, type_, arity, _on_element(module, name, type_.element))
        return
    else:
        result = body.call(define_library_function(module, name, type_, arity), *arguments)
    parameters = ", ".join(f"{type_.value} {a}" for a in arguments)
    module.define(
        symbol,
        f"define internal {type_.value} @{symbol}({parameters}) #1 {{\nentry:\n"
        + "\n".join(body.lines)
        + f"\n  ret {type_.value} {result}\n}}",
    )


def _on_element(module: ModuleBuilder, name: str, element: str) -> str:
    """The scalar function ``name`` for ``element``; float32 goes through double."""
    callee = _SCALAR[name](module)
    if element == "double":
        return callee
    symbol = f"kiln_{name}_f32"
    module.define(
        symbol,
        f"define internal float @{symbol}(float %x) #1 {{\n"
        "  %wide = fpext float %x to double\n"
        f"  %result = call double {callee}(double %wide)\n"
        "  %narrow = fptrunc double %result to float\n"
        "  ret float %narrow\n}",
    )
    return f"@{symbol}"


def _define_with_limit(body: MathBody, name: str) -> str:
    """The inline function, and in lanes beyond its limit the library's, which is called only when there are any."""
    type_ = body.type
    # Lanes that a masked load left undefined must not make the branch undefined.
    x = body.fresh(f"freeze {type_.value} %x")
    beyond = body.compare("ogt", body.fabs(x), math_trigonometric.REDUCTION_LIMIT)
    if type_.lanes == 1:
        any_beyond = beyond
    else:
        bits = body.fresh(f"bitcast {type_.mask} {beyond} to i{type_.lanes}")
        any_beyond = body.fresh(f"icmp ne i{type_.lanes} {bits}, 0")
    near = _INLINE_TO_LIMIT[name](body, x)
    body.lines += [
        f'  br i1 {any_beyond}, label %far, label %exit, !prof !{{!"branch_weights", i32 1, i32 100000}}',
        "far:",
    ]
    far = body.select(beyond, body.call(_define_cold(body.module, name, type_), x), near)
    body.lines += ["  br label %exit", "exit:"]
    return body.fresh(f"phi {type_.value} [ {near}, %entry ], [ {far}, %far ]")


def _define_cold(module: ModuleBuilder, name: str, type_: VectorType) -> str:
    """The library's function behind a call of our own, so that its code is not repeated at every use."""
    symbol = type_.symbol(f"cold_{name}")
    callee = define_library_function(module, name, type_, 1)
    module.define(
        symbol,
        f"define internal {type_.value} @{symbol}({type_.value} %x) cold noinline nounwind willreturn memory(none) "
        '"prefer-vector-width"="512" "no-trapping-math"="true" {\n'
        f"  %result = call {type_.value} {callee}({type_.value} %x)\n"
        f"  ret {type_.value} %result\n}}",
    )
    return f"@{symbol}"
