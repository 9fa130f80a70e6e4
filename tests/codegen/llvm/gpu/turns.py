"""Threads of a block that take turns on one thread of the system: each runs until it waits for others.

What is wrong shows the same way in every run: the first thread goes as far ahead of the others as barriers let it, or
the last one does. Threads that wait for each other for ever are an error.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any

from torchkiln.native.host import host_processor
from torchkiln.native.jit import compile_module
from torchkiln.native.loader import load_object
from torchkiln.native.symbols import address_of

_MOST = 1024
_STACK = 1 << 16
_CONTEXT = 1 << 13  # of ucontext_t and jmp_buf no more is known than that they are smaller
_JUMP = 512

# A thread that waits at a barrier gives its turn to the next. The barrier counts who has come and how often all have,
# and knows who came first: that one goes on when all have, so that a warp goes as far as it can before the next begins.
_CODE = f"""
@turns_main = internal global [{_JUMP} x i8] zeroinitializer, align 64
@turns_places = internal global [{_MOST} x [{_JUMP} x i8]] zeroinitializer, align 64
@turns_done = internal global [{_MOST} x i8] zeroinitializer
@turns_states = internal global ptr null
@turns_entry = internal global ptr null
@turns_current = internal global i32 0
@turns_count = internal global i32 0
@turns_step = internal global i32 0
@turns_left = internal global i32 0
@turns_idle = internal global i32 0

declare i32 @_setjmp(ptr) returns_twice
declare void @_longjmp(ptr, i32) noreturn
declare i32 @getcontext(ptr) returns_twice
declare void @makecontext(ptr, ptr, i32, ...)
declare i32 @setcontext(ptr)

define internal ptr @turns_place(i32 %thread) {{
  %place = getelementptr [{_JUMP} x i8], ptr @turns_places, i32 %thread
  ret ptr %place
}}

define internal void @turns_go_on() noreturn {{
  %count = load i32, ptr @turns_count
  %step = load i32, ptr @turns_step
  %old = load i32, ptr @turns_current
  br label %search
search:
  %from = phi i32 [ %old, %0 ], [ %next, %search ]
  %sum = add i32 %from, %step
  %next = urem i32 %sum, %count
  %flag = getelementptr i8, ptr @turns_done, i32 %next
  %done = load i8, ptr %flag
  %over = icmp ne i8 %done, 0
  br i1 %over, label %search, label %found
found:
  store i32 %next, ptr @turns_current
  %place = call ptr @turns_place(i32 %next)
  call void @_longjmp(ptr %place, i32 1)
  unreachable
}}

define internal void @turns_give(ptr %barrier) {{
  %first_at = getelementptr i32, ptr %barrier, i64 2
  %first = load i32, ptr %first_at
  store i32 %first, ptr @turns_current
  %place = call ptr @turns_place(i32 %first)
  call void @_longjmp(ptr %place, i32 1)
  unreachable
}}

define void @turns_wait(ptr %barrier, i32 %members) noinline {{
  %gen_at = getelementptr i32, ptr %barrier, i64 1
  %first_at = getelementptr i32, ptr %barrier, i64 2
  %self = load i32, ptr @turns_current
  %own = call ptr @turns_place(i32 %self)
  %mine = load volatile i32, ptr %gen_at
  %here = load volatile i32, ptr %barrier
  %come = add i32 %here, 1
  %alone = icmp eq i32 %here, 0
  br i1 %alone, label %begin, label %join
begin:
  store i32 %self, ptr %first_at
  br label %join
join:
  %all = icmp eq i32 %come, %members
  br i1 %all, label %open, label %wait
open:
  store volatile i32 0, ptr %barrier
  %following = add i32 %mine, 1
  store volatile i32 %following, ptr %gen_at
  store i32 0, ptr @turns_idle
  %opened_back = call i32 @_setjmp(ptr %own) returns_twice
  %resumed = icmp ne i32 %opened_back, 0
  br i1 %resumed, label %done, label %give
give:
  call void @turns_give(ptr %barrier)
  unreachable
wait:
  store volatile i32 %come, ptr %barrier
  br label %turn
turn:
  %idle = load i32, ptr @turns_idle
  %longer = add i32 %idle, 1
  store i32 %longer, ptr @turns_idle
  %stuck = icmp ugt i32 %longer, {4 * _MOST}
  br i1 %stuck, label %give_up, label %pass
give_up:
  call void @_longjmp(ptr @turns_main, i32 2)
  unreachable
pass:
  %back = call i32 @_setjmp(ptr %own) returns_twice
  %again = icmp ne i32 %back, 0
  br i1 %again, label %look, label %leave
leave:
  call void @turns_go_on()
  unreachable
look:
  %now = load volatile i32, ptr %gen_at
  %opened = icmp ne i32 %now, %mine
  br i1 %opened, label %done, label %turn
done:
  ret void
}}

