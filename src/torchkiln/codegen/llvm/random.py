"""Random numbers inside kernels: Philox-4x32-10 in vector instructions, and what distributions make of its words.

The numbers are defined in :mod:`torchkiln.graph.seeded`. A block of four words serves four elements (32-bit draws) or
two (64-bit draws). Where lanes are neighbours that begin with a block, each block is computed once; otherwise every
lane computes its own block, with the same result.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from torchkiln.codegen.llvm.instructions import Register, join_lanes, take_lanes, vector_type
from torchkiln.codegen.llvm.module import ModuleBuilder
from torchkiln.codegen.llvm.operations import Instructions, Value, apply, register_type
from torchkiln.graph.seeded import MULTIPLIERS, ROUNDS, WEYL

_WORD = 0xFFFFFFFF
_Block = tuple[Register, Register, Register, Register]


def elements_per_block(dtype: torch.dtype) -> int:
    """How many neighbouring elements share one block of four words."""
    return 2 if dtype.itemsize == 8 else 4


@dataclass(frozen=True)
class Place:
    """Where the elements to draw lie. ``index`` is the element of each lane, as int32 or int64 values; with
    ``neighbours`` it is the one of lane 0, scalar, the others follow it and lane 0 begins a block.
    """

    index: Value
    lanes: int
    neighbours: bool


def draw(f: Instructions, name: str, operands: Sequence[Value], place: Place, dtype: torch.dtype) -> Value:
    """Emit random operation ``name``. ``operands``: the seed, the stream and, for integers, the size of the range."""
    words = _words(f, operands[0], operands[1], place, elements_per_block(dtype))
    if name == "random_integer":
        return _integer(words, operands[2], place.lanes)
    if name == "random_normal":
        return _normal(f, words, place.lanes, dtype)
    is_open = name == "random_open"
    if dtype == torch.float64:
        return _fraction(f, _long(*words.mine), place.lanes, 52 if is_open else 53, is_open=is_open)
    return _fraction(f, words.mine[0], place.lanes, 23 if is_open else 24, is_open=is_open)


@dataclass(frozen=True)
class _Words:
    """The words of each lane's block in order, and which elements of it the lanes are.

    ``mine`` are the words of the element itself: one, or two for 64-bit draws.
    """

    block: _Block
    element: Register
    mine: tuple[Register, ...]


def _words(f: Instructions, seed: Value, stream: Value, place: Place, per_block: int) -> _Words:
    lanes, type_ = place.lanes, vector_type("i32", place.lanes)
    index = f.register(place.index)
    numbers = index >> per_block.bit_length() - 1
    if place.neighbours:
        count = lanes // per_block
        if count > 1:
            steps = ", ".join(f"i64 {k}" for k in range(count))
            first = f.widen(Value(numbers.name, torch.int64, 1), count)
            numbers = f.result(first.type, f"add {first.operand}, <{steps}>")
        block = _repeated(f, _philox(f, seed, stream, numbers, count), count, per_block)
        element = Register(f, type_, f"<{', '.join(f'i32 {k % per_block}' for k in range(lanes))}>")
    else:
        block = _philox(f, seed, stream, numbers, lanes)
        narrow = index if index.type == type_ else index.convert("trunc", type_)
        element = narrow & per_block - 1
    odd = (element & 1).ne(0)
    if per_block == 2:
        return _Words(block, element, (odd.select(block[2], block[0]), odd.select(block[3], block[1])))
    second = (element & 2).ne(0)
    return _Words(block, element, (second.select(odd.select(block[3], block[2]), odd.select(block[1], block[0])),))


def _repeated(f: Instructions, block: _Block, count: int, times: int) -> _Block:
    """Each word of the blocks repeated for every lane that shares the block."""
    type_, lanes = vector_type("i32", count * times), [k // times for k in range(count * times)]

    def repeated(word: Register) -> Register:
        if count == 1:
            return Register(f, type_, f.widen(Value(word.name, torch.int32, 1), times).ref)
        return Register(f, type_, take_lanes(f, "i32", count, word.name, lanes))

    a, b, c, d = map(repeated, block)
    return a, b, c, d


def _philox(f: Instructions, seed: Value, stream: Value, counters: Register, lanes: int) -> _Block:
    """The blocks of ``lanes`` counters, a few registers at a time: the state is four words a lane."""
    type_, most = vector_type("i32", lanes), max(1, f.module.target.vector_bits // 32)
    if counters.type == type_:
        low, high = counters, f.literal(type_, 0)
    else:
        low, high = counters.convert("trunc", type_), (counters >> 32).convert("trunc", type_)
    if lanes <= most:
        a, b, c, d = _philox_call(f, seed, stream, low.name, high.name, lanes)
    else:
        parts = []
        for at in range(0, lanes, most):
            low_part, high_part = (take_lanes(f, "i32", lanes, h.name, range(at, at + most)) for h in (low, high))
            parts.append(_philox_call(f, seed, stream, low_part, high_part, most))
        a, b, c, d = (join_lanes(f, "i32", most, words) for words in zip(*parts, strict=True))
    return Register(f, type_, a), Register(f, type_, b), Register(f, type_, c), Register(f, type_, d)


def _philox_call(f: Instructions, seed: Value, stream: Value, low: str, high: str, lanes: int) -> list[str]:
    symbol, type_ = _define_philox(f.module, lanes), vector_type("i32", lanes)
    words = f"{{ {', '.join([type_] * 4)} }}"
    result = f.fresh(f"call {words} @{symbol}(i64 {seed.ref}, i64 {stream.ref}, {type_} {low}, {type_} {high})")
    return [f.fresh(f"extractvalue {words} {result}, {k}") for k in range(4)]


def _define_philox(module: ModuleBuilder, lanes: int) -> str:
    """Ten rounds on ``lanes`` counters; the stream is the third word of every counter, the seed the key."""
    symbol = f"kiln_philox_{lanes}"
    if module.has(symbol):
        return symbol
    type_, wide = vector_type("i32", lanes), vector_type("i64", lanes)
    body = Instructions(module)
    seed, stream = (Register(body, "i64", name) for name in ("%seed", "%stream"))
    low, high = (Register(body, type_, name) for name in ("%low", "%high"))

    def spread(word: Register) -> Register:
        return Register(body, type_, body.widen(Value(word.name, torch.int32, 1), lanes).ref)

    def multiplied(word: Register, factor: int) -> tuple[Register, Register]:
        whole = word.convert("zext", wide).binary("mul nuw", factor)
        return (whole >> 32).convert("trunc", type_), whole.convert("trunc", type_)

    keys = [seed.convert("trunc", "i32"), (seed >> 32).convert("trunc", "i32")]
    c0, c1, c2, c3 = low, high, spread(stream.convert("trunc", "i32")), body.literal(type_, 0)
    for number in range(ROUNDS):
        high0, low0 = multiplied(c0, MULTIPLIERS[0])
        high1, low1 = multiplied(c2, MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ spread(keys[0]), low1, high0 ^ c3 ^ spread(keys[1]), low0
        if number < ROUNDS - 1:
            keys = [key + _signed(step) for key, step in zip(keys, WEYL, strict=True)]
    words = f"{{ {', '.join([type_] * 4)} }}"
    result = "poison"
    for k, word in enumerate((c0, c1, c2, c3)):
        result = body.fresh(f"insertvalue {words} {result}, {word}, {k}")
    parameters = ", ".join(map(str, (seed, stream, low, high)))
    text = "\n".join((*body.lines, f"  ret {words} {result}"))
    module.define(symbol, f"define internal {words} @{symbol}({parameters}) #1 {{\n{text}\n}}")
    return symbol


def _signed(word: int) -> int:
    return word - (1 << 32) if word >> 31 else word


# -- distributions --------------------------------------------------------------------------------------------------


def _long(low: Register, high: Register) -> Register:
    """Two words as one of 64 bits."""
    wide = low.type.replace("i32", "i64")
    return (high.convert("zext", wide) << 32) | low.convert("zext", wide)


def _fraction(f: Instructions, word: Register, lanes: int, bits: int, *, is_open: bool) -> Value:
    """The top bits of a word as a fraction, in the middle of its step where zero must not come out."""
    dtype = torch.float64 if "i64" in word.type else torch.float32
    dropped = 8 * dtype.itemsize - bits
    kept = word >> dropped if dropped else word
    number = Value(kept.convert("uitofp", vector_type(register_type(dtype), lanes)).name, dtype, lanes)
    step = f.constant(2.0**-bits, dtype, lanes)
    if is_open:
        return f.intrinsic("fma", [number, step, f.constant(2.0 ** -(bits + 1), dtype, lanes)], dtype)
    return f.binary("fmul", number, step)


def _normal(f: Instructions, words: _Words, lanes: int, dtype: torch.dtype) -> Value:
    """Radius and angle of Box and Muller; elements with an odd number are a quarter turn behind."""
    a, b, c, d = words.block
    if dtype == torch.float64:
        radius = _fraction(f, _long(a, b), lanes, 52, is_open=True)
        turn = _fraction(f, _long(c, d), lanes, 53, is_open=False)
    else:
        later = (words.element & 2).ne(0)
        radius_word, angle_word = later.select(c, a), later.select(d, b)
        radius = _fraction(f, radius_word, lanes, 32, is_open=True)
        turn = _fraction(f, angle_word, lanes, 24, is_open=False)
    odd = Value((words.element & 1).ne(0).name, torch.bool, lanes)
    turn = f.select(odd, f.binary("fsub", turn, f.constant(0.25, dtype, lanes)), turn)
    angle = f.binary("fmul", turn, f.constant(2 * math.pi, dtype, lanes))
    twice = f.binary("fmul", apply(f, "log", [radius], dtype), f.constant(-2.0, dtype, lanes))
    length = f.intrinsic("sqrt", [twice], dtype)
    return f.binary("fmul", length, apply(f, "cos", [angle], dtype))


def _integer(words: _Words, size: Value, lanes: int) -> Value:
    """The high half of the product of 64 random bits and the size of the range, from products of words."""
    low, high = (word.convert("zext", word.type.replace("i32", "i64")) for word in words.mine)
    size_high, size_low = divmod(int(size.ref) & 0xFFFFFFFFFFFFFFFF, 1 << 32)
    carried = high * size_low + (low * size_low >> 32)  # below 2**64: (2**32 - 1)**2 + 2**32 - 1
    result = carried >> 32
    if size_high:
        middle = low * size_high
        result = result + (high * size_high + ((carried & _WORD) + middle >> 32))
    return Value(result.name, torch.int64, lanes)
