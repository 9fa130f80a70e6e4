"""How far compiled and eager may be apart: measured with a float64 run that is the same program."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings

from tests.programs import vocabulary
from tests.programs.check import _in_double, allowances, check
from tests.programs.generate import Growth, programs
from tests.programs.program import Input, Program, namespace
from tests.programs.standalone import expected


class _Chosen(Growth):
    """A program of one input, grown by the choices in ``wanted`` where they are offered, else by the simplest."""

    def __init__(self, base: str, dtype: torch.dtype, *, training: bool = False) -> None:
        super().__init__(lambda _: training)
        self.wanted: tuple[object, ...] = ()
        self._accept_input(Input(0, "b0", base, dtype, gradient="leaf" if training else "no"), None)

    def pick(self, choices: Sequence[Any]) -> Any:
        return next((c for c in choices if c in getattr(self, "wanted", ())), choices[0])

    def number(self, low: int, high: int) -> int:
        return low

    def dimensions(self, name: str) -> tuple[int, ...]:
        return (0,)


def _eager(program: Program) -> dict[str, Any]:
    defined = namespace(program.source())
    return expected(defined["program"], partial(defined["inputs"], *program.sizes[0]), **program.how(defined))


@settings(max_examples=400, derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck))
@given(programs())
def test_values_share_memory_in_the_float64_run_where_they_do_in_the_program(program: Program | None) -> None:
    if program is None or not program.statements:
        return
    names = tuple(s.name for s in program.statements if s.name is not None)
    program = dataclasses.replace(program, outputs=names, after=(), steps=0, between="", training=False)
    shared = _eager(program)["memory shared"]
    for generator in (None, torch.Generator().manual_seed(0)):
        found = _in_double(program, program.sizes[0], generator)
        assert found["memory shared"] == shared, program.source(reference=True)


def test_a_gradient_through_a_conversion_whose_result_is_written_may_differ_in_its_last_bits() -> None:
    growth = _Chosen("torch.tensor([[0.3, -1.7], [2.2, 0.4]], dtype=torch.float64)", torch.float64, training=True)
    growth.let("sigmoid", "x0.sigmoid()", "x0")
    growth.wanted = (torch.float32,)
    vocabulary.conversion(growth)
    growth.let("neg", "v1.neg()", "v1", exact=True)
    growth.update("mul_", "v1.mul_(2)", "v1")
    program = dataclasses.replace(growth.finish(), steps=0, between="", outputs=("v2",))  # type: ignore[type-var]
    limit = allowances(program, program.sizes[0], _eager(program))["gradient 0"]
    assert bool(((limit > 0) & (limit < 1e-5)).all()), limit


@pytest.mark.parametrize("place", range(3))
def test_the_mean_of_infinities_is_the_right_one_or_the_nan_of_eager(place: int) -> None:
    values = [0.5, 1.5, -2.0]
    values[place] = float("inf")
    growth = _Chosen(f"torch.tensor([[{', '.join(f'float({str(v)!r})' for v in values)}], [1., 2., 3.]]).t()",
                     torch.float32)  # fmt: skip
    growth.wanted = ("std_mean",)
    vocabulary.reduction(growth)
    program = growth.finish()
    assert program is not None
    assert "var_mean" in program.source()
    assert check(program) == "same"
    finite = allowances(program, program.sizes[0], _eager(program))["output 0"][1]
    assert 0 < finite < 1e-4


def test_a_float64_run_that_raises_where_the_program_does_not_is_no_judge() -> None:
    growth = _Chosen("torch.tensor([0.3, -1.7], dtype=torch.float64)", torch.float64, training=True)
    growth.let("sigmoid", "x0.sigmoid()", "x0")
    growth.let("conversion", "v0.to(torch.float32)", "v0")  # without what it means in float64
    growth.let("neg", "v1.neg()", "v1", exact=True)
    growth.update("mul_", "v1.mul_(2)", "v1")
    program = dataclasses.replace(growth.finish(), steps=0, between="", outputs=("v2",))  # type: ignore[type-var]
    with pytest.raises(ValueError, match="another program"):
        allowances(program, program.sizes[0], _eager(program))
