"""How loop nests are divided among the threads of a card."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from tests.codegen.llvm.gpu.on_threads import kernels_of, plan_for, run_on_threads
from torchkiln.schedule.gpu import WARP, tile_pitch
from torchkiln.schedule.kernel import GpuMapping


def _mapping(shape: tuple[int, ...], dtype: torch.dtype) -> GpuMapping:
    (kernel,) = kernels_of(plan_for(lambda x: x.t().contiguous(), [torch.zeros(shape, dtype=dtype)])).values()
    assert isinstance(kernel.mapping, GpuMapping)
    return kernel.mapping


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int8], ids=str)
def test_threads_of_a_warp_find_elements_of_a_tile_in_different_banks(dtype: torch.dtype) -> None:
    lanes, itemsize = _mapping((512, 512), dtype).lanes, dtype.itemsize
    pitch = tile_pitch(WARP * lanes)
    along_lanes = [pitch * thread * lanes for thread in range(WARP)]
    along_tile = [thread * lanes for thread in range(WARP)]
    for elements in (along_lanes, along_tile):
        served = WARP * 4 // max(4, itemsize)  # threads whose words are fetched at one time
        banks = [element * itemsize // 4 % 32 for element in elements[:served]]
        assert max(Counter(banks).values()) == 1, banks


@pytest.mark.parametrize(
    ("dtype", "lanes"), [(torch.float32, 1), (torch.bfloat16, 2), (torch.int8, 4), (torch.float64, 1)], ids=str
)
def test_a_line_of_a_tile_has_the_bytes_of_a_warps_access(dtype: torch.dtype, lanes: int) -> None:
    mapping = _mapping((4096, 4096), dtype)
    assert (mapping.lanes, mapping.block) == (lanes, WARP * lanes)
    assert mapping.grid == (4096 // mapping.block) ** 2


def test_short_dimensions_have_no_tiles() -> None:
    assert _mapping((8, 4096), torch.float32).tile is None
    assert _mapping((4096, 8), torch.float32).tile is None
    assert _mapping((16, 16), torch.float32).tile is not None
    assert _mapping((40, 4096), torch.int8).block == 64  # a square of 128 would be mostly empty


def test_a_norm_that_stores_across_its_lanes_leaves_the_store_to_tiles() -> None:
    def norm(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.layer_norm(x.permute(0, 2, 3, 1), (96,))

    x = torch.zeros(4, 96, 28, 28)
    mappings = [kernel.mapping for kernel in kernels_of(plan_for(norm, [x])).values()]
    assert [mapping.tile is not None for mapping in mappings] == [False, True]
    x = torch.rand(1, 96, 14, 14)
    torch.testing.assert_close(run_on_threads(norm, [x])[0], norm(x))


@pytest.mark.parametrize(("start", "lanes"), [(0, 4), (8, 4), (2, 2), (3, 1)])
def test_accesses_that_begin_between_are_shorter(start: int, lanes: int) -> None:
    (kernel,) = kernels_of(plan_for(lambda x: x[:, start:] + 1, [torch.empty(4096, 1024 + start)])).values()
    assert isinstance(kernel.mapping, GpuMapping)
    assert kernel.mapping.lanes == lanes
