"""The sort of rows of floating-point numbers: stable, and linear in their length.

An element becomes a key of 32 bits, which orders as torch does: -0.0 and 0.0 are equal, and NaN is more than anything.
Keys are paired with their positions and sorted by 8 bits at a time, from the lowest; what all keys have in common is
passed over. Short rows are sorted by insertion: pairs differ by their positions, so that any order of them is stable.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from torchkiln.codegen.llvm.support.part import Part

# Rows up to this length are sorted by insertion.
_SHORT = 32

_DECLARATIONS = """
declare void @llvm.memset.p0.i64(ptr, i8, i64, i1)
"""


@dataclass(frozen=True)
class _Format:
    """A format whose bits, ``shift`` to the left, are ordered as those of float32 are; ``infinity`` is so shifted."""

    name: str
    bits: int
    infinity: int

    @property
    def shift(self) -> int:
        return 32 - self.bits

    @property
    def digits(self) -> range:
        """Bytes of the key that differ between elements."""
        return range(self.shift // 8, 4)


_FORMATS = {
    torch.float32: _Format("float32", 32, 0x7F800000),
    torch.bfloat16: _Format("bfloat16", 16, 0x7F800000),
    torch.float16: _Format("float16", 16, 0x7C000000),
}


def row_sort(dtype: torch.dtype) -> str:
    """The name of ``void (i64 begin, i64 end, ptr context)``, which sorts these rows.

    The context holds pointers to the rows, the values, the positions and as much memory as those take, then the length
    of a row and a mask: 0, or -1 for the largest element first.
    """
    return f"kiln_sort_rows_{_FORMATS[dtype].name}"


def part() -> Part:
    code = "\n".join(_row_sort(row_sort(dtype), form) for dtype, form in _FORMATS.items())
    return Part(_DECLARATIONS, code, tuple(row_sort(dtype) for dtype in _FORMATS))


def _row_sort(name: str, form: _Format) -> str:
    kind = f"i{form.bits}"
    digits = form.digits
    widened = "%bits" if not form.shift else "%wide"
    widen = (
        ""
        if not form.shift
        else f"""
  %extended = zext {kind} %bits to i32
  %wide = shl i32 %extended, {form.shift}"""
    )
    return f"""
define void @{name}(i64 %begin, i64 %end, ptr %context) {{
entry:
  %counts = alloca [{len(digits) * 256} x i32], align 64
  %x = load ptr, ptr %context
  %values_at = getelementptr i64, ptr %context, i64 1
  %values = load ptr, ptr %values_at
  %positions_at = getelementptr i64, ptr %context, i64 2
  %positions = load ptr, ptr %positions_at
  %spare_at = getelementptr i64, ptr %context, i64 3
  %spare = load ptr, ptr %spare_at
  %n_at = getelementptr i64, ptr %context, i64 4
  %n = load i64, ptr %n_at
  %mask_at = getelementptr i64, ptr %context, i64 5
  %wide_mask = load i64, ptr %mask_at
  %mask = trunc i64 %wide_mask to i32
  %all = trunc i64 %n to i32
  %short = icmp ule i64 %n, {_SHORT}
  br label %rows

rows:
  %row = phi i64 [ %begin, %entry ], [ %next_row, %row_done ]
  %more_rows = icmp slt i64 %row, %end
  br i1 %more_rows, label %one_row, label %done
one_row:
  %first = mul i64 %row, %n
  %in = getelementptr {kind}, ptr %x, i64 %first
  %out = getelementptr {kind}, ptr %values, i64 %first
  %a = getelementptr i64, ptr %positions, i64 %first
  %b = getelementptr i64, ptr %spare, i64 %first
  br i1 %short, label %keys, label %clear
clear:
  call void @llvm.memset.p0.i64(ptr %counts, i8 0, i64 {len(digits) * 1024}, i1 false)
  br label %keys

; Pairs of keys and positions, and how often each byte is what (which a short row has no use for).
keys:
  %i = phi i64 [ 0, %one_row ], [ 0, %clear ], [ %next_i, %key ]
  %more_keys = icmp ult i64 %i, %n
  br i1 %more_keys, label %key, label %keys_done
key:
  %bits_at = getelementptr {kind}, ptr %in, i64 %i
  %bits = load {kind}, ptr %bits_at{widen}
  %magnitude = and i32 {widened}, {0x7FFFFFFF}
  %is_nan = icmp ugt i32 %magnitude, {form.infinity}
  %is_zero = icmp eq i32 %magnitude, 0
  %plain = select i1 %is_zero, i32 0, i32 {widened}
  %negative = ashr i32 %plain, 31
  %flipped = or i32 %negative, {-(2**31)}
  %number = xor i32 %plain, %flipped
  %ascending = select i1 %is_nan, i32 -1, i32 %number
  %of_key = xor i32 %ascending, %mask
  %high = zext i32 %of_key to i64
  %raised = shl i64 %high, 32
  %pair = or i64 %raised, %i
  %pair_at = getelementptr i64, ptr %a, i64 %i
  store i64 %pair, ptr %pair_at
{"".join(_count(place, digit) for place, digit in enumerate(digits))}
  %next_i = add i64 %i, 1
  br label %keys
keys_done:
  br i1 %short, label %insertion, label %pass0
{_insertion()}
{"".join(_pass(place, digit, last=place == len(digits) - 1) for place, digit in enumerate(digits))}
; Positions are what is left of pairs; values are where they say.
gather:
  %source = phi ptr [ %a, %insertion ], [ %source{len(digits)}, %passes_done ]
  br label %taking
taking:
  %t = phi i64 [ 0, %gather ], [ %next_t, %take ]
  %more_t = icmp ult i64 %t, %n
  br i1 %more_t, label %take, label %row_done
take:
  %sorted_at = getelementptr i64, ptr %source, i64 %t
  %sorted = load i64, ptr %sorted_at
  %position = and i64 %sorted, {0xFFFFFFFF}
  %value_at = getelementptr {kind}, ptr %in, i64 %position
  %value = load {kind}, ptr %value_at
  %out_at = getelementptr {kind}, ptr %out, i64 %t
  store {kind} %value, ptr %out_at
  %place_at = getelementptr i64, ptr %a, i64 %t
  store i64 %position, ptr %place_at
  %next_t = add i64 %t, 1
  br label %taking

row_done:
  %next_row = add i64 %row, 1
  br label %rows
done:
  ret void
}}
"""


def _count(place: int, digit: int) -> str:
    return f"""
  %moved{place} = lshr i32 %of_key, {8 * digit}
  %byte{place} = and i32 %moved{place}, 255
  %slot{place} = add i32 %byte{place}, {256 * place}
  %count{place}_at = getelementptr i32, ptr %counts, i32 %slot{place}
  %count{place} = load i32, ptr %count{place}_at
  %more{place} = add i32 %count{place}, 1
  store i32 %more{place}, ptr %count{place}_at"""


def _insertion() -> str:
    return """
