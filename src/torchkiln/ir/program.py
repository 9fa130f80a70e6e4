"""A lowered graph: buffers, the loops and extern calls that fill them, and what goes in and out.

Lowering makes a :class:`Program`; the scheduler reads it. Loops address buffers by logical subscripts, so a
layout can change without touching them; extern calls and outputs see buffers through :class:`StridedView`.

An *opaque* buffer is a tensor that is no strided memory of the CPU: sparse, quantized, packed by oneDNN, on the meta
device. Extern calls alone read and write it, always as a whole; it has no place in the arena.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any, Literal, Union

import torch

from torchkiln.graph.effects import is_ordered_effect
from torchkiln.ir import index as ix
from torchkiln.ir.expr import Expr
from torchkiln.ir.higher_order import HigherOrder
from torchkiln.ir.index import Extent, Index, Size, Var

EMULATED = -1
"""The number of a card whose memory is that of this process."""


@dataclass(frozen=True)
class Buffer:
    """Memory for one tensor. ``strides`` are in elements; the data pointer addresses element ``[0, ..., 0]``.

    An ``opaque`` one has no strides, and no bytes that are ours to plan. ``device`` is the kind of device whose memory
    it is: "cpu", or "cuda" for the card of the program.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[Extent, ...]
    strides: tuple[Extent, ...]
    opaque: bool = False
    device: str = "cpu"

    @property
    def whole(self) -> StridedView:
        """All of the buffer, as extern calls and outputs see it."""
        return StridedView(self.name, self.dtype, self.shape, self.strides, opaque=self.opaque)

    @cached_property
    def elements(self) -> Extent:
        """Elements from the first to the last one addressed (0 for an empty tensor, and for an opaque one)."""
        return 0 if 0 in self.shape or self.opaque else self.whole.end

    @cached_property
    def nbytes(self) -> Extent:
        return ix.product((self.elements, self.dtype.itemsize))

    def __str__(self) -> str:
        layout = "opaque" if self.opaque else f"strides {list(self.strides)}"
        place = "" if self.device == "cpu" else f" on {self.device}"
        return f"{self.name}: {str(self.dtype).removeprefix('torch.')}{list(self.shape)} {layout}{place}"


@dataclass(frozen=True)
class StridedView:
    """A tensor over the memory of ``buffer``; ``offset`` in elements of ``dtype`` from the buffer's first element.

    One of an opaque buffer is the tensor itself, and has no strides.
    """

    buffer: str
    dtype: torch.dtype
    shape: tuple[Extent, ...]
    strides: tuple[Extent, ...]
    offset: Extent = 0
    opaque: bool = False

    @property
    def end(self) -> Extent:
        """Elements of the buffer's memory up to the last one that is shown."""
        last = ix.as_index(self.offset)
        for size, stride in zip(self.shape, self.strides, strict=True):
            last = last + (ix.as_index(size) - 1) * stride
        return ix.extent(last + 1)

    def __str__(self) -> str:
        if self.opaque:
            return self.buffer
        return f"{self.buffer}.as_strided({list(self.shape)}, {list(self.strides)}, {self.offset})"


@dataclass(frozen=True)
class Origin:
    """Where an operation came from: the FX node names it computes and the user's source line, if known."""

    nodes: tuple[str, ...] = ()
    source: str | None = None


NO_ORIGIN = Origin()


REDUCERS = frozenset(("sum", "prod", "max", "min", "argmax", "argmin", "any", "all"))
INDEX_REDUCERS = frozenset(("argmax", "argmin"))


def reduced_dtype(reducer: str | None, dtype: torch.dtype) -> torch.dtype:
    """What values of ``dtype`` are reduced to."""
    return torch.int64 if reducer in INDEX_REDUCERS else dtype


@dataclass(frozen=True)
class Loop:
    """``target[store] = value`` for every point of ``ranges``; with a ``reducer``, reduced over ``reduced``.

    A reduction accumulates in the dtype of ``value``. Each element of ``target`` is stored at most once.
    """

    target: str
    ranges: tuple[Var, ...]
    value: Expr
    store: tuple[Index, ...]
    reducer: str | None = None
    reduced: tuple[Var, ...] = ()
    origin: Origin = NO_ORIGIN

    @property
    def statement(self) -> str:
        """What one iteration does, as text."""
        value = f"{self.value}"
        if self.reducer:
            over = ", ".join(f"{v.name} < {v.extent}" for v in self.reduced)
            value = f"{self.reducer}({over}: {value})" if over else f"{self.reducer}({value})"
        return f"{self.target}[{', '.join(map(str, self.store))}] = {value}"

    def __str__(self) -> str:
        head = ", ".join(f"{v.name} < {v.extent}" for v in self.ranges)
        return f"for {head or '()'}: {self.statement}"


@dataclass(frozen=True)
class SizeOfResult:
    """A size that an extern call decides: that of ``buffer``, one of its results, along ``dim``."""

    size: Size
    buffer: str
    dim: int


# Matmuls of bfloat16 matrices with a float32 result, which torch has for other devices only; native code does them.
BF16_MATMULS = (torch.ops.aten.mm.dtype, torch.ops.aten.bmm.dtype)

# Operators that can write their result into memory they are given: it may be planned, and lie in the arena.
WRITES_INTO = frozenset(
    (
        torch.ops.aten.mm.default,
        torch.ops.aten.addmm.default,
        torch.ops.aten.bmm.default,
        torch.ops.aten.baddbmm.default,
        *BF16_MATMULS,
    )
)

# What an extern argument may be: StridedView for tensors, Index for a number known at run time, or plain Python data
# in (nested) tuples.
ExternArgument = Any


