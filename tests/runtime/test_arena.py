"""The pool of arenas, called directly."""

from __future__ import annotations

import ctypes
import random
import threading
from collections.abc import Iterator

import pytest

from torchkiln.codegen.llvm.support.arena import POOL_SLOTS
from torchkiln.runtime import support
from torchkiln.runtime.arena import arena_stats, clear_arena


@pytest.fixture(autouse=True)
def _empty_pool() -> Iterator[None]:
    clear_arena()
    assert arena_stats().blocks == 0
    yield
    clear_arena()


def acquire(size: int) -> int:
    address: int | None = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_int64)(support.existing("kiln_arena_acquire"))(
        size
    )
    assert address is not None
    return address


def release(address: int) -> None:
    ctypes.CFUNCTYPE(None, ctypes.c_void_p)(support.existing("kiln_arena_release"))(address)


def test_blocks_are_aligned_and_used_again() -> None:
    first = acquire(1000)
    assert first % 64 == 0
    release(first)
    assert acquire(500) == first
    release(first)
    assert arena_stats().blocks == 1


def test_blocks_in_use_are_distinct() -> None:
    blocks = [acquire(100) for _ in range(20)]
    assert len(set(blocks)) == 20
    for block in blocks:
        release(block)
    assert arena_stats().blocks == POOL_SLOTS


def test_a_block_too_small_makes_way_for_the_larger() -> None:
    release(acquire(1000))
    release(acquire(5000))
    stats = arena_stats()
    assert stats.blocks == 1
    assert 5000 <= stats.bytes < 6000


def test_the_biggest_goes_when_the_pool_is_full() -> None:
    sizes = [1000 * (k + 1) for k in range(POOL_SLOTS + 1)]
    random.Random(0).shuffle(sizes)
    blocks = [acquire(size) for size in sizes]
    for block in blocks:
        release(block)
    stats = arena_stats()
    kept = sorted(sizes)[:-1]
    assert stats.blocks == POOL_SLOTS
    assert sum(kept) <= stats.bytes <= sum(kept) + 64 * len(kept)


def test_clearing_leaves_blocks_in_use_alone() -> None:
    block = acquire(64)
    clear_arena()
    assert arena_stats().blocks == 1
    ctypes.memset(block, 1, 64)
    release(block)


def test_memory_that_cannot_be_had_is_null() -> None:
    function = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_int64)(support.existing("kiln_arena_acquire"))
    assert function(1 << 60) is None
    assert arena_stats().blocks == 0


def test_threads_never_share_a_block() -> None:
    clashes: list[int] = []

    def work(mark: int) -> None:
        choose = random.Random(mark)
        for _ in range(3000):
            size = choose.choice((64, 640, 6400))
            block = acquire(size)
            ctypes.memset(block, mark, size)
            if ctypes.string_at(block, size) != bytes([mark]) * size:
                clashes.append(mark)
            release(block)

    workers = [threading.Thread(target=work, args=(mark,)) for mark in range(1, 13)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert clashes == []
    assert arena_stats().blocks <= POOL_SLOTS
