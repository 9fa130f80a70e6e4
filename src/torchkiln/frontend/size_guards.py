"""Guards on symbolic sizes that compiling a graph adds: noted when it is compiled, added again when it is reused.

They are stored as trees of plain data. Reading makes expressions of the classes listed here and of no others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sympy
from sympy.logic.boolalg import BooleanFalse, BooleanTrue
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._sympy import functions as torch_functions

from torchkiln.graph.fake import symbol_examples

_SYMPY = ("Add", "Mul", "Pow", "And", "Or", "Not", "Eq", "Ne", "Lt", "Le", "Gt", "Ge")
_TORCH = (
    *("FloorDiv", "ModularIndexing", "Where", "PythonMod", "Mod", "CleanDiv", "CeilToInt", "FloorToInt", "CeilDiv"),
    *("Max", "Min", "Identity", "IntTrueDiv", "ToFloat", "TruncToInt", "PowByNatural"),
)
_CLASSES: dict[str, Any] = {
    **{getattr(sympy, name).__name__: getattr(sympy, name) for name in _SYMPY},
    **{name: getattr(torch_functions, name) for name in _TORCH if hasattr(torch_functions, name)},
}

Tree = tuple[Any, ...]
"""The name of a class and the trees of its arguments; ("symbol", its number), ("integer", its value)."""


class NotStorableError(Exception):
    """A guard has a part that is none of the known classes."""


class GuardNotes:
    """The guards of ``shape_env`` from when this is made on."""

    def __init__(self, shape_env: ShapeEnv | None) -> None:
        self._shape_env = shape_env
        self._before = self._counts()

    def _counts(self) -> tuple[int, int]:
        env = self._shape_env
        return (0, 0) if env is None else (len(env.guards), sum(map(len, env.deferred_runtime_asserts.values())))

    def added(self, symbols: Sequence[sympy.Symbol]) -> tuple[Tree, ...]:
        """Those added since, over numbered symbols; :class:`NotStorableError` for what is no guard on these."""
        if self._shape_env is None:
            return ()
        guards, asserts = self._counts()
        if asserts != self._before[1]:
            raise NotStorableError("assertions on sizes known at run time")
        numbers = {symbol: number for number, symbol in enumerate(symbols)}
        return tuple(_tree(guard.expr, numbers) for guard in self._shape_env.guards[self._before[0] : guards])


def add_guards(guards: Sequence[Tree], shape_env: ShapeEnv | None, symbols: Sequence[sympy.Symbol]) -> bool:
    """Add stored guards where all of them hold for the sizes at hand; otherwise add none and answer False."""
    if not guards:
        return True
    if shape_env is None:
        return False
    expressions = [_expression(guard, symbols) for guard in guards]
    known = symbol_examples(shape_env)
    examples = {symbol: known.get(symbol) for symbol in symbols}
    if any(value is None for value in examples.values()):
        return False
    if not all(expression.xreplace(examples) == sympy.true for expression in expressions):
        return False
    for expression in expressions:
        shape_env.evaluate_expr(expression)
    return True


def _tree(expression: sympy.Basic, numbers: dict[sympy.Symbol, int]) -> Tree:
    if isinstance(expression, sympy.Symbol):
        if expression not in numbers:
            raise NotStorableError(f"the symbol {expression}, which no input has")
        return "symbol", numbers[expression]
    if isinstance(expression, sympy.Integer):
        return "integer", int(expression)
    if isinstance(expression, sympy.Rational):
        return "rational", int(expression.p), int(expression.q)
    if isinstance(expression, (BooleanTrue, BooleanFalse)):
        return "boolean", bool(expression)
    name = type(expression).__name__
    if _CLASSES.get(name) is not type(expression):
        raise NotStorableError(f"{name}, which is no known function of sizes")
    return name, *(_tree(argument, numbers) for argument in expression.args)


def _expression(tree: Any, symbols: Sequence[sympy.Symbol]) -> Any:
    name, *parts = tree
    if name == "symbol":
        return symbols[parts[0]]
    if name == "integer":
        return sympy.Integer(int(parts[0]))
    if name == "rational":
        return sympy.Rational(int(parts[0]), int(parts[1]))
    if name == "boolean":
        return sympy.true if parts[0] else sympy.false
    return _CLASSES[name](*(_expression(part, symbols) for part in parts))
