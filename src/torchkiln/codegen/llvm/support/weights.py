"""Whether the weights of a graph are those that were prepared: one comparison of addresses and numbers for each."""

from __future__ import annotations

from torchkiln.codegen.llvm.functions import Function, Register, native
from torchkiln.native.tensor_layout import TENSOR_OFFSET

# Where the bytes of a Python bytes object begin.
_BYTES_OFFSET = bytes.__basicsize__ - 1


@native("ptr kiln_weights_hold(i8*, ptr)", exported=True)
def _weights_hold(f: Function, table: Register, inputs: Register) -> None:
    """A function of Python's: whether the list ``inputs`` has the tensors of ``table``, as they were marked.

    The table, a bytes object, is written by :mod:`torchkiln.runtime.weight_marks`.
    """
    header = table.at(_BYTES_OFFSET).cast("i64*")
    count, storage_at, counter_at, memory_at, version_at, offset_at = (header[k] for k in range(6))
    size = f.call("PyList_Size", inputs)
    following = f.variable("i64*", header.at(6))
    with f.loop(count):
        mark = following[0]
        known = mark.cast("ptr*")
        samples = mark[7]
        following[0] = mark.at(samples * 3 + 8)
        with f.if_(mark[0] >= size):
            _answer(f, False)
        given = f.call("PyList_GetItem", inputs, mark[0])
        with f.if_(given.ne(known[1])):
            _answer(f, False)
        tensor = given.cast("i8*").at(TENSOR_OFFSET).cast("i8**")[0]
        storage = tensor.at(storage_at).cast("i8**")[0]
        with f.if_(storage.ne(known[2])):
            _answer(f, False)
        with f.if_(storage.at(memory_at).cast("ptr*")[0].ne(known[3])):
            _answer(f, False)
        counter = tensor.at(counter_at).cast("i8**")[0]
        with f.if_(counter.ne(known[4])):
            _answer(f, False)
        with f.if_(tensor.at(offset_at).cast("i64*")[0].ne(mark[5])):
            _answer(f, False)
        with f.if_(counter.at(version_at).cast("i32*")[0].convert("zext", "i64").ne(mark[6])):
            _answer(f, False)
        with f.loop(samples) as k:
            sample = mark.at(k * 3 + 8)
            with f.if_((sample.cast("i64**")[0][0] & sample[1]).ne(sample[2])):
                _answer(f, False)
    _answer(f, True)


def _answer(f: Function, holds: bool) -> None:
    f.ret(f.call("PyBool_FromLong", int(holds)))


EXPORTS = (_weights_hold,)
