"""Random operators that are pure functions of a seed: ``torch.ops.kiln.random`` and ``torch.ops.kiln.randint``.

Numbers come from Philox-4x32-10 (Salmon, Moraes, Dror and Shaw: Parallel Random Numbers: As Easy as 1, 2, 3). The key
is the seed. The counter is an element's place in its tensor and ``stream``, the number of the random operator in its
graph: element k is a function of (seed, stream, k) alone.

These implementations with tensor operations are the definition. They serve graphs that are run as they are, and tests;
kernels come from :mod:`torchkiln.codegen.llvm.random`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache

import torch

from torchkiln.graph.dtypes import HALF
from torchkiln.graph.fake import inverse_order

# Written by hand rather than taken from annotations: the text is what graphs, caches and error messages show.
_SCHEMAS = {
    "random": "(Tensor seed, int stream, str distribution, SymInt[] size, int[]? order, ScalarType dtype, "
    "float scale=1.0, float shift=0.0) -> Tensor",
    "randint": "(Tensor seed, int stream, int low, int high, SymInt[] size, int[]? order) -> Tensor",
}

_WORD = 0xFFFFFFFF
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10

Words = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def philox(counter: Words, key: tuple[int, int]) -> Words:
    """Philox-4x32-10: four words for every counter. Words are int64 tensors with values in [0, 2**32)."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        high0, low0 = _product(c0, MULTIPLIERS[0])
        high1, low1 = _product(c2, MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + WEYL[0]) & _WORD, (k1 + WEYL[1]) & _WORD
    return c0, c1, c2, c3


