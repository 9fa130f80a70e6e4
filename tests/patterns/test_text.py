"""Patterns as text: what is written is read back as the same pattern."""

from __future__ import annotations

import math
import operator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchkiln.errors import PatternError
from torchkiln.patterns import IGNORED, Call, Capture, ListOf, OneOf, Outputs, Repeated, text
from torchkiln.patterns.expressions import Dimension

aten = torch.ops.aten
TARGETS = [aten.sin.default, aten.add.Tensor, aten.cat.default, aten.sum.dim_IntList, operator.getitem]
CONSTANTS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(["none", "tanh", 'a "quoted" = (b)', "%0", "$x", "?", "@1:2", "\\", "return", "a, b"]),
    st.sampled_from([torch.float32, torch.bfloat16, torch.contiguous_format, torch.channels_last, torch.strided]),
)
CAPTURES = st.builds(
    Capture,
    st.sampled_from(["x", "query", "tangents_1", "self", "None", "größe"]),
    exclusive=st.booleans(),
    rank=st.one_of(st.none(), st.integers(0, 5)),
)

DIMENSIONS = st.integers(1, 5).flatmap(lambda rank: st.builds(Dimension, st.integers(-rank, rank - 1), st.just(rank)))


@st.composite
def patterns(draw: st.DrawFn) -> Call | Outputs:
    """Calls of earlier calls, captures and constants, all in use."""
    made: list[Call] = []

    def value() -> st.SearchStrategy[Any]:
        leaves = [CONSTANTS, CAPTURES, DIMENSIONS, st.just(IGNORED)]
        if made:
            leaves.append(st.sampled_from(list(made)))
        return st.one_of(*leaves, st.lists(st.one_of(*leaves), max_size=3))

    for _ in range(draw(st.integers(1, 5))):
        call = Call(draw(st.sampled_from(TARGETS)))
        call.args = tuple(draw(st.lists(value(), max_size=4)))
        call.kwargs = draw(st.dictionaries(st.sampled_from(["dim", "alpha", "memory_format"]), value(), max_size=2))
        made.append(call)
    read = {id(part) for call in made for part in _flat(call.parts())}
    roots = [call for call in made if id(call) not in read]
    return Outputs(*roots) if len(roots) > 1 else roots[0]


def _flat(values: Any) -> list[Any]:
    return [part for value in values for part in (_flat(value) if isinstance(value, (list, tuple)) else [value])]


def form(top: Any) -> Any:
    """A pattern as nested tuples; calls are numbered where they are first met, so that sharing shows."""
    numbers: dict[int, int] = {}

    def visit(item: Any) -> Any:
        if isinstance(item, Call):
            if id(item) in numbers:
                return ("again", numbers[id(item)])
            numbers[id(item)] = len(numbers)
            names = {key: visit(value) for key, value in item.kwargs.items()}
            return ("call", item.targets, tuple(visit(value) for value in item.args), names)
        if isinstance(item, Capture):
            return ("capture", item.name, item.exclusive, item.rank)
        if isinstance(item, Dimension):
            return ("dimension", item.dim, item.rank)
        if isinstance(item, Outputs):
            return ("outputs", tuple(visit(root) for root in item.roots))
        if isinstance(item, (list, tuple)):
            return ("list", tuple(visit(value) for value in item))
        if isinstance(item, float):
            return ("float", "nan" if math.isnan(item) else item.hex())
        return (type(item).__name__, item)

    return visit(top)


@settings(max_examples=150, deadline=None)
@given(patterns())
def test_what_is_written_is_read_back(pattern: Call | Outputs) -> None:
    written = text.write(pattern)
    assert form(text.read(written)) == form(pattern)
    assert text.write(text.read(written)) == written


def test_a_pattern_reads_like_the_program_it_stands_for() -> None:
    x, y = Capture("x", rank=2), Capture("y", exclusive=True)
    total = Call(aten.add.Tensor, x, y, alpha=2)
    pattern = Outputs(Call(aten.sum.dim_IntList, total, [1], True), Call(aten.mul.Tensor, total, IGNORED))
    assert text.write(pattern) == (
        "needs aten.add.Tensor, aten.mul.Tensor, aten.sum.dim_IntList\n"
        "%0 = aten.add.Tensor($x:2, $!y, alpha=2)\n"
        "%1 = aten.sum.dim_IntList(%0, [1], True)\n"
        "%2 = aten.mul.Tensor(%0, ?)\n"
        "return %1, %2\n"
    )


@pytest.mark.parametrize(
    "pattern",
    [
        Call([aten.sin.default, aten.cos.default], Capture("x")),
        Call(aten.sin.default, OneOf(1, 2)),
        Call(aten.cat.default, ListOf(Capture("x"))),
        Call(aten.sin.default, Capture("x"), users=1),
        Outputs(Call(aten.sin.default, Capture("x")), Repeated(Call(aten.cos.default, Capture("x")))),
        Call(aten.sin.default, 1 + 2j),
    ],
)
def test_what_cannot_be_read_back_is_not_written(pattern: Call | Outputs) -> None:
    with pytest.raises(PatternError, match="cannot be written as text"):
        text.write(pattern)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("%0 = aten.nothing.default($x)", "aten.nothing.default"),
        ("%0 = os.system.default($x)", "os.system.default"),
        ("%0 = aten.sin.default(__import__)", "__import__"),
        ("%0 = aten.sin.default(torch.load)", "torch.load"),
        ("%0 = aten.sin.default($x)", "without a return"),
    ],
)
def test_text_that_says_something_else_is_refused_and_never_run(line: str, message: str) -> None:
    ending = "" if "return" in message else "return %0\n"
    with pytest.raises(PatternError, match=message):
        text.read(f"needs aten.sin.default\n{line}\n{ending}")
