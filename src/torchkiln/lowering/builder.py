"""The program under construction while a graph is lowered: values, buffers, loops."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from torchkiln.actions import Actions
from torchkiln.errors import UnsupportedError
from torchkiln.graph.dtypes import FLOATS, HALF, INTEGERS_AND_BOOL
from torchkiln.graph.source import source_line
from torchkiln.ir import expr as ex
from torchkiln.ir import index as ix
from torchkiln.ir.expr import Constant, Expr, Load, index_value, op, where
from torchkiln.ir.higher_order import HigherOrder
from torchkiln.ir.index import Extent, Index, Size, Var
from torchkiln.ir.program import (
    EMULATED,
    Buffer,
    ExternCall,
    Loop,
    Operation,
    Origin,
    ReadNumber,
    Refusal,
    SizeOfResult,
    StridedView,
    reduced_dtype,
)
from torchkiln.lowering.sizes import Sizes
from torchkiln.target import Target, place_of, target_on

Mark = tuple[int, int, tuple[int, int]]  # numbers of operations, buffers, sizes
Subscripts = tuple[Index, ...]
Element = Callable[[Subscripts], Expr]  # the value at each point of a tensor

SUPPORTED_DTYPES = frozenset((*FLOATS, *INTEGERS_AND_BOOL))
QUANTIZED_DTYPES = frozenset((torch.quint8, torch.qint8, torch.qint32, torch.quint4x2, torch.quint2x4))


@dataclass(frozen=True)
class TensorValue:
    """A tensor as an expression over its own dimensions: ``value`` at ``dims`` is the element there.

    A view is a value whose expression is a single load at other subscripts; nothing is copied to make one.
    """

    shape: tuple[Extent, ...]
    dtype: torch.dtype
    dims: tuple[Var, ...]
    value: Expr

    def at(self, subscripts: Sequence[Index]) -> Expr:
        """The element at ``subscripts``."""
        mapping = dict(zip(self.dims, subscripts, strict=True))
        return ex.rewrite(self.value, _keep, mapping, {})

    @property
    def numel(self) -> Extent:
        return ix.product(self.shape)


@dataclass(frozen=True)
class NewTensor:
    """A result of an extern call for which there is no fake tensor, contiguous where there are no ``strides``."""

    shape: tuple[Extent, ...]
    dtype: torch.dtype
    strides: tuple[Extent, ...] | None = None
    device: str | None = None  # that of the node where there is none


@dataclass(frozen=True)
class OpaqueValue:
    """A tensor that only operators of torch read and write: sparse, quantized, packed, or without data (``meta``).

    Fake tensors do not say that they are ``quantized``, so what operators make of one is taken for quantized too.
    """

    buffer: Buffer
    quantized: bool = False


def is_opaque(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` is anything but strided memory of the CPU or a card whose bits are its values.

    Other devices than ``meta`` are refused: their operators run apart from the steps of a graph.
    """
    if tensor.device.type not in ("cpu", "cuda", "meta"):
        raise UnsupportedError(f"a tensor on {tensor.device}: only the CPU and NVIDIA cards are compiled for")
    return tensor.device.type == "meta" or tensor.layout is not torch.strided or tensor.dtype in QUANTIZED_DTYPES


def _keep(_: Expr) -> None:
    return None


def dimension_variables(shape: Sequence[Extent], prefix: str = "i") -> tuple[Var, ...]:
    return tuple(Var(f"{prefix}{k}", size) for k, size in enumerate(shape))


def indices(variables: Sequence[Var]) -> tuple[Index, ...]:
    return tuple(ix.of(v) for v in variables)


