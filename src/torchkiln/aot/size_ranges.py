"""Sizes that a package serves: all those declared, or none.

torch.export takes every size to be 2 or more and declares the code to hold from 1 on. Compiling asks torch questions of
sizes whose answers would be guards in a process that compiles; a package cannot compile again, so they must not matter.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any, cast

import sympy
import torch
import torch.fx
from torch._guards import detect_fake_mode
from torch._subclasses import fake_impls
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._sympy.value_ranges import ValueRanges

from torchkiln.aot.signature import Range
from torchkiln.errors import PackageError
from torchkiln.graph.fake import symbol_examples

# What torch takes for the bound of a size that has none is close to the largest integer.
_UNBOUNDED = 2**62
# The least size that torch traces with: 0 and 1 would be constants.
_LEAST_TRACED = 2


def shape_env_of(inputs: Sequence[Any]) -> ShapeEnv | None:
    """That of fake inputs; None where all sizes are known."""
    mode = detect_fake_mode(inputs)
    return mode.shape_env if mode is not None else None


def served_range(traced: ValueRanges[Any], declared: ValueRanges[Any] | None = None) -> Range:
    """The values of a symbol that code is for: those it was traced for, and 1 where that is declared too."""
    least, most = _bound(traced.lower), _bound(traced.upper)
    if declared is not None and least == _LEAST_TRACED:
        least = max(1, min(_bound(declared.lower) or 0, least))
    return Range(least, most)


def _bound(value: Any) -> int | None:
    return int(value) if value.is_finite and abs(value) < _UNBOUNDED else None


@contextmanager
def as_traced(inputs: Sequence[Any]) -> Iterator[None]:
    """Sizes of ``inputs`` have the ranges they were traced with: those of a program from a file are as declared.

    Such a program has example values of expressions too, which AOTAutograd takes for symbols: they are dropped.
    """
    shape_env = shape_env_of(inputs)
    if shape_env is None:
        yield
        return
    examples = cast(dict[Any, Any], symbol_examples(shape_env))
    for expression in [key for key in examples if not isinstance(key, sympy.Symbol)]:
        del examples[expression]
    found = dict(shape_env.var_to_range)
    shapes: list[Sequence[Any]] = [value.shape for value in inputs if isinstance(value, torch.Tensor)]
    sizes = [size.node.expr for shape in shapes for size in shape if isinstance(size, torch.SymInt)]
    for symbol in {symbol for size in sizes for symbol in size.free_symbols}:
        declared = found[symbol]
        if declared.lower < _LEAST_TRACED <= declared.upper:
            shape_env.var_to_range[symbol] = ValueRanges(_LEAST_TRACED, declared.upper)
    try:
        yield
    finally:
        shape_env.var_to_range.update(found)


@contextmanager
def lowered_for(ranges: Mapping[Any, Range], shape_env: ShapeEnv | None) -> Iterator[None]:
    """Code that is generated inside is for all of ``ranges``."""
    if shape_env is None:
        yield
        return
    traced = dict(shape_env.var_to_range)
    for symbol, found in ranges.items():
        if symbol in traced and found.least is not None:
            shape_env.var_to_range[symbol] = ValueRanges(found.least, traced[symbol].upper)
    try:
        yield
    finally:
        shape_env.var_to_range.update(traced)


@contextmanager
def for_all_sizes(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Iterator[None]:
    """Raise :class:`PackageError` where what is compiled inside is right for some of the declared sizes only.

    Guards that the model was captured under hold: each call is compared with them (``size_guards.py``).
    """
    shape_env = shape_env_of(inputs)
    if shape_env is None:
        yield
        return
    asked: list[tuple[Any, Any]] = []
    known = {guard.expr for guard in shape_env.guards}

    def note(expression: Any, value: Any) -> None:
        if not _chooses_convolution():
            asked.append((expression, value))

    # torch calls this method with every question that the ranges of sizes do not answer.
    vars(shape_env)["_check_frozen"] = note
    try:
        with as_traced(inputs), shape_env.suppress_guards():
            yield
    finally:
        del vars(shape_env)["_check_frozen"]
    for expression, value in asked:
        answer = sympy.Not(expression) if value is sympy.false else expression
        if answer not in known and not shape_env.bound_sympy(expression).is_singleton():
            raise PackageError(
                f"The model cannot be compiled for all sizes that were declared, only where"
                f" {_condition(expression, value, graph)}; declare smaller ranges or these sizes as fixed."
            )


def _chooses_convolution() -> bool:
    """Whether torch asks which kernel it would run for a convolution: NNPACK's, for example, below a batch of 16.

    Code calls the operator, which chooses again.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "conv" and frame.f_code.co_filename == fake_impls.__file__:
            return True
        frame = frame.f_back
    return False


def _condition(expression: Any, value: Any, graph: torch.fx.GraphModule) -> str:
    """A condition on sizes in the words of a user: ``x.size(0) < 16``."""
    if value is sympy.false:
        expression = sympy.Not(expression)
    elif value is not sympy.true:
        expression = sympy.Eq(expression, value)
    names: dict[Any, Any] = {}
    for node in graph.graph.find_nodes(op="placeholder"):
        found = node.meta.get("val")
        sizes: Sequence[Any] = found.shape if isinstance(found, torch.Tensor) else ()
        for dim, size in enumerate(sizes):
            if isinstance(size, torch.SymInt):
                names.setdefault(size.node.expr, sympy.Symbol(f"{node.name}.size({dim})"))
    return str(expression.xreplace(names))
