"""Small matmuls of bfloat16 matrices of symbolic shapes, into the memory of a bfloat16 result.

BLAS multiplies block by block into float32 memory on the stack, where the addend is added and the sum is rounded while
the block is in the cache. Sizes that this does not pay for are left to the caller, which has torch's operator for them.
Microseconds of one thread on a busy machine, the second matrix transposed; a batch is made ready for once by oneDNN:

| M x K x N, or batch x M x K x N | operator | here |
|---|---|---|
| 1 x 17 x 64 | 4.1 | 1.7 |
| 32 x 64 x 64 | 54 | 11 |
| 512 x 128 x 64 | 75 | 48 |
| 512 x 512 x 32 | 85 | 63 |
| 512 x 128 x 128 | 71 | 69 |
| 1 x 4096 x 4096 | 4600 | 1900 |
| 128 x 512 x 512 | 208 | 241 |
| 2048 x 32 x 256 | 88 | 304 |
| 16 x 64 x 64 x 32 | 82 | 54 |
| 64 x 64 x 32 x 64 | 186 | 268 |
| 256 x 16 x 16 x 16 | 153 | 303 |

Up to how many multiplications is a matter of the processor (``lowering/matmul.py``): on a Zen 5 a graph of symbolic
sizes took 193 µs here for 128 x 256 x 256, and takes 69 by the operator.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from torchkiln.codegen.llvm.functions import Function, Register, native
from torchkiln.codegen.llvm.instructions import suffix
from torchkiln.codegen.llvm.operations import Value, convert
from torchkiln.ir.matrices import MOST
from torchkiln.native.blas import ALONE, BF16_GEMM, SET_THREADS, SHARE

SMALL_MATMUL = "kiln_small_matmul"

# Elements of the result and matmuls of a batch above which torch's operator is as fast.
MOST_ELEMENTS, MOST_MATMULS = 2**16, 32
# Elements of a block, 64 KiB of stack, and the rows that it has where there are as many: BLAS reads all of the second
# matrix for each block of rows.
_BLOCK, _BLOCK_ROWS = 2**14, 64
_LANES = 16
_FLOATS, _WORDS, _HALVES = (f"<{_LANES} x {kind}>" for kind in ("float", "i32", "i16"))

NUMBERS = (
    *("batch", "rows", "columns", "terms", "left_by_rows", "left_step", "left_batch"),
    *("right_by_rows", "right_step", "right_batch", "out_row", "out_batch"),
    *("addend_row", "addend_column", "addend_batch", "alpha", "beta", "most_work", "most_work_of_one"),
)
"""What the numbers handed to the function are, in order.

