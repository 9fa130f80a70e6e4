"""The body of one math function: appends LLVM instructions on a scalar or vector type, one method per instruction."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass

from torchkiln.codegen.llvm.instructions import InstructionList, double_literal, splat_literal, suffix, vector_type
from torchkiln.codegen.llvm.module import ModuleBuilder

Operand = str | float
"""A value name such as ``%v3``, or a number that becomes a constant of the body's type."""

IntOperand = str | int


@dataclass(frozen=True)
class VectorType:
    """``lanes`` values of ``element`` (``float`` or ``double``); one lane is the scalar type."""

    element: str
    lanes: int

    @property
    def bits(self) -> int:
        return 32 if self.element == "float" else 64

    @property
    def value(self) -> str:
        return self.shape(self.element)

    @property
    def integer(self) -> str:
        return self.shape(f"i{self.bits}")

    @property
    def mask(self) -> str:
        return self.shape("i1")

    def shape(self, element: str) -> str:
        """The type with as many lanes of another element."""
        return vector_type(element, self.lanes)

    def constant(self, number: float) -> str:
        return self.splat(self.element, double_literal(float32(number) if self.element == "float" else number))

    def integer_constant(self, number: int) -> str:
        limit = 1 << self.bits
        wrapped = number % limit
        return self.splat(f"i{self.bits}", str(wrapped - limit if wrapped >= limit // 2 else wrapped))

    def splat(self, element: str, literal: str) -> str:
        return splat_literal(element, literal, self.lanes)

    def symbol(self, name: str) -> str:
        """The symbol (without ``@``) of the function ``name`` on this type."""
        return f"kiln_{name}_f{self.bits}_v{self.lanes}"


def float32(number: float) -> float:
    """The float32 value nearest to ``number``."""
    return float(struct.unpack("<f", struct.pack("<f", number))[0])


def in_float32_parts(number: float) -> tuple[float, float]:
    """Two float32 values, the second a small one, whose sum is ``number``."""
    high = float32(number)
    return high, float32(number - high)


def _binary(name: str) -> Callable[[MathBody, Operand, Operand], str]:
    return lambda b, x, y: b.fresh(f"{name} {b.type.value} {b.value(x)}, {b.value(y)}")


class MathBody(InstructionList):
    """Every method appends one instruction and answers the name of its result.

    No fast-math flags: what may fuse is written as ``fma``, because the error terms need all other operations to round.
    """

    def __init__(self, module: ModuleBuilder, type_: VectorType, prefix: str = "v") -> None:
        super().__init__(module, prefix)
        self.type = type_

    def on(self, type_: VectorType) -> MathBody:
        """The same body seen as working on another type: instructions go to the same list."""
        self._values += 1
        view = MathBody(self.module, type_, f"{self._prefix}{self._values}_")
        view.lines = self.lines
        return view

    def value(self, x: Operand) -> str:
        return x if isinstance(x, str) else self.type.constant(x)

    def int_operand(self, x: IntOperand) -> str:
        return x if isinstance(x, str) else self.type.integer_constant(x)

    # Arithmetic

    add, sub, mul, div = map(_binary, ("fadd", "fsub", "fmul", "fdiv"))

    def neg(self, x: str) -> str:
        return self.fresh(f"fneg {self.type.value} {x}")

    def fma(self, x: Operand, y: Operand, z: Operand) -> str:
        """``x * y + z`` with one rounding."""
        return self.intrinsic("fma", x, y, z)

    def intrinsic(self, name: str, *arguments: Operand) -> str:
        """A call of ``llvm.<name>`` overloaded on the body's type."""
        value = self.type.value
        symbol = f"@llvm.{name}.{suffix(self.type.element, self.type.lanes)}"
        self.module.declare(f"declare {value} {symbol}({', '.join([value] * len(arguments))})")
        return self.call(symbol, *arguments)

    def fabs(self, x: str) -> str:
        return self.intrinsic("fabs", x)

    def copysign(self, magnitude: Operand, sign: str) -> str:
        return self.intrinsic("copysign", magnitude, sign)

    def at_least(self, x: str, low: float) -> str:
        """``max(x, low)`` that keeps NaN; one instruction on x86 in this form."""
        return self.select(self.compare("olt", x, low), low, x)

    def at_most(self, x: str, high: float) -> str:
        """``min(x, high)`` that keeps NaN."""
        return self.select(self.compare("ogt", x, high), high, x)

    def horner(self, x: str, coefficients: tuple[float, ...], last: Operand | None = None) -> str:
        """The polynomial with these coefficients, highest power first; ``last`` is one more, constant term."""
        result: Operand = coefficients[0]
        for c in coefficients[1:] if last is None else (*coefficients[1:], last):
            result = self.fma(result, x, c)
        return self.value(result)

    def odd(self, x: str, coefficients: tuple[float, ...]) -> str:
        """``x + x**3 P(x**2)``."""
        s = self.mul(x, x)
        return self.fma(self.mul(self.horner(s, coefficients), s), x, x)

    def split_horner(self, x: str, square: str, coefficients: tuple[float, ...]) -> str:
        """As ``horner``, even and odd powers apart: the chain of dependent operations is half as long."""
        parts = [self.horner(square, coefficients[start::2]) for start in (0, 1)]
        odd, even = parts if len(coefficients) % 2 == 0 else reversed(parts)
        return self.fma(odd, x, even)

    # Choice

    def compare(self, predicate: str, x: Operand, y: Operand) -> str:
        return self.fresh(f"fcmp {predicate} {self.type.value} {self.value(x)}, {self.value(y)}")

    def select(self, condition: str, x: Operand, y: Operand) -> str:
        value = self.type.value
        return self.fresh(f"select {self.type.mask} {condition}, {value} {self.value(x)}, {value} {self.value(y)}")

    def both(self, x: str, y: str) -> str:
        """Both conditions hold."""
        return self.fresh(f"and {self.type.mask} {x}, {y}")

    # Bits

    def bits(self, x: str) -> str:
        return self.fresh(f"bitcast {self.type.value} {x} to {self.type.integer}")

    def from_bits(self, x: str) -> str:
        return self.fresh(f"bitcast {self.type.integer} {x} to {self.type.value}")

    def integer(self, operation: str, x: IntOperand, y: IntOperand) -> str:
        """An integer instruction such as ``add``, ``shl`` or ``and`` on the bits of the type."""
        return self.fresh(f"{operation} {self.type.integer} {self.int_operand(x)}, {self.int_operand(y)}")

    def int_compare(self, predicate: str, x: IntOperand, y: IntOperand) -> str:
        return self.fresh(f"icmp {predicate} {self.type.integer} {self.int_operand(x)}, {self.int_operand(y)}")

    def int_to_float(self, x: str) -> str:
        return self.fresh(f"sitofp {self.type.integer} {x} to {self.type.value}")

    # Calls

    def call(self, symbol: str, *arguments: Operand) -> str:
        """A call of a function (``symbol`` with ``@``) whose arguments and result have the body's type."""
        value = self.type.value
        return self.fresh(f"call {value} {symbol}({', '.join(f'{value} {self.value(a)}' for a in arguments)})")

    def define(self, symbol: str, result: str, arity: int = 1, *, attributes: str = "#1") -> str:
        """Add the function of ``%x``, or of ``%x`` and ``%y``, with this body to the module; its symbol with ``@``."""
        value = self.type.value
        parameters = ", ".join(f"{value} %{name}" for name in "xy"[:arity])
        head = f"define internal {value} @{symbol}({parameters}) {attributes} {{"
        self.module.define(symbol, "\n".join((head, *self.lines, f"  ret {value} {result}", "}")))
        return f"@{symbol}"
