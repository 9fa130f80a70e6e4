"""Which half-precision values are rounded although a kernel uses them right away.

A value with one reader is not rounded on the way there. A value with several readers is rounded for all of them:
otherwise the same tensor would have two values, one in memory and one in a register, whose difference is not zero.

Where every reader does nothing but add up multiples of the value, nobody can tell: sums are rounded themselves. So it
is with gradients that are summed over one side and over the other. (Of 512 x 512 distances in 64 dimensions, bfloat16:
a step of 7.0 ms with the rounding, 3.9 ms without, on one thread.)

What is compared for equality is rounded at each step, in any precision: the gradient of a maximum looks for the maximum
among the elements it was taken of, which may be recomputed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch

from torchkiln.graph.dtypes import HALF
from torchkiln.ir import expr as ex
from torchkiln.ir.expr import Expr, Load, Op
from torchkiln.ir.program import Loop, Operation, Program
from torchkiln.schedule.dependencies import reads, visible_buffers

_LINEAR = ("cast", "narrow", "add", "sub", "neg")
# Operations whose result nothing that follows is rounded together with.
_ROUNDED_ANYWAY = (
    *("add", "sub", "neg", "abs", "sign", "maximum", "minimum", "fmax", "fmin", "copysign", "first_maximum"),
    *("floor", "ceil", "trunc", "round", "where", "cast", "rounded"),
)


def round_shared_values(program: Program) -> Program:
    """Make the rounding of every half-precision value with several readers one that is not skipped."""
    readers: dict[str, list[Operation | None]] = {}
    for operation in program.operations:
        for name in reads(operation):
            readers.setdefault(name, []).append(operation)
    for name in visible_buffers(program):
        readers.setdefault(name, []).append(None)

    def rounded(operation: Operation) -> Operation:
        if not isinstance(operation, Loop) or len(readers.get(operation.target, ())) < 2:
            return operation
        value = operation.value
        if not isinstance(value, Op) or value.name != "narrow" or _is_only_summed(operation.target, readers):
            return operation
        return replace(operation, value=Op("cast", value.args, value.dtype))

    return replace(program, operations=tuple(rounded(operation) for operation in program.operations))


def _is_only_summed(name: str, readers: Mapping[str, list[Operation | None]]) -> bool:
    """Whether a value goes into sums alone, directly or through loops that add it to others or scale it."""
    waiting, seen = [name], {name}
    while waiting:
        here = waiting.pop()
        for reader in readers.get(here, ()):
            if not isinstance(reader, Loop) or not _is_linear(reader.value, here):
                return False
            if reader.reducer is None and reader.target not in seen:
                seen.add(reader.target)
                waiting.append(reader.target)
            elif reader.reducer not in (None, "sum"):
                return False
    return True


def _is_linear(value: Expr, name: str) -> bool:
    """Whether ``name`` is read in ``value`` in terms of a sum only, each times something that does not depend on it."""
    depends: set[Expr] = set()
    for node in ex.walk((value,)):
        if isinstance(node, Load) and node.buffer == name:
            depends.add(node)
        below = [operand for operand in node.operands if operand in depends]
        if not below:
            continue
        depends.add(node)
        if not isinstance(node, Op) or node.dtype not in (torch.float32, *HALF):
            return False
        if node.name not in _LINEAR and not (node.name == "mul" and len(below) == 1):
            return False
    return True


def round_compared_values(program: Program) -> Program:
    """Round every step of what is compared for equality, so that it is the same wherever it is recomputed.

    Otherwise what else a kernel computes decides where it rounds: it may keep a half-precision value as it is, and
    contract a product and the sum it goes into.
    """
    loops = {operation.target: operation for operation in program.operations if isinstance(operation, Loop)}
    exact: set[str] = set()
    pending = [load.buffer for loop in loops.values() for load in _compared(loop.value)]
    while pending:
        name = pending.pop()
        if name in exact or name not in loops or loops[name].reducer not in (None, "max", "min"):
            continue  # sums are computed once
        exact.add(name)
        pending.extend(load.buffer for load in ex.loads(loops[name].value))
    if not exact:
        return program

    def rounded(operation: Operation) -> Operation:
        if not isinstance(operation, Loop) or operation.target not in exact:
            return operation
        return replace(operation, value=_in_steps(operation.value))

    return replace(program, operations=tuple(rounded(operation) for operation in program.operations))


def _compared(value: Expr) -> Iterator[Load]:
    """What is read for the two sides of questions whether floating-point numbers are equal."""
    for node in ex.walk((value,)):
        if isinstance(node, Op) and node.name in ("eq", "ne") and node.args[0] != node.args[1]:
            sides = [ex.loads(side) for side in node.args if side.dtype.is_floating_point]
            if len(sides) == 2 and all(sides):
                yield from (*sides[0], *sides[1])


def _in_steps(value: Expr) -> Expr:
    done: dict[Expr, Expr] = {}
    for node in ex.walk((value,)):
        rebuilt = ex.rewrite(node, lambda _: None, {}, done)
        if isinstance(rebuilt, Op) and rebuilt.dtype.is_floating_point:
            if rebuilt.name == "narrow":
                rebuilt = Op("cast", rebuilt.args, rebuilt.dtype)
            elif rebuilt.name not in _ROUNDED_ANYWAY:
                rebuilt = Op("rounded", (rebuilt,), rebuilt.dtype)
        done[node] = rebuilt
    return done[value]
