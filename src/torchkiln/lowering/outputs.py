"""What a graph returns, and which of it may lie in the same memory.

Autograd takes the results of a backward as the caller's own: a gradient that no other tensor object stands for becomes
``.grad`` itself, and later steps add to it in place. Two objects over one memory are then added to twice. What a
forward returns shows memory that it saves for backward too, and autograd finds a write in between by the version that
tensors over one memory share.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.fx
from torch.fx import Node

from torchkiln.errors import UnsupportedError
from torchkiln.graph.aliases import TRACED_RESULTS, Aliases, TracedResult
from torchkiln.ir import index as ix
from torchkiln.ir.expr import Expr, Load
from torchkiln.ir.index import Extent, Index
from torchkiln.ir.program import Input, Number, Output, PassInput, PlainValue, StridedView
from torchkiln.lowering.builder import (
    SUPPORTED_DTYPES,
    Builder,
    OpaqueValue,
    TensorValue,
    as_strided,
    dimension_variables,
    indices,
    is_dense,
    same_strides,
)

aten = torch.ops.aten
Extents = tuple[Extent, ...]


def lower_outputs(
    builder: Builder,
    node: Node,
    values: dict[Node, Any],
    inputs: Sequence[Input],
    aliases: Aliases,
    *,
    kind: str,
    fresh: bool,
) -> tuple[Output, ...]:
    """The outputs of a graph of this ``kind``, of which ``node`` is the output node.

    No result of a backward shows memory of another one, or of anything that was given but a tangent; results that are
    one node are one tensor. Results of other graphs share memory where those of eager do, and what a forward returns
    shares the version of the memory it shows. With ``fresh`` no output shows memory of an input.
    """
    returned: Any = node.args[0]
    if not isinstance(returned, (tuple, list)):
        returned = (returned,)  # a graph made by hand may return a single value
    shared = frozenset() if kind == "backward" else _shared_roots(returned, aliases)
    _store(builder, shared, values)
    positions = {n: k for k, n in enumerate(node.graph.find_nodes(op="placeholder"))}
    outputs: list[Output] = []
    made: dict[Node, Output] = {}
    for item in returned:
        again = isinstance(item, Node) and item in made
        outputs.append(made[item] if again else _lower_output(builder, item, values, positions, aliases, shared))
        if kind == "backward" and isinstance(item, Node):
            made[item] = outputs[-1]  # one tensor, where it is returned again
    if kind == "backward":
        known = node.meta.get(TRACED_RESULTS) or ()
        traced = known if len(known) == len(returned) else (None,) * len(returned)
        outputs = _in_memory_of_their_own(builder, returned, traced, values, outputs)
    elif kind == "forward":
        outputs = _with_shared_versions(builder, returned, outputs)
    if fresh:
        outputs = [_fresh_output(builder, output, inputs) for output in outputs]
    return tuple(outputs)


def _shared_roots(returned: Sequence[Any], aliases: Aliases) -> frozenset[Node]:
    """Tensors whose memory several results show."""
    items = {item for item in returned if isinstance(item, Node)}
    counts = Counter(aliases.root(item) for item in items)
    return frozenset(root for root, count in counts.items() if count > 1)


def _store(builder: Builder, roots: Iterable[Node], values: dict[Node, Any]) -> None:
    """Give memory to those of ``roots`` that have none: ``full`` and ``arange`` are computed where they are read."""
    for root in roots:
        value = values[root]
        if not isinstance(value, TensorValue) or builder.strided_view(value) is not None:
            continue
        strides = builder.sizes.strides(root.meta["val"].stride())
        if value.dtype in SUPPORTED_DTYPES and is_dense(value.shape, strides):
            builder.lower_for(root)
            values[root] = builder.copy(value, strides)


def _lower_output(
    builder: Builder,
    item: Any,
    values: dict[Node, Any],
    positions: dict[Node, int],
    aliases: Aliases,
    shared: frozenset[Node],
) -> Output:
    if not isinstance(item, Node):
        return PlainValue(item)
    if item in positions:
        return PassInput(positions[item])
    value = values[item]
    if isinstance(value, Index):
        return Number(value)
    if isinstance(value, Expr) and value.dtype == torch.bool:
        return Number(builder.sizes.of_condition(value), is_bool=True)
    if isinstance(value, Expr):
        raise UnsupportedError(f"the result {item.name}, a number known only at run time that is no size")
    if isinstance(value, OpaqueValue):
        return value.buffer.whole
    if not isinstance(value, TensorValue):
        return PlainValue(plain_value(value))
    builder.lower_for(item)
    expected = builder.sizes.strides(item.meta["val"].stride())
    root = aliases.root(item)
    view = builder.strided_view(value)
    if view is None or (root in shared and not _same_memory(builder, view, values[root])):
        view = _view_of_root(builder, item, root, values) or view
    if view is None or not same_strides(value.shape, view.strides, expected):
        return _stored(builder, value, expected)
    return replace(view, strides=expected)


def _same_memory(builder: Builder, view: StridedView, root: Any) -> bool:
    base = builder.strided_view(root) if isinstance(root, TensorValue) else None
    return base is not None and builder.memory_of(view.buffer) == builder.memory_of(base.buffer)


def _view_of_root(builder: Builder, item: Node, root: Node, values: dict[Node, Any]) -> StridedView | None:
    """A view by the place torch gives it in the memory of ``root``, where its index did not simplify to strides.

    The caller goes by where a view lies in its storage, so it cannot be given a copy.
    """
    known, given, base = item.meta["val"], root.meta.get("val"), values[root]
    if root is item or not isinstance(base, TensorValue) or not isinstance(given, torch.Tensor):
        return None
    if (known.is_neg(), known.is_conj()) != (given.is_neg(), given.is_conj()) or base.dtype.itemsize % known.itemsize:
        return None  # other values than those in memory, or several of them in one element
    sizes, view = builder.sizes, builder.strided_view(base)
    if view is None or not same_strides(base.shape, view.strides, sizes.strides(given.stride())):
        return None
    parts = base.dtype.itemsize // known.itemsize
    start = (ix.as_index(view.offset) - sizes.extent(given.storage_offset())) * parts
    offset = ix.extent(start + sizes.extent(known.storage_offset()))
    shape, strides = sizes.extents(known.shape), sizes.strides(known.stride())
    return StridedView(view.buffer, known.dtype, shape, strides, offset)


_PLAIN = (bool, int, float, complex, str, torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Generator)


def plain_value(value: Any) -> Any:
    """``value``, which must mean the same outside of the compiler as in it."""
    if value is None or isinstance(value, _PLAIN):
        return value
    raise UnsupportedError(f"the value {value}, known only at run time, where torch or the user takes a number")


def _stored(builder: Builder, value: TensorValue, strides: Sequence[Extent]) -> StridedView:
    """``value`` in a new buffer, with these strides."""
    if not is_dense(value.shape, strides):
        return _materialize_overlapping(builder, value, strides)
    return replace(builder.materialize(value, strides), strides=tuple(strides))


def stored_copy(builder: Builder, value: TensorValue, strides: Extents, known: torch.Tensor) -> StridedView:
    """``value`` in new memory with these strides, whatever its dtype; ``known`` is the fake tensor of it."""
    if value.dtype in SUPPORTED_DTYPES:
        return _stored(builder, value, strides)
    # By torch: a result with other strides than expected is copied into memory with those.
    (copy,) = builder.extern(aten.clone.default, (builder.materialize(value), None), [known])
    assert copy is not None
    return builder.materialize(copy)


def _materialize_overlapping(builder: Builder, value: TensorValue, strides: Sequence[Extent]) -> StridedView:
    """Memory for strides with gaps or zeros: dimensions of stride 0 are stored once.

    Where the values do vary along such a dimension, the strides cannot be eager's (some fake implementations give
    the strides of an expanded argument), and the result is contiguous.
    """
    if any(stride == 0 and dim in value.value.variables for stride, dim in zip(strides, value.dims, strict=True)):
        return builder.materialize(value, ix.contiguous_strides(value.shape))
    shape = tuple(1 if stride == 0 else size for size, stride in zip(value.shape, strides, strict=True))
    stored = [1 if stride == 0 else stride for stride in strides]
    view = builder.materialize(builder.pointwise(shape, value.dtype, value.at, stored))
    return replace(view, shape=value.shape, strides=tuple(strides))


# -- a body's outputs -------------------------------------------------------------------------------------------------


def _fresh_output(builder: Builder, output: Output, inputs: Sequence[Input]) -> Output:
    """A copy of an output that shows memory of an input."""
    names = [graph_input.buffer for graph_input in inputs]
    name = names[output.position] if isinstance(output, PassInput) else None
    if isinstance(output, StridedView):
        name = output.buffer if builder.memory_of(output.buffer) in names else None
    if name is None:
        return output
    buffer = builder.buffers[name]
    if buffer.opaque:
        raise UnsupportedError("a body that returns a sparse, quantized or meta tensor that it was given")
    if isinstance(output, StridedView) and not _is_whole(builder, output):
        value = as_strided(builder, output, output.shape, output.strides, 0)
        if value is None:
            raise UnsupportedError("a body that returns a view of an argument")
        return builder.materialize(value, ix.contiguous_strides(output.shape))
    value = builder.read(buffer)
    dense = is_dense(buffer.shape, buffer.strides)
    return builder.materialize(value, buffer.strides if dense else ix.contiguous_strides(buffer.shape))


# -- results of a backward --------------------------------------------------------------------------------------------

# Stands for the memory of every tangent: two of them may be one tensor, when the outputs they belong to are added up.
_TANGENTS = "tangents"


@dataclass(frozen=True, eq=False)
class _Shown:
    """A result in memory that it may be given away with: the tensor given where ``given``, else a view.

    ``traced`` is what eager returns in its place, where that is known.
    """

    node: Node
    traced: TracedResult | None
    memory: str
    given: bool
    value: TensorValue

    def conflicts_with(self, other: _Shown) -> bool:
        """Whether both would be added to where one is. One tensor twice is not: autograd sees that and copies."""
        if self.memory != other.memory or (self.given and other.given):
            return False
        if self.node is other.node and self.traced is not None and self.traced == other.traced:
            return False
        return not _lie_apart(self.value, other.value)


def _in_memory_of_their_own(
    builder: Builder,
    returned: Sequence[Any],
    traced: Sequence[TracedResult | None],
    values: dict[Node, Any],
    outputs: Sequence[Output],
) -> list[Output]:
    """``outputs`` with a copy of each that shows memory which is not its own to give away.

    One tensor as two results, a tangent, and one view of it are handed on where eager does so.
    """
    kept: list[_Shown] = []
    copies: dict[tuple[Node, TracedResult | None], Output] = {}
    result = list(outputs)
    for position in sorted(range(len(outputs)), key=lambda k: _preference(builder, outputs[k])):
        item, output, eager = returned[position], outputs[position], traced[position]
        if not isinstance(output, (PassInput, StridedView)) or not _is_gradient(item, values[item]):
            continue
        memory = _memory(builder, output, eager)
        if memory is not None:
            shown = _Shown(item, eager, memory, isinstance(output, PassInput), values[item])
            if not any(shown.conflicts_with(other) for other in kept):
                kept.append(shown)
                continue
        if eager is None or (item, eager) not in copies:
            copies[item, eager] = _copied(builder, item, values[item])
        result[position] = copies[item, eager]
    return result


def _is_gradient(node: Node, value: Any) -> bool:
    """Whether autograd adds to ``node``; offsets of a nested gradient are integers and known by identity."""
    known = node.meta["val"]
    return isinstance(value, TensorValue) and bool(known.is_floating_point() or known.is_complex())


def _preference(builder: Builder, output: Output) -> int:
    """Which of several results in one memory stays there: what is given, else all of it, else the first part."""
    if isinstance(output, StridedView):
        return 1 if _is_whole(builder, output) else 2
    return 0


def _memory(builder: Builder, output: PassInput | StridedView, traced: TracedResult | None) -> str | None:
    """The memory a result may be given away with; None for memory of the graph's caller or of the graph itself."""
    if isinstance(output, StridedView):
        name = builder.memory_of(output.buffer)
        if not builder.is_given(name):
            return name
    return _TANGENTS if traced is not None and traced.shows_tangent else None


