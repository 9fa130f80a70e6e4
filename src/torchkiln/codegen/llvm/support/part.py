"""What one file adds to the support module."""

from __future__ import annotations

from dataclasses import dataclass

from torchkiln.codegen.llvm.functions import NativeFunction, Variable


@dataclass(frozen=True)
class Part:
    """The functions of one subject that graphs call, and the variables they keep."""

    functions: tuple[NativeFunction, ...] = ()
    variables: tuple[Variable, ...] = ()

    @property
    def exports(self) -> tuple[str, ...]:
        """The names graphs may use."""
        functions = (function.prototype.name for function in self.functions)
        return (*functions, *(variable.name for variable in self.variables))
