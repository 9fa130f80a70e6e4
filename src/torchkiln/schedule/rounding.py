"""Which half-precision values are rounded although they are used again right away.

A value with one reader skips its rounding on the way there, as a chain in one kernel should. A value with several
readers is rounded for all of them: otherwise the same tensor would have two values, one for the reader that finds
it in memory and one for the reader that has it in a register, and their difference would not be zero.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from torchkiln.ir.expr import Op
from torchkiln.ir.program import Loop, Operation, Program, StridedView
from torchkiln.schedule.dependencies import reads


def round_shared_values(program: Program) -> Program:
    """Make the rounding of every half-precision value with several readers one that is not skipped."""
    readers = Counter(name for operation in program.operations for name in reads(operation))
    readers.update(o.buffer for o in program.outputs if isinstance(o, StridedView))
    readers.update(i.buffer for i in program.inputs if i.buffer is not None)  # the caller sees what is written there

    def rounded(operation: Operation) -> Operation:
        if not isinstance(operation, Loop) or readers[operation.target] < 2:
            return operation
        value = operation.value
        if not isinstance(value, Op) or value.name != "narrow":
            return operation
        return replace(operation, value=Op("cast", value.args, value.dtype))

    return replace(program, operations=tuple(rounded(operation) for operation in program.operations))
