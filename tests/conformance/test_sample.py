"""A fixed choice of torch's operator database against eager, made to reach every lowering (conformance/cover.py)."""

from __future__ import annotations

import pytest
import torch

from conformance import cover
from conformance.cases import Case, database, samples
from conformance.check import CAPTURE_FAILED, PASSED, Verdict, check
from conformance.observe import Observed
from torchkiln.graph.operators import Kind, lowered
from torchkiln.lowering import LOWERINGS
from torchkiln.native.blas import BF16_GEMM, callable_routines

SAMPLE = cover.read()


def _release(version: str) -> tuple[str, ...]:
    return tuple(version.split(".")[:2])


# Another version of torch captures some of the samples as other calls, or not at all.
MADE_FOR_THIS_TORCH = _release(SAMPLE.torch_version) == _release(torch.__version__)
# Lowerings of matmuls stand on a routine of the BLAS that torch was built with.
NOT_HERE = (
    set()
    if BF16_GEMM in callable_routines()
    else {str(target) for target, kind in lowered().items() if kind is Kind.MATMUL}
)
FINE = {PASSED} if MADE_FOR_THIS_TORCH else {PASSED, CAPTURE_FAILED}


@pytest.mark.usefixtures("no_cache")  # lowerings are counted
@pytest.mark.parametrize("case", SAMPLE.cases, ids=lambda case: str(case).replace(" ", "-"))
def test_compiled_samples_equal_eager_and_reach_the_lowerings_they_stand_for(case: Case) -> None:
    if case.operator not in database():
        pytest.skip(f"this version of torch has no {case.operator} in its database")
    verdicts: list[Verdict] = []
    reached: set[str] = set()

    def done(batch: list[Verdict], observed: Observed) -> None:
        verdicts.extend(batch)
        reached.update(observed.lowerings)

    check(case, only=cover.EACH.of(case, len(samples(case))), done=done)
    assert verdicts
    assert [v for v in verdicts if v.category not in FINE] == []
    assert set(SAMPLE.cases[case]) <= reached | NOT_HERE or not MADE_FOR_THIS_TORCH


def test_every_lowering_is_reached_by_the_sample_or_known_not_to_be_reached_by_the_database() -> None:
    listed = {name for reached in SAMPLE.cases.values() for name in reached}
    assert listed.isdisjoint(SAMPLE.unreached)
    assert {str(target) for target in LOWERINGS} - listed - SAMPLE.unreached == set()
