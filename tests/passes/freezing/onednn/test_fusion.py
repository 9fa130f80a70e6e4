"""Activations and second tensors inside calls of oneDNN: values, what is fused, and what is not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.fx
import torch.nn.functional as F
from torch import Tensor, nn

import torchkiln
from tests.passes.freezing.onednn.comparison import DTYPES, agree, calls_since, compare, packed_calls
from tests.passes.freezing.onednn.fusions import ACTIVATIONS, BINARY, Function, Then, fused, moved_into_bias
from torchkiln.config import Settings
from torchkiln.native.onednn import packed_dtypes
from torchkiln.passes.freezing.onednn import fusion
from torchkiln.patterns.rewrites import Rewrite, RewriteSet
from torchkiln.recorder import Record, listen
from torchkiln.target import capture_target

__all__ = ["fused"]
pytestmark = pytest.mark.skipif("float32" not in packed_dtypes(), reason="needs oneDNN")


@pytest.fixture(autouse=True)
def _everything_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is fused does not depend on the table."""
    monkeypatch.setattr(fusion, "pays", lambda *_: True)


LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "convolution": (lambda: nn.Conv2d(6, 8, 3, padding=1), (6, 9, 7)),
    "convolution of sequences": (lambda: nn.Conv1d(6, 8, 3, padding=1), (6, 20)),
    "convolution of volumes": (lambda: nn.Conv3d(4, 8, 3), (4, 5, 6, 5)),
    "transposed convolution": (lambda: nn.ConvTranspose2d(6, 8, 3, stride=2), (6, 9, 7)),
}
class Pooled(Then):
    """The same, read by an operator of torch: a kernel that copies it for the caller would compute it on the way."""

    def forward(self, x: Tensor, *more: Tensor) -> Tensor:
        y = super().forward(x, *more)
        pool: Function = {3: F.max_pool1d, 4: F.max_pool2d, 5: F.adaptive_max_pool3d}[y.dim()]
        return pool(y, 2)


def layer_and_input(name: str, dtype: torch.dtype, batch: int = 2, *, last: bool = False) -> tuple[nn.Module, Tensor]:
    make, shape = LAYERS[name]
    x = torch.randn(batch, *shape).to(dtype)
    return make().eval().to(dtype), x.to(memory_format=torch.channels_last) if last else x


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_an_activation_is_fused_into_a_convolution(
    name: str, dtype: torch.dtype, fused: list[tuple[str, ...]]
) -> None:
    attribute, function = ACTIVATIONS[name]
    for batch, last in ((1, False), (4, True)):
        layer, x = layer_and_input("convolution", dtype, batch, last=last)
        agree(Pooled(layer, function), x)
        torch._dynamo.reset()
    assert fused == [() if moved_into_bias(name, dtype) else (attribute,)] * 2


@pytest.mark.parametrize("name", ["convolution of sequences", "convolution of volumes", "transposed convolution"])
def test_an_activation_is_fused_into_other_convolutions(name: str, fused: list[tuple[str, ...]]) -> None:
    for dtype in DTYPES:
        for activation in ("relu", "gelu", "hardswish", "clamp"):
            layer, x = layer_and_input(name, dtype)
            agree(Pooled(layer, ACTIVATIONS[activation][1]), x)
            torch._dynamo.reset()
    assert fused == [(ACTIVATIONS[name][0],) for name in ("relu", "gelu", "hardswish", "clamp")] * len(DTYPES)


@pytest.mark.parametrize("name", BINARY)
def test_a_second_tensor_is_fused_into_a_convolution(name: str, fused: list[tuple[str, ...]]) -> None:
    for dtype in DTYPES:
        for then in ((), ("relu",)):
            layer, x = layer_and_input("convolution", dtype, last=True)
            other = torch.randn(2, 8, 9, 7).to(dtype).to(memory_format=torch.channels_last)
            module = Then(layer, lambda y, other: BINARY[name](y, other).relu()) if then else Then(layer, BINARY[name])
            agree(module, x, other)
            torch._dynamo.reset()
    attribute = name.partition(" ")[0]
    assert fused == [(attribute,), (attribute, "relu")] * len(DTYPES)


def test_what_is_subtracted_is_not_fused(fused: list[tuple[str, ...]]) -> None:
    layer, x = layer_and_input("convolution", torch.float32, last=True)
    agree(Then(layer, lambda y, other: other - y), x, torch.randn(2, 8, 9, 7).to(memory_format=torch.channels_last))
    assert fused == [()]


