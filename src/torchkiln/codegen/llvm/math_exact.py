"""Functions whose results are exact or correctly rounded on any element type: square roots and the next value."""

from __future__ import annotations

from torchkiln.codegen.llvm.math_body import MathBody


def nextafter(b: MathBody, x: str, y: str) -> str:
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


def rsqrt(b: MathBody, x: str) -> str:
    return b.div(1.0, b.intrinsic("sqrt", x))


def sqrt(b: MathBody, x: str) -> str:
    return b.intrinsic("sqrt", x)
