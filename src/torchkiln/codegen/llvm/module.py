"""Text of one LLVM module, put together from declarations, constants and functions that may be asked for twice."""

from __future__ import annotations

from collections.abc import Sequence

from torchkiln.target import Target

# LLVM prefers 256-bit registers on server chips that have 512-bit ones; "no-trapping-math" lets selects fold.
_ATTRIBUTES = """
attributes #0 = {{ nounwind {flags} }}
attributes #1 = {{ alwaysinline nounwind willreturn memory(none) {flags} }}
"""


class ModuleBuilder:
    """Collects the parts of a module for ``target``; each part is added once however often it is asked for.

    Functions carry attribute group ``#0``; pure helpers meant to be inlined everywhere carry ``#1``.
    """

    def __init__(self, target: Target) -> None:
        self.target = target
        self._declarations: dict[str, None] = {}
        self._constants: dict[str, str] = {}
        self._functions: dict[str, str] = {}

    def declare(self, declaration: str) -> None:
        """Add a whole ``declare ...`` line."""
        self._declarations[declaration.strip()] = None

    def has(self, symbol: str) -> bool:
        return symbol in self._functions

    def define(self, symbol: str, text: str) -> None:
        """Add the definition of ``symbol`` (without ``@``) unless it is there already."""
        self._functions.setdefault(symbol, text)

    def integers(self, values: Sequence[int]) -> str:
        """A pointer operand to a constant array of i64 with these values (``null`` when empty)."""
        if not values:
            return "null"
        body = ", ".join(f"i64 {v}" for v in values)
        return self._constant(f"[{len(values)} x i64] [{body}]")

    def words(self, values: Sequence[int]) -> str:
        """The same of i32."""
        body = ", ".join(f"i32 {v}" for v in values)
        return self._constant(f"[{len(values)} x i32] [{body}]")

    def string(self, text: str) -> str:
        """A pointer operand to a NUL-terminated constant string."""
        data = text.encode() + b"\0"
        body = "".join(chr(b) if 32 <= b < 127 and b not in (34, 92) else f"\\{b:02X}" for b in data)
        return self._constant(f'[{len(data)} x i8] c"{body}"')

    def _constant(self, initializer: str) -> str:
        name = self._constants.get(initializer)
        if name is None:
            name = f"@c{len(self._constants)}"
            self._constants[initializer] = name
        return name

    def text(self) -> str:
        flags = f'"prefer-vector-width"="{self.target.vector_bits}" "no-trapping-math"="true"'
        attributes = _ATTRIBUTES.format(flags=flags)
        constants = [f"{name} = private unnamed_addr constant {init}" for init, name in self._constants.items()]
        return "\n".join([*self._declarations, *constants, *self._functions.values(), attributes])
