"""What one file adds to the support module."""

from __future__ import annotations

from dataclasses import dataclass

from torchkiln.codegen.llvm.functions import NativeFunction, Variable


@dataclass(frozen=True)
class Part:
    """Functions of one subject, and the variables they keep."""

    functions: tuple[NativeFunction, ...] = ()
    variables: tuple[Variable, ...] = ()
    declarations: str = ""
    code: str = ""
    names: tuple[str, ...] = ()

    @property
    def exports(self) -> tuple[str, ...]:
        """The names graphs may use."""
        functions = (function.prototype.name for function in self.functions if function.exported)
        return (*functions, *(variable.name for variable in self.variables), *self.names)


def message(name: str, text: str) -> str:
    """A C string that code of the same part names ``@message_<name>``."""
    return f'@message_{name} = private constant [{len(text) + 1} x i8] c"{text}\\00"'
