"""Running sums and products, along rows or across them, forward or backward.

Memory is seen as ``outer`` times ``length`` times ``inner`` elements, and ``length`` is walked. Numbers are accumulated
one after the other in the type eager accumulates in, so results are eager's to the bit.

- Along rows (``inner`` is 1) each addition waits for the one before. Rows lie in lanes, transposed square by square;
  where their elements are apart or wide, and for the last rows, four at once keep the processor busy. Rows that are
  read may lie anywhere, equally far apart; results, and what is read across rows, are row-major.
- Across rows, sums of a block of columns wait in memory that stays in the nearest cache, and rows are read in order.

Microseconds of 768 x 1024 numbers, one thread of a busy Zen 5, torch's operator, here four rows at once, and in
squares: sums along rows of float32 620, 330, 190, of bfloat16 710, 710, 145; across rows of float32 4,700 and 100.
"""

from __future__ import annotations

from functools import partial

import torch

from torchkiln.codegen.llvm.functions import Function, NativeFunction, Register, native
from torchkiln.codegen.llvm.operations import Value, convert, memory_type, register_type
from torchkiln.codegen.llvm.transpose import transposed

# Of an element, and what it is accumulated in.
ACCUMULATED = {
    torch.float32: torch.float64,
    torch.float64: torch.float64,
    torch.bfloat16: torch.float32,
    torch.int64: torch.int64,
}
REDUCERS = ("sum", "prod")
BLOCK = 512
"""Columns whose sums are kept at once: 4 KiB."""
_ROWS = 4
_LANES = 8
_WORD = 4  # bytes of what a square has as many rows of as fill a register
# Rows of a square for each byte of an element from which on squares pay. (Sums of 768 x 1024, µs of four rows at once
# and of squares, Zen 5: float32 with AVX-512 287 and 150, with AVX2 287 and 310; bfloat16 650 and 115, 640 and 270.
# Numbers of 8 bytes leave the processor waiting for memory either way.)
_ROWS_PER_BYTE = 4
_INSTRUCTIONS = {("sum", True): "fadd", ("prod", True): "fmul", ("sum", False): "add", ("prod", False): "mul"}


def scan_function(reducer: str, dtype: torch.dtype, *, across: bool) -> str:
    """The name of ``void (i64 begin, i64 end, ptr context)`` for rows, or ``across`` for blocks of columns.

    The context: pointers to what is read and written, ``length``, ``inner``, 1 where it runs from the end, else 0, and
    how far apart rows and elements of a row are that are read.
    """
    return f"kiln_{reducer}_{'across' if across else 'along'}_rows_{str(dtype).removeprefix('torch.')}"


class _Scan:
    """One reducer and dtype: how elements are read, accumulated and stored, one at a time or in lanes."""

    def __init__(self, f: Function, reducer: str, dtype: torch.dtype) -> None:
        self.f, self.dtype, self.accumulated = f, dtype, ACCUMULATED[dtype]
        self.memory = memory_type(dtype)
        self.instruction = _INSTRUCTIONS[reducer, self.accumulated.is_floating_point]
        self.start = f.constant(int(reducer == "prod"), self.accumulated).ref

    @property
    def register(self) -> str:
        return register_type(self.accumulated)

    def step(self, total: Register, source: Register, target: Register, lanes: int = 1) -> None:
        """Accumulate the element, or the lanes, at ``source`` in ``total``, and store it at ``target``."""
        f, align = self.f, self.dtype.itemsize
        kind = self.memory if lanes == 1 else f"<{lanes} x {self.memory}>"
        read = Value(f.fresh(f"load {kind}, {source}, align {align}"), self.dtype, lanes)
        new = f.register(convert(f, read, self.accumulated))
        wide = self.register if lanes == 1 else f"<{lanes} x {self.register}>"
        width = self.accumulated.itemsize
        before = f.result(wide, f"load {wide}, {total}, align {width}")
        after = before.binary(self.instruction, new)
        f.emit(f"store {after}, {total}, align {width}")
        stored = convert(f, Value(after.name, self.accumulated, lanes), self.dtype)
        f.emit(f"store {kind} {stored.ref}, {target}, align {align}")


def _along_rows(
    reducer: str, dtype: torch.dtype, f: Function, begin: Register, end: Register, context: Register
) -> None:
    scan = _Scan(f, reducer, dtype)
    source, target = (context.cast("ptr*")[k].cast(f"{scan.memory}*") for k in range(2))
    length, step, first = _direction(context)
    pitch, apart = context[5], context[6]

    def rows(row: Register, count: int) -> None:
        totals = [f.alloca(scan.register, align=8) for _ in range(count)]
        for total in totals:
            f.emit(f"store {scan.register} {scan.start}, {total}")
        with f.loop(length) as i:
            for k, total in enumerate(totals):
                column = first + i * step
                read = source.at((row + k) * pitch + column * apart)
                scan.step(total, read, target.at((row + k) * length + column))

    in_tiles = begin
    if _side(f) >= _ROWS_PER_BYTE * dtype.itemsize:
        in_tiles = begin + apart.eq(1).select((end - begin) & -_side(f), 0)
        with f.loop(in_tiles, begin, step=_side(f)) as row:
            _rows_in_tiles(scan, context, row, source, target)
    together = in_tiles + ((end - in_tiles) & -_ROWS)
    with f.loop(together, in_tiles, step=_ROWS) as row:
        rows(row, _ROWS)
    with f.loop(end, together) as row:
        rows(row, 1)