insertion:
  %j = phi i64 [ 1, %keys_done ], [ %next_j, %inserted ]
  %more_j = icmp ult i64 %j, %n
  br i1 %more_j, label %insert, label %gather
insert:
  %new_at = getelementptr i64, ptr %a, i64 %j
  %new = load i64, ptr %new_at
  br label %sink
sink:
  %hole = phi i64 [ %j, %insert ], [ %before, %shift ]
  %at_start = icmp eq i64 %hole, 0
  br i1 %at_start, label %inserted, label %compare
compare:
  %before = sub i64 %hole, 1
  %before_at = getelementptr i64, ptr %a, i64 %before
  %neighbour = load i64, ptr %before_at
  %greater = icmp ugt i64 %neighbour, %new
  br i1 %greater, label %shift, label %inserted
shift:
  %hole_at = getelementptr i64, ptr %a, i64 %hole
  store i64 %neighbour, ptr %hole_at
  br label %sink
inserted:
  %here = getelementptr i64, ptr %a, i64 %hole
  store i64 %new, ptr %here
  %next_j = add i64 %j, 1
  br label %insertion
"""


def _pass(place: int, digit: int, *, last: bool) -> str:
    """Sort by one byte from ``%source<place>`` into ``%target<place>``, unless it is the same in all keys."""
    k, following = place, "passes_done" if last else f"pass{place + 1}"
    came = "[ %a, %keys_done ]" if k == 0 else f"[ %source{k - 1}, %pass{k - 1} ], [ %target{k - 1}, %moving{k - 1} ]"
    went = "[ %b, %keys_done ]" if k == 0 else f"[ %target{k - 1}, %pass{k - 1} ], [ %source{k - 1}, %moving{k - 1} ]"
    after = f"[ %source{k}, %pass{k} ], [ %target{k}, %moving{k} ]"
    end = f"passes_done:\n  %source{k + 1} = phi ptr {after}\n  br label %gather\n" if last else ""
    return f"""
pass{k}:
  %source{k} = phi ptr {came}
  %target{k} = phi ptr {went}
  %some{k} = load i64, ptr %source{k}
  %some_moved{k} = lshr i64 %some{k}, {32 + 8 * digit}
  %some_byte{k} = and i64 %some_moved{k}, 255
  %bucket{k} = getelementptr i32, ptr %counts, i64 {256 * k}
  %some_at{k} = getelementptr i32, ptr %bucket{k}, i64 %some_byte{k}
  %some_count{k} = load i32, ptr %some_at{k}
  %common{k} = icmp eq i32 %some_count{k}, %all
  br i1 %common{k}, label %{following}, label %sums{k}
sums{k}:
  %s{k} = phi i64 [ 0, %pass{k} ], [ %next_s{k}, %sums{k} ]
  %below{k} = phi i32 [ 0, %pass{k} ], [ %next_below{k}, %sums{k} ]
  %start_at{k} = getelementptr i32, ptr %bucket{k}, i64 %s{k}
  %of_byte{k} = load i32, ptr %start_at{k}
  store i32 %below{k}, ptr %start_at{k}
  %next_below{k} = add i32 %below{k}, %of_byte{k}
  %next_s{k} = add i64 %s{k}, 1
  %summed{k} = icmp eq i64 %next_s{k}, 256
  br i1 %summed{k}, label %moving{k}, label %sums{k}
moving{k}:
  %m{k} = phi i64 [ 0, %sums{k} ], [ %next_m{k}, %move{k} ]
  %more_m{k} = icmp ult i64 %m{k}, %n
  br i1 %more_m{k}, label %move{k}, label %{following}
move{k}:
  %moved_at{k} = getelementptr i64, ptr %source{k}, i64 %m{k}
  %one{k} = load i64, ptr %moved_at{k}
  %shifted{k} = lshr i64 %one{k}, {32 + 8 * digit}
  %byte_of{k} = and i64 %shifted{k}, 255
  %free_at{k} = getelementptr i32, ptr %bucket{k}, i64 %byte_of{k}
  %free{k} = load i32, ptr %free_at{k}
  %taken{k} = add i32 %free{k}, 1
  store i32 %taken{k}, ptr %free_at{k}
  %free_wide{k} = zext i32 %free{k} to i64
  %to{k} = getelementptr i64, ptr %target{k}, i64 %free_wide{k}
  store i64 %one{k}, ptr %to{k}
  %next_m{k} = add i64 %m{k}, 1
  br label %moving{k}
{end}"""
