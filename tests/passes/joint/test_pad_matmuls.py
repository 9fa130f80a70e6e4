"""Matmuls are padded where a measurement says so, with results and strides as before."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from tests.passes.joint.graphs import check_same, compile_and_compare, text, trace, trace_symbolic
from torchkiln.cache import open_cache
from torchkiln.config import Settings
from torchkiln.errors import OptionError
from torchkiln.graph.fake import update_fake_values
from torchkiln.passes.joint import pad_matmuls as pad_module
from torchkiln.passes.joint.matmul_timing import (
    Matmul,
    Operand,
    TimeCache,
    Times,
)
from torchkiln.passes.joint.pad_matmuls import (
    measured_to_pay,
    pad_matmuls,
    padded_sizes,
    pads_on_cpu,
    pads_on_gpu,
    pays,
)
from torchkiln.target import capture_target

aten = torch.ops.aten
CUDA = torch.device("cuda", 0)
TARGET = capture_target(Settings())


def _matmul(
    rows: int,
    inner: int,
    columns: int,
    dtype: torch.dtype = torch.float16,
    transposed: tuple[bool, bool] = (False, False),
) -> Matmul:
    first = Operand((rows, inner), (1, rows) if transposed[0] else (inner, 1))
    second = Operand((inner, columns), (1, inner) if transposed[1] else (columns, 1))
    return Matmul("mm", CUDA, dtype, (first, second))


@pytest.mark.parametrize(
    ("matmul", "expected"),
    [
        (_matmul(4095, 4095, 4097), (4095, 4096, 4104)),
        (_matmul(4096, 4096, 4096), None),
        (_matmul(4095, 4096, 4096), None),  # rows lie in lines of K and N, which are whole
        (_matmul(4095, 4096, 4096, transposed=(True, False)), (4096, 4096, 4096)),
        (_matmul(4096, 4095, 4096, transposed=(True, False)), None),  # no line has the length of K
        (_matmul(4096, 4095, 4096, transposed=(True, True)), (4096, 4096, 4096)),
        (_matmul(512, 4094, 512, torch.float32), (512, 4096, 512)),
        (_matmul(512, 4092, 512, torch.float32), None),
        (_matmul(512, 4092, 512, torch.bfloat16), (512, 4096, 512)),
        (_matmul(4096, 4096, 1), None),  # a vector
        (_matmul(33, 33, 33), None),  # too small to be worth anything
        (_matmul(4095, 4095, 4097, torch.float64), None),
    ],
)
def test_lines_are_rounded_up_to_sixteen_bytes(matmul: Matmul, expected: tuple[int, int, int] | None) -> None:
    assert padded_sizes(matmul) == expected


def test_the_measurement_decides() -> None:
    asked: list[Matmul] = []

    def measure(faster: bool) -> Callable[..., Times]:
        def times(matmul: Matmul, padded: tuple[int, int, int]) -> Times:
            asked.append(matmul)
            return Times(2.0, 1.0) if faster else Times(1.0, 1.0)

        return times

    matmul = _matmul(4095, 4095, 4097)
    known = TimeCache()
    assert measured_to_pay(matmul, (4095, 4096, 4104), TARGET, known, measure=measure(True))
    assert measured_to_pay(matmul, (4095, 4096, 4104), TARGET, known, measure=measure(False))
    assert len(asked) == 1  # what is known is not measured again
    assert not measured_to_pay(_matmul(512, 999, 999), (512, 1000, 1000), TARGET, known, measure=measure(False))
    assert not measured_to_pay(matmul, (1, 1, 1), TARGET, known, measure=lambda matmul, padded: None)
    assert not pays(Times(1.0, 0.99))


def _cuda_graph(function: Callable[..., Any], *shapes: tuple[int, ...]) -> torch.fx.GraphModule:
    """A graph of half-precision tensors on a GPU, which need not exist."""
    with FakeTensorMode():
        return make_fx(function)(*(torch.empty(shape, dtype=torch.float16, device=CUDA) for shape in shapes))


def _always(matmul: Matmul, padded: tuple[int, int, int]) -> bool:
    return True


def test_a_matmul_on_the_gpu_is_padded_and_sliced() -> None:
    gm = _cuda_graph(lambda x, y: torch.mm(x, y) * 2, (513, 1023), (1023, 515))
    assert not pad_matmuls(gm, "cpu", _always)
    assert not pad_matmuls(gm, "cuda", lambda matmul, padded: False)
    assert pad_matmuls(gm, "cuda", _always)
    assert text(gm) == [
        "constant_pad_nd_default = aten.constant_pad_nd.default(x_1, [0, 1])",
        "constant_pad_nd_default_1 = aten.constant_pad_nd.default(y_1, [0, 5, 0, 1])",
        "mm_default = aten.mm.default(constant_pad_nd_default, constant_pad_nd_default_1)",
        "slice_tensor = aten.slice.Tensor(mm_default, 1, 0, 515)",
        "clone_default = aten.clone.default(slice_tensor, memory_format=torch.contiguous_format)",
        "mul = aten.mul.Tensor(clone_default, 2)",
    ]
    assert not update_fake_values(gm, everything=True)


def test_what_is_asked_is_the_matmul_as_it_is() -> None:
    seen: list[Matmul] = []
    gm = _cuda_graph(lambda b, x, y: torch.addmm(b, x, y.t()), (515,), (513, 1023), (515, 1023))
    pad_matmuls(gm, "cuda", lambda matmul, padded: seen.append(matmul) is not None)
    operands = (Operand((515,), (1,)), Operand((513, 1023), (1023, 1)), Operand((1023, 515), (1, 1023)))
    assert seen == [Matmul("addmm", CUDA, torch.float16, operands)]


SHAPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@pytest.mark.parametrize("dtype", SHAPES)
@pytest.mark.parametrize(
    ("function", "shapes"),
    [
        (lambda x, y: torch.mm(x, y), ((129, 131), (131, 133))),
        (lambda x, y: torch.mm(x.t(), y), ((128, 133), (128, 256))),
        (lambda x, y: torch.bmm(x, y), ((3, 129, 130), (3, 130, 131))),
        (lambda b, x, y: torch.addmm(b, x, y), ((133,), (129, 131), (131, 133))),
        (lambda b, x, y: torch.addmm(b, x, y), ((129, 133), (129, 131), (131, 133))),
        (lambda b, x, y: torch.addmm(b, x, y), ((129, 1), (129, 131), (131, 133))),
    ],
)
def test_the_values_are_those_of_the_matmul(
    function: Callable[..., Any], shapes: tuple[tuple[int, ...], ...], dtype: str
) -> None:
    # Small integers: sums are exact in any order.
    inputs = [torch.randint(-2, 3, shape).to(SHAPES[dtype]) for shape in shapes]
    gm = trace(function, *inputs)
    assert pad_matmuls(gm, "cpu", _always)
    check_same(gm, function, *inputs)


def test_infinities_meet_no_zeros() -> None:
    x, y = torch.randn(129, 131), torch.randn(131, 133)
    x[0, 0], y[:, 1] = float("inf"), 1.0
    gm = trace(torch.mm, x, y)
    assert pad_matmuls(gm, "cpu", _always)
    gm.recompile()
    torch.testing.assert_close(gm(x, y), torch.mm(x, y), rtol=1e-4, atol=1e-4, equal_nan=True)


def test_some_matmuls_are_never_asked_about() -> None:
    def asked(matmul: Matmul, padded: tuple[int, int, int]) -> bool:
        raise AssertionError("asked")

    x, y = torch.randn(129, 131), torch.randn(131, 133)
    assert not pad_matmuls(trace_symbolic(torch.mm, x, y), "cpu", asked)
    assert not pad_matmuls(trace(lambda x, y: torch.addmm(x, x, y, beta=2), x[:, :1], y[:1]), "cpu", asked)
    assert not pad_matmuls(trace(lambda x, y: torch.mm(x[:, :128], y[:128, :128]), x, y), "cpu", asked)


def test_the_cpu_is_left_alone_unless_asked_for() -> None:
    assert pads_on_gpu(Settings())
    assert not pads_on_cpu(Settings())
    assert pads_on_cpu(Settings(pad_matmuls="all"))
    assert not pads_on_gpu(Settings(pad_matmuls="off"))
    with pytest.raises(OptionError):
        Settings(pad_matmuls="cpu")  # type: ignore[arg-type]


def test_compiled_training_gives_the_gradients_of_eager(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KILN_CACHE", "1")
    monkeypatch.setenv("KILN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(pad_module, "pays", lambda times: True)
    x = torch.randn(131, 129, requires_grad=True)
    w, b = torch.randn(133, 129, requires_grad=True), torch.randn(133, requires_grad=True)
    compile_and_compare(torch.nn.functional.linear, x, w, b, expects="pad_cpu_matmuls", rtol=1e-3, pad_matmuls="all")
    assert _kept(tmp_path) == 3  # forward, and a matmul for each of x and w


def _kept(folder: Path) -> int:
    """How many matmuls have their times in the cache of that folder."""
    stored = open_cache(Settings(cache_dir=str(folder)))
    assert stored is not None
    return [head.key.kind for _, head in stored.heads()].count("matmul times")


def test_times_go_to_the_cache_of_the_compilation(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    others, own = tmp_path / "others", tmp_path / "own"
    monkeypatch.setenv("KILN_CACHE", "1")
    monkeypatch.setenv("KILN_CACHE_DIR", str(others))
    options = {"pad_matmuls": "all", "fallback": False, "adaptive": False}

    def multiply(size: int, **more: object) -> None:
        torch._dynamo.reset()
        compiled = torch.compile(torch.mm, backend="kiln", options={**options, **more})
        compiled(torch.randn(size, 133), torch.randn(133, 135))

    multiply(131, cache=False)
    multiply(137, cache_dir=str(own))
    assert _kept(others) == 0
    assert _kept(own) == 1
    multiply(139)
    assert _kept(others) == 1