def _side(f: Function) -> int:
    """Rows and columns of a square: as many words as fill a register."""
    return f.module.target.vector_bits // (8 * _WORD)


def _transpose(dtype: torch.dtype) -> NativeFunction:
    """``void (square, elements between its rows, where it goes, elements between rows there)``."""
    memory = memory_type(dtype)

    def write(f: Function, source: Register, apart: Register, target: Register, there: Register) -> None:
        side = _side(f)
        wide, numbers = f"<{side} x {memory}>", [f.literal("i64", k) for k in range(side)]
        values = [f.fresh(f"load {wide}, {source.at(k * apart)}, align {dtype.itemsize}") for k in numbers]
        for k, value in zip(numbers, transposed(f, values, memory), strict=True):
            f.emit(f"store {wide} {value}, {target.at(k * there)}, align {dtype.itemsize}")

    # Not inline: this module is compiled in 155 ms so, in 195 with eight copies.
    prototype = f"void kiln_transpose_{memory}({memory}*, i64, {memory}*, i64)"
    return native(prototype, attributes="noinline")(write)


def _rows_in_tiles(scan: _Scan, context: Register, row: Register, source: Register, target: Register) -> None:
    """Rows from ``row`` on, each in a lane: squares are transposed, accumulated, and transposed back."""
    f, side, transpose = scan.f, _side(scan.f), _transpose(scan.dtype)
    length, step, first = _direction(context)
    backward, pitch = context[4], context[5]
    source, target = source.at(row * pitch), target.at(row * length)
    accumulated = f"<{side} x {scan.register}>"
    square, totals = f.alloca(scan.memory, side * side, align=64), f.alloca(accumulated, align=64)
    splat = ", ".join([f"{scan.register} {scan.start}"] * side)
    f.emit(f"store {accumulated} <{splat}>, {totals}")
    whole = length & -side
    with f.loop(whole, step=side) as i:
        left = i * step + backward * (length - side)
        f.call(transpose, source.at(left), pitch, square, side)
        with f.loop(f.literal("i64", side)) as k:
            column = square.at((k * step + backward * (side - 1)) * side)
            scan.step(totals, column, column, side)
        f.call(transpose, square, side, target.at(left), length)
    rest = f.alloca(scan.register, side, align=64)
    f.emit(f"store {f.result(accumulated, f'load {accumulated}, {totals}')}, {rest}")
    with f.loop(length, whole) as i, f.loop(f.literal("i64", side)) as k:
        column = first + i * step
        scan.step(rest.at(k), source.at(k * pitch + column), target.at(k * length + column))


def _across_rows(
    reducer: str, dtype: torch.dtype, f: Function, begin: Register, end: Register, context: Register
) -> None:
    scan = _Scan(f, reducer, dtype)
    source, target = (context.cast("ptr*")[k].cast(f"{scan.memory}*") for k in range(2))
    inner = context[3]
    length, step, first = _direction(context)
    totals = f.alloca(scan.register, BLOCK, align=64)
    blocks = (inner + (BLOCK - 1)).udiv(BLOCK)
    with f.loop(end, begin) as block:
        column = block.urem(blocks) * BLOCK
        width = (inner - column).min(f.literal("i64", BLOCK))
        in_lanes = width & -_LANES
        with f.loop(width) as c:
            f.emit(f"store {scan.register} {scan.start}, {totals.at(c)}")
        with f.loop(length) as i:
            place = (block.udiv(blocks) * length + first + i * step) * inner + column
            with f.loop(in_lanes, step=_LANES) as c:
                scan.step(totals.at(c), source.at(place + c), target.at(place + c), _LANES)
            with f.loop(width, in_lanes) as c:
                scan.step(totals.at(c), source.at(place + c), target.at(place + c))


def _direction(context: Register) -> tuple[Register, Register, Register]:
    """The length, and the step and the first place along it."""
    length, backward = context[2], context[4]
    return length, backward * -2 + 1, backward * (length - 1)


def _exports() -> tuple[NativeFunction, ...]:
    writers = {False: _along_rows, True: _across_rows}
    return tuple(
        native(f"void {scan_function(reducer, dtype, across=across)}(i64, i64, i64*)", exported=True)(
            partial(writer, reducer, dtype)
        )
        for reducer in REDUCERS
        for dtype in ACCUMULATED
        for across, writer in writers.items()
    )


EXPORTS = _exports()
