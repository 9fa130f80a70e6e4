"""Lowerings are bound to what the operator table declares, and none looks at the name it was called by."""

from __future__ import annotations

import ast
import inspect

import pytest

from torchkiln.graph.operators import lowered
from torchkiln.lowering import FAMILIES, LOWERINGS
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


@pytest.mark.parametrize("family", FAMILIES, ids=lambda module: module.__name__.rpartition(".")[2])
def test_no_lowering_searches_the_name_of_its_operator(family: object) -> None:
    tree = ast.parse(inspect.getsource(family))  # type: ignore[arg-type]
    tests = [node for node in ast.walk(tree) if isinstance(node, (ast.Compare, ast.If, ast.IfExp, ast.Match))]
    conditions = [node if isinstance(node, ast.Compare) else getattr(node, "test", None) for node in tests]
    read = [
        ast.unparse(condition)
        for condition in conditions
        if condition is not None
        for node in ast.walk(condition)
        if isinstance(node, ast.Attribute) and node.attr in ("target", "_opname", "_schema")
        if ast.unparse(node) != "builder.target"  # the machine
    ]
    assert not read


def test_a_lowering_takes_a_builder_and_the_arguments_of_every_operator_it_is_registered_for() -> None:
    for operator, lowering in LOWERINGS.items():
        signature = inspect.signature(lowering)
        arguments = operator._schema.arguments
        given = [object() for argument in arguments if not argument.kwarg_only and not argument.has_default_value()]
        named = {a.name: object() for a in arguments if a.kwarg_only and not a.has_default_value()}
        signature.bind(object(), *given, **named)
