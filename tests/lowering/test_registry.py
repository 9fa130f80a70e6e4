"""Lowerings are bound to what the operator table declares, all of it and nothing else."""

from __future__ import annotations

import pytest

from torchkiln.graph.operators import lowered
from torchkiln.lowering import LOWERINGS
from torchkiln.lowering.registry import lowers


def test_what_the_table_declares_as_lowered_is_what_has_a_lowering() -> None:
    assert set(LOWERINGS) == set(lowered())


def test_a_lowering_of_an_operator_that_is_not_declared_is_refused() -> None:
    with pytest.raises(ValueError, match=r"erfcx.*declare it in graph/operators\.py"):
        lowers("special_erfcx.default")(lambda builder, x: x)


def test_a_lowering_of_an_operator_that_torch_does_not_have_is_left_out() -> None:
    before = dict(LOWERINGS)
    lowers("an_operator_of_another_version", "add.AnOverloadOfAnotherVersion")(lambda builder, x: x)
    assert before == LOWERINGS
