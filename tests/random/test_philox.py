"""The generator: published vectors, kernels against the definition, and independence of everything but the seed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from torchkiln.graph import seeded

Compile = Callable[..., Any]
FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
SHAPES = ((), (1,), (3,), (64,), (5, 7), (4, 8), (3, 5, 16), (1000,), (0, 4), (37, 130))

# From the known-answer tests of the Random123 library, philox4x32 with 10 rounds: counter, key, result.
VECTORS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "expected"), VECTORS)
def test_the_definition_gives_the_published_numbers(
    counter: Sequence[int], key: tuple[int, int], expected: Sequence[int]
) -> None:
    c0, c1, c2, c3 = (torch.tensor([word]) for word in counter)
    assert tuple(word.item() for word in seeded.philox((c0, c1, c2, c3), key)) == tuple(expected)


def test_a_kernel_gives_the_published_numbers(compile_strictly: Compile) -> None:
    """The first block of seed 0, from operators of the graph itself: no seed is drawn."""
    seed = torch.zeros(1, dtype=torch.int64)
    run = compile_strictly(
        lambda seed: (
            torch.ops.kiln.random(seed, 0, "uniform", [4], None, torch.float32),
            torch.ops.kiln.randint(seed, 0, -(2**63), 2**63 - 1, [2], None),
        )
    )
    uniform, integers = run(seed)
    words = VECTORS[0][2]
    assert uniform.tolist() == [(word >> 8) * 2.0**-24 for word in words]
    # The high half of a product with 2**64 - 1 is the number less one.
    assert (integers - -(2**63) + 1).tolist() == [
        word if word < 2**63 else word - 2**64 for word in ((words[1] << 32 | words[0]), (words[3] << 32 | words[2]))
    ]


def _draws(shape: tuple[int, ...], dtype: torch.dtype) -> list[Callable[[torch.Tensor], torch.Tensor]]:
    def draw(stream: int, distribution: str, *affine: float) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda seed: torch.ops.kiln.random(seed, stream, distribution, shape, None, dtype, *affine)

    return [
        draw(0, "uniform"),
        draw(1, "open"),
        draw(2, "uniform", 5.0, -2.0),
        draw(3, "normal"),
        draw(4, "normal", 2.0, 1.0),
    ]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_kernels_give_what_the_definition_gives(dtype: torch.dtype, compile_strictly: Compile) -> None:
    seed = torch.tensor([0x0123456789ABCDEF])
    functions = [function for shape in SHAPES for function in _draws(shape, dtype)]
    results = compile_strictly(lambda seed: tuple(function(seed) for function in functions))(seed)
    for k, (function, result) in enumerate(zip(functions, results, strict=True)):
        expected = function(seed)
        if k % 5 < 2 or (k % 5 == 2 and dtype != torch.float64):
            assert torch.equal(result, expected), (k, result, expected)
        else:  # logarithms and cosines of another library; near zero the cosine's error is absolute
            close = {torch.float64: 1e-13, torch.float32: 4e-6}.get(dtype, 1e-2)
            torch.testing.assert_close(result, expected, rtol=close, atol=close)


@pytest.mark.parametrize(
    ("low", "high"), [(0, 1), (0, 10), (-7, 2**31), (-5, 2**32 + 3), (-(2**62), 2**62 + 2**61), (-(2**63), 2**63 - 1)]
)
def test_integers_of_a_kernel_are_those_of_the_definition_and_in_range(
    low: int, high: int, compile_strictly: Compile
) -> None:
    seed = torch.tensor([-42])
    run = compile_strictly(lambda seed: torch.ops.kiln.randint(seed, 9, low, high, [3, 37], None))
    result = run(seed)
    assert torch.equal(result, torch.ops.kiln.randint(seed, 9, low, high, [3, 37], None))
    assert result.min().item() >= low
    assert result.max().item() < high


def test_the_definition_of_integers_is_the_high_half_of_the_product() -> None:
    seed, size = torch.tensor([77]), 3 * 2**61 + 12345
    words = [torch.ops.kiln.randint(seed, 0, 0, 2**k, [50], None) for k in (32, 62)]
    lo, hi = seeded._pairs(seed, 0, 50)
    bits = [(int(h) << 32) | int(word) for h, word in zip(hi, lo, strict=True)]
    assert words[0].tolist() == [b >> 32 for b in bits]
    assert words[1].tolist() == [b >> 2 for b in bits]
    drawn = torch.ops.kiln.randint(seed, 0, -5, size - 5, [50], None)
    assert drawn.tolist() == [(b * size >> 64) - 5 for b in bits]


def _program(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Numbers read in several ways: stored, transposed, broadcast, in a reduction, as bits of a mask."""
    u, n = torch.rand(6, 70), torch.randn(6, 70)
    d = torch.randn(6, 70, dtype=torch.float64)
    k = torch.randint(0, 1000, (6, 70))
    return u, u.t() + 1, (u < 0.5).sum(1), n, n.t().contiguous(), d, k, u + x[:, None]


@pytest.mark.parametrize(
    "options", [{"threads": 1}, {"vector_bits": 128}, {"vector_bits": 256}, {"fuse": False}], ids=str
)
def test_numbers_depend_on_nothing_but_the_seed(options: dict[str, Any], compile_strictly: Compile) -> None:
    x = torch.zeros(6)
    results = []
    for settings in ({}, {"parallel_threshold": 16, **options}):
        torch._dynamo.reset()
        torch.manual_seed(5)
        results.append(compile_strictly(_program, **settings)(x))
    for plain, changed in zip(*results, strict=True):
        assert torch.equal(plain, changed)


def test_numbers_are_the_same_for_any_number_of_threads(compile_strictly: Compile) -> None:
    run = compile_strictly(lambda: (torch.rand(64, 1000), torch.randn(64, 1000)), parallel_threshold=16)
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            torch.manual_seed(1)
            results.append(run())
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert torch.equal(results[0][0], other[0])
        assert torch.equal(results[0][1], other[1])
