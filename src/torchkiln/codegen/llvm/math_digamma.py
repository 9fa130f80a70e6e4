"""The digamma function, one lane at a time in double precision."""

from __future__ import annotations

import math

from torchkiln.codegen.llvm.math_body import MathBody, VectorType
from torchkiln.codegen.llvm.math_library import PURE
from torchkiln.codegen.llvm.module import ModuleBuilder

# B(2k) / 2k of the asymptotic series, B the Bernoulli numbers, highest first.
_SERIES = (1 / 12, -691 / 32760, 1 / 132, -1 / 240, 1 / 252, -1 / 120, 1 / 12)


def define_digamma(module: ModuleBuilder, element: str) -> str:
    """The scalar function of ``float``, which goes through double, or ``double``; returns its symbol with ``@``."""
    wide = _define_digamma_double(module)
    if element == "double":
        return wide
    b = MathBody(module, VectorType("float", 1))
    b.emit("%wide = fpext float %x to double")
    b.emit(f"%result = call double {wide}(double %wide)")
    b.emit("%narrow = fptrunc double %result to float")
    return b.define("kiln_digamma_f32", "%narrow")


def _define_digamma_double(module: ModuleBuilder) -> str:
    b = MathBody(module, VectorType("double", 1))
    b.start_block("entry")
    negative = b.compare("olt", "%x", 0.0)
    whole = b.intrinsic("trunc", "%x")
    b.lines += [f"  br i1 {negative}, label %reflect, label %test", "reflect:"]
    # digamma(x) = digamma(1 - x) - pi / tan(pi x), with the period of tan removed before the product.
    cotangent = b.div(math.pi, b.call("@tan", b.mul(b.sub("%x", whole), math.pi)))
    mirrored, begin = b.sub(1.0, "%x"), b.neg(cotangent)
    b.lines += ["  br label %test", "test:"]
    b.lines += [
        f"  %z = phi double [ %x, %entry ], [ {mirrored}, %reflect ], [ %z.next, %raise ]",
        f"  %sum = phi double [ {b.value(0.0)}, %entry ], [ {begin}, %reflect ], [ %sum.next, %raise ]",
        f"  %low = fcmp olt double %z, {b.value(10.0)}",
        "  br i1 %low, label %raise, label %series",
        # digamma(z) = digamma(z + 1) - 1 / z
        "raise:",
        f"  %inverse = fdiv double {b.value(1.0)}, %z",
        "  %sum.next = fsub double %sum, %inverse",
        f"  %z.next = fadd double %z, {b.value(1.0)}",
        "  br label %test",
        "series:",
    ]
    inverse = b.div(1.0, "%z")
    s = b.mul(inverse, inverse)
    tail = b.mul(b.horner(s, _SERIES), s)
    value = b.sub(b.sub(b.call("@log", "%z"), b.mul(inverse, 0.5)), tail)
    result = b.add(value, "%sum")
    pole = b.both(negative, b.compare("oeq", "%x", whole))
    result = b.select(pole, math.nan, result)
    result = b.select(b.compare("oeq", "%x", 0.0), b.copysign(math.inf, b.neg("%x")), result)
    for name in ("log", "tan"):
        module.declare(f"declare double @{name}(double) {PURE}")
    return b.define("kiln_digamma_double", result, attributes=f'noinline {PURE} "no-trapping-math"="true"')
