"""The decomposition table: what it leaves whole, and what it never touches."""

from __future__ import annotations

import pytest
import torch

from torchkiln.graph import decompositions as module
from torchkiln.graph.decompositions import decompositions
from torchkiln.graph.operators import lowered

aten = torch.ops.aten


def test_operators_we_lower_are_not_decomposed() -> None:
    assert not decompositions().keys() & lowered().keys()


def test_the_rule_follows_the_operator_table(monkeypatch: pytest.MonkeyPatch) -> None:
    assert aten.gelu.default not in decompositions()
    monkeypatch.setattr(module, "lowered", dict)
    assert aten.gelu.default in module._table.__wrapped__()


@pytest.mark.parametrize(
    "op",
    [
        aten.mm.default,
        aten.addmm.default,
        aten.baddbmm.default,
        aten.mv.default,
        aten.convolution.default,
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        aten.native_dropout.default,
        aten.bernoulli.p,
        aten.rrelu_with_noise.default,
        aten.binary_cross_entropy.default,
    ],
    ids=str,
)
def test_matmuls_attention_and_random_operators_stay_whole(
    op: torch._ops.OpOverload, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "lowered", dict)
    assert op not in module._table.__wrapped__()


def test_callers_cannot_change_the_table_for_each_other() -> None:
    decompositions().clear()
    assert decompositions()


def test_ranges_of_integers_stay_whole_and_those_of_floats_do_not() -> None:
    decompose = decompositions()[aten.linspace.default]
    assert decompose(0, 5, 3, dtype=torch.int32) is NotImplemented
    torch.testing.assert_close(decompose(0, 5, 3, dtype=torch.float32), torch.linspace(0, 5, 3))