define internal void @turns_thread() {{
  br label %top
top:
  %self = load volatile i32, ptr @turns_current
  %place = call ptr @turns_place(i32 %self)
  %back = call i32 @_setjmp(ptr %place) returns_twice
  %again = icmp ne i32 %back, 0
  br i1 %again, label %work, label %made
made:
  call void @_longjmp(ptr @turns_main, i32 1)
  unreachable
work:
  %me = load volatile i32, ptr @turns_current
  %entry = load ptr, ptr @turns_entry
  %states = load ptr, ptr @turns_states
  %state_at = getelementptr ptr, ptr %states, i32 %me
  %state = load ptr, ptr %state_at
  call void %entry(ptr %state)
  %flag = getelementptr i8, ptr @turns_done, i32 %me
  store i8 1, ptr %flag
  store i32 0, ptr @turns_idle
  %left = load i32, ptr @turns_left
  %less = sub i32 %left, 1
  store i32 %less, ptr @turns_left
  %mine = call ptr @turns_place(i32 %me)
  %b = call i32 @_setjmp(ptr %mine) returns_twice
  %more = icmp ne i32 %b, 0
  br i1 %more, label %work, label %end
end:
  %none = icmp eq i32 %less, 0
  br i1 %none, label %home, label %other
home:
  call void @_longjmp(ptr @turns_main, i32 1)
  unreachable
other:
  call void @turns_go_on()
  unreachable
}}

define void @turns_make(i32 %thread, ptr %context, ptr %stack, i64 %stack_at, i64 %size_at) {{
  %back = call i32 @_setjmp(ptr @turns_main) returns_twice
  %again = icmp ne i32 %back, 0
  br i1 %again, label %made, label %make
make:
  store volatile i32 %thread, ptr @turns_current
  %g = call i32 @getcontext(ptr %context) returns_twice
  %sp = getelementptr i8, ptr %context, i64 %stack_at
  store ptr %stack, ptr %sp
  %size = getelementptr i8, ptr %context, i64 %size_at
  store i64 {_STACK}, ptr %size
  call void (ptr, ptr, i32, ...) @makecontext(ptr %context, ptr @turns_thread, i32 0)
  %s = call i32 @setcontext(ptr %context)
  ret void
made:
  ret void
}}

define i32 @turns_run(ptr %entry, ptr %states, i32 %count, i32 %step, i32 %first) {{
  store ptr %entry, ptr @turns_entry
  store ptr %states, ptr @turns_states
  store i32 %count, ptr @turns_count
  store i32 %count, ptr @turns_left
  store i32 %step, ptr @turns_step
  store i32 %first, ptr @turns_current
  store i32 0, ptr @turns_idle
  call void @llvm.memset.p0.i64(ptr @turns_done, i8 0, i64 {_MOST}, i1 false)
  %back = call i32 @_setjmp(ptr @turns_main) returns_twice
  %again = icmp ne i32 %back, 0
  br i1 %again, label %done, label %begin
begin:
  %place = call ptr @turns_place(i32 %first)
  call void @_longjmp(ptr %place, i32 1)
  unreachable
done:
  ret i32 %back
}}
declare void @llvm.memset.p0.i64(ptr, i8, i64, i1)

define ptr @turns_state() {{
  %self = load i32, ptr @turns_current
  %states = load ptr, ptr @turns_states
  %state_at = getelementptr ptr, ptr %states, i32 %self
  %state = load ptr, ptr %state_at
  ret ptr %state
}}

define void @turns_alone(ptr %entry, ptr %states, i32 %count) {{
  store ptr %states, ptr @turns_states
  br label %next
next:
  %thread = phi i32 [ 0, %0 ], [ %following, %next ]
  store i32 %thread, ptr @turns_current
  %state = call ptr @turns_state()
  call void %entry(ptr %state)
  %following = add i32 %thread, 1
  %more = icmp slt i32 %following, %count
  br i1 %more, label %next, label %end
end:
  ret void
}}
"""


class Stuck(AssertionError):
    """Threads wait for each other, and none can go on: a barrier that some of them do not reach."""


class Turns:
    """The threads, made when they are first needed and used again by every launch."""

    def __init__(self) -> None:
        code = compile_module(_CODE, host_processor())
        names = ("turns_wait", "turns_state", "turns_make", "turns_run", "turns_alone")
        self.code = loaded = load_object(code, names, address_of)
        self._make = ctypes.CFUNCTYPE(
            None, ctypes.c_int32, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64
        )(loaded["turns_make"])
        run = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int32, ctypes.c_int32, ctypes.c_int32)
        self._run = ctypes.CFUNCTYPE(ctypes.c_int32, *run)(loaded["turns_run"])
        alone = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int32)
        self._alone = ctypes.CFUNCTYPE(None, *alone)(loaded["turns_alone"])
        self._memory: list[Any] = []

    def run(self, entry: int, states: Sequence[int], *, alone: bool, backwards: bool) -> None:
        """``entry`` of each of ``states``, with the first thread ahead of the others, or ``backwards`` the last one.

        Those that have nothing to do with each other, ``alone``, run one after the other.
        """
        if alone:
            self._alone(entry, (ctypes.c_void_p * len(states))(*states), len(states))
            return
        while len(self._memory) < len(states):
            self._add()
        count = len(states)
        step, first = (count - 1, count - 1) if backwards else (1, 0)
        if self._run(entry, (ctypes.c_void_p * count)(*states), count, step, first) != 1:
            self._memory.clear()  # they stand in the middle of what they did
            raise Stuck("a barrier that not all threads reach")

    def _add(self) -> None:
        whole = (ctypes.c_char * (_CONTEXT + _STACK + 64))()
        start = -(-ctypes.addressof(whole) // 64) * 64
        # glibc's ucontext_t begins with flags and a link, 8 bytes each; ss_sp, ss_flags and ss_size follow.
        self._make(len(self._memory), start, start + _CONTEXT, 16, 32)
        self._memory.append(whole)


@cache
def turns() -> Turns:
    return Turns()
