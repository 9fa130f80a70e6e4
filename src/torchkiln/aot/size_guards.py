"""Guards on sizes under which a model was captured, as conditions that each call of its package must fulfil.

torch.export keeps what it assumed of several sizes beside their ranges: that a slice lies inside of a tensor, that a
size divides another. Code that is called with other sizes would read what is not there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import sympy
from sympy.logic.boolalg import BooleanFalse
from torch.export import ExportedProgram
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._sympy import functions as torch_functions
from torch.utils._sympy.printers import PythonPrinter

from torchkiln.aot.size_conditions import SizeCondition, Tree
from torchkiln.aot.size_ranges import as_traced
from torchkiln.errors import PackageError

_NAMES: dict[Any, str] = {
    sympy.Add: "add", sympy.Mul: "mul", sympy.And: "and", sympy.Or: "or", sympy.Not: "not",
    **{getattr(sympy, name.capitalize()): name for name in ("eq", "ne", "lt", "le", "gt", "ge")},
    torch_functions.FloorDiv: "floordiv", torch_functions.CleanDiv: "floordiv",
    torch_functions.Mod: "mod", torch_functions.PythonMod: "mod",
    torch_functions.Max: "max", torch_functions.Min: "min",
}
_MOST_FACTORS = 8


def note_guards(exported: ExportedProgram, inputs: Sequence[Any], shape_env: ShapeEnv | None) -> None:
    """Have the shape environment of ``inputs`` know the guards of a program that was read from a file.

    ``inputs`` are the fake ones that a call gives. A file has the guards as code, which torch checks its calls with.
    """
    if shape_env is None or not getattr(exported, "_guards_code", None):
        return
    check = getattr(exported.module(), "_guards_fn", None)
    if check is not None:
        with as_traced(inputs):
            check(*inputs)


def size_conditions(shape_env: ShapeEnv | None, names: Mapping[Any, tuple[int, str]]) -> tuple[SizeCondition, ...]:
    """The guards of ``shape_env`` that the ranges of sizes do not imply.

    ``names`` has for each symbol its number and what a user calls it. Raises :class:`PackageError` for a guard that no
    package can compare.
    """
    if shape_env is None:
        return ()
    # A captured graph may have symbols of a larger program, whose other guards are not its own.
    own = (guard for guard in _guards(shape_env) if not guard.free_symbols.isdisjoint(names))
    return tuple(dict.fromkeys(_condition(guard, names) for guard in own))


def _guards(shape_env: ShapeEnv) -> Iterator[Any]:
    for guard in shape_env.guards:
        expression = shape_env.replace(guard.expr)
        bound = shape_env.bound_sympy(expression)
        if not (bound.is_singleton() and bound.lower):
            yield expression


def _condition(guard: Any, names: Mapping[Any, tuple[int, str]]) -> SizeCondition:
    named = guard.xreplace({symbol: sympy.Symbol(name, integer=True) for symbol, (_, name) in names.items()})
    text = PythonPrinter().doprint(named)
    try:
        return SizeCondition(_tree(guard, names), text)
    except KeyError as error:
        raise PackageError(
            f"The model was captured for sizes where {text}, which a package cannot compare; declare these sizes as"
            " fixed."
        ) from error


def _tree(expression: Any, names: Mapping[Any, tuple[int, str]]) -> Tree:
    """Raises KeyError for what no package computes."""
    if isinstance(expression, sympy.Symbol):
        return "symbol", names[expression][0]
    if isinstance(expression, sympy.Integer):
        return int(expression)
    if isinstance(expression, BooleanFalse):
        return 0
    if expression.is_Pow and expression.exp.is_Integer and 0 < expression.exp <= _MOST_FACTORS:
        return "mul", *[_tree(expression.base, names)] * int(expression.exp), 1
    return _NAMES[type(expression)], *(_tree(argument, names) for argument in expression.args)
