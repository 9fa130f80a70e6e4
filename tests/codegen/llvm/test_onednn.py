"""Calls of oneDNN's operators through torch's C ABI, against the operators called from Python."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch

from tests.runtime.hand_made import HandMade
from torchkiln.graph import quantized_operators as int8
from torchkiln.native.onednn import packed_dtypes
from torchkiln.passes.freezing.onednn.calls import OPERATORS
from torchkiln.runtime.executable import CompiledGraph

pytestmark = pytest.mark.skipif(not packed_dtypes(), reason="this torch has no oneDNN")

GEOMETRY = ([1, 1], [1, 1], [1, 1], 1)
GELU = ("gelu", [], "tanh")
CLAMP = ("hardtanh", [-0.5, 0.75], "")


def run(target: Any, *arguments: Any, calls: int = 2) -> CompiledGraph:
    """Compile one call with every tensor an input; its results must be those of the operator, also when repeated."""
    graph = HandMade()
    tensors: list[torch.Tensor] = []

    def named(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        tensors.append(value)
        return graph.input(f"in{len(tensors) - 1}", value)

    names = tuple(map(named, arguments))
    written = [k for k, a in enumerate(target._schema.arguments) if a.alias_info is not None]
    kept = [arguments[k].clone() for k in written]
    expected = target(*(kept[written.index(k)] if k in written else a for k, a in enumerate(arguments)))
    graph.own("out", expected)
    graph.extern(target, names, ("out",))
    graph.output("out")
    compiled = graph.build()
    assert [route for _, route in compiled.info.extern_calls] == ["typed"]
    for _ in range(1 if written else calls):
        (result,) = compiled(list(tensors))
        assert torch.equal(result, expected)
        assert result.stride() == expected.stride()
    for k, value in zip(written, kept, strict=True):
        assert torch.equal(arguments[k], value)
    return compiled


def dtypes() -> list[Any]:
    return [pytest.param(getattr(torch, name), id=name) for name in sorted(packed_dtypes() & {"float32", "bfloat16"})]


@pytest.mark.parametrize("dtype", dtypes())
@pytest.mark.parametrize("has_bias", [True, False], ids=["bias", "no bias"])
def test_linear(dtype: torch.dtype, has_bias: bool) -> None:
    x, weight = torch.randn(5, 16, dtype=dtype), torch.randn(8, 16, dtype=dtype)
    bias, other = (torch.randn(8, dtype=dtype) if has_bias else None), torch.randn(5, 8, dtype=dtype)
    packed = OPERATORS.pack_linear(weight)
    for unary in (("none", [], ""), GELU, CLAMP, ("relu", [], None)):
        run(OPERATORS.linear, x, packed, bias, *unary)
    run(OPERATORS.linear_binary, x, other, packed, bias, "mul")


@pytest.mark.parametrize("dtype", dtypes())
def test_convolutions(dtype: torch.dtype) -> None:
    x = torch.randn(2, 8, 9, 9, dtype=dtype).to(memory_format=torch.channels_last)
    weight, bias = torch.randn(16, 8, 3, 3, dtype=dtype), torch.randn(16, dtype=dtype)
    other = torch.randn(2, 16, 9, 9, dtype=dtype).to(memory_format=torch.channels_last)
    packed = OPERATORS.pack_convolution(weight, *GEOMETRY, list(x.shape))
    for unary in (("none", [], ""), GELU, CLAMP):
        run(OPERATORS.convolution, x, packed, bias, *GEOMETRY, *unary)
    run(OPERATORS.convolution_binary, x, other, packed, bias, *GEOMETRY, "add", None, "relu", [], None)
    run(OPERATORS.convolution_binary, x, other, packed, None, *GEOMETRY, "add", 1.0, None, [], None)
    moved = OPERATORS.pack_transposed(
        torch.randn(8, 16, 3, 3, dtype=dtype), [1, 1], [0, 0], *GEOMETRY[1:], list(x.shape)
    )
    geometry = ([1, 1], [0, 0], *GEOMETRY[1:])
    run(OPERATORS.convolution_transpose, x, moved, bias, *geometry, "leaky_relu", [0.1], "")


def test_a_sum_in_place() -> None:
    x = torch.randn(2, 8, 9, 9).to(memory_format=torch.channels_last)
    packed = OPERATORS.pack_convolution(torch.randn(16, 8, 3, 3), *GEOMETRY, list(x.shape))
    into = torch.randn(2, 16, 9, 9).to(memory_format=torch.channels_last)
    graph = HandMade()
    names = [graph.input(name, value) for name, value in (("into", into), ("x", x), ("w", packed))]
    more = (None, *GEOMETRY, "add", None, "relu", [], None)
    graph.extern(OPERATORS.convolution_into, (*names, *more), (None,))
    graph.output("into")
    expected = OPERATORS.convolution_into(into.clone(), x, packed, *more)
    compiled = graph.build()
    assert [route for _, route in compiled.info.extern_calls] == ["typed"]
    compiled([into, x, packed])
    assert torch.equal(into, expected)


def activation(*sizes: int) -> torch.Tensor:
    return torch.randint(0, 256, sizes, dtype=torch.uint8)


def scales(channels: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.rand(channels) / 100 + 0.001, torch.zeros(channels, dtype=torch.int64)


needs_int8 = pytest.mark.skipif(int8.QCONV is None or int8.QLINEAR is None, reason="this torch has no int8 calls")


@needs_int8
def test_int8_linear() -> None:
    assert int8.QLINEAR_PREPACK is not None
    x, weight = activation(5, 16), torch.randint(-128, 128, (8, 16), dtype=torch.int8)
    packed, bias = int8.QLINEAR_PREPACK(weight, list(x.shape)), torch.randn(8)
    # 0.1 is no float32, so a scale that was rounded on the way would show.
    numbers, held = (0.1, 7), (torch.tensor(0.1, dtype=torch.float64), torch.tensor(7))
    for target, given in ((int8.QLINEAR, numbers), (int8.QLINEAR_TENSOR, held)):
        for after in (("none", [], ""), GELU, CLAMP):
            run(target, x, *given, packed, *scales(8), bias, 1.0, 0, torch.float32, *after)
        run(target, x, *given, packed, *scales(8), None, 0.3, 11, torch.uint8, "relu", [], "")
    other = torch.randn(5, 8)
    more = (1.0, 0, "add", 1.0, "relu", [], "")
    run(int8.QLINEAR_BINARY, x, *numbers, packed, *scales(8), other, bias, 0.3, 11, torch.uint8, *more)


@needs_int8
def test_int8_convolution() -> None:
    assert int8.QCONV_PREPACK is not None
    x = activation(2, 8, 9, 9).to(memory_format=torch.channels_last)
    weight, (w_scales, w_zeros) = torch.randint(-128, 128, (16, 8, 3, 3), dtype=torch.int8), scales(16)
    stride_first = ([1, 1], [1, 1], [1, 1], 1)
    packed = int8.QCONV_PREPACK(weight, w_scales, 0.1, 7, *stride_first, list(x.shape))
    for asked in ((1.0, 0, torch.float32), (0.3, 11, torch.uint8)):
        for after in (("none", [], ""), CLAMP, ("relu", [], None)):
            run(int8.QCONV, x, 0.1, 7, packed, w_scales, w_zeros, torch.randn(16), *stride_first, *asked, *after)


def bytes_in_use() -> int:
    """What the C library has handed out and not got back."""

    class Report(ctypes.Structure):
        _fields_ = [
            (name, ctypes.c_size_t)
            for name in ("arena", "free", "small", "maps", "mapped", "a", "b", "in_use", "unused", "top")
        ]

    library = ctypes.CDLL(None)
    if not hasattr(library, "mallinfo2"):
        pytest.skip("only glibc tells how much memory is in use")
    library.mallinfo2.restype = Report
    return int(library.mallinfo2().in_use)


def test_calls_that_take_strings_keep_no_memory() -> None:
    packed = OPERATORS.pack_linear(torch.randn(8, 16))
    x, bias = torch.randn(5, 16), torch.randn(8)
    compiled = run(OPERATORS.linear, x, packed, bias, *GELU)
    searching = HandMade()
    names = [searching.input(name, value) for name, value in (("sorted", bias.sort().values), ("x", x))]
    searching.own("out", torch.empty(5, 16, dtype=torch.int64))
    searching.extern(torch.ops.aten.searchsorted.Tensor, (*names, False, False, "right", None), ("out",))
    searching.output("out")
    for graph, given in ((compiled, [x, packed, bias]), (searching.build(), [bias.sort().values, x])):
        for _ in range(200):
            graph(list(given))
        before = bytes_in_use()
        for _ in range(2000):
            graph(list(given))
        assert bytes_in_use() - before < 16_000  # 48 bytes for each string of each call would be 96,000
