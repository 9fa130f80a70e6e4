"""Native functions written in Python: values with operators, and blocks for loops and conditions.

A function is a prototype and a Python function that writes its body::

    @native("i64 count_zeros(i64*, i64)")
    def count_zeros(f: Function, numbers: Register, length: Register) -> None:
        count = f.variable("i64", 0)
        with f.loop(length) as i, f.if_(numbers[i].eq(0)):
            count[0] += 1
        f.ret(count[0])

Types are LLVM's. ``i64*`` is a pointer whose elements are ``i64``, which subscripts load and store. Variables live on
the stack, from where LLVM takes them into registers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import NoReturn, Union

from torchkiln.codegen.llvm.module import ModuleBuilder
from torchkiln.codegen.llvm.operations import Instructions, splat_literal
from torchkiln.codegen.llvm.prototypes import FUNCTIONS, VARIABLES


class Register:
    """A value in LLVM code, or a constant. Operators write an instruction, and give its result.

    ``<`` and its like compare signed numbers; unsigned comparisons are ``compare("ult", ...)``.
    """

    __slots__ = ("function", "name", "type")

    def __init__(self, function: Function, type_: str, name: str) -> None:
        self.function = function
        self.type = type_
        self.name = name

    def __add__(self, other: Operand) -> Register:
        return self.binary("add", other)

    def __sub__(self, other: Operand) -> Register:
        return self.binary("sub", other)

    def __mul__(self, other: Operand) -> Register:
        return self.binary("mul", other)

    def __and__(self, other: Operand) -> Register:
        return self.binary("and", other)

    def __or__(self, other: Operand) -> Register:
        return self.binary("or", other)

    def __xor__(self, other: Operand) -> Register:
        return self.binary("xor", other)

    def __lshift__(self, other: Operand) -> Register:
        return self.binary("shl", other)

    def __rshift__(self, other: Operand) -> Register:
        """Zeros come in from the left."""
        return self.binary("lshr", other)

    def __invert__(self) -> Register:
        """All bits turned over, which is "not" for a condition."""
        return self.binary("xor", -1)

    def __lt__(self, other: Operand) -> Register:
        return self.compare("slt", other)

    def __le__(self, other: Operand) -> Register:
        return self.compare("sle", other)

    def __gt__(self, other: Operand) -> Register:
        return self.compare("sgt", other)

    def __ge__(self, other: Operand) -> Register:
        return self.compare("sge", other)

    def eq(self, other: Operand) -> Register:
        return self.compare("eq", other)

    def ne(self, other: Operand) -> Register:
        return self.compare("ne", other)

    def udiv(self, other: Operand) -> Register:
        return self.binary("udiv", other)

    def urem(self, other: Operand) -> Register:
        return self.binary("urem", other)

    def min(self, other: Register) -> Register:
        """The smaller of two signed numbers."""
        return (self < other).select(self, other)

    def max(self, other: Register) -> Register:
        """The larger of two signed numbers."""
        return (self > other).select(self, other)

    def binary(self, name: str, other: Operand) -> Register:
        return self.function.result(self.type, f"{name} {self}, {self.function.operand(self.type, other)}")

    def compare(self, predicate: str, other: Operand) -> Register:
        result = re.sub(r"\w+(?=>?$)", "i1", _llvm(self.type))
        return self.function.result(result, f"icmp {predicate} {self}, {self.function.operand(self.type, other)}")

    def select(self, yes: Register, no: Operand) -> Register:
        """``yes`` where this is true, else ``no``."""
        other = self.function.operand(yes.type, no)
        return self.function.result(yes.type, f"select {self}, {yes}, {_llvm(yes.type)} {other}")

    def convert(self, name: str, type_: str) -> Register:
        """A conversion such as ``zext``, ``trunc`` or ``bitcast``."""
        return self.function.result(type_, f"{name} {self} to {_llvm(type_)}")

    # Pointers

    def at(self, index: Operand) -> Register:
        """The address of an element."""
        if isinstance(index, int) and index == 0:
            return self
        element = _llvm(self.element)
        return self.function.result(
            self.type, f"getelementptr {element}, ptr {self.name}, i64 {self.function.operand('i64', index)}"
        )

    def __getitem__(self, index: Operand) -> Register:
        return self.function.result(self.element, f"load {_llvm(self.element)}, ptr {self.at(index).name}")

    def __setitem__(self, index: Operand, value: Operand) -> None:
        stored = f"{_llvm(self.element)} {self.function.operand(self.element, value)}"
        self.function.emit(f"store {stored}, ptr {self.at(index).name}")

    def cast(self, type_: str) -> Register:
        """The same pointer to elements of another type."""
        return Register(self.function, type_, self.name)

    @property
    def element(self) -> str:
        if self.type[-1] != "*":
            raise TypeError(f"{self} is no pointer with a known type of elements")
        return self.type[:-1]

    def __str__(self) -> str:
        return f"{_llvm(self.type)} {self.name}"

    # What Python would make of a value while code is written

    def __bool__(self) -> NoReturn:
        raise TypeError(f"{self} is known only at run time: write if_(...)")

    def __eq__(self, other: object) -> NoReturn:
        raise TypeError(f"{self} is known only at run time: write eq(...)")

    def __iter__(self) -> NoReturn:
        raise TypeError(f"{self} has no known length: write loop(...)")


Operand = Union[Register, int, str, tuple[int, ...], None]
"""What an instruction takes: a value, a whole number, or None for a null pointer. A text is a pointer to a C string, a
tuple one to constants of 64 bits."""


def _llvm(type_: str) -> str:
    return "ptr" if type_[-1] == "*" else type_


@dataclass(frozen=True)
class Prototype:
    """What a function takes and gives, written like ``i32 name(ptr, i64*)``."""

    result: str
    name: str
    parameters: tuple[str, ...]

    @staticmethod
    @cache
    def parse(text: str) -> Prototype:
        match = re.fullmatch(r"(.+) ([\w.]+)\((.*)\)", text)
        assert match is not None, text
        result, name, parameters = match.groups()
        return Prototype(result, name, tuple(parameters.split(", ")) if parameters else ())

    @property
    def declaration(self) -> str:
        return f"declare {self.result} @{self.name}({', '.join(map(_llvm, self.parameters))})"


@dataclass(frozen=True)
class Variable:
    """A variable of the module, of one or several elements, all zero at first."""

    type: str
    name: str
    count: int = 1


@dataclass(frozen=True)
class NativeFunction:
    """A function of the module: its prototype, and what writes its body. Only exported ones are
    seen outside; another one is part of a module that calls it."""

    prototype: Prototype
    write: Callable[..., None]
    exported: bool
    attributes: str

    def define(self, module: ModuleBuilder) -> None:
        """Add the function to ``module``, unless it is there."""
        if module.has(self.prototype.name):
            return
        function = Function(module, self.prototype)
        self.write(function, *function.parameters)
        module.define(self.prototype.name, function.text("" if self.exported else "internal", self.attributes))


def native(
    prototype: str, *, exported: bool = False, attributes: str = ""
) -> Callable[[Callable[..., None]], NativeFunction]:
    """Make a native function of a Python function that writes its body: it gets a :class:`Function` and parameters."""
    return lambda write: NativeFunction(Prototype.parse(prototype), write, exported, attributes)


class Function(Instructions):
    """The body of a native function while it is written."""

    def __init__(self, module: ModuleBuilder, prototype: Prototype) -> None:
        super().__init__(module)
        self.prototype = prototype
        self.parameters = [Register(self, type_, f"%p{k}") for k, type_ in enumerate(prototype.parameters)]
        self._stack: list[str] = []
        self._block: str | None = "entry"  # None where nothing can be added: the block has ended
        self._loops: list[tuple[str, str]] = []

    def text(self, linkage: str = "", attributes: str = "") -> str:
        """The definition; a function without a result ends with its last instruction."""
        if self._block is not None:
            self.ret()
        parameters = ", ".join(map(str, self.parameters))
        symbol = f"@{self.prototype.name}({parameters})"
        words = ("define", linkage, _llvm(self.prototype.result), symbol, "#0", attributes, "{")
        return "\n".join((" ".join(filter(None, words)), "entry:", *self._stack, *self.lines, "}"))

    def operand(self, type_: str, value: Operand) -> str:
        """``value`` as an operand of a type, which is checked."""
        if isinstance(value, Register):
            if _llvm(value.type) != _llvm(type_):
                raise TypeError(f"{self.prototype.name} has {value} where {type_} belongs")
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

    def result(self, type_: str, instruction: str) -> Register:
        """The result of an instruction given as text."""
        return Register(self, type_, self.fresh(instruction))

    def call(self, function: str | NativeFunction, *arguments: Operand) -> Register:
        """Call a native function, or a function of torch, Python or a library by its name."""
        if isinstance(function, str):
            prototype = Prototype.parse(FUNCTIONS[function])
            self.module.declare(prototype.declaration)
        else:
            prototype = function.prototype
            function.define(self.module)
        fixed = [p for p in prototype.parameters if p != "..."]
        given = [
            f"{_llvm(p)} {self.operand(p.removesuffix(' zeroext'), a)}" for p, a in zip(fixed, arguments, strict=False)
        ]
        rest = arguments[len(fixed) :]
        if len(arguments) < len(fixed) or (rest and len(fixed) == len(prototype.parameters)):
            raise TypeError(f"{prototype.name} takes {prototype.parameters}, got {len(arguments)} arguments")
        given += [str(a) if isinstance(a, Register) else f"ptr {self.operand('ptr', a)}" for a in rest]
        kind = f"{prototype.result} ({', '.join(prototype.parameters)})" if fixed != [*prototype.parameters] else ""
        text = f"call {kind or _llvm(prototype.result)} @{prototype.name}({', '.join(given)})"
        if prototype.result == "void":
            self.emit(text)
            return Register(self, "void", "")
        return self.result(prototype.result.removeprefix("zeroext "), text)

    def address(self, symbol: str | Variable | NativeFunction) -> Register:
        """The address of a variable of Python by its name, or of a variable or function of the module."""
        if isinstance(symbol, NativeFunction):
            symbol.define(self.module)
            return Register(self, "ptr", f"@{symbol.prototype.name}")
        if isinstance(symbol, Variable):
            array = f"[{symbol.count} x {_llvm(symbol.type)}]"
            self.module.define(symbol.name, f"@{symbol.name} = global {array} zeroinitializer, align 16")
            return Register(self, f"{symbol.type}*", f"@{symbol.name}")
        self.module.declare(f"@{symbol} = external global {VARIABLES[symbol]}")
        return Register(self, f"{VARIABLES[symbol]}*", f"@{symbol}")

    def literal(self, type_: str, value: Operand) -> Register:
        """A constant that is a value."""
        return Register(self, type_, self.operand(type_, value))

    def atomic(self, operation: str, address: Register, value: Operand, order: str = "monotonic") -> Register:
        """Change an element at once for all threads, by ``add``, ``sub`` or ``xchg``; the result is what it was."""
        type_ = address.element
        text = f"atomicrmw {operation} {address}, {_llvm(type_)} {self.operand(type_, value)} {order}"
        return self.result(type_, text)

    # The stack

    def alloca(self, type_: str, count: int = 1, align: int = 16) -> Register:
        """Memory of this call for ``count`` elements."""
        self._values += 1
        name = f"%v{self._values}"
        kind = _llvm(type_) if count == 1 else f"[{count} x {_llvm(type_)}]"
        self._stack.append(f"  {name} = alloca {kind}, align {align}")
        return Register(self, f"{type_}*", name)

    def variable(self, type_: str, value: Operand) -> Register:
        """Memory for one element, which is element 0 of the result, and ``value`` at first."""
        place = self.alloca(type_, align=8)
        place[0] = value
        return place

    # Blocks

    @contextmanager
    def if_(self, condition: Register) -> Iterator[None]:
        """What is written inside runs where ``condition`` holds."""
        then, after = self.new_label("then"), self.new_label("after")
        self._end(f"br {condition}, label %{then}, label %{after}")
        self.start_block(then)
        yield
        if self._block is not None:
            self.branch(after)
        self.start_block(after)

    @contextmanager
    def loop(self, end: Operand, begin: Operand = 0, step: int = 1) -> Iterator[Register]:
        """What is written inside runs for each number from ``begin`` up to ``end``; without an end, until it breaks."""
        head, body, following, done = (self.new_label(stem) for stem in ("head", "body", "next", "done"))
        before = self._block
        self.branch(head)
        self.start_block(head)
        first = f"[ {self.operand('i64', begin)}, %{before} ]"
        index = self.result("i64", f"phi i64 {first}, [ %{following}.index, %{following} ]")
        if end is None:
            self.branch(body)
        else:
            self._end(f"br {index < end}, label %{body}, label %{done}")
        self.start_block(body)
        self._loops.append((following, done))
        yield index
        self._loops.pop()
        if self._block is not None:
            self.branch(following)
        self.start_block(following)
        self.emit(f"%{following}.index = add i64 {index.name}, {step}")
        self.branch(head)
        self.start_block(done)

    def continue_(self) -> None:
        """Go to the next iteration of the innermost loop."""
        self.branch(self._loops[-1][0])

    def break_(self) -> None:
        """Leave the innermost loop."""
        self.branch(self._loops[-1][1])

    def ret(self, value: Operand = None) -> None:
        """Leave the function."""
        kind = self.prototype.result
        self._end("ret void" if kind == "void" else f"ret {_llvm(kind)} {self.operand(kind, value)}")

    def branch(self, label: str) -> None:
        self._end(f"br label %{label}")

    def start_block(self, label: str) -> None:
        super().start_block(label)
        self._block = label

    def _end(self, instruction: str) -> None:
        self.emit(instruction)
        self._block = None