A factor has contiguous rows (1) or columns (0), which begin ``step`` elements apart. Rows of the result are contiguous.
The addend has a stride of 1 or 0 along its columns. ``alpha`` and ``beta`` are the bits of float32.
``most_work`` are the multiplications up to which the target's BLAS is faster, and those with one row or one column.
"""

# What blocks are given: pointers, then what is known once sizes are.
_POINTERS = ("left", "right", "out", "addend", "numbers")
_CONTEXT = (*_POINTERS, "left_step", "right_step", "height", "width", "down", "across")


@native(f"i32 {SMALL_MATMUL}(ptr, ptr, ptr, ptr, i64*, i64)", exported=True)
def _small_matmul(
    f: Function, left: Register, right: Register, out: Register, addend: Register, numbers: Register, threads: Register
) -> None:
    """Multiply and answer 0, or answer 1 where sizes are not for this.

    ``addend`` may be null, and ``threads``, the most that may be used, 0 for as many as there are.
    """
    given = _named(numbers, NUMBERS)
    batch, rows, columns, terms = (given[name] for name in ("batch", "rows", "columns", "terms"))
    work, steps = _require_small(f, given)
    most_rows = f.literal("i64", _BLOCK).udiv(columns)
    height = rows.min(most_rows.max(f.literal("i64", _BLOCK_ROWS)))
    width = columns.min(f.literal("i64", _BLOCK).udiv(height))
    down, across = _ceil_divide(rows, height), _ceil_divide(columns, width)
    count = down * across * batch
    context = f.alloca("i64", len(_CONTEXT))
    for k, value in enumerate((left, right, out, addend, numbers, *steps, height, width, down, across)):
        context.cast(f"{value.type}*")[k] = value
    with f.if_((work <= ALONE) | threads.eq(1)):
        f.call(_blocks, 0, count, context)
        f.ret(0)
    grain = f.literal("i64", SHARE).udiv(height * width * terms) + 1
    share = _ceil_divide(count, threads.eq(0).select(count, threads))
    f.ret(f.call("torch_parallel_for", 0, count, share.max(grain), f.address(_blocks), context))


def _require_small(f: Function, given: Mapping[str, Register]) -> tuple[Register, list[Register]]:
    """Return 1 from the function where the matmul is not small; its multiplications, and the steps of its factors."""

    def require(condition: Register) -> None:
        with f.if_(~condition):
            f.ret(1)

    sizes = batch, rows, columns, terms = [given[name] for name in ("batch", "rows", "columns", "terms")]
    for size in sizes:
        require((size - 1).compare("ult", MOST))
    area = rows * columns
    require((batch <= MOST_MATMULS) & area.compare("ule", MOST_ELEMENTS))
    work = area * terms * batch
    most = (rows.eq(1) | columns.eq(1)).select(given["most_work_of_one"], given["most_work"])
    require((area * batch <= MOST_ELEMENTS) & (work <= most))
    steps = [
        _step(given["left_by_rows"], given["left_step"], rows, terms),
        _step(given["right_by_rows"], given["right_step"], terms, columns),
    ]
    for step, long in steps:
        require((step >= long) & (step <= MOST))
    return work, [step for step, _ in steps]


def _named(array: Register, names: Sequence[str]) -> dict[str, Register]:
    return {name: array[k] for k, name in enumerate(names)}


def _step(by_rows: Register, step: Register, rows: Register, columns: Register) -> tuple[Register, Register]:
    """How far apart the rows or columns of a factor begin, and how long one is. A single one may lie anywhere."""
    is_rows = by_rows.ne(0)
    long, count = is_rows.select(columns, rows), is_rows.select(rows, columns)
    return count.eq(1).select(long, step), long


def _ceil_divide(number: Register, by: Register) -> Register:
    return (number + by - 1).udiv(by)


@native("void product_blocks(i64, i64, i64*)")
def _blocks(f: Function, begin: Register, end: Register, context: Register) -> None:
    """The blocks from ``begin`` to ``end``, counted along rows of blocks, down a matrix and through the batch."""
    numbers = context.cast("i64**")[_CONTEXT.index("numbers")]
    left, right, out, addend = (context.cast("i16**")[_CONTEXT.index(name)] for name in _POINTERS[:4])
    given = _named(numbers, NUMBERS) | _named(context, _CONTEXT)  # steps are those of the context
    left_is_rows, right_is_rows = given["left_by_rows"].ne(0), given["right_by_rows"].ne(0)
    left_row = left_is_rows.select(given["left_step"], 1)
    right_column = right_is_rows.select(f.literal("i64", 1), given["right_step"])
    beta = _splat(f, given["beta"].convert("trunc", "i32").convert("bitcast", "float"))
    adds = addend.ne(None), given["addend_column"].ne(0)
    sums, m, n = f.alloca("float", _BLOCK, align=64), f.alloca("i64"), f.alloca("i64")
    threads = f.call(SET_THREADS, 1)
    with f.loop(end, begin) as block:
        matrix = block.udiv(given["across"]).udiv(given["down"])
        row = block.udiv(given["across"]).urem(given["down"]) * given["height"]
        column = block.urem(given["across"]) * given["width"]
        m[0], n[0] = (given["rows"] - row).min(given["height"]), (given["columns"] - column).min(given["width"])
        height, width = m[0], n[0]
        # BLAS is column-major, so the transposed matmul is asked for: right times left.
        f.call(
            BF16_GEMM,
            right_is_rows.select(f.literal("ptr", "N"), "T"),
            left_is_rows.select(f.literal("ptr", "N"), "T"),
            *(n, m, numbers.at(NUMBERS.index("terms")), numbers.at(NUMBERS.index("alpha"))),
            *(right.at(matrix * given["right_batch"] + column * right_column), _step_of(context, "right")),
            *(left.at(matrix * given["left_batch"] + row * left_row), _step_of(context, "left")),
            *((0,), sums, n),
            *(1, 1),
        )
        out_block = out.at(matrix * given["out_batch"] + column)
        addend_block = addend.at(matrix * given["addend_batch"] + column * given["addend_column"])
        with f.loop(height) as r:
            sums_row = sums.at(r * width)
            out_row = out_block.at((row + r) * given["out_row"])
            addend_row = addend_block.at((row + r) * given["addend_row"])
            _round_row(f, sums_row, out_row, addend_row, width, beta, *adds)
    f.call(SET_THREADS, threads)


def _round_row(
    f: Function,
    sums: Register,
    out: Register,
    addend: Register,
    width: Register,
    beta: Register,
    adds: Register,
    adds_row: Register,
) -> None:
    """Round a row of sums, with ``beta`` times an element of the addend, or a row of it, where there is one."""
    with f.loop(width, step=_LANES) as c:
        mask = _lanes_below(f, width - c)
        total = f.variable(_FLOATS, _masked_load(f, sums.at(c), mask))
        with f.if_(adds):
            added = f.variable(_HALVES, _splat(f, addend[0]))
            with f.if_(adds_row):
                added[0] = _masked_load(f, addend.at(c), mask)
            total[0] = total[0].binary(
                "fadd", _converted(f, added[0], torch.bfloat16, torch.float32).binary("fmul", beta)
            )
        _masked_store(f, _converted(f, total[0], torch.float32, torch.bfloat16), out.at(c), mask)


def _step_of(context: Register, side: str) -> Register:
    return context.at(_CONTEXT.index(f"{side}_step"))


# Vectors


def _splat(f: Function, value: Register) -> Register:
    """A number in every lane."""
    vector = f"<{_LANES} x {value.type}>"
    first = f.fresh(f"insertelement {vector} poison, {value}, i32 0")
    return f.result(vector, f"shufflevector {vector} {first}, {vector} poison, {_WORDS} zeroinitializer")


def _lanes_below(f: Function, count: Register) -> Register:
    """A mask of the first ``count`` lanes."""
    lanes = f"<{', '.join(f'i32 {k}' for k in range(_LANES))}>"
    return _splat(f, count.convert("trunc", "i32")).compare("sgt", Register(f, _WORDS, lanes))


def _converted(f: Function, vector: Register, source: torch.dtype, target: torch.dtype) -> Register:
    return f.register(convert(f, Value(vector.name, source, _LANES), target))


def _masked_load(f: Function, address: Register, mask: Register) -> Register:
    vector, align = f"<{_LANES} x {address.element}>", 4 if address.element == "float" else 2
    name = f"llvm.masked.load.{suffix(address.element, _LANES)}.p0"
    f.module.declare(f"declare {vector} @{name}(ptr, i32, {mask.type}, {vector})")
    return f.result(vector, f"call {vector} @{name}({address}, i32 {align}, {mask}, {vector} zeroinitializer)")


def _masked_store(f: Function, halves: Register, address: Register, mask: Register) -> None:
    name = f"llvm.masked.store.{suffix('i16', _LANES)}.p0"
    f.module.declare(f"declare void @{name}({_HALVES}, ptr, i32, {mask.type})")
    f.emit(f"call void @{name}({halves}, {address}, i32 2, {mask})")


EXPORTS = (_small_matmul,)
