"""The check of whole models sees a wrong kernel, forgives rounding, and draws eager's masks in every precision."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from tests.models.architectures.architecture import Architecture
from tests.models.model_check import check
from torchkiln.lowering.registry import LOWERINGS

_SIN, _COS = torch.ops.aten.sin.default, torch.ops.aten.cos.default


class _Network(nn.Module):
    """Dropout, a norm with running statistics, a graph break, and a parameter that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.norm = nn.Linear(13, 21), nn.BatchNorm1d(21)
        self.tied = nn.Parameter(torch.randn(21, 21) / 5)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        hidden = nn.functional.dropout(self.norm(self.enter(x)).sin(), 0.3, self.training)
        torch._dynamo.graph_break()
        return {"hidden": hidden @ self.tied, "logits": torch.rand_like(hidden) * (hidden @ self.tied.t())}


@dataclass(frozen=True)
class _Small(Architecture):
    def build(self) -> nn.Module:
        return _Network()


SMALL = _Small("", "", {}, lambda: {"x": torch.randn(7, 13)})


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_that_is_compiled_right_passes(dtype: str) -> None:
    judged = check(SMALL, dtype)
    assert not judged.failures + judged.captured, judged
    assert judged.graphs == 4  # forward and backward on both sides of the break
    assert judged.breaks == 1
    assert judged.share == pytest.approx(1.0, abs=0.1)
    # The bias before the norm has no influence, so that its gradient is rounding and the error is not small.
    assert 0 < judged.output_error < 0.01
    assert 0 < judged.gradient_error < 3 * judged.eager_gradient_error


@pytest.fixture
def planted_mistake() -> Iterator[None]:
    """sin is compiled as cos."""
    right = LOWERINGS[_SIN]
    LOWERINGS[_SIN] = LOWERINGS[_COS]
    yield
    LOWERINGS[_SIN] = right


@pytest.mark.usefixtures("no_cache")  # a stage is replaced
def test_a_wrong_kernel_is_a_failure_and_not_blamed_on_capture(planted_mistake: None) -> None:
    judged = check(SMALL, "bfloat16")
    assert any("hidden" in failure for failure in judged.failures), judged
    assert not judged.captured


class _Rounds(_Network):
    """One output is as long as a number that lies between two whole ones; capturing moves that by less than a unit in
    its last place of bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.length = nn.Parameter(torch.tensor([8.5]))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        outputs = super().forward(x)
        length = int((self.length.float() + (0.01 if torch.compiler.is_compiling() else 0)).round())
        return {**outputs, "start": outputs["hidden"][:, :length]}


class _Rounding(_Small):
    def build(self) -> nn.Module:
        return _Rounds()


def test_a_size_that_rounding_decides_is_no_failure_and_named() -> None:
    judged = check(_Rounding("", "", {}, SMALL.inputs), "bfloat16")
    assert not judged.failures + judged.captured, judged
    assert judged.undecided == ("inference output.start", "step 0 output.start", "step 1 output.start")
    assert judged.output_error < 0.1


@pytest.mark.usefixtures("no_cache")  # a stage is replaced
def test_a_wrong_kernel_is_seen_beside_a_size_that_rounding_decides(planted_mistake: None) -> None:
    judged = check(_Rounding("", "", {}, SMALL.inputs), "bfloat16")
    assert any("hidden" in failure for failure in judged.failures), judged


class _Asks(_Network):
    """Computes something else while it is captured."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return super().forward(x * 2 if torch.compiler.is_compiling() else x)


class _Asking(_Small):
    def build(self) -> nn.Module:
        return _Asks()


def test_a_model_that_is_captured_otherwise_is_no_failure_of_the_compiler() -> None:
    judged = check(_Asking("", "", {}, SMALL.inputs), "float32")
    assert not judged.failures
    assert judged.captured


class _Refuses(_Network):
    """Cannot be captured."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return super().forward(x @ x if torch.compiler.is_compiling() else x)


class _Refusing(_Small):
    def build(self) -> nn.Module:
        return _Refuses()


@pytest.mark.usefixtures("no_cache")  # a stage is replaced
@pytest.mark.parametrize("by", ["capture", "the compiler"])
def test_an_error_is_the_compilers_unless_capture_raises_it_alone(by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise ValueError("not here")

    if by == "the compiler":
        monkeypatch.setitem(LOWERINGS, _SIN, refuse)
    judged = check((_Refusing if by == "capture" else _Small)("", "", {}, SMALL.inputs), "float32")
    assert [bool(judged.captured), bool(judged.failures)] == [by == "capture", by == "the compiler"], judged
    assert ("a and b must have same reduction dim" if by == "capture" else "not here") in str(judged)
