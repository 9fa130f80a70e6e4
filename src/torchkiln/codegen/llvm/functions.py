"""Native functions written in Python: values with operators, and blocks for loops and conditions.

A function is a prototype and a Python function that writes its body::

    @native("i64 count_zeros(i64*, i64)")
    def count_zeros(f: Function, numbers: Register, length: Register) -> None:
        count = f.variable("i64", 0)
        with f.loop(length) as i, f.if_(numbers[i].eq(0)):
            count[0] += 1
        f.ret(count[0])

Variables live on the stack, from where LLVM takes them into registers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

from torchkiln.codegen.llvm.instructions import Operand, Register, llvm_type
from torchkiln.codegen.llvm.module import ModuleBuilder
from torchkiln.codegen.llvm.operations import Instructions
from torchkiln.codegen.llvm.prototypes import FUNCTIONS, VARIABLES

__all__ = ["Function", "NativeFunction", "Operand", "Prototype", "Register", "Variable", "native"]


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
        return f"declare {self.result} @{self.name}({', '.join(map(llvm_type, self.parameters))})"


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

    @property
    def name(self) -> str:
        return self.prototype.name

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
        words = ("define", linkage, llvm_type(self.prototype.result), symbol, "#0", attributes, "{")
        return "\n".join((" ".join(filter(None, words)), "entry:", *self._stack, *self.lines, "}"))

    def call(self, function: str | NativeFunction, *arguments: Operand) -> Register:
        """Call a native function, or a function of torch, Python or a library by its name."""
        if isinstance(function, str):
            prototype = Prototype.parse(FUNCTIONS[function])
            self.module.declare(prototype.declaration)
        else:
            prototype = function.prototype
            function.define(self.module)
        fixed = [p for p in prototype.parameters if p != "..."]
        rest = arguments[len(fixed) :]
        if len(arguments) < len(fixed) or (rest and len(fixed) == len(prototype.parameters)):
            raise TypeError(f"{prototype.name} takes {prototype.parameters}, got {len(arguments)} arguments")
        typed = zip(fixed, arguments, strict=False)
        given = [f"{llvm_type(p)} {self.operand(p.removesuffix(' zeroext'), a)}" for p, a in typed]
        given += [str(a) if isinstance(a, Register) else f"ptr {self.operand('ptr', a)}" for a in rest]
        kind = f"{prototype.result} ({', '.join(prototype.parameters)})" if fixed != [*prototype.parameters] else ""
        text = f"call {kind or llvm_type(prototype.result)} @{prototype.name}({', '.join(given)})"
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
            array = f"[{symbol.count} x {llvm_type(symbol.type)}]"
            self.module.define(symbol.name, f"@{symbol.name} = global {array} zeroinitializer, align 16")
            return Register(self, f"{symbol.type}*", f"@{symbol.name}")
        self.module.declare(f"@{symbol} = external global {VARIABLES[symbol]}")
        return Register(self, f"{VARIABLES[symbol]}*", f"@{symbol}")

    def atomic(self, operation: str, address: Register, value: Operand, order: str = "monotonic") -> Register:
        """Change an element at once for all threads, by what LLVM calls ``operation``; the result is what it was."""
        type_ = address.element
        text = f"atomicrmw {operation} {address}, {llvm_type(type_)} {self.operand(type_, value)} {order}"
        return self.result(type_, text)

    # The stack

    def alloca(self, type_: str, count: int = 1, align: int = 16) -> Register:
        """Memory of this call for ``count`` elements."""
        self._values += 1
        name = f"%v{self._values}"
        kind = llvm_type(type_) if count == 1 else f"[{count} x {llvm_type(type_)}]"
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
        self._end("ret void" if kind == "void" else f"ret {llvm_type(kind)} {self.operand(kind, value)}")

    def branch(self, label: str) -> None:
        self._end(f"br label %{label}")

    def start_block(self, label: str) -> None:
        super().start_block(label)
        self._block = label

    def _end(self, instruction: str) -> None:
        self.emit(instruction)
        self._block = None