def view_of(
    base: TensorValue, shape: Sequence[Extent], subscripts: Callable[[Subscripts], Sequence[Index]]
) -> TensorValue:
    """A view: element ``i`` of it is element ``subscripts(i)`` of ``base``."""
    dims = dimension_variables(shape)
    return TensorValue(tuple(shape), base.dtype, dims, base.at(subscripts(indices(dims))))


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype arithmetic on ``dtype`` is done in: half types compute in float32."""
    return torch.float32 if dtype in HALF else dtype


class Builder:
    """Collects buffers and operations. One per graph; the current node supplies layouts and origins."""

    def __init__(self, target: Target, *, exact_half: bool = False, actions: Actions | None = None) -> None:
        self.target = target
        self.exact_half = exact_half
        self.sizes = Sizes(self.compute_size)
        self.buffers: dict[str, Buffer] = {}
        self.inputs: set[str] = set()  # buffers that are the caller's memory
        self.constants: set[str] = set()
        self.tables: list[tuple[str, torch.Tensor]] = []  # constants that lowerings made
        self._from_torch: set[str] = set()  # results of extern calls
        self._shown: dict[str, str] = {}  # those of them that are views, and what they are views of
        self.operations: list[Operation] = []
        self.node: torch.fx.Node  # the one being lowered
        self.origin = Origin()
        self._actions = actions
        self.through_python = False  # whether the operator of the node is to be called as eager does
        self.device = "cpu"  # whose memory the results of the node are
        self.known_numbers: dict[str, bool | int | float] = {}  # constants that are one number
        self.card: int | None = None  # the number torch has for the card whose memory has been met

    def watch(self, what: str, described: Callable[[], object]) -> None:
        """Hand what was decided to those who watch the compilation."""
        if self._actions is not None:
            self._actions.watch(what, described)

    def lower_for(self, node: torch.fx.Node) -> None:
        """What is added from here on comes from ``node``."""
        self.node, self.origin = node, Origin((node.name,), source_line(node))
        self.device = self._device_of(node)
        counted = self._actions is not None and isinstance(node.target, torch._ops.OpOverload)
        self.through_python = counted and not self._may_compile()

    def _may_compile(self) -> bool:
        assert self._actions is not None
        return self._actions.take("call", lambda: (f"{self.node.target} at {self.node.name}", self.origin.source))

    # -- devices ------------------------------------------------------------------------------------------

    @property
    def computes_on(self) -> Target:
        """The machine that loops of the current node run on."""
        return target_on(self.target, self.device)

    def _device_of(self, node: torch.fx.Node) -> str:
        """Where the results of a node are, or what it looks at where it has none."""
        for value in (node, *node.all_input_nodes):
            for tensor in tree_leaves(value.meta.get("val")):
                if isinstance(tensor, torch.Tensor):
                    return self.place_of(tensor)
        return self.device

    def place_of(self, tensor: torch.Tensor) -> str:
        """The kind of device whose memory a tensor of the graph is; one card is enough for a graph."""
        place = place_of(self.target, tensor.device)
        if place == "cuda":
            emulated = self.target.card.emulated if self.target.card is not None else tensor.device.type == "cpu"
            number = EMULATED if emulated else tensor.device.index or 0
            if self.target.card is None and not self.target.is_gpu:
                raise UnsupportedError(f"a tensor on {tensor.device}, while torch uses no NVIDIA card")
            if self.card not in (None, number):
                raise UnsupportedError(f"tensors on the cards {self.card} and {number}: a graph is compiled for one")
            self.card = number
        return place

    def device_of(self, value: TensorValue) -> str | None:
        """Where a value is computed: on the card where it reads memory of that; None where it reads none."""
        found = {self.buffers[load.buffer].device for load in ex.loads(value.value)}
        return "cuda" if "cuda" in found else next(iter(found), None)

    def as_parameter(self, value: TensorValue) -> TensorValue:
        """A number on the CPU as loops of a card take it: one known here, or a buffer that is a number."""
        load = value.value
        if isinstance(load, Load) and load.buffer in self.known_numbers:
            number = Constant(self.known_numbers[load.buffer], value.dtype)
            return TensorValue(value.shape, value.dtype, value.dims, number)
        if isinstance(load, Load) and not self.buffers[load.buffer].shape:
            return value
        return self.copy(value, ())

    def on_cpu(self, value: TensorValue) -> TensorValue:
        """A value of a card as one on the CPU, once the card has computed it; any other as it is."""
        if self.device_of(value) != "cuda":
            return value
        copy = torch.ops.aten._to_copy.default
        view = self.materialize(value)
        given = (view, None, None, torch.device("cpu"), None, False, None)
        (made,) = self.extern(copy, given, [NewTensor(value.shape, value.dtype, device="cpu")])
        assert isinstance(made, TensorValue)
        return made

    # -- buffers and values -------------------------------------------------------------------------------

    def add_buffer(
        self,
        prefix: str,
        dtype: torch.dtype,
        shape: Sequence[Extent],
        strides: Sequence[Extent],
        *,
        opaque: bool = False,
        device: str | None = None,
    ) -> Buffer:
        """A buffer of the program, in memory of ``device``, or else of that of the current node."""
        place = self.device if device is None else device
        buffer = Buffer(f"{prefix}{len(self.buffers)}", dtype, tuple(shape), tuple(strides), opaque, place)
        self.buffers[buffer.name] = buffer
        return buffer

    def add_buffer_for(
        self, prefix: str, tensor: torch.Tensor, *, strides: Sequence[Extent] | None = None, opaque: bool = False
    ) -> Buffer:
        """A buffer laid out as ``tensor``, or by other ``strides``; one of an opaque tensor has none."""
        shape, device = self.sizes.extents(tensor.shape), self.place_of(tensor)
        if opaque or is_opaque(tensor):
            return self.add_buffer(prefix, tensor.dtype, shape, (), opaque=True, device=device)
        layout = self.sizes.strides(tensor.stride()) if strides is None else strides
        return self.add_buffer(prefix, tensor.dtype, shape, layout, device=device)

    def value_of(self, buffer: Buffer, *, quantized: bool = False) -> TensorValue | OpaqueValue:
        if not buffer.opaque:
            return self.read(buffer)
        return OpaqueValue(buffer, quantized or buffer.dtype in QUANTIZED_DTYPES)

    def read(self, buffer: Buffer) -> TensorValue:
        """The whole of ``buffer`` as a value."""
        dims = dimension_variables(buffer.shape)
        return TensorValue(buffer.shape, buffer.dtype, dims, Load(buffer.name, indices(dims), buffer.dtype))

    def table(self, values: torch.Tensor) -> TensorValue:
        """Numbers that are known while compiling, as a constant of the program."""
        buffer = self.add_buffer("c", values.dtype, values.shape, ix.contiguous_strides(tuple(values.shape)))
        self.constants.add(buffer.name)
        self.tables.append((buffer.name, values))
        return self.read(buffer)

    def layout_for(self, shape: Sequence[Extent]) -> tuple[Extent, ...]:
        """Strides for a new buffer of ``shape``: eager's strides of the current node where it has that shape."""
        if not shape:  # nor is the node asked: its sizes may be what is being computed into the buffer
            return ()
        for result in self.results:
            if isinstance(result, torch.Tensor) and self.sizes.extents(result.shape) == tuple(shape):
                strides = self.sizes.strides(result.stride())
                if is_dense(shape, strides):
                    return strides
        return ix.contiguous_strides(shape)

    @property
    def results(self) -> Sequence[Any]:
        """The fake values of what eager gives as results of the current node."""
        value = self.node.meta.get("val")
        return value if isinstance(value, (tuple, list)) else (value,)

    @property
    def result_shape(self) -> tuple[Extent, ...]:
        """The shape of the one result of the current node."""
        (result,) = self.results
        return self.sizes.extents(result.shape)

    # -- operations ---------------------------------------------------------------------------------------

    def pointwise(
        self, shape: Sequence[Extent], dtype: torch.dtype, element: Element, strides: Sequence[Extent] | None = None
    ) -> TensorValue:
        """A new tensor whose element at ``i`` is ``element(i)``, converted to ``dtype``."""
        if dtype not in SUPPORTED_DTYPES:
            raise UnsupportedError(f"a copy of {dtype} values by generated code")
        dims = dimension_variables(shape)
        subscripts = indices(dims)
        value = self.convert(element(subscripts), dtype)
        layout = self.layout_for(shape) if strides is None else strides
        buffer = self.add_buffer("b", dtype, shape, layout, device=self._place_for(value))
        self.operations.append(Loop(buffer.name, dims, value, subscripts, origin=self.origin))
        return self.read(buffer)

    def reduce(
        self,
        reducer: str,
        shape: Sequence[Extent],
        reduced: Sequence[Extent],
        element: Callable[[Subscripts, Subscripts], Expr],
    ) -> TensorValue:
        """Reduce ``element(kept, reduced)`` over ``reduced``; the result has ``shape``."""
        kept, over = dimension_variables(shape), dimension_variables(reduced, "r")
        value = element(indices(kept), indices(over))
        place = self._place_for(value)
        buffer = self.add_buffer("b", reduced_dtype(reducer, value.dtype), shape, self.layout_for(shape), device=place)
        self.operations.append(Loop(buffer.name, kept, value, indices(kept), reducer, over, self.origin))
        return self.read(buffer)

    def _place_for(self, value: Expr) -> str:
        """Where a loop stores ``value``: beside what it reads, or where the node has its results.

        Loops of a card may read numbers on the CPU, too.
        """
        found = [self.buffers[load.buffer] for load in ex.loads(value)]
        if all(buffer.device == "cpu" and not buffer.shape for buffer in found):
            return self.device
        return "cuda" if any(buffer.device == "cuda" for buffer in found) else "cpu"

    def store(self, buffer: Buffer, source: TensorValue, dims: tuple[Var, ...], subscripts: Subscripts) -> None:
        """Overwrite the elements of an existing buffer at ``subscripts``, written in ``dims``, with ``source``."""
        value = self.convert(source.at(indices(dims)), buffer.dtype)
        self.operations.append(Loop(buffer.name, dims, value, subscripts, origin=self.origin))

    def extern(
        self,
        target: torch._ops.OpOverload | HigherOrder,
        arguments: tuple[Any, ...],
        results: Sequence[Any],
        mutates: tuple[str, ...] = (),
        *,
        quantized: bool = False,
        packed: bool = False,
        states: Collection[int] = (),
    ) -> list[Any]:
        """Call an operator; ``results`` are fake or new tensors (or None) in the order it returns them.

        What comes back is a :class:`TensorValue` or :class:`OpaqueValue` for each, or None. With ``quantized`` results
        are quantized tensors, with ``packed`` weights in a library's own layout, whatever the fake ones say. Those at
        ``states`` are for the operator's backward, wherever and however they lie.
        """
        opaque = quantized or packed
        buffers = [
            None if r is None else self._result_buffer(r, opaque=opaque or k in states) for k, r in enumerate(results)
        ]
        names = tuple(None if b is None else b.name for b in buffers)
        decided = tuple(
            SizeOfResult(size, b.name, dim)
            for b in buffers
            if b is not None
            for dim, extent in enumerate(b.shape)
            if (size := self.sizes.decide(extent)) is not None
        )
        self.operations.append(ExternCall(target, arguments, names, mutates, self.origin, decided, self.through_python))
        self._from_torch.update(name for name in names if name is not None)
        return [None if b is None else self.value_of(b, quantized=quantized) for b in buffers]

    def _result_buffer(self, tensor: torch.Tensor | NewTensor, *, opaque: bool) -> Buffer:
        if isinstance(tensor, NewTensor):
            strides = ix.contiguous_strides(tensor.shape) if tensor.strides is None else tensor.strides
            return self.add_buffer("x", tensor.dtype, tensor.shape, strides, device=tensor.device)
        return self.add_buffer_for("x", tensor, opaque=opaque)

    def shows(self, results: Sequence[TensorValue | OpaqueValue | None], buffer: str) -> None:
        """Note that results of an extern call lie in the memory of ``buffer``."""
        for result in results:
            if isinstance(result, TensorValue):
                assert isinstance(result.value, Load)
                self._shown[result.value.buffer] = buffer

    def just_filled(self, buffer: str) -> Loop | None:
        """The loop that fills all of ``buffer``, element by element, if nothing came after it: nothing it read has
        been written to since."""
        last = self.operations[-1] if self.operations else None
        if not isinstance(last, Loop) or last.target != buffer or last.reducer is not None:
            return None
        return last if last.store == indices(last.ranges) else None

    def view_by_torch(
        self,
        target: torch._ops.OpOverload,
        arguments: tuple[Any, ...],
        base: StridedView,
        shape: Sequence[Extent],
        strides: Sequence[Extent],
        dtype: torch.dtype | None = None,
    ) -> StridedView:
        """The view of ``base`` that an operator returns for ``arguments``, of its dtype unless another is given."""
        (view,) = self.extern(target, arguments, [NewTensor(tuple(shape), dtype or base.dtype, tuple(strides))])
        self.shows((view,), base.buffer)
        return self.buffers[view.value.buffer].whole

    def starts_its_storage(self, buffer: str) -> bool:
        """Whether native code allocates ``buffer``: what is given, or comes from torch, may start anywhere."""
        return not self.is_given(buffer) and buffer not in self._from_torch

    def memory_of(self, buffer: str) -> str:
        """The buffer in whose memory ``buffer`` lies: itself, unless an extern call returned it as a view."""
        while buffer in self._shown:
            buffer = self._shown[buffer]
        return buffer

    def is_given(self, buffer: str) -> bool:
        """Whether ``buffer`` was there before the graph ran, and is there after it."""
        return buffer in self.inputs or buffer in self.constants

    def compute_size(self, value: Expr, size: Size, refusal: Refusal | None = None) -> None:
        """Compute ``value``, of 64 bits, when the graph gets here: ``size`` from there on.

        Where it is not in the bounds of ``size``, nothing that depends on ``size`` runs.
        """
        view = self.materialize(self.on_cpu(self.pointwise((), torch.int64, lambda _: value)))
        self.operations.append(ReadNumber(size, view, self.origin, refusal))

    def mark(self) -> Mark:
        """What there is so far, for :meth:`rollback`."""
        return len(self.operations), len(self.buffers), self.sizes.mark()

    def rollback(self, mark: Mark) -> None:
        """Drop what was added since."""
        operations, buffers, sizes = mark
        del self.operations[operations:]
        for name in list(self.buffers)[buffers:]:
            del self.buffers[name]
            self._from_torch.discard(name)  # the name will be another buffer's
            self._shown.pop(name, None)
            self.constants.discard(name)
        self.tables = [(name, values) for name, values in self.tables if name in self.buffers]
        self.sizes.rollback(sizes)

    # -- expressions --------------------------------------------------------------------------------------

    def convert(self, value: Expr, dtype: torch.dtype) -> Expr:
        """Convert a computed value; half-precision rounding may be skipped unless this builder is exact."""
        return ex.cast(value, dtype, exact=self.exact_half)

    def load(self, value: TensorValue, subscripts: Sequence[Index], dtype: torch.dtype) -> Expr:
        """An element of ``value`` converted to ``dtype``."""
        return self.convert(value.at(subscripts), dtype)

    # -- memory views -------------------------------------------------------------------------------------

    def strided_view(self, value: TensorValue) -> StridedView | None:
        """``value`` as strided memory, or None where it is not a plain view of a buffer."""
        if not isinstance(value.value, Load):
            return None
        buffer = self.buffers[value.value.buffer]
        offset = ix.flatten(value.value.subscripts, buffer.strides)
        strides = []
        start = offset
        fallback = ix.contiguous_strides(value.shape)
        for dim, plain in zip(value.dims, fallback, strict=True):
            stride = offset.coefficient(dim)
            if stride is None:
                return None
            start = start - ix.of(dim) * stride
            strides.append(stride if ix.moves(dim.extent) else plain)
        if start.variables() or ex.index_operands(start):  # something else than the view's own dimensions moves it
            return None
        return StridedView(buffer.name, buffer.dtype, value.shape, tuple(strides), ix.extent(start))

    def copy(self, value: TensorValue, strides: Sequence[Extent] | None = None) -> TensorValue:
        """``value`` in a new buffer, laid out as by :meth:`layout_for` where there are no ``strides``."""
        return self.pointwise(value.shape, value.dtype, value.at, strides)

    def materialize(self, value: TensorValue, strides: Sequence[Extent] | None = None) -> StridedView:
        """``value`` as strided memory, copied into a new buffer where it is not that already."""
        if strides is None:
            view = self.strided_view(value)
            if view is not None:
                return view
            strides = ix.contiguous_strides(value.shape)
        result = self.strided_view(self.copy(value, strides))
        assert result is not None
        return result


