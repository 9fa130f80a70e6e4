"""A choice of torch's operator database on a card, against eager on the card; a few of it on an emulated one."""

from __future__ import annotations

import pytest

import torchkiln
from conformance import cover
from conformance.cases import DTYPES, Case, database, samples
from conformance.check import CAPTURE_FAILED, PASSED, Verdict, check
from tests.gpu.emulated_card import emulated

SAMPLE = cover.read()
ON_CARD = [
    Case(operator, dtype, "cuda")
    for operator in dict.fromkeys(case.operator for case in SAMPLE.cases)
    for dtype in ("float32", "bfloat16", "float16", "int64")
]
# Of each kind of lowering one.
EMULATED = [
    Case(operator, dtype)
    for operator, dtype in (
        *(("add", "bfloat16"), ("cat", "int64"), ("index_add", "float32"), ("cumsum", "float32"), ("argmax", "int64")),
        *(("nn.functional.layer_norm", "float16"), ("matmul", "float32"), ("var", "float32"), ("gather", "float32")),
    )
]


def _verdicts(case: Case) -> list[Verdict]:
    found: list[Verdict] = []
    check(case, only=cover.EACH.of(case, len(samples(case))), done=lambda verdicts, _: found.extend(verdicts))
    return found


@pytest.mark.card
@pytest.mark.parametrize("case", ON_CARD, ids=lambda case: str(case).replace(" ", "-"))
def test_operators_give_eagers_results_on_a_card(case: Case) -> None:
    if case.operator not in database():
        pytest.skip(f"this version of torch has no {case.operator} in its database")
    if DTYPES[case.dtype] not in database()[case.operator].supported_dtypes("cuda"):
        pytest.skip(f"torch has no {case.operator} of {case.dtype} on cards")
    verdicts = _verdicts(case)
    assert verdicts
    assert [v for v in verdicts if v.category not in (PASSED, CAPTURE_FAILED)] == []


@pytest.mark.parametrize("case", EMULATED, ids=lambda case: str(case).replace(" ", "-"))
def test_operators_give_eagers_results_on_an_emulated_card(case: Case) -> None:
    with emulated() as driver, torchkiln.settings(cache=False):
        verdicts = _verdicts(case)
    assert verdicts
    assert [v for v in verdicts if v.category != PASSED] == []
    assert driver.launches or case.operator in ("cumsum", "matmul")
