"""Splitting long reductions into partial ones: few results then run in parallel, and no part is very long.

The number of parts depends on sizes alone, never on the thread count: results are the same bit for bit on any
number of threads. Symbolic sizes are taken as they were in the first call; kernels take sums over them in chunks, so
that they keep their accuracy at other sizes too.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from torchkiln.ir import expr as ex
from torchkiln.ir import index as ix
from torchkiln.ir.expr import Constant, Expr, Load, Masked
from torchkiln.ir.index import Extent, Index, Var
from torchkiln.ir.program import Buffer, Loop, Operation, Program
from torchkiln.schedule.dependencies import extent_product
from torchkiln.schedule.limits import Limits

_SPLITTABLE = ("sum", "prod", "max", "min", "any", "all")


def split_reductions(program: Program, limits: Limits) -> Program:
    """Rewrite each long reduction with few results as a partial reduction and a short final one."""
    buffers = dict(program.buffers)
    operations: list[Operation] = []
    for operation in program.operations:
        if isinstance(operation, Loop) and operation.reducer in _SPLITTABLE:
            operations.extend(_split(operation, buffers, limits))
        else:
            operations.append(operation)
    return replace(program, buffers=buffers, operations=tuple(operations))


def _split(loop: Loop, buffers: dict[str, Buffer], limits: Limits) -> list[Loop]:
    points, length = extent_product(loop.reduced), ix.hint_of(extent_product(loop.reduced))
    results = ix.hint_of(extent_product(loop.ranges))
    if results == 0 or length < 128:
        return [loop]
    across = _kept_is_contiguous(loop, buffers)
    tasks = -(-results // limits.results_side_by_side) if across else results
    wanted = 1
    points_of_task = results * length // tasks
    enough = results * length >= limits.split_points and points_of_task >= limits.task_points
    if tasks < limits.enough_results and enough:
        wanted = min(limits.most_parts, results * length // limits.part_points, limits.enough_parts // tasks)
    most = limits.longest_column if across else limits.longest_row
    if loop.reducer == "sum" and loop.value.dtype.is_floating_point and length > wanted * most:
        wanted = -(-2 * length // most)
    if wanted > 1 and _goes_by_rows(loop, wanted, most, limits):
        return _in_two(loop, loop.reduced[0], loop.reduced[1:], buffers)
    if isinstance(points, int):
        return _in_parts_of_all(loop, points, _parts(length, wanted), buffers)
    return _in_parts_of_one(loop, wanted, buffers)


def _in_parts_of_all(loop: Loop, points: int, parts: int, buffers: dict[str, Buffer]) -> list[Loop]:
    """Parts of equal length of all the points that are reduced, in row-major order."""
    if parts < 2:
        return [loop]
    size = -(-points // parts)
    part, within = Var("p0", parts), Var("r0", size)
    flat = ix.of(part) * size + ix.of(within)
    mapping = dict(zip(loop.reduced, ix.unflatten(flat, [v.extent for v in loop.reduced]), strict=True))
    # The last part may be short, and what lies past the end is not evaluated: the first subscript needs no remainder.
    mapping[loop.reduced[0]] = flat // ix.product(v.extent for v in loop.reduced[1:])
    value = ex.rewrite(loop.value, lambda _: None, mapping, {})
    if parts * size != points:
        value = _within(flat, points, value, loop.reducer)
    return _in_two(replace(loop, value=value), part, (within,), buffers)


def _in_parts_of_one(loop: Loop, wanted: int, buffers: dict[str, Buffer]) -> list[Loop]:
    """Parts of one of the reduced variables, for symbolic sizes.

    Parts of all points would take a division by sizes for each element. (Normalizing eight images of 256 x 256 by their
    largest edges: 5.0 ms with divisions, 0.9 ms so, on one thread.)
    """
    chosen = next((v for v in loop.reduced if ix.hint_of(v.extent) >= wanted), None)
    chosen = chosen or max(loop.reduced, key=lambda v: ix.hint_of(v.extent))
    parts = min(wanted, ix.hint_of(chosen.extent))
    if parts < 2:
        return [loop]
    size = ix.ceil_divide(chosen.extent, parts)
    part, within = Var("p0", parts), Var(chosen.name, size)
    index = ix.of(part) * size + ix.of(within)
    value = ex.rewrite(loop.value, lambda _: None, {chosen: index}, {})
    if ix.product((parts, size)) != chosen.extent:
        value = _within(index, chosen.extent, value, loop.reducer)
    reduced = tuple(within if v is chosen else v for v in loop.reduced)
    return _in_two(replace(loop, value=value), part, reduced, buffers)


def _within(index: Index, limit: Extent, value: Expr, reducer: str | None) -> Expr:
    """``value`` where ``index`` is below ``limit``, and past it what leaves the reduction unchanged."""
    inside = ex.index_value(index) < limit
    return ex.where(inside, Masked(inside, value), identity(reducer, value.dtype))


def _goes_by_rows(loop: Loop, wanted: int, most: int, limits: Limits) -> bool:
    """Whether a part for each value of the first reduced variable does as well as the parts that are wanted.

    Such parts can be fused with other loops over the same rows. (The divergence of two log-softmaxes of 256 x 8000
    reads one of them while it is made: a step of training 6.6 ms with 64 parts and 5.3 ms with 256, on one thread.)
    """
    first, *others = loop.reduced
    rows, row = ix.hint_of(first.extent), ix.hint_of(extent_product(others))
    return wanted // 2 <= rows <= limits.most_row_parts and limits.shortest_row <= row <= most


def _in_two(loop: Loop, part: Var, within: tuple[Var, ...], buffers: dict[str, Buffer]) -> list[Loop]:
    """``loop`` as a reduction over ``within`` for each ``part``, and one over the parts."""
    dtype = loop.value.dtype
    shape: tuple[Extent, ...] = (part.extent, *(v.extent for v in loop.ranges))
    device = buffers[loop.target].device
    partial = Buffer(f"{loop.target}_parts", dtype, shape, ix.contiguous_strides(shape), device=device)
    buffers[partial.name] = partial
    subscripts = (ix.of(part), *(ix.of(v) for v in loop.ranges))
    first = replace(loop, target=partial.name, ranges=(part, *loop.ranges), reduced=within, store=subscripts)
    second = replace(loop, reduced=(part,), value=Load(partial.name, subscripts, dtype))
    return [first, second]


def _parts(length: int, wanted: int) -> int:
    """A number of parts near ``wanted`` that divides ``length`` where there is one."""
    return next((parts for parts in range(wanted, max(wanted // 2, 1), -1) if length % parts == 0), wanted)


def _kept_is_contiguous(loop: Loop, buffers: dict[str, Buffer]) -> bool:
    """Whether the kept dimensions, not the reduced ones, run along memory in most reads of single points."""
    kept = reduced = 0
    for load in ex.loads(loop.value):
        offset = ix.flatten(load.subscripts, buffers[load.buffer].strides)
        if offset.variables().isdisjoint(loop.reduced) or offset.variables().isdisjoint(loop.ranges):
            continue  # read once for each result, or the same for all
        kept += any(offset.coefficient(v) == 1 for v in loop.ranges if v.extent != 1)
        reduced += any(offset.coefficient(v) == 1 for v in loop.reduced if v.extent != 1)
    return kept > reduced


def identity(reducer: str | None, dtype: torch.dtype) -> Expr:
    """The value that leaves a reduction unchanged."""
    if reducer in ("sum", "any", "prod", "all"):
        return ex.literal(reducer in ("prod", "all"), dtype)
    most = float("inf") if dtype.is_floating_point else torch.iinfo(dtype).max
    least = -most if dtype.is_floating_point else torch.iinfo(dtype).min
    return Constant(least if reducer in ("max", "argmax") else most, dtype)
