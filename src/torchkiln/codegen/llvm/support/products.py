"""Products of small bfloat16 matrices of sizes known only at run time, in the memory of a bfloat16 result.

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
"""

from __future__ import annotations

from torchkiln.codegen.llvm.support.part import Part
from torchkiln.ir.matrices import MOST
from torchkiln.native.blas import ALONE, SET_THREADS, SHARE, WIDE_ROUTINE
from torchkiln.native.host import vector_bits
from torchkiln.native.symbols import address_of

SMALL_PRODUCT = "kiln_small_product"

# Multiplications, elements of the result and products of a batch above which torch's operator is as fast.
MOST_WORK, MOST_ELEMENTS, MOST_PRODUCTS = 2**25, 2**16, 32
# Elements of a block, 64 KiB of stack, and the rows that it has where there are as many: BLAS reads all of the second
# matrix for each block of rows.
_BLOCK, _BLOCK_ROWS = 2**14, 64
_LANES = 16

NUMBERS = (
    "batch",
    "rows",
    "columns",
    "terms",
    "left_by_rows",
    "left_step",
    "left_batch",
    "right_by_rows",
    "right_step",
    "right_batch",
    "out_row",
    "out_batch",
    "addend_row",
    "addend_column",
    "addend_batch",
    "alpha",
    "beta",
)
"""What the numbers handed to the function are, in order.

A factor has contiguous rows (1) or columns (0), which begin ``step`` elements apart. Rows of the result are contiguous.
The addend has a stride of 1 or 0 along its columns. ``alpha`` and ``beta`` are the bits of float32.
"""

_DECLARATIONS = f"""
declare i32 @{SET_THREADS}(i32)
declare void @{WIDE_ROUTINE}(ptr, ptr, ptr, ptr, ptr, ptr, ptr, ptr, ptr, ptr, ptr, ptr, ptr, i64, i64)
declare i32 @torch_parallel_for(i64, i64, i64, ptr, ptr)
declare i64 @llvm.smin.i64(i64, i64)
declare i64 @llvm.smax.i64(i64, i64)
declare <{_LANES} x float> @llvm.masked.load.v{_LANES}f32.p0(ptr, i32, <{_LANES} x i1>, <{_LANES} x float>)
declare <{_LANES} x i16> @llvm.masked.load.v{_LANES}i16.p0(ptr, i32, <{_LANES} x i1>, <{_LANES} x i16>)
declare void @llvm.masked.store.v{_LANES}i16.p0(<{_LANES} x i16>, ptr, i32, <{_LANES} x i1>)
"""

# The context of blocks: pointers of left, right, out, addend and the numbers, then what is known once sizes are.
_POINTERS = ("left", "right", "out", "addend", "numbers")
_CONTEXT = (*_POINTERS, "steps_left", "steps_right", "height", "width", "down", "across")


def part() -> Part:
    """Nothing where the library has no such routine: no graph calls the function then."""
    if address_of(WIDE_ROUTINE) is None or address_of(SET_THREADS) is None:
        return Part()
    return Part((), (), _DECLARATIONS, _CONSTANTS + _decision() + _blocks(), (SMALL_PRODUCT,))


_CONSTANTS = """
@product_kept = private constant [2 x i8] c"N\\00"
@product_turned = private constant [2 x i8] c"T\\00"
@product_zero = private constant i64 0
"""


def _number(name: str) -> str:
    return f"""
  %{name}_at = getelementptr i64, ptr %numbers, i64 {NUMBERS.index(name)}
  %{name} = load i64, ptr %{name}_at"""


def _context(name: str, kind: str) -> str:
    return f"""
  %{name}_in = getelementptr i64, ptr %context, i64 {_CONTEXT.index(name)}
  %{name} = load {kind}, ptr %{name}_in"""


def _kept_in_context(name: str, operand: str) -> str:
    return f"""
  %{name}_to = getelementptr i64, ptr %context, i64 {_CONTEXT.index(name)}
  store {operand}, ptr %{name}_to"""