@pytest.mark.parametrize(
    "other",
    [torch.randn(8, 1, 1), torch.randn(2, 8, 9, 7), torch.randn(2, 8, 9, 7, dtype=torch.float64)],
    ids=["a row", "row by row", "of another dtype"],
)
def test_a_second_tensor_of_another_kind_is_not_fused(other: Tensor, fused: list[tuple[str, ...]]) -> None:
    layer, x = layer_and_input("convolution", torch.float32, last=True)
    agree(Then(layer, torch.add), x, other)
    assert fused == [()]


def test_one_compilation_serves_batches_of_all_sizes(fused: list[tuple[str, ...]]) -> None:
    layer, x = layer_and_input("convolution", torch.float32, 3)
    module = Pooled(layer, F.hardswish)
    run = agree(module, x, dynamic=True)
    for batch in (2, 7):
        compare(run, module, torch.randn(batch, 6, 9, 7))
    assert fused == [("hardswish",)]


def test_a_result_that_others_read_is_not_changed(fused: list[tuple[str, ...]]) -> None:
    layer, x = layer_and_input("convolution", torch.float32)
    agree(Then(layer, lambda y: torch.cat([y, y.relu()], 1)), x)
    assert fused == [()]


def test_an_activation_that_a_kernel_computes_on_the_way_is_not_fused(fused: list[tuple[str, ...]]) -> None:
    layer, x = layer_and_input("convolution", torch.float32)
    agree(Then(layer, lambda y: y.relu().sum(1)), x)
    assert fused == [()]


def test_numbers_that_the_library_does_not_take_are_left_alone(fused: list[tuple[str, ...]]) -> None:
    layer, x = layer_and_input("convolution", torch.float32)
    agree(Then(layer, lambda y: y.clamp(max=0.5)), x)
    assert fused == [()]


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(6, 8, 3), nn.Conv2d(8, 8, 3, padding=1)


class ReadLater(Residual):
    def forward(self, x: Tensor) -> Any:
        y = self.first(x).relu()
        return F.max_pool2d((self.second(F.avg_pool2d(y, 3, 1, 1)) + y).relu(), 2), F.max_pool2d(y, 2)


class OfItself(Residual):
    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x).relu()
        return F.max_pool2d((self.second(y) + y).relu(), 2)


class OfPooled(Residual):
    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x).relu()
        return F.max_pool2d((self.second(F.avg_pool2d(y, 3, 1, 1)) + y).relu(), 2)


@pytest.mark.parametrize(("module", "in_place"), [(OfPooled(), 1), (OfItself(), 0)])
def test_a_sum_goes_into_memory_that_dies_there(module: nn.Module, in_place: int) -> None:
    before = torchkiln.stats()
    run = agree(module.eval(), torch.randn(2, 6, 12, 12))
    compare(run, module, torch.randn(2, 6, 12, 12))
    assert packed_calls(before) == 2
    assert calls_since(before)["mkldnn._convolution_pointwise_.binary"] == in_place


def test_memory_that_is_read_later_is_not_added_to() -> None:
    before, module, x = torchkiln.stats(), ReadLater().eval(), torch.randn(2, 6, 12, 12)
    run = torch.compile(module, backend="kiln", fullgraph=True, options={"fallback": False})
    with torch.no_grad():
        torch.testing.assert_close(run(x), module(x))
    assert calls_since(before)["mkldnn._convolution_pointwise_.binary"] == 0


def test_what_was_not_measured_to_pay_is_not_fused(
    monkeypatch: pytest.MonkeyPatch, fused: list[tuple[str, ...]]
) -> None:
    asked: list[tuple[Any, ...]] = []
    monkeypatch.setattr(fusion, "pays", lambda *question: asked.append(question))
    layer, x = layer_and_input("convolution", torch.float32)
    agree(Pooled(layer, F.hardswish), x)
    assert fused == [()]
    assert [question[1:] for question in asked] == [("convolution", torch.float32, "hardswish")]


def test_explain_match_says_what_stands_against_a_fusion() -> None:
    kept: list[torch.fx.GraphModule] = []

    def keep(record: Record) -> None:
        if record.stage == "inference graph":
            kept.append(record.value)

    layer, x = layer_and_input("convolution", torch.float32)
    with listen(keep):
        agree(Then(layer, lambda y: y.relu().sum(1)), x)
    found = fusion.fusions(fusion.measured_on(capture_target(Settings())))
    explanation = torchkiln.explain_match(_last(found, "onednn/relu"), kept[0])
    assert not explanation.fires_at
    assert "kernels compute relu where they read it" in str(explanation)
    (record,) = torchkiln.stats().matmuls[-1:]
    assert record.packed
    assert record.reason == "kernels compute relu where they read it"


def _last(rewrites: RewriteSet, name: str) -> Rewrite:
    """The form without casts comes last."""
    return [rewrite for rewrite in rewrites.rewrites if rewrite.name == name][-1]
