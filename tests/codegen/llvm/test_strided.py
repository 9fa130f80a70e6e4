"""Lanes that lie a constant stride apart, and interleaved ones: values of eager, no memory touched beside them."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.lowering.against_eager import DTYPES, check, difference, specimen
from torchkiln.codegen.llvm.instructions import InstructionList
from torchkiln.codegen.llvm.kernel import emit_kernel
from torchkiln.codegen.llvm.module import ModuleBuilder
from torchkiln.codegen.llvm.strided import load_places, places_of_lanes
from torchkiln.config import Settings
from torchkiln.ir import expr as ex
from torchkiln.ir import index as ix
from torchkiln.ir.expr import Constant, Expr, FlatLoad, IndexValue, Interleaved, Masked, Parameter
from torchkiln.ir.index import Index, Size, Var
from torchkiln.native.jit import compile_module
from torchkiln.native.loader import load_object
from torchkiln.schedule.kernel import CpuMapping, Kernel, LoopNest, Phase, Store
from torchkiln.schedule.verify import verify_kernel
from torchkiln.target import capture_target

Function = Callable[..., Any]
STRIDES = [-8, -4, -3, -2, -1, 1, 2, 3, 4, 5, 8, 9, 20]
BITS = st.sampled_from([128, 256, 512])
TARGET = capture_target(Settings())


@given(st.integers(0, 6), st.sampled_from(STRIDES), st.integers(0, 6), st.data())
def test_loads_stay_between_the_first_and_the_last_lane(
    log: int, stride: int, register: int, data: st.DataObject
) -> None:
    lanes = 1 << log
    active = data.draw(st.integers(1, lanes))
    places = places_of_lanes(lanes, active, stride)
    assert [p - places[0] for p in places[:active]] == [k * stride for k in range(active)]
    assert min(places) == 0
    assert max(places) == (active - 1) * abs(stride)
    read: list[int] = []

    def load(start: int, count: int) -> str:
        read.extend(range(start, start + count))
        return f"%at{start}"

    load_places(InstructionList(ModuleBuilder(TARGET)), "float", places, 1 << register, load)
    assert set(places) <= set(read) <= set(range(max(places) + 1))


@contextmanager
def _between_unreadable_pages(count: int, dtype: torch.dtype, *, at_start: bool) -> Iterator[torch.Tensor]:
    """Memory for ``count`` elements right after, or right before, a page that may not be touched."""
    page, size = mmap.PAGESIZE, count * dtype.itemsize
    inner = -(-size // page) * page
    memory = mmap.mmap(-1, inner + 2 * page)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    libc = ctypes.CDLL(None, use_errno=True)

    def protect(flags: int) -> None:
        for start in (whole.data_ptr(), whole.data_ptr() + page + inner):
            assert libc.mprotect(ctypes.c_void_p(start), ctypes.c_size_t(page), flags) == 0

    first = page if at_start else page + inner - size
    protect(0)
    try:
        yield whole[first : first + size].view(dtype)
    finally:
        protect(mmap.PROT_READ | mmap.PROT_WRITE)


def _strided(lane: Var, stride: int) -> Index:
    """Element 0 is that of the first lane, or of the last where the stride is negative."""
    along = ix.of(lane) * stride
    return along if stride > 0 else along + (ix.as_index(lane.extent) - 1) * -stride


def _copy(
    dtype: torch.dtype, length: int, strides: tuple[int, int], lanes: int, *, symbolic: bool, guarded: range | None
) -> Kernel:
    """A kernel that copies elements a stride apart to elements a stride apart, zeros outside ``guarded``."""
    sizes = (Size("n0", 0, 1 << 20, 100),) if symbolic else ()
    lane = Var("i0", ix.of(sizes[0]) if symbolic else length)
    value: Expr = FlatLoad(Parameter(0), _strided(lane, strides[0]), dtype)
    if guarded is not None:
        at = IndexValue(ix.of(lane), torch.int64)
        low, high = (Constant(bound, torch.int64) for bound in (guarded.start, guarded.stop))
        value = Masked(ex.op("logical_and", ex.op("ge", at, low), ex.op("lt", at, high)), value)
    store = Store(Parameter(1), _strided(lane, strides[1]), value)
    nest = LoopNest((lane,), (), lane, (Phase((), (store,)),), (dtype, dtype), (), sizes)
    return Kernel(nest, CpuMapping(lanes, None, 0, 1, 1, 1, 0))


def _run(kernel: Kernel, bits: int, source: torch.Tensor, target: torch.Tensor, length: int) -> None:
    module = ModuleBuilder(replace(TARGET, vector_bits=bits))
    emit_kernel(module, kernel, "copy")
    loaded = load_object(compile_module(module.text(), TARGET.processor), ["copy"], lambda name: None)
    context = (ctypes.c_int64 * 3)(source.data_ptr(), target.data_ptr(), length)
    ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p)(loaded["copy"])(0, 1, context)


def _elements(memory: torch.Tensor, stride: int) -> torch.Tensor:
    return memory[::stride] if stride > 0 else memory[::-stride].flip(0)


@settings(deadline=None, max_examples=150)
@given(st.data())
def test_a_copy_reads_and_writes_its_elements_and_nothing_beside_them(data: st.DataObject) -> None:
    """Memory outside the first and the last element may not be touched, and gaps between results keep what they had."""
    dtype = data.draw(st.sampled_from(DTYPES))
    strides = data.draw(st.tuples(st.sampled_from(STRIDES), st.sampled_from([-3, -1, -1, 1, 1, 2])))
    lanes = 1 << data.draw(st.integers(1, 6))
    length = data.draw(st.integers(1, 2 * lanes + 3))
    guarded = data.draw(st.none() | st.tuples(st.integers(0, length), st.integers(0, length)))
    window = None if guarded is None else range(*guarded)
    kernel = _copy(dtype, length, strides, lanes, symbolic=data.draw(st.booleans()), guarded=window)
    counts = [(length - 1) * abs(stride) + 1 for stride in strides]
    ends = data.draw(st.tuples(st.booleans(), st.booleans()))
    with (
        _between_unreadable_pages(counts[0], dtype, at_start=ends[0]) as source,
        _between_unreadable_pages(counts[1], dtype, at_start=ends[1]) as target,
    ):
        source.copy_(specimen(dtype, source.shape))
        target.copy_(specimen(dtype, target.shape, 1))
        values = _elements(source, strides[0]).clone()
        if window is not None:
            outside = torch.tensor([k not in window for k in range(length)])
            values[outside] = 0
        expected = target.clone()
        expected[:: abs(strides[1])] = values if strides[1] > 0 else values.flip(0)
        _run(kernel, data.draw(BITS), source, target, length)
        assert difference(target.clone(), expected, exact=True) is None


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_interleaved_results_are_written_and_nothing_beside_them(data: st.DataObject) -> None:
    dtype, parts = data.draw(st.sampled_from(DTYPES)), data.draw(st.integers(2, 8))
    lanes = 1 << data.draw(st.integers(0, 5))
    length = data.draw(st.integers(2, 2 * lanes + 3))
    lane = Var("i0", ix.of(Size("n0", 0, 1 << 20, 100)) if data.draw(st.booleans()) else length)
    places = [ix.of(lane) * parts + number for number in range(parts)]
    value = Interleaved(tuple(FlatLoad(Parameter(0), place, dtype) for place in places))
    store = Store(Parameter(1), places[0], value)
    sizes = tuple(ix.sizes_in(lane.extent))
    nest = LoopNest((lane,), (), lane, (Phase((), (store,)),), (dtype, dtype), (), sizes)
    kernel = Kernel(nest, CpuMapping(lanes, None, 0, 1, 1, 1, 0))
    verify_kernel(kernel)
    ends = data.draw(st.tuples(st.booleans(), st.booleans()))
    with (
        _between_unreadable_pages(length * parts, dtype, at_start=ends[0]) as source,
        _between_unreadable_pages(length * parts + 2, dtype, at_start=ends[1]) as target,
    ):
        source.copy_(specimen(dtype, source.shape))
        target.copy_(specimen(dtype, target.shape, 1))
        expected = target.clone()
        expected[1:-1] = source
        _run(kernel, data.draw(BITS), source, target[1:], length)
        assert difference(target.clone(), expected, exact=True) is None


def _every(x: torch.Tensor, stride: int) -> torch.Tensor:
    """Elements ``stride`` apart along the rows, the last one first where it is negative."""
    return x[:, ::stride] if stride > 0 else x.flip(1)[:, ::-stride]


@pytest.mark.parametrize("bits", [128, 256, 512])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_slices_and_reversals_have_the_values_of_eager(dtype: torch.dtype, bits: int) -> None:
    x, y = specimen(dtype, (5, 201))[:, 3:], specimen(dtype, (5, 99), 1)
    functions: dict[str, Function] = {
        "copy": lambda x, y: _every(x, 3).clone(),
        "beside contiguous": lambda x, y: _every(x, -2) == y,
        "in a mask": lambda x, y: F.pad(_every(x, 2), (2, 3)),
        "reversed in a mask": lambda x, y: F.pad(x.flip(1), (2, 3)),
        "largest of columns": lambda x, y: _every(x, 2).amax(0),
        "both ways": lambda x, y: (x.clone(), x.flip(1) == x),
        "rolled": lambda x, y: x.flip(1).roll(2, 1),
    }
    check(functions, [x, y], exact=True, vector_bits=bits)


@pytest.mark.parametrize("bits", [128, 256, 512])
@pytest.mark.parametrize("dtype", [torch.bool, torch.int16, torch.float32], ids=str)
def test_slices_and_reversals_of_symbolic_length_have_the_values_of_eager(dtype: torch.dtype, bits: int) -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return *(_every(x, stride).clone() for stride in (-3, -1, 2, 5)), F.pad(x.flip(1), (1, 2)), _every(x, 2).any(1)

    torch.compiler.reset()
    options: Any = {"fallback": False, "vector_bits": bits}
    run = torch.compile(function, backend="kiln", fullgraph=True, dynamic=True, options=options)
    for width in (2, 3, 15, 16, 17, 40, 63, 64, 65, 130, 391):
        x = specimen(dtype, (3, width))
        for got, wanted in zip(run(x), function(x), strict=True):
            assert difference(got, wanted, exact=True) is None, width


COMPUTED: dict[str, Function] = {
    "each": lambda x, i: x[:, i],
    "under a guard": lambda x, i: F.pad(x[:, i], (2, 3)),
    "of a few": lambda x, i: x[:, i[:9]],
    "of two dimensions": lambda x, i: x[i % 3, i],
    "of what is far apart": lambda x, i: x.view(-1)[::17] == x.view(-1)[-1],
    "reduced": lambda x, i: x[:, i].amax(1),
}


def _places(seed: int) -> torch.Tensor:
    return torch.randint(-71, 71, (135,), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("bits", [128, 256, 512])
@pytest.mark.parametrize("start", [0, 1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.bool, torch.int8, torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_elements_at_computed_places_have_the_values_of_eager(dtype: torch.dtype, start: int, bits: int) -> None:
    """Narrow elements come out of wider words, wherever the memory begins; or lanes are loaded one by one."""
    x = specimen(dtype, (start + 3 * 71,))[start:].view(3, 71)
    check(COMPUTED, [x, _places(start)], exact=True, vector_bits=bits)
    check({"alone": COMPUTED["each"]}, [x, _places(start)], exact=True, vector_bits=bits)


@pytest.mark.parametrize("start", [1, 3])
def test_memory_may_begin_inside_of_an_element(start: int) -> None:
    x = torch.frombuffer(bytearray(range(256)) * 2, dtype=torch.int16, offset=start, count=3 * 71).view(3, 71)
    assert x.data_ptr() % x.itemsize
    check(COMPUTED, [x, _places(start)], exact=True)


REDUCTIONS: dict[str, Function] = {
    "sum": lambda x: x.sum(0),
    "all": lambda x: x.sum(),
    "softmax of columns": lambda x: x.softmax(0),
    "softmax": lambda x: x.softmax(1),
    "norm": lambda x: F.layer_norm(x, (x.shape[1],)),
    "argmax": lambda x: x.argmax(0),
}


@pytest.mark.parametrize("stride", [-2, -1, 2, 3, 9, 30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_reductions_of_any_stride_are_close_to_eager(dtype: torch.dtype, stride: int) -> None:
    x = specimen(dtype, (70, 83 * abs(stride)), tame=True)
    check({k: lambda x, f=f: f(_every(x, stride)) for k, f in REDUCTIONS.items()}, [x], slack=8)