def _step(side: str, rows: str, columns: str) -> str:
    """How far apart the rows or columns of a factor begin, and whether BLAS takes it: a single one may lie anywhere."""
    return f"""
  %{side}_is_rows = icmp ne i64 %{side}_by_rows, 0
  %{side}_long = select i1 %{side}_is_rows, i64 %{columns}, i64 %{rows}
  %{side}_count = select i1 %{side}_is_rows, i64 %{rows}, i64 %{columns}
  %{side}_single = icmp eq i64 %{side}_count, 1
  %{side}_lead = select i1 %{side}_single, i64 %{side}_long, i64 %{side}_step
  %{side}_apart = icmp sge i64 %{side}_lead, %{side}_long
  %{side}_counted = icmp sle i64 %{side}_lead, {MOST}
  %{side}_good = and i1 %{side}_apart, %{side}_counted"""


def _decision() -> str:
    """``i32 (left, right, out, addend or null, numbers, most threads or 0)``: 0 where the product was taken."""
    sizes = ("batch", "rows", "columns", "terms")
    positive = "".join(
        f"""
  %{name}_less = sub i64 %{name}, 1
  %{name}_fits = icmp ult i64 %{name}_less, {MOST}"""
        for name in sizes
    )
    return f"""
define i32 @{SMALL_PRODUCT}(ptr %left, ptr %right, ptr %out, ptr %addend, ptr %numbers, i64 %threads) {{
entry:
  %context = alloca [{len(_CONTEXT)} x i64], align 16
  {"".join(map(_number, (*sizes, "left_by_rows", "left_step", "right_by_rows", "right_step")))}
  {positive}
  %fit0 = and i1 %batch_fits, %rows_fits
  %fit1 = and i1 %columns_fits, %terms_fits
  %fit = and i1 %fit0, %fit1
  br i1 %fit, label %measured, label %refused
measured:
  %short = icmp sle i64 %batch, {MOST_PRODUCTS}
  %area = mul i64 %rows, %columns
  %no_large = icmp ule i64 %area, {MOST_ELEMENTS}
  %no_long = and i1 %short, %no_large
  br i1 %no_long, label %measured_one, label %refused
measured_one:
  %work = mul i64 %area, %terms
  %all_area = mul i64 %area, %batch
  %all_work = mul i64 %work, %batch
  %few = icmp sle i64 %all_area, {MOST_ELEMENTS}
  %little_work = icmp sle i64 %all_work, {MOST_WORK}
  %small = and i1 %few, %little_work
  {_step("left", "rows", "terms")}
  {_step("right", "terms", "columns")}
  %forms = and i1 %left_good, %right_good
  %taken = and i1 %small, %forms
  br i1 %taken, label %multiply, label %refused
multiply:
  %most_rows = udiv i64 {_BLOCK}, %columns
  %block_rows = call i64 @llvm.smax.i64(i64 %most_rows, i64 {_BLOCK_ROWS})
  %height = call i64 @llvm.smin.i64(i64 %rows, i64 %block_rows)
  %most_columns = udiv i64 {_BLOCK}, %height
  %width = call i64 @llvm.smin.i64(i64 %columns, i64 %most_columns)
  %rows_up = add i64 %rows_less, %height
  %down = udiv i64 %rows_up, %height
  %columns_up = add i64 %columns_less, %width
  %across = udiv i64 %columns_up, %width
  %of_one = mul i64 %down, %across
  %count = mul i64 %of_one, %batch
  {_kept_in_context("left", "ptr %left")}
  {_kept_in_context("right", "ptr %right")}
  {_kept_in_context("out", "ptr %out")}
  {_kept_in_context("addend", "ptr %addend")}
  {_kept_in_context("numbers", "ptr %numbers")}
  {_kept_in_context("steps_left", "i64 %left_lead")}
  {_kept_in_context("steps_right", "i64 %right_lead")}
  {_kept_in_context("height", "i64 %height")}
  {_kept_in_context("width", "i64 %width")}
  {_kept_in_context("down", "i64 %down")}
  {_kept_in_context("across", "i64 %across")}
  %little = icmp sle i64 %all_work, {ALONE}
  %one_thread = icmp eq i64 %threads, 1
  %alone = or i1 %little, %one_thread
  br i1 %alone, label %here, label %shared
here:
  call void @product_blocks(i64 0, i64 %count, ptr %context)
  ret i32 0
shared:
  %block_area = mul i64 %height, %width
  %block_work = mul i64 %block_area, %terms
  %enough = udiv i64 {SHARE}, %block_work
  %grain = add i64 %enough, 1
  %any_threads = icmp eq i64 %threads, 0
  %of_threads = select i1 %any_threads, i64 %count, i64 %threads
  %threads_less = sub i64 %of_threads, 1
  %count_up = add i64 %count, %threads_less
  %share = udiv i64 %count_up, %of_threads
  %least = call i64 @llvm.smax.i64(i64 %share, i64 %grain)
  %status = call i32 @torch_parallel_for(i64 0, i64 %count, i64 %least, ptr @product_blocks, ptr %context)
  ret i32 %status
refused:
  ret i32 1
}}
"""