def _product(value: torch.Tensor, factor: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The high and the low word of a product. int64 multiplication wraps, which leaves every bit in its place."""
    product = value * factor
    return (product >> 32) & _WORD, product & _WORD


def random(
    seed: torch.Tensor,
    stream: int,
    distribution: str,
    size: Sequence[int],
    order: Sequence[int] | None,
    dtype: torch.dtype,
    scale: float = 1.0,
    shift: float = 0.0,
) -> torch.Tensor:
    """``scale * draw + shift``, rounded once. ``order`` lists the dimensions from the largest stride to the smallest
    (None: row-major); it changes where elements lie in memory, not their values.
    """
    inner = torch.float64 if dtype == torch.float64 else torch.float32
    value = _DRAWS[distribution](seed, stream, math.prod(size), inner)
    if dtype in HALF and distribution != "normal":
        steps, middle = coarse_grid(dtype, distribution)
        value = (torch.floor(value * steps) + middle) / steps
    if scale != 1 or shift != 0:
        factor, term = (float(torch.tensor(number, dtype=inner)) for number in (scale, shift))
        value = (value.double() * factor + term).to(inner)
    return _laid_out(value.to(dtype).reshape(tuple(size)), order)


def coarse_grid(dtype: torch.dtype, distribution: str) -> tuple[float, float]:
    """The steps of [0, 1), or (0, 1), that a half type holds exactly, and where in a step its number lies.

    As many steps as its precision tells apart, so that nothing is rounded up to 1; half of them for their middles.
    """
    steps = 2.0 / torch.finfo(dtype).eps
    return (steps / 2, 0.5) if distribution == "open" else (steps, 0.0)


def randint(
    seed: torch.Tensor, stream: int, low: int, high: int, size: Sequence[int], order: Sequence[int] | None
) -> torch.Tensor:
    """Integers of [low, high): the high half of the 128-bit product of 64 random bits and ``high - low``.

    No value is more likely than another by more than (high - low) / 2**64, and never a whole range than another.
    """
    lo, hi = _pairs(seed, stream, math.prod(size))
    value = _multiply_high(hi, lo, high - low) + low
    return _laid_out(value.reshape(tuple(size)), order)


def _multiply_high(hi: torch.Tensor, lo: torch.Tensor, factor: int) -> torch.Tensor:
    f_hi, f_lo = factor >> 32, factor & _WORD
    cross1, carry1 = _product(hi, f_lo)
    cross2, carry2 = _product(lo, f_hi)
    middle = carry1 + carry2 + _product(lo, f_lo)[0]
    return hi * f_hi + cross1 + cross2 + (middle >> 32)


def _blocks(seed: torch.Tensor, stream: int, count: int) -> Words:
    place = torch.arange(count, dtype=torch.int64)
    bits = int(seed.reshape(-1)[0].item())
    counter = (place & _WORD, place >> 32, torch.full_like(place, stream & _WORD), torch.zeros_like(place))
    return philox(counter, (bits & _WORD, (bits >> 32) & _WORD))


def _words(seed: torch.Tensor, stream: int, count: int) -> torch.Tensor:
    """One word an element: four elements share a block."""
    return torch.stack(_blocks(seed, stream, -(-count // 4)), dim=1).reshape(-1)[:count]


def _pairs(seed: torch.Tensor, stream: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Two words an element, low and high: two elements share a block."""
    words = torch.stack(_blocks(seed, stream, -(-count // 2)), dim=1).reshape(-1, 2)[:count]
    return words[:, 0], words[:, 1]


def _fraction(high: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    """A float64 of [0, 1) with the 53 highest bits of two words."""
    return ((high << 21) | (low >> 11)).double() * 2.0**-53


def _open_fraction(high: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    """A float64 of (0, 1) with the 52 highest bits of two words."""
    return (((high << 20) | (low >> 12)).double() + 0.5) * 2.0**-52


def _uniform(seed: torch.Tensor, stream: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    if dtype == torch.float64:
        low, high = _pairs(seed, stream, count)
        return _fraction(high, low)
    return (_words(seed, stream, count) >> 8).float() * 2.0**-24


def _open(seed: torch.Tensor, stream: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    if dtype == torch.float64:
        low, high = _pairs(seed, stream, count)
        return _open_fraction(high, low)
    return ((_words(seed, stream, count) >> 9).float() + 0.5) * 2.0**-23


def _normal(seed: torch.Tensor, stream: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Box and Muller's transform: a radius and an angle for every two elements, which are its cosine and its sine."""
    pairs = -(-count // 2)
    if dtype == torch.float64:
        c0, c1, c2, c3 = _blocks(seed, stream, pairs)
        radius, angle = _open_fraction(c1, c0), _fraction(c3, c2)
    else:
        words = _words(seed, stream, 2 * pairs).reshape(-1, 2)
        # All 32 bits: the tail reaches 6.7 standard deviations, and the logarithm is never of zero.
        radius = words[:, 0].float() * 2.0**-32 + 2.0**-33
        angle = (words[:, 1] >> 8).float() * 2.0**-24
    radius = torch.sqrt(-2 * torch.log(radius))
    phases = torch.stack([angle, angle - 0.25], dim=1)
    return (radius[:, None] * torch.cos(2 * math.pi * phases)).reshape(-1)[:count]


# uniform: [0, 1). open: (0, 1), for taking logarithms of. normal: mean 0, standard deviation 1.
_DRAWS = {"uniform": _uniform, "open": _open, "normal": _normal}


def _laid_out(value: torch.Tensor, order: Sequence[int] | None) -> torch.Tensor:
    if order is None:
        return value
    result = _empty(tuple(value.shape), order, value.dtype, value.device)
    return result.copy_(value)


def _empty(
    size: Sequence[int], order: Sequence[int] | None, dtype: torch.dtype, device: torch.device | str
) -> torch.Tensor:
    if order is None:
        return torch.empty(tuple(size), dtype=dtype, device=device)
    return torch.empty([size[d] for d in order], dtype=dtype, device=device).permute(inverse_order(order))


def _fake_random(
    seed: torch.Tensor,
    _stream: int,
    _distribution: str,
    size: Sequence[int],
    order: Sequence[int] | None,
    dtype: torch.dtype,
    *_scale_and_shift: float,
) -> torch.Tensor:
    return _empty(size, order, dtype, seed.device)


def _fake_randint(
    seed: torch.Tensor, _stream: int, _low: int, _high: int, size: Sequence[int], order: Sequence[int] | None
) -> torch.Tensor:
    return _empty(size, order, torch.int64, seed.device)


@cache
def _library() -> torch.library.Library:
    """The registration, which lives as long as the process."""
    library = torch.library.Library("kiln", "FRAGMENT")
    for name, implementation, fake in (("random", random, _fake_random), ("randint", randint, _fake_randint)):
        library.define(name + _SCHEMAS[name], tags=(torch.Tag.pt2_compliant_tag,))
        library.impl(name, implementation, "CPU")
        torch.library.register_fake(f"kiln::{name}", fake, lib=library)
    return library


_library()
RANDOM: torch._ops.OpOverload = torch.ops.kiln.random.default
RANDINT: torch._ops.OpOverload = torch.ops.kiln.randint.default
SEEDED = frozenset({RANDOM, RANDINT})
"""The operators whose results a seed reproduces."""