@dataclass(frozen=True)
class ExternCall:
    """A call of a torch operator through the dispatcher, or of a higher-order operator with bodies of its own.

    ``arguments`` follow the operator's schema order, every argument present (defaults filled in); tensors are
    :class:`StridedView`, lists are tuples. ``results`` name the buffer of each tensor the operator returns (a
    tensor list returns several), None for an unused result. ``mutates`` names buffers written in place.
    ``binds`` are the sizes that the call decides. With ``through_python`` it is called as eager would.
    """

    target: torch._ops.OpOverload | HigherOrder
    arguments: tuple[ExternArgument, ...]
    results: tuple[str | None, ...]
    mutates: tuple[str, ...] = ()
    origin: Origin = NO_ORIGIN
    binds: tuple[SizeOfResult, ...] = ()
    through_python: bool = False

    @property
    def writes_into(self) -> bool:
        """Whether the operator may write its result into memory that it is given."""
        return self.target in WRITES_INTO and not self.through_python

    @property
    def has_effect(self) -> bool:
        """Whether the call does more than compute its results (draws random numbers, mutates, prints)."""
        if isinstance(self.target, HigherOrder):
            return self.target.effect
        drawn = torch.Tag.nondeterministic_seeded in self.target.tags
        return self.target._schema.is_mutable or drawn or not self.results or is_ordered_effect(self.target)

    def __str__(self) -> str:
        results = ", ".join(r or "_" for r in self.results)
        return f"{results} = {self.target}({', '.join(map(str, self.arguments))})"


@dataclass(frozen=True)
class Input:
    """A graph input. ``buffer`` is None for anything but a tensor (a size, None, a generator).

    ``donated`` says that the tensor was made for this graph alone: where the caller holds it no longer either, its
    memory is reused after the last step that reads it. ``any_strides`` says that it may come with other strides than
    those of the buffer, and is then copied: hooks for saved tensors unpack what they like. ``static`` says that the
    tensor is held beyond the call, as a module holds its parameters: giving it up early frees nothing.
    """

    name: str
    buffer: str | None
    donated: bool = False
    any_strides: bool = False
    static: bool = False


@dataclass(frozen=True)
class SizeSource:
    """Where a size is found when the graph starts.

    It is graph input ``position`` itself or, with ``dim``, the size of that tensor along ``dim``, or its stride there.
    """

    size: Size
    position: int
    dim: int | None = None
    stride: bool = False


@dataclass(frozen=True)
class Refusal:
    """What to raise for a value eager, or Python, refuses."""

    error: Literal["IndexError", "RuntimeError", "ZeroDivisionError", "OverflowError", "ValueError"]
    text: str


TOO_LARGE = Refusal("OverflowError", "an integer of more than 64 bits")


@dataclass(frozen=True)
class ReadNumber:
    """Reads the one integer of ``view`` when the graph gets here: a size from there on.

    One outside of the size's bounds raises ``refusal``: eager's class of error, and a text.
    """

    size: Size
    view: StridedView
    origin: Origin = NO_ORIGIN
    refusal: Refusal | None = None

    def __str__(self) -> str:
        return f"{self.size} = {self.view}.item()"


@dataclass(frozen=True)
class CheckSizes:
    """Fails with ``message`` unless ``left`` and ``right`` compare so: what the program says of data-dependent sizes.

    ``comparison`` is an operation of the IR's vocabulary.
    """

    comparison: str
    left: Extent
    right: Extent
    message: str
    origin: Origin = NO_ORIGIN

    def __str__(self) -> str:
        return f"check {self.comparison}({self.left}, {self.right})"


@dataclass(frozen=True)
class CheckFits:
    """Raises ``TOO_LARGE`` unless ``value``, computed without a limit, is a number of 64 bits.

    So is every dividend in it: from there on arithmetic that wraps gives the right number.
    """

    value: Index
    origin: Origin = NO_ORIGIN

    def __str__(self) -> str:
        return f"check that {self.value} fits"


@dataclass(frozen=True)
class PassInput:
    """Graph output that is a graph input itself, the same object."""

    position: int


@dataclass(frozen=True)
class PlainValue:
    """Graph output that is a Python value known at compile time (None, an int)."""

    value: object


@dataclass(frozen=True)
class Number:
    """Graph output that is an integer computed from sizes, or with ``is_bool`` a bool: whether it is not 0."""

    value: Index
    is_bool: bool = False


Output = Union[StridedView, PassInput, PlainValue, Number]
Operation = Union[Loop, ExternCall, ReadNumber, CheckSizes, CheckFits]


@dataclass(frozen=True)
class Program:
    """A whole lowered graph, operations in an order that respects every dependency. ``buffers`` cannot be changed.

    ``card`` is the number that torch has for the card of its buffers, or ``EMULATED``; None where all are on the CPU.
    ``saved`` are the positions of outputs that only backward sees.
    """

    inputs: tuple[Input, ...]
    constants: tuple[tuple[str, torch.Tensor], ...]
    buffers: Mapping[str, Buffer]
    operations: tuple[Operation, ...]
    outputs: tuple[Output, ...]
    sizes: tuple[SizeSource, ...] = ()
    card: int | None = None
    saved: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "buffers", MappingProxyType(dict(self.buffers)))

    @property
    def device(self) -> str:
        """The kind of device that the program's own memory is planned on: the card, where it has one."""
        return "cpu" if self.card is None else "cuda"

    def __str__(self) -> str:
        lines = [f"input {i.name} -> {i.buffer}" for i in self.inputs]
        lines += [f"size {s.size} in {list(s.size.bounds)}" for s in self.sizes]
        lines += [f"buffer {b}" for b in self.buffers.values()]
        lines += [str(op) for op in self.operations]
        lines += [f"output {o}" for o in self.outputs]
        return "\n".join(lines)