def _by_stride(shape: Sequence[Extent], strides: Sequence[Extent]) -> list[tuple[Extent, Extent]]:
    """Stride and size of the dimensions along which elements differ, the innermost first."""
    moving = [(stride, size) for stride, size in zip(strides, shape, strict=True) if ix.moves(size)]
    return sorted(moving, key=lambda pair: (ix.hint_of(pair[0]), ix.hint_of(pair[1])))


def is_dense(shape: Sequence[Extent], strides: Sequence[Extent]) -> bool:
    """Whether strides lay the elements out without gaps or overlap, in some order of the dimensions."""
    if 0 in shape:
        return True
    expected: Extent = 1
    for stride, size in _by_stride(shape, strides):
        if stride != expected:
            return False
        expected = ix.product((stride, size))
    return True


def elements_share_memory(shape: Sequence[Extent], strides: Sequence[Extent]) -> bool:
    """Whether two elements may lie at one place: some stride is no longer than the reach of the smaller ones."""
    if 0 in shape:
        return False
    reach = ix.ZERO
    for stride, size in _by_stride(shape, strides):
        if not ix.known_below(reach, stride):
            return True
        reach = reach + (ix.as_index(size) - 1) * stride
    return False


def same_strides(shape: Sequence[Extent], left: Sequence[Extent], right: Sequence[Extent]) -> bool:
    """Whether two sets of strides address the same elements."""
    if 0 in shape:
        return True
    return all(a == b or not ix.moves(size) for size, a, b in zip(shape, left, right, strict=True))


