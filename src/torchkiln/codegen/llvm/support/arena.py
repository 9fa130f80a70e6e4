"""The pool of arenas: blocks of memory that calls take and give back.

A block is one header (its whole size) and the memory after it. A slot is only ever exchanged whole, so a block is
owned by its slot or by one thread, and no header is read by a thread that does not own its block.
"""

from __future__ import annotations

from torchkiln.codegen.llvm.support.part import Part

POOL_SLOTS = 8
_HEADER_BYTES = 64

_DECLARATIONS = """
declare i32 @posix_memalign(ptr, i64, i64)
declare void @free(ptr)
"""

_CODE = f"""
@kiln_arena_slots = global [{POOL_SLOTS} x ptr] zeroinitializer
@kiln_arena_bytes = global i64 0
@kiln_arena_blocks = global i64 0

define internal void @free_block(ptr %block) {{
  %size = load i64, ptr %block
  %b = atomicrmw sub ptr @kiln_arena_bytes, i64 %size monotonic
  %c = atomicrmw sub ptr @kiln_arena_blocks, i64 1 monotonic
  call void @free(ptr %block)
  ret void
}}

; Memory of at least this many bytes, or null. A cached block that is too small makes way for the new one, so the
; number of blocks is the number of calls that ever ran at the same time, not the number of graphs.
define ptr @kiln_arena_acquire(i64 %bytes) {{
entry:
  %new_at = alloca ptr
  %needed = add i64 %bytes, {_HEADER_BYTES}
  br label %head
head:
  %k = phi i64 [ 0, %entry ], [ %next, %advance ]
  %small = phi ptr [ null, %entry ], [ %small_next, %advance ]
  %more = icmp slt i64 %k, {POOL_SLOTS}
  br i1 %more, label %body, label %miss
body:
  %slot = getelementptr ptr, ptr @kiln_arena_slots, i64 %k
  %taken = atomicrmw xchg ptr %slot, ptr null acq_rel
  %empty = icmp eq ptr %taken, null
  br i1 %empty, label %advance, label %look
look:
  %size = load i64, ptr %taken
  %enough = icmp uge i64 %size, %needed
  br i1 %enough, label %hit, label %keep
keep:
  %have_small = icmp ne ptr %small, null
  br i1 %have_small, label %put_back, label %advance
put_back:
  call void @return_block(ptr %small)
  br label %advance
advance:
  %small_next = phi ptr [ %small, %body ], [ %taken, %keep ], [ %taken, %put_back ]
  %next = add i64 %k, 1
  br label %head
hit:
  %had_small = icmp ne ptr %small, null
  br i1 %had_small, label %return_small, label %found
return_small:
  call void @return_block(ptr %small)
  br label %found
found:
  %memory = getelementptr i8, ptr %taken, i64 {_HEADER_BYTES}
  ret ptr %memory
miss:
  %stale = icmp ne ptr %small, null
  br i1 %stale, label %drop, label %allocate
drop:
  call void @free_block(ptr %small)
  br label %allocate
allocate:
  %e = call i32 @posix_memalign(ptr %new_at, i64 64, i64 %needed)
  %failed = icmp ne i32 %e, 0
  br i1 %failed, label %no_memory, label %fresh
fresh:
  %block = load ptr, ptr %new_at
  store i64 %needed, ptr %block
  %b = atomicrmw add ptr @kiln_arena_bytes, i64 %needed monotonic
  %c = atomicrmw add ptr @kiln_arena_blocks, i64 1 monotonic
  %new = getelementptr i8, ptr %block, i64 {_HEADER_BYTES}
  ret ptr %new
no_memory:
  ret ptr null
}}

; Put a block in an empty slot; with none, free the biggest.
define internal void @return_block(ptr %block) {{
entry:
  br label %head
head:
  %k = phi i64 [ 0, %entry ], [ %next, %body ]
  %more = icmp slt i64 %k, {POOL_SLOTS}
  br i1 %more, label %body, label %full
body:
  %slot = getelementptr ptr, ptr @kiln_arena_slots, i64 %k
  %pair = cmpxchg ptr %slot, ptr null, ptr %block acq_rel monotonic
  %stored = extractvalue {{ ptr, i1 }} %pair, 1
  %next = add i64 %k, 1
  br i1 %stored, label %done, label %head
full:
  %j = phi i64 [ 0, %head ], [ %next_j, %step ]
  %held = phi ptr [ %block, %head ], [ %held_next, %step ]
  %more_j = icmp slt i64 %j, {POOL_SLOTS}
  br i1 %more_j, label %swap, label %drop
swap:
  %slot_j = getelementptr ptr, ptr @kiln_arena_slots, i64 %j
  %other = atomicrmw xchg ptr %slot_j, ptr null acq_rel
  %gone = icmp eq ptr %other, null
  br i1 %gone, label %weigh_none, label %weigh
weigh_none:
  %small_none = call i1 @offer(ptr %slot_j, ptr %held)
  br i1 %small_none, label %done, label %step
weigh:
  %held_size = load i64, ptr %held
  %other_size = load i64, ptr %other
  %bigger = icmp ugt i64 %other_size, %held_size
  %stay = select i1 %bigger, ptr %held, ptr %other
  %leave = select i1 %bigger, ptr %other, ptr %held
  %back = call i1 @offer(ptr %slot_j, ptr %stay)
  br i1 %back, label %step, label %lost
lost:
  call void @free_block(ptr %stay)
  br label %step
step:
  %held_next = phi ptr [ %held, %weigh_none ], [ %leave, %weigh ], [ %leave, %lost ]
  %next_j = add i64 %j, 1
  br label %full
drop:
  call void @free_block(ptr %held)
  br label %done
done:
  ret void
}}

define internal i1 @offer(ptr %slot, ptr %block) {{
  %pair = cmpxchg ptr %slot, ptr null, ptr %block acq_rel monotonic
  %stored = extractvalue {{ ptr, i1 }} %pair, 1
  ret i1 %stored
}}

define void @kiln_arena_release(ptr %memory) {{
  %block = getelementptr i8, ptr %memory, i64 -{_HEADER_BYTES}
  call void @return_block(ptr %block)
  ret void
}}

; Free every block no call is using.
define void @kiln_arena_clear() {{
entry:
  br label %head
head:
  %k = phi i64 [ 0, %entry ], [ %next, %advance ]
  %more = icmp slt i64 %k, {POOL_SLOTS}
  br i1 %more, label %body, label %done
body:
  %slot = getelementptr ptr, ptr @kiln_arena_slots, i64 %k
  %taken = atomicrmw xchg ptr %slot, ptr null acq_rel
  %empty = icmp eq ptr %taken, null
  br i1 %empty, label %advance, label %drop
drop:
  call void @free_block(ptr %taken)
  br label %advance
advance:
  %next = add i64 %k, 1
  br label %head
done:
  ret void
}}
"""


def part() -> Part:
    return Part(
        (),
        (),
        _DECLARATIONS,
        _CODE,
        (
            "kiln_arena_acquire",
            "kiln_arena_release",
            "kiln_arena_clear",
            "kiln_arena_bytes",
            "kiln_arena_blocks",
        ),
    )
