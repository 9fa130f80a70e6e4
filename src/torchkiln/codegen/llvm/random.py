"""Random numbers inside kernels: Philox-4x32-10 in vector instructions, and what distributions make of its words.

The numbers are defined in :mod:`torchkiln.graph.seeded`. A block of four words serves four elements (32-bit draws) or
two (64-bit draws). Where the lanes of a vector are neighbours that begin with a block, each block is computed once
and its words are dealt out; otherwise every lane computes its own block and takes its word, with the same result.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from torchkiln.codegen.llvm.math import math_function
from torchkiln.codegen.llvm.module import ModuleBuilder
from torchkiln.codegen.llvm.operations import Instructions, Value, register_type, splat_literal, vector_type
from torchkiln.graph.seeded import MULTIPLIERS, ROUNDS, WEYL

_WORD = 0xFFFFFFFF


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
    seed, stream = operands[0], operands[1]
    words = _words(f, seed, stream, place, elements_per_block(dtype))
    if name == "random_integer":
        return _integer(f, words, operands[2], place.lanes)
    if name == "random_normal":
        return _normal(f, words, place.lanes, dtype)
    return _fraction(f, words, place.lanes, dtype, is_open=name == "random_open")


@dataclass(frozen=True)
class _Words:
    """The words of each lane's block in order, as names of i32 vectors, and which elements of it the lanes are.

    ``mine`` are the words of the element itself: one, or two for 64-bit draws.
    """

    block: tuple[str, str, str, str]
    element: str
    mine: tuple[str, ...]


def _words(f: Instructions, seed: Value, stream: Value, place: Place, per_block: int) -> _Words:
    lanes = place.lanes
    if place.neighbours:
        blocks = lanes // per_block
        first = f.fresh(f"lshr i64 {place.index.ref}, {per_block.bit_length() - 1}")
        low, high = _counters(f, Value(first, torch.int64, 1), blocks)
        drawn = _philox(f, seed, stream, low, high, blocks)
        spread = [k // per_block for k in range(lanes)]
        block = _dealt(f, drawn, blocks, spread)
        element = "<" + ", ".join(f"i32 {k % per_block}" for k in range(lanes)) + ">"
    else:
        wide = place.index
        type_ = vector_type(register_type(wide.dtype), lanes)
        shift = splat_literal(register_type(wide.dtype), str(per_block.bit_length() - 1), lanes)
        numbers = Value(f.fresh(f"lshr {type_} {wide.ref}, {shift}"), wide.dtype, lanes)
        low, high = _halves(f, numbers)
        block = _philox(f, seed, stream, low, high, lanes)
        narrow = wide.ref if wide.dtype == torch.int32 else f.fresh(f"trunc {type_} {wide.ref} to {_words_type(lanes)}")
        element = f.fresh(f"and {_words_type(lanes)} {narrow}, {splat_literal('i32', str(per_block - 1), lanes)}")
    return _Words(block, element, _own_words(f, block, element, lanes, per_block))


def _own_words(
    f: Instructions, block: tuple[str, str, str, str], element: str, lanes: int, per_block: int
) -> tuple[str, ...]:
    """The words of each lane's own element, chosen by its number in the block."""
    type_ = _words_type(lanes)

    def bit(number: int) -> str:
        masked = f.fresh(f"and {type_} {element}, {splat_literal('i32', str(number), lanes)}")
        return f.fresh(f"icmp ne {type_} {masked}, {splat_literal('i32', '0', lanes)}")

    def choose(condition: str, yes: str, no: str) -> str:
        return f.fresh(f"select {vector_type('i1', lanes)} {condition}, {type_} {yes}, {type_} {no}")

    odd = bit(1)
    if per_block == 2:
        return choose(odd, block[2], block[0]), choose(odd, block[3], block[1])
    return (choose(bit(2), choose(odd, block[3], block[2]), choose(odd, block[1], block[0])),)


def _words_type(lanes: int) -> str:
    return vector_type("i32", lanes)


