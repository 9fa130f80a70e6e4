"""Linear layers with packed weights: values, fusions, which are packed, and the limit on their memory."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchkiln
from tests.passes.freezing.onednn.comparison import DTYPES, agree, calls_since, compare, packed_calls
from tests.passes.freezing.onednn.fusions import ACTIVATIONS, BINARY, Then, fused, moved_into_bias
from torchkiln.config import Settings
from torchkiln.native.onednn import packed_dtypes
from torchkiln.passes.freezing.onednn import fusion, packed_linears
from torchkiln.target import Target, capture_target

__all__ = ["fused"]
pytestmark = pytest.mark.skipif("float32" not in packed_dtypes(), reason="needs oneDNN")
decides = packed_linears._pays


@pytest.fixture(autouse=True)
def _everything_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small layers are packed too, and what is fused does not depend on the table."""
    monkeypatch.setattr(packed_linears, "_pays", lambda *_: True)
    monkeypatch.setattr(fusion, "pays", lambda *_: True)


class StoredByInputs(nn.Module):
    """As GPT-2 stores its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(12, 20)), nn.Parameter(torch.randn(20))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.view(-1, 12), self.weight).view(*x.shape[:-1], 20)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 12), (4, 12), (2, 3, 12), (2, 1, 3, 12)])
@pytest.mark.parametrize("module", [nn.Linear(12, 20), nn.Linear(12, 20, bias=False), StoredByInputs()])
def test_a_packed_layer_gives_what_eager_gives(module: nn.Module, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    before = torchkiln.stats()
    agree(module.to(dtype).eval(), torch.randn(shape).to(dtype))
    assert packed_calls(before) == 1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_an_activation_is_fused_into_a_layer(name: str, dtype: torch.dtype, fused: list[tuple[str, ...]]) -> None:
    attribute, function = ACTIVATIONS[name]
    shape = (1, 12) if dtype == torch.float32 else (4, 3, 12)
    agree(Then(nn.Linear(12, 20).to(dtype).eval(), function), torch.randn(shape).to(dtype))
    assert fused == [() if moved_into_bias(name, dtype) else (attribute,)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", BINARY)
def test_a_second_tensor_is_fused_into_a_layer(name: str, dtype: torch.dtype, fused: list[tuple[str, ...]]) -> None:
    for shape in ((4,), (4, 3)):
        module = Then(nn.Linear(12, 20).to(dtype).eval(), BINARY[name])
        agree(module, torch.randn(*shape, 12).to(dtype), torch.randn(*shape, 20).to(dtype))
        torch._dynamo.reset()
    assert fused == [(name.partition(" ")[0],)] * 2


def test_a_second_tensor_and_an_activation_are_a_kernel_after_a_layer(fused: list[tuple[str, ...]]) -> None:
    module = Then(nn.Linear(12, 20).eval(), lambda y, other: (y + other).relu())
    agree(module, torch.randn(4, 12), torch.randn(4, 20))
    assert fused == [()]


def test_one_compilation_serves_batches_of_all_sizes(fused: list[tuple[str, ...]]) -> None:
    module = Then(nn.Linear(12, 20).eval(), F.gelu)
    run = agree(module, torch.randn(5, 3, 12), dynamic=True)
    for batch in (2, 9):
        compare(run, module, torch.randn(batch, 3, 12))
    assert fused == [("gelu",)]


def test_a_weight_of_two_layers_is_packed_once() -> None:
    layer, before = nn.Linear(12, 12), torchkiln.stats()
    agree(nn.Sequential(layer, nn.Tanh(), layer).eval(), torch.randn(4, 12))
    assert calls_since(before)["mkldnn._reorder_linear_weight.default"] == 1


def test_a_changed_weight_is_packed_again() -> None:
    module, x = nn.Linear(12, 20).eval(), torch.randn(4, 12)
    run = agree(module, x)
    with torch.no_grad():
        module.weight.mul_(2)
    compare(run, module, x)


@pytest.mark.usefixtures("no_cache")  # what a cache has leaves no record of its layers
def test_weights_beyond_the_limit_are_not_packed() -> None:
    module, before = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16)).eval(), torchkiln.stats()
    agree(module, torch.randn(4, 16), prepared_limit="1KiB")
    records = torchkiln.stats().matmuls[len(before.matmuls) :]
    assert [record.packed for record in records] == [True, False]
    assert "prepared_limit, 1KiB" in records[1].reason
    torch._dynamo.reset()
    agree(module, torch.randn(4, 16), prepared_limit="1KiB", freezing=True)
    assert [record.packed for record in torchkiln.stats().matmuls[-2:]] == [True, True]


def test_a_weight_that_is_kept_in_a_smaller_dtype_is_not_packed() -> None:
    class Small(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("weight", torch.randint(-9, 9, (20, 12), dtype=torch.int8))

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.weight.to(x.dtype).t()

    before = torchkiln.stats()
    agree(Small(), torch.randn(4, 12))
    assert packed_calls(before) == 0


def test_less_precise_matmuls_stay_those_of_torch() -> None:
    before, module, x = torchkiln.stats(), nn.Linear(12, 20).eval(), torch.randn(4, 12)
    torch.set_float32_matmul_precision("medium")
    try:
        with torch.no_grad():
            torch.testing.assert_close(torch.compile(module, backend="kiln")(x), module(x))
    finally:
        torch.set_float32_matmul_precision("highest")
    assert packed_calls(before) == 0


@pytest.mark.parametrize(
    ("dtype", "sizes", "expected"),
    [
        (torch.float32, (1, 1024, 4096), False),
        (torch.float32, (4, 768, 768), True),
        (torch.float32, (64, 128, 128), False),
        (torch.bfloat16, (1, 768, 768), True),
        (torch.bfloat16, (4, 64, 64), False),
    ],
)
def test_sizes_decide_what_is_packed(dtype: torch.dtype, sizes: tuple[int, int, int], expected: bool) -> None:
    assert decides(_target("znver4"), dtype, *sizes) is expected


def test_float32_layers_are_left_to_mkl_on_processors_of_its_maker() -> None:
    sizes = (128, 768, 3072)
    assert decides(_target("znver4"), torch.float32, *sizes)
    assert not decides(_target("sapphirerapids"), torch.float32, *sizes)
    assert decides(_target("sapphirerapids"), torch.bfloat16, *sizes)


def _target(cpu: str) -> Target:
    return dataclasses.replace(capture_target(Settings()), cpu=cpu)