def _copied(builder: Builder, node: Node, value: TensorValue) -> Output:
    builder.lower_for(node)
    known = node.meta["val"]
    return stored_copy(builder, value, builder.sizes.strides(known.stride()), known)


def _lie_apart(left: TensorValue, right: TensorValue) -> bool:
    """Whether two views of one buffer have no element in common, such as the parts of a concatenation."""
    here, there = left.value, right.at(indices(dimension_variables(right.shape, "o")))
    if 0 in left.shape or 0 in right.shape:
        return True
    if not isinstance(here, Load) or not isinstance(there, Load) or here.buffer != there.buffer:
        return False
    return any(
        ix.known_below(a - b, 0) or ix.known_below(b - a, 0)
        for a, b in zip(here.subscripts, there.subscripts, strict=True)
    )


# -- what a forward returns -------------------------------------------------------------------------------------------


def _with_shared_versions(builder: Builder, returned: Sequence[Any], outputs: Sequence[Output]) -> list[Output]:
    """``outputs`` where views of memory that is seen elsewhere too are made by torch, which shares the version.

    Native code makes a view of a storage, with a version of its own: enough where nobody else shows the memory.
    """
    shown: dict[str, set[Node]] = {}
    for item, output in zip(returned, outputs, strict=True):
        if isinstance(output, StridedView):
            shown.setdefault(builder.memory_of(output.buffer), set()).add(item)
    made: dict[Node, StridedView] = {}
    result = list(outputs)
    for position, (item, output) in enumerate(zip(returned, outputs, strict=True)):
        if not isinstance(output, StridedView) or _is_whole(builder, output) or not _torch_can_place(builder, output):
            continue
        memory = builder.memory_of(output.buffer)
        if len(shown[memory]) > 1 or builder.is_given(memory):
            if item not in made:
                builder.lower_for(item)
                made[item] = _view_by_torch(builder, output)
            result[position] = made[item]
    return result