def as_strided(
    builder: Builder,
    view: StridedView,
    shape: Sequence[Extent],
    strides: Sequence[Extent],
    offset: Extent,
    *,
    whole: bool = False,
) -> TensorValue | None:
    """Other strides over the memory of a dense buffer, as a value; None where the buffer is not dense.

    None also where a place may lie outside of the buffer; but where the buffer is the ``whole`` storage that eager has,
    and the data decides, that is checked when the graph runs.
    """
    buffer = builder.buffers[view.buffer]
    if not is_dense(buffer.shape, buffer.strides):
        return None
    dims = dimension_variables(shape)
    start = ix.as_index(view.offset) + offset
    steps = ix.flatten(indices(dims), strides)
    inside = ix.known_not_negative(steps + start) and ix.known_below(steps + start, buffer.elements)
    if ix.product(shape) != 0 and not inside:
        if not whole or not builder.sizes.from_data(*shape, *strides, ix.extent(start), buffer.elements):
            return None
        start = _checked_start(builder, buffer, start, shape, strides)
    subscripts = [
        ix.ZERO if size in (0, 1) else ((steps + start) // stride) % size
        for size, stride in zip(buffer.shape, buffer.strides, strict=True)
    ]
    return TensorValue(tuple(shape), buffer.dtype, dims, Load(buffer.name, tuple(subscripts), buffer.dtype))


def _checked_start(
    builder: Builder, buffer: Buffer, start: Index, shape: Sequence[Extent], strides: Sequence[Extent]
) -> Index:
    """``start``, where the elements from there on all lie in ``buffer`` or there are none; else the graph raises."""
    reach = ix.as_index(StridedView(buffer.name, buffer.dtype, tuple(shape), tuple(strides)).end) - 1
    room = ix.as_index(buffer.elements) - 1 - reach
    first, elements = index_value(start), index_value(ix.product(shape))
    # Where there are no elements the last place is no place at all, and the start does not matter.
    zero = Constant(0, torch.int64)
    chosen = where(elements.eq(0), op("minimum", first, zero), where(first <= index_value(room), first, -1))
    text = f"as_strided: sizes {list(shape)} and strides {list(strides)} from {start} on reach out of the storage"
    return builder.sizes.compute(chosen, 0, max(room.bounds[1], 0), 0, Refusal("RuntimeError", text))


def normalize_dim(dim: int, rank: int) -> int:
    return operator.index(dim) % rank if rank else 0


def normalize_dims(dims: Sequence[int] | int | None, rank: int) -> tuple[int, ...]:
    if dims is None or (isinstance(dims, (tuple, list)) and len(dims) == 0):
        return tuple(range(rank))
    if isinstance(dims, int):
        dims = (dims,)
    return tuple(sorted({normalize_dim(d, rank) for d in dims})) if rank else ()
