"""The instructions of a function while they are written, and the values they work on."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Sequence
from typing import NoReturn, Union

from torchkiln.codegen.llvm.module import ModuleBuilder


def vector_type(element: str, lanes: int) -> str:
    return element if lanes == 1 else f"<{lanes} x {element}>"


def splat_literal(element: str, text: str, lanes: int) -> str:
    return text if lanes == 1 else f"splat ({element} {text})"


def suffix(element: str, lanes: int) -> str:
    """A type in the name of an intrinsic: ``f32``, ``v64f32``, ``v8i64``."""
    short = {"float": "f32", "double": "f64", "half": "f16", "ptr": "p0"}.get(element, element)
    return short if lanes == 1 else f"v{lanes}{short}"


def double_literal(number: float) -> str:
    """A constant of ``float`` or ``double``: LLVM writes both as the bits of a double."""
    return f"0x{struct.unpack('<Q', struct.pack('<d', number))[0]:016X}"


def llvm_type(type_: str) -> str:
    """LLVM's name of a type in which pointers know their elements."""
    return "ptr" if type_[-1] == "*" else type_


class InstructionList:
    """Appends lines of LLVM code, and makes names for values and labels."""

    def __init__(self, module: ModuleBuilder, prefix: str = "v") -> None:
        self.module = module
        self.lines: list[str] = []
        self._prefix = prefix
        self._values = 0
        self._labels = 0

    def emit(self, line: str) -> None:
        """Append an instruction without a result."""
        self.lines.append(f"  {line}")

    def fresh(self, instruction: str) -> str:
        """Append an instruction, and answer the name of its result."""
        self._values += 1
        name = f"%{self._prefix}{self._values}"
        self.lines.append(f"  {name} = {instruction}")
        return name

    def new_label(self, stem: str = "b") -> str:
        self._labels += 1
        return f"{stem}{self._labels}"

    def start_block(self, label: str) -> None:
        self.lines.append(f"{label}:")

    def branch(self, label: str) -> None:
        self.emit(f"br label %{label}")

    def result(self, type_: str, instruction: str) -> Register:
        """The result of an instruction given as text."""
        return Register(self, type_, self.fresh(instruction))

    def operand(self, type_: str, value: Operand) -> str:
        """``value`` as an operand of a type, which is checked."""
        if isinstance(value, Register):
            if llvm_type(value.type) != llvm_type(type_):
                raise TypeError(f"{value} where {type_} belongs")
            return value.name
        if value is None:
            return "null"
        if isinstance(value, str):
            return self.module.string(value)
        if isinstance(value, tuple):
            return self.module.integers(value)
        if type_[0] == "<":
            lanes, element = type_[1:-1].split(" x ")
            return splat_literal(element, str(value), int(lanes))
        return str(value)

    def literal(self, type_: str, value: Operand) -> Register:
        """A constant that is a value."""
        return Register(self, type_, self.operand(type_, value))


def shuffle(f: InstructionList, element: str, lanes: int, first: str, second: str, wanted: Sequence[int]) -> str:
    """Lanes of two vectors of ``lanes`` lanes, counted through both; -1 where any value will do."""
    order = ", ".join(f"i32 {lane}" if lane >= 0 else "i32 poison" for lane in wanted)
    source = f"<{lanes} x {element}>"
    return f.fresh(f"shufflevector {source} {first}, {source} {second}, <{len(wanted)} x i32> <{order}>")


def take_lanes(f: InstructionList, element: str, lanes: int, value: str, wanted: Sequence[int]) -> str:
    """The vector of the ``wanted`` lanes of ``value``, which has ``lanes`` lanes (1: a scalar) of ``element``."""
    if lanes == 1:
        value = f.fresh(f"insertelement <1 x {element}> poison, {element} {value}, i32 0")
    elif list(wanted) == list(range(lanes)):
        return value
    return shuffle(f, element, lanes, value, "poison", wanted)


def join_lanes(f: InstructionList, element: str, lanes: int, pieces: Sequence[str]) -> str:
    """Vectors of ``lanes`` lanes, a power of two of them, one after the other in one vector."""
    while len(pieces) > 1:
        pairs = zip(pieces[::2], pieces[1::2], strict=True)
        pieces = [shuffle(f, element, lanes, low, high, range(2 * lanes)) for low, high in pairs]
        lanes *= 2
    return pieces[0]