def _torch_can_place(builder: Builder, view: StridedView) -> bool:
    """Whether :func:`_view_by_torch` serves ``view``, whatever symbolic sizes are: one may be 0, of memory given."""
    return builder.starts_its_storage(view.buffer) or all(ix.bounds_of(size)[0] > 0 for size in view.shape)


def _view_by_torch(builder: Builder, view: StridedView) -> StridedView:
    """The tensor that ``view`` is, with the version of the buffer's tensor and no other tie to it.

    Autograd would not let the user write to a view that was made while it was off; ``detach`` makes it a plain tensor.
    """
    base, offset = builder.buffers[view.buffer].whole, None
    if view.dtype != base.dtype:
        base = _row_of_dtype(builder, base, view.dtype)
    if builder.starts_its_storage(view.buffer):
        offset = view.offset
    elif view.offset != 0:
        # Where the buffer starts in its storage is known to torch alone.
        row = _restrided(builder, base, (view.end,), (1,))
        left = (ix.extent(ix.as_index(view.end) - view.offset),)
        base = builder.view_by_torch(aten.slice.Tensor, (row, 0, view.offset, view.end, 1), row, left, (1,))
    seen = _restrided(builder, base, view.shape, view.strides, offset)
    return builder.view_by_torch(aten.detach.default, (seen,), seen, view.shape, view.strides)


def _row_of_dtype(builder: Builder, base: StridedView, dtype: torch.dtype) -> StridedView:
    """The memory of a whole buffer, from its start, as a row of elements of a dtype no larger than its own."""
    row = _restrided(builder, base, (base.end,), (1,))
    parts = (ix.product((base.end, base.dtype.itemsize // dtype.itemsize)),)
    return builder.view_by_torch(aten.view.dtype, (row, dtype), row, parts, (1,), dtype)


def _restrided(
    builder: Builder, base: StridedView, shape: Extents, strides: Extents, offset: Extent | None = None
) -> StridedView:
    return builder.view_by_torch(aten.as_strided.default, (base, shape, strides, offset), base, shape, strides)


def _is_whole(builder: Builder, view: StridedView) -> bool:
    return view == builder.buffers[view.buffer].whole
