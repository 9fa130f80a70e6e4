"""The pool of arenas: blocks of memory that calls take and give back.

A block is a header (its size) and the memory after it. Slots are only ever exchanged whole, so a block is owned by its
slot or by one thread, and no other thread reads its header.
"""

from __future__ import annotations

from torchkiln.codegen.llvm.functions import Function, Register, Variable, native

POOL_SLOTS = 8
_HEADER_BYTES = 64

_SLOTS = Variable("i64*", "kiln_arena_slots", POOL_SLOTS)
_BYTES = Variable("i64", "kiln_arena_bytes")
_BLOCKS = Variable("i64", "kiln_arena_blocks")


@native("ptr kiln_arena_acquire(i64)", exported=True)
def _acquire(f: Function, size: Register) -> None:
    """Memory of at least this many bytes, or null.

    A cached block that is too small makes way for the new one, so there are as many blocks as calls ran at one time.
    """
    needed = size + _HEADER_BYTES
    too_small = f.variable("i64*", None)
    with f.loop(POOL_SLOTS) as k:
        block = _take(f, k)
        with f.if_(block.eq(None)):
            f.continue_()
        with f.if_(too_small[0].ne(None)):
            f.call(_return_block, too_small[0])
            too_small[0] = None
        with f.if_(block[0].compare("uge", needed)):
            f.ret(block.cast("i8*").at(_HEADER_BYTES))
        too_small[0] = block
    with f.if_(too_small[0].ne(None)):
        f.call(_free_block, too_small[0])
    new = f.alloca("i64*")
    with f.if_(f.call("posix_memalign", new, 64, needed).ne(0)):
        f.ret(None)
    block = new[0]
    block[0] = needed
    f.atomic("add", f.address(_BYTES), needed)
    f.atomic("add", f.address(_BLOCKS), 1)
    f.ret(block.cast("i8*").at(_HEADER_BYTES))


@native("void kiln_arena_release(i8*)", exported=True)
def _release(f: Function, memory: Register) -> None:
    f.call(_return_block, memory.at(-_HEADER_BYTES))


@native("void kiln_arena_clear()", exported=True)
def _clear(f: Function) -> None:
    """Free every block no call is using."""
    with f.loop(POOL_SLOTS) as k:
        block = _take(f, k)
        with f.if_(block.ne(None)):
            f.call(_free_block, block)


@native("void return_block(i64*)")
def _return_block(f: Function, block: Register) -> None:
    """Put a block in an empty slot; with none, free the largest."""
    with f.loop(POOL_SLOTS) as k, f.if_(_put(f, k, block)):
        f.ret()
    held = f.variable("i64*", block)
    with f.loop(POOL_SLOTS) as k:
        other = _take(f, k)
        with f.if_(other.eq(None)):
            with f.if_(_put(f, k, held[0])):
                f.ret()
            f.continue_()
        other_is_larger = other[0].compare("ugt", held[0][0])
        smaller = other_is_larger.select(held[0], other)
        held[0] = other_is_larger.select(other, held[0])
        with f.if_(~_put(f, k, smaller)):  # another thread has filled the slot meanwhile
            f.call(_free_block, smaller)
    f.call(_free_block, held[0])


@native("void free_block(i64*)")
def _free_block(f: Function, block: Register) -> None:
    f.atomic("sub", f.address(_BYTES), block[0])
    f.atomic("sub", f.address(_BLOCKS), 1)
    f.call("free", block)


def _take(f: Function, slot: Register) -> Register:
    """What is in a slot, a block or null; the slot is empty afterwards."""
    return f.atomic("xchg", f.address(_SLOTS).at(slot), None, "acq_rel")


def _put(f: Function, slot: Register, block: Register) -> Register:
    """Whether the slot was empty, and holds the block now."""
    exchange = f"cmpxchg {f.address(_SLOTS).at(slot)}, ptr null, {block} acq_rel monotonic"
    return f.result("i1", f"extractvalue {{ ptr, i1 }} {f.fresh(exchange)}, 1")


EXPORTS = (_acquire, _release, _clear, _SLOTS, _BYTES, _BLOCKS)
