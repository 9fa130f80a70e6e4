"""How the conformance suite judges random operators and symbolic sizes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

import conformance.check as checking
from conformance.cases import Case, samples
from conformance.check import CAPTURE_FAILED, EAGERS_NUMBERS, PASSED, WRONG, Verdict, Way, check


def _verdicts(case: Case, **given: Any) -> list[Verdict]:
    found: list[Verdict] = []
    check(case, done=lambda verdicts, _: found.extend(verdicts), **given)
    return found


def test_random_numbers_are_compared_with_eagers() -> None:
    verdicts = _verdicts(Case("uniform", "float32"), only=range(3))
    assert [v.category for v in verdicts] == [PASSED] * 3
    assert all(EAGERS_NUMBERS in v.note for v in verdicts)


def test_other_random_numbers_than_eagers_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    run = checking._run_compiled

    def with_fused_numbers(operator: Any, group: Sequence[Any], way: Way, **settings: Any) -> Any:
        if way.backend == "kiln":
            settings["rng"] = "fused"
        return run(operator, group, way, **settings)

    monkeypatch.setattr(checking, "_run_compiled", with_fused_numbers)
    verdicts = _verdicts(Case("uniform", "float32"), only=[len(samples(Case("uniform", "float32"))) - 1])
    assert [v.category for v in verdicts] == [WRONG]
    assert "rng='eager'" in verdicts[0].reason


@pytest.mark.parametrize(("dtype", "sample"), [("float32", 23), ("bfloat16", 15)])
def test_numbers_that_are_eagers_may_differ_by_what_eager_itself_is_off(dtype: str, sample: int) -> None:
    """Attention with dropout on large scores: two orders of summation differ, float64 with the same mask decides."""
    case = Case("nn.functional.scaled_dot_product_attention", dtype)
    assert samples(case)[sample].kwargs["dropout_p"] > 0
    (verdict,) = _verdicts(case, only=[sample])
    assert verdict.category == PASSED


def test_other_masks_than_eagers_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    run = checking._run_compiled

    def with_fused_numbers(operator: Any, group: Sequence[Any], way: Way, **settings: Any) -> Any:
        return run(operator, group, way, **({"rng": "fused"} if way.backend == "kiln" else settings))

    monkeypatch.setattr(checking, "_run_compiled", with_fused_numbers)
    (verdict,) = _verdicts(Case("nn.functional.scaled_dot_product_attention", "float32"), only=[23])
    assert verdict.category == WRONG


def test_sizes_that_torch_itself_foresees_wrongly_are_no_crash_of_ours() -> None:
    """torch's fake unique_consecutive has a dimension too many where the dimension asked for is negative."""
    case = Case("unique_consecutive", "float32")
    (number,) = [
        k
        for k, sample in enumerate(samples(case))
        if sample.args[0].shape == (5,)
        and sample.kwargs == {"return_inverse": False, "return_counts": False, "dim": -1}
        and sample.args[0].unique_consecutive().numel() == 5
    ][:1]
    (verdict,) = _verdicts(case, only=[number])
    assert verdict.category == CAPTURE_FAILED
    assert "foresees other sizes" in verdict.reason


@pytest.mark.parametrize("dynamic", [True, False])
def test_sizes_are_symbols_only_where_asked_for(dynamic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    original: Callable[..., Any] = torch.compile

    def recorded(*args: Any, **kwargs: Any) -> Any:
        asked.append(kwargs["dynamic"])
        return original(*args, **kwargs)

    monkeypatch.setattr(torch, "compile", recorded)
    verdicts = _verdicts(Case("add", "float32"), way=Way(dynamic=dynamic), only=[0, 1])
    assert [v.category for v in verdicts] == [PASSED] * 2
    assert set(asked) == {dynamic}