def _counters(f: Instructions, first: Value, count: int) -> tuple[str, str]:
    """The numbers ``first, first + 1, ...`` as low and high words."""
    steps = ", ".join(f"i64 {k}" for k in range(count))
    numbers = first
    if count > 1:
        wide = f.widen(first, count)
        numbers = Value(f.fresh(f"add {wide.operand}, <{steps}>"), torch.int64, count)
    return _halves(f, numbers)


def _halves(f: Instructions, numbers: Value) -> tuple[str, str]:
    lanes = numbers.lanes
    if numbers.dtype == torch.int32:
        return numbers.ref, splat_literal("i32", "0", lanes)
    low = f.fresh(f"trunc {numbers.operand} to {_words_type(lanes)}")
    shifted = f.fresh(f"lshr {numbers.operand}, {splat_literal('i64', '32', lanes)}")
    return low, f.fresh(f"trunc {vector_type('i64', lanes)} {shifted} to {_words_type(lanes)}")


def _dealt(
    f: Instructions, drawn: tuple[str, str, str, str], count: int, spread: list[int]
) -> tuple[str, str, str, str]:
    """Each word of the blocks repeated for every lane that shares the block."""
    lanes = len(spread)
    mask = f"<{lanes} x i32> <" + ", ".join(f"i32 {k}" for k in spread) + ">"

    def repeated(word: str) -> str:
        if count == 1:
            return f.widen(Value(word, torch.int32, 1), lanes).ref
        type_ = _words_type(count)
        return f.fresh(f"shufflevector {type_} {word}, {type_} poison, {mask}")

    a, b, c, d = (repeated(word) for word in drawn)
    return a, b, c, d


