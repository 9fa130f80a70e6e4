"""The instructions of a function while they are written."""

from __future__ import annotations

from torchkiln.codegen.llvm.module import ModuleBuilder


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