def _binary(name: str) -> Callable[[Register, Operand], Register]:
    return lambda self, other: self.binary(name, other)


def _comparison(predicate: str) -> Callable[[Register, Operand], Register]:
    return lambda self, other: self.compare(predicate, other)


class Register:
    """A value in LLVM code, or a constant. Operators append an instruction, and give its result.

    Types are LLVM's, but ``i64*`` is a pointer whose elements are ``i64``, which subscripts load and store. ``<`` and
    its like compare signed numbers; unsigned comparisons are ``compare("ult", ...)``.
    """

    __slots__ = ("function", "name", "type")

    def __init__(self, function: InstructionList, type_: str, name: str) -> None:
        self.function = function
        self.type = type_
        self.name = name

    __add__ = _binary("add")
    __sub__ = _binary("sub")
    __mul__ = _binary("mul")
    __and__ = _binary("and")
    __or__ = _binary("or")
    __xor__ = _binary("xor")
    __lshift__ = _binary("shl")
    __rshift__ = _binary("lshr")  # zeros come in from the left
    udiv = _binary("udiv")
    urem = _binary("urem")
    __lt__ = _comparison("slt")
    __le__ = _comparison("sle")
    __gt__ = _comparison("sgt")
    __ge__ = _comparison("sge")
    eq = _comparison("eq")
    ne = _comparison("ne")

    def __invert__(self) -> Register:
        return self.binary("xor", -1)

    def min(self, other: Register) -> Register:
        """The smaller of two signed numbers."""
        return (self < other).select(self, other)

    def max(self, other: Register) -> Register:
        """The larger of two signed numbers."""
        return (self > other).select(self, other)

    def binary(self, name: str, other: Operand) -> Register:
        return self.function.result(self.type, f"{name} {self}, {self.function.operand(self.type, other)}")

    def compare(self, predicate: str, other: Operand) -> Register:
        result = re.sub(r"\w+(?=>?$)", "i1", llvm_type(self.type))
        return self.function.result(result, f"icmp {predicate} {self}, {self.function.operand(self.type, other)}")

    def select(self, yes: Register, no: Operand) -> Register:
        """``yes`` where this is true, else ``no``."""
        other = self.function.operand(yes.type, no)
        return self.function.result(yes.type, f"select {self}, {yes}, {llvm_type(yes.type)} {other}")

    def convert(self, name: str, type_: str) -> Register:
        """A conversion such as ``zext``, ``trunc`` or ``bitcast``."""
        return self.function.result(type_, f"{name} {self} to {llvm_type(type_)}")

    # Pointers

    def at(self, index: Operand) -> Register:
        """The address of an element."""
        if isinstance(index, int) and index == 0:
            return self
        place = self.function.operand("i64", index)
        return self.function.result(self.type, f"getelementptr {llvm_type(self.element)}, {self}, i64 {place}")

    def __getitem__(self, index: Operand) -> Register:
        return self.function.result(self.element, f"load {llvm_type(self.element)}, {self.at(index)}")

    def __setitem__(self, index: Operand, value: Operand) -> None:
        stored = self.function.operand(self.element, value)
        self.function.emit(f"store {llvm_type(self.element)} {stored}, {self.at(index)}")

    def cast(self, type_: str) -> Register:
        """The same pointer to elements of another type."""
        return Register(self.function, type_, self.name)

    @property
    def element(self) -> str:
        if self.type[-1] != "*":
            raise TypeError(f"{self} is no pointer with a known type of elements")
        return self.type[:-1]

    def __str__(self) -> str:
        return f"{llvm_type(self.type)} {self.name}"

    # What Python would make of a value while code is written

    def __bool__(self) -> NoReturn:
        raise TypeError(f"{self} is known only at run time: write if_(...)")

    def __eq__(self, other: object) -> NoReturn:
        raise TypeError(f"{self} is known only at run time: write eq(...)")

    def __iter__(self) -> NoReturn:
        raise TypeError(f"{self} has no known length: write loop(...)")


Operand = Union[Register, int, str, tuple[int, ...], None]
"""What an instruction takes: a value, an integer, None for a null pointer, a text for a pointer to a C string, a tuple
for one to 64-bit constants."""