def _blocks() -> str:
    """BLAS goes down columns, so that the transposed product is asked for: right times left."""
    floats, words, halves = (f"<{_LANES} x {kind}>" for kind in ("float", "i32", "i16"))
    lanes = ", ".join(f"i32 {k}" for k in range(_LANES))
    masked_floats = f"i32 4, <{_LANES} x i1> %mask, {floats} zeroinitializer"
    masked_halves = f"i32 2, <{_LANES} x i1> %mask, {halves} zeroinitializer"
    numbers = [name for name in NUMBERS if name not in ("batch", "terms", "left_step", "right_step", "alpha")]

    def splat(kind: str, value: int) -> str:
        return f"<{', '.join([f'{kind} {value}'] * _LANES)}>"

    def repeated(name: str, kind: str, value: str) -> str:
        return f"""
  %{name}_first = insertelement <{_LANES} x {kind}> poison, {kind} {value}, i32 0
  %{name} = shufflevector <{_LANES} x {kind}> %{name}_first, <{_LANES} x {kind}> poison, {words} zeroinitializer"""

    gemm = ", ".join(
        f"ptr {pointer}"
        for pointer in (
            *("%right_kept", "%left_kept", "%n_cell", "%m_cell", "%terms_at", "%alpha_at"),
            *("%right_from", "%steps_right_in", "%left_from", "%steps_left_in"),
            *("@product_zero", "%sums", "%n_cell"),
        )
    )
    return f"""
define internal void @product_blocks(i64 %begin, i64 %end, ptr %context) "prefer-vector-width"="{vector_bits()}" {{
entry:
  %sums = alloca [{_BLOCK} x float], align 64
  %m_cell = alloca i64
  %n_cell = alloca i64
  {"".join(_context(name, "ptr" if name in _POINTERS else "i64") for name in _CONTEXT)}
  {"".join(map(_number, numbers))}
  %terms_at = getelementptr i64, ptr %numbers, i64 {NUMBERS.index("terms")}
  %alpha_at = getelementptr i64, ptr %numbers, i64 {NUMBERS.index("alpha")}
  %left_is_rows = icmp ne i64 %left_by_rows, 0
  %right_is_rows = icmp ne i64 %right_by_rows, 0
  %left_kept = select i1 %left_is_rows, ptr @product_kept, ptr @product_turned
  %right_kept = select i1 %right_is_rows, ptr @product_kept, ptr @product_turned
  %left_row = select i1 %left_is_rows, i64 %steps_left, i64 1
  %right_column = select i1 %right_is_rows, i64 1, i64 %steps_right
  %adds = icmp ne ptr %addend, null
  %adds_row = icmp ne i64 %addend_column, 0
  %beta_bits = trunc i64 %beta to i32
  %beta_one = bitcast i32 %beta_bits to float
  {repeated("betas", "float", "%beta_one")}
  %threads = call i32 @{SET_THREADS}(i32 1)
  br label %blocks

blocks:
  %i = phi i64 [ %begin, %entry ], [ %next_i, %block_done ]
  %more = icmp slt i64 %i, %end
  br i1 %more, label %block, label %done
block:
  %above = udiv i64 %i, %across
  %place_across = urem i64 %i, %across
  %b = udiv i64 %above, %down
  %place_down = urem i64 %above, %down
  %row = mul i64 %place_down, %height
  %column = mul i64 %place_across, %width
  %rows_left = sub i64 %rows, %row
  %columns_left = sub i64 %columns, %column
  %m = call i64 @llvm.smin.i64(i64 %rows_left, i64 %height)
  %n = call i64 @llvm.smin.i64(i64 %columns_left, i64 %width)
  store i64 %m, ptr %m_cell
  store i64 %n, ptr %n_cell
  %left_b = mul i64 %b, %left_batch
  %left_r = mul i64 %row, %left_row
  %left_off = add i64 %left_b, %left_r
  %left_from = getelementptr i16, ptr %left, i64 %left_off
  %right_b = mul i64 %b, %right_batch
  %right_c = mul i64 %column, %right_column
  %right_off = add i64 %right_b, %right_c
  %right_from = getelementptr i16, ptr %right, i64 %right_off
  %out_b = mul i64 %b, %out_batch
  %out_off = add i64 %out_b, %column
  %addend_b = mul i64 %b, %addend_batch
  %addend_c = mul i64 %column, %addend_column
  %addend_off = add i64 %addend_b, %addend_c
  call void @{WIDE_ROUTINE}({gemm}, i64 1, i64 1)
  br label %rows_loop

rows_loop:
  %r = phi i64 [ 0, %block ], [ %next_r, %row_done ]
  %more_rows = icmp slt i64 %r, %m
  br i1 %more_rows, label %one_row, label %block_done
one_row:
  %at_row = add i64 %row, %r
  %sums_off = mul i64 %r, %n
  %sums_row = getelementptr float, ptr %sums, i64 %sums_off
  %out_r = mul i64 %at_row, %out_row
  %out_at = add i64 %out_off, %out_r
  %out_to = getelementptr i16, ptr %out, i64 %out_at
  %addend_r = mul i64 %at_row, %addend_row
  %addend_at = add i64 %addend_off, %addend_r
  %addend_from = getelementptr i16, ptr %addend, i64 %addend_at
  br label %vectors

vectors:
  %c = phi i64 [ 0, %one_row ], [ %next_c, %rounding ]
  %more_columns = icmp slt i64 %c, %n
  br i1 %more_columns, label %vector, label %row_done
vector:
  %rest = sub i64 %n, %c
  %rest_word = trunc i64 %rest to i32
  {repeated("rests", "i32", "%rest_word")}
  %mask = icmp slt {words} <{lanes}>, %rests
  %sums_at = getelementptr float, ptr %sums_row, i64 %c
  %product = call {floats} @llvm.masked.load.v{_LANES}f32.p0(ptr %sums_at, {masked_floats})
  br i1 %adds, label %adding, label %rounding
adding:
  br i1 %adds_row, label %adding_row, label %adding_one
adding_row:
  %added_at = getelementptr i16, ptr %addend_from, i64 %c
  %added_row = call {halves} @llvm.masked.load.v{_LANES}i16.p0(ptr %added_at, {masked_halves})
  br label %added
adding_one:
  %added_number = load i16, ptr %addend_from
  {repeated("added_one", "i16", "%added_number")}
  br label %added
added:
  %added_halves = phi {halves} [ %added_row, %adding_row ], [ %added_one, %adding_one ]
  %added_words = zext {halves} %added_halves to {words}
  %added_bits = shl {words} %added_words, {splat("i32", 16)}
  %added_floats = bitcast {words} %added_bits to {floats}
  %scaled = fmul {floats} %added_floats, %betas
  %sum = fadd {floats} %product, %scaled
  br label %rounding
rounding:
  %value = phi {floats} [ %product, %vector ], [ %sum, %added ]
  %bits = bitcast {floats} %value to {words}
  %upper = lshr {words} %bits, {splat("i32", 16)}
  %odd = and {words} %upper, {splat("i32", 1)}
  %half = add {words} %odd, {splat("i32", 0x7FFF)}
  %up = add {words} %bits, %half
  %rounded = lshr {words} %up, {splat("i32", 16)}
  %is_nan = fcmp uno {floats} %value, zeroinitializer
  %chosen = select <{_LANES} x i1> %is_nan, {words} {splat("i32", 0x7FC0)}, {words} %rounded
  %result = trunc {words} %chosen to {halves}
  %result_at = getelementptr i16, ptr %out_to, i64 %c
  call void @llvm.masked.store.v{_LANES}i16.p0({halves} %result, ptr %result_at, i32 2, <{_LANES} x i1> %mask)
  %next_c = add i64 %c, {_LANES}
  br label %vectors
row_done:
  %next_r = add i64 %r, 1
  br label %rows_loop
block_done:
  %next_i = add i64 %i, 1
  br label %blocks
done:
  %alone = call i32 @{SET_THREADS}(i32 %threads)
  ret void
}}
"""