def _philox(f: Instructions, seed: Value, stream: Value, low: str, high: str, lanes: int) -> tuple[str, str, str, str]:
    """The blocks of ``lanes`` counters, a few registers at a time: the state is four words a lane."""
    most = max(1, f.module.target.vector_bits // 32)
    if lanes <= most:
        return _philox_call(f, seed, stream, low, high, lanes)
    parts = [
        _philox_call(f, seed, stream, _part(f, low, lanes, at, most), _part(f, high, lanes, at, most), most)
        for at in range(0, lanes, most)
    ]
    a, b, c, d = (_joined(f, [part[k] for part in parts], most) for k in range(4))
    return a, b, c, d


def _part(f: Instructions, value: str, lanes: int, at: int, count: int) -> str:
    type_ = _words_type(lanes)
    mask = ", ".join(f"i32 {k}" for k in range(at, at + count))
    return f.fresh(f"shufflevector {type_} {value}, {type_} poison, <{count} x i32> <{mask}>")


def _joined(f: Instructions, parts: list[str], count: int) -> str:
    while len(parts) > 1:
        mask = ", ".join(f"i32 {k}" for k in range(2 * count))
        type_ = _words_type(count)
        parts = [
            f.fresh(f"shufflevector {type_} {a}, {type_} {b}, <{2 * count} x i32> <{mask}>")
            for a, b in zip(parts[::2], parts[1::2], strict=True)
        ]
        count *= 2
    return parts[0]


def _philox_call(
    f: Instructions, seed: Value, stream: Value, low: str, high: str, lanes: int
) -> tuple[str, str, str, str]:
    symbol = _define_philox(f.module, lanes)
    type_ = _words_type(lanes)
    words = f"{{ {', '.join([type_] * 4)} }}"
    result = f.fresh(f"call {words} @{symbol}(i64 {seed.ref}, i64 {stream.ref}, {type_} {low}, {type_} {high})")
    a, b, c, d = (f.fresh(f"extractvalue {words} {result}, {k}") for k in range(4))
    return a, b, c, d


def _define_philox(module: ModuleBuilder, lanes: int) -> str:
    """Ten rounds on ``lanes`` counters; the stream is the third word of every counter, the seed the key."""
    symbol = f"kiln_philox_{lanes}"
    if module.has(symbol):
        return symbol
    type_, wide = _words_type(lanes), vector_type("i64", lanes)
    body = Instructions(module)

    def spread(word: str) -> str:
        return body.widen(Value(word, torch.int32, 1), lanes).ref

    def product(word: str, factor: int) -> tuple[str, str]:
        long = body.fresh(f"zext {type_} {word} to {wide}")
        whole = body.fresh(f"mul nuw {wide} {long}, {splat_literal('i64', str(factor), lanes)}")
        above = body.fresh(f"lshr {wide} {whole}, {splat_literal('i64', '32', lanes)}")
        return body.fresh(f"trunc {wide} {above} to {type_}"), body.fresh(f"trunc {wide} {whole} to {type_}")

    def mixed(a: str, b: str, key: str) -> str:
        return body.fresh(f"xor {type_} {body.fresh(f'xor {type_} {a}, {b}')}, {spread(key)}")

    keys = [body.fresh("trunc i64 %seed to i32"), body.fresh(f"trunc i64 {body.fresh('lshr i64 %seed, 32')} to i32")]
    c0, c1, c2, c3 = "%low", "%high", spread(body.fresh("trunc i64 %stream to i32")), splat_literal("i32", "0", lanes)
    for number in range(ROUNDS):
        high0, low0 = product(c0, MULTIPLIERS[0])
        high1, low1 = product(c2, MULTIPLIERS[1])
        c0, c1, c2, c3 = mixed(high1, c1, keys[0]), low1, mixed(high0, c3, keys[1]), low0
        if number < ROUNDS - 1:
            keys = [body.fresh(f"add i32 {key}, {_signed(step)}") for key, step in zip(keys, WEYL, strict=True)]
    words = f"{{ {', '.join([type_] * 4)} }}"
    result = "poison"
    for k, word in enumerate((c0, c1, c2, c3)):
        result = body.fresh(f"insertvalue {words} {result}, {type_} {word}, {k}")
    module.define(
        symbol,
        f"define internal {words} @{symbol}(i64 %seed, i64 %stream, {type_} %low, {type_} %high) #1 {{\n"
        + "\n".join(body.lines)
        + f"\n  ret {words} {result}\n}}",
    )
    return symbol


def _signed(word: int) -> int:
    return word - (1 << 32) if word >> 31 else word


# -- distributions --------------------------------------------------------------------------------------------------


def _fraction(f: Instructions, words: _Words, lanes: int, dtype: torch.dtype, *, is_open: bool) -> Value:
    if dtype == torch.float64:
        return _double_fraction(f, words.mine[0], words.mine[1], lanes, is_open=is_open)
    return _float_fraction(f, words.mine[0], lanes, bits=23 if is_open else 24, is_open=is_open)


def _float_fraction(f: Instructions, word: str, lanes: int, *, bits: int, is_open: bool) -> Value:
    """The top bits of a word as a fraction, in the middle of its step where zero must not come out."""
    type_ = _words_type(lanes)
    kept = word if bits == 32 else f.fresh(f"lshr {type_} {word}, {splat_literal('i32', str(32 - bits), lanes)}")
    number = f.make(f"uitofp {type_} {kept} to {vector_type('float', lanes)}", torch.float32, lanes)
    return _scaled(f, number, bits, is_open=is_open)


def _double_fraction(f: Instructions, low: str, high: str, lanes: int, *, is_open: bool) -> Value:
    bits = 52 if is_open else 53
    type_ = vector_type("i64", lanes)
    long = _joined_words(f, low, high, lanes)
    kept = f.fresh(f"lshr {type_} {long}, {splat_literal('i64', str(64 - bits), lanes)}")
    number = f.make(f"uitofp {type_} {kept} to {vector_type('double', lanes)}", torch.float64, lanes)
    return _scaled(f, number, bits, is_open=is_open)


def _scaled(f: Instructions, number: Value, bits: int, *, is_open: bool) -> Value:
    step = f.constant(2.0**-bits, number.dtype, number.lanes)
    if is_open:
        return f.intrinsic(
            "fma", [number, step, f.constant(2.0 ** -(bits + 1), number.dtype, number.lanes)], number.dtype
        )
    return f.make(f"fmul {number.operand}, {step.ref}", number.dtype, number.lanes)


def _joined_words(f: Instructions, low: str, high: str, lanes: int) -> str:
    type_, wide = _words_type(lanes), vector_type("i64", lanes)
    above = f.fresh(f"zext {type_} {high} to {wide}")
    moved = f.fresh(f"shl {wide} {above}, {splat_literal('i64', '32', lanes)}")
    return f.fresh(f"or {wide} {moved}, {f.fresh(f'zext {type_} {low} to {wide}')}")


def _normal(f: Instructions, words: _Words, lanes: int, dtype: torch.dtype) -> Value:
    """Radius and angle of Box and Muller; elements with an odd number are a quarter turn behind."""
    type_ = _words_type(lanes)
    a, b, c, d = words.block
    if dtype == torch.float64:
        radius = _double_fraction(f, a, b, lanes, is_open=True)
        turn = _double_fraction(f, c, d, lanes, is_open=False)
    else:
        second = f.fresh(f"and {type_} {words.element}, {splat_literal('i32', '2', lanes)}")
        later = f.fresh(f"icmp ne {type_} {second}, {splat_literal('i32', '0', lanes)}")
        mask = vector_type("i1", lanes)
        radius_word = f.fresh(f"select {mask} {later}, {type_} {c}, {type_} {a}")
        angle_word = f.fresh(f"select {mask} {later}, {type_} {d}, {type_} {b}")
        radius = _float_fraction(f, radius_word, lanes, bits=32, is_open=True)
        turn = _float_fraction(f, angle_word, lanes, bits=24, is_open=False)
    odd = f.fresh(f"and {type_} {words.element}, {splat_literal('i32', '1', lanes)}")
    is_odd = Value(f.fresh(f"icmp ne {type_} {odd}, {splat_literal('i32', '0', lanes)}"), torch.bool, lanes)
    behind = f.make(f"fsub {turn.operand}, {f.constant(0.25, dtype, lanes).ref}", dtype, lanes)
    turn = f.select(is_odd, behind, turn)
    angle = f.make(f"fmul {turn.operand}, {f.constant(2 * math.pi, dtype, lanes).ref}", dtype, lanes)
    logarithm = _math(f, "log", radius)
    twice = f.make(f"fmul {logarithm.operand}, {f.constant(-2.0, dtype, lanes).ref}", dtype, lanes)
    length = f.intrinsic("sqrt", [twice], dtype)
    cosine = _math(f, "cos", angle)
    return f.make(f"fmul {length.operand}, {cosine.ref}", dtype, lanes)


def _math(f: Instructions, name: str, value: Value) -> Value:
    symbol = math_function(f.module, name, register_type(value.dtype), value.lanes)
    return f.make(f"call {value.type} {symbol}({value.operand})", value.dtype, value.lanes)


def _integer(f: Instructions, words: _Words, size: Value, lanes: int) -> Value:
    """The high half of the product of 64 random bits and the size of the range, from products of words."""
    type_, wide = _words_type(lanes), vector_type("i64", lanes)
    low, high = (f.fresh(f"zext {type_} {word} to {wide}") for word in words.mine)
    range_size = int(size.ref) & 0xFFFFFFFFFFFFFFFF
    size_low, size_high = range_size & _WORD, range_size >> 32

    def times(word: str, factor: int) -> str:
        return f.fresh(f"mul {wide} {word}, {splat_literal('i64', str(factor), lanes)}")

    def add(a: str, b: str) -> str:
        return f.fresh(f"add {wide} {a}, {b}")

    def above(value: str) -> str:
        return f.fresh(f"lshr {wide} {value}, {splat_literal('i64', '32', lanes)}")

    def below(value: str) -> str:
        return f.fresh(f"and {wide} {value}, {splat_literal('i64', str(_WORD), lanes)}")

    first = times(high, size_low)
    carried = add(first, above(times(low, size_low)))  # below 2**64: (2**32 - 1)**2 + 2**32 - 1
    result = above(carried)
    if size_high:
        middle = times(low, size_high)
        result = add(result, add(times(high, size_high), above(add(below(carried), middle))))
    return Value(result, torch.int64, lanes)
