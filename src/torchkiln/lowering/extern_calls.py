"""Calls of operators of torch: what they are given, what they write to, and views that are other strides."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.fx
from torch._ops import OpOverload
from torch.fx import Node

from torchkiln.errors import UnsupportedError
from torchkiln.graph.aliases import Aliases
from torchkiln.graph.attention_states import states_returned
from torchkiln.graph.effects import is_torchs_own, is_written, mutated_arguments
from torchkiln.graph.operators import Kind, Strides, kind_of, strides_taken
from torchkiln.graph.weights import is_packed_weight
from torchkiln.ir import expr as ex
from torchkiln.ir import index as ix
from torchkiln.ir.expr import Load
from torchkiln.ir.index import Index
from torchkiln.ir.program import WRITES_INTO, StridedView
from torchkiln.lowering.builder import (
    QUANTIZED_DTYPES,
    SUPPORTED_DTYPES,
    Builder,
    NewTensor,
    OpaqueValue,
    TensorValue,
    as_strided,
    is_dense,
    is_opaque,
    same_strides,
)
from torchkiln.lowering.numbers import number_in
from torchkiln.lowering.outputs import plain_value, stored_copy

aten = torch.ops.aten
# Operators that make plain tensors of quantized ones.
_FROM_QUANTIZED = frozenset((aten.dequantize.self, aten.dequantize.tensors))
# Views that only mark the tensor, to be acted on by whoever reads it: here the work is done at once.
_EAGER_FORM = {aten._conj.default: aten._conj_physical.default, aten._neg_view.default: aten.neg.default}


@dataclass(frozen=True)
class Call:
    """A call of an operator. ``args`` and ``kwargs`` are lowered, ``values`` are all nodes lowered so far."""

    builder: Builder
    node: Node
    target: torch._ops.OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    values: Mapping[Node, Any]
    aliases: Aliases


def call_extern(call: Call) -> Any:
    """The results of calling torch's operator, or for a view without a lowering other strides over its argument."""
    if call.target in _EAGER_FORM:
        call = replace(call, target=_EAGER_FORM[call.target])
    schema, result = call.target._schema, call.node.meta.get("val")
    ordered = _in_schema_order(schema, call.args, call.kwargs)
    if (
        _returns_alias(schema)
        and not schema.is_mutable
        and isinstance(result, torch.Tensor)
        and isinstance(ordered[0], TensorValue)
        and not is_opaque(result)
    ):
        return _lower_alias(call.builder, call.node, call.target, ordered, result)
    if any(isinstance(known, (tuple, list)) for known in call.builder.results):
        raise UnsupportedError("an operator that returns nested lists")
    arguments, mutates, copies = _arguments(call, ordered)
    if schema.is_mutable and _returns_alias(schema):
        returned = _call_in_place(call, arguments, mutates)
    else:
        returned = _call_for_results(call, arguments, mutates, quantized=_makes_quantized(call.target, ordered))
    for value, copy in copies:
        _write_back(call.builder, call.target, value, copy)
    return returned


def _call_in_place(call: Call, arguments: tuple[Any, ...], mutates: tuple[str, ...]) -> Any:
    """Call an operator that gives back its first argument, written to."""
    builder, written = call.builder, call.args[0]
    in_memory = isinstance(written, TensorValue) and builder.strided_view(written) is not None
    if not in_memory and not isinstance(written, OpaqueValue):
        raise UnsupportedError(f"{call.target} on a value that is not in memory")
    builder.extern(call.target, arguments, [None] * len(builder.results), mutates)
    return written


def _call_for_results(call: Call, arguments: tuple[Any, ...], mutates: tuple[str, ...], *, quantized: bool) -> Any:
    builder, results = call.builder, call.builder.results
    all_of_them = call.target in WRITES_INTO
    wanted = [_result_in_memory(r) if all_of_them or is_used(call.node, k) else None for k, r in enumerate(results)]
    packed = is_packed_weight(call.node)
    states = states_returned(call.target)
    made = builder.extern(call.target, arguments, wanted, mutates, quantized=quantized, packed=packed, states=states)
    if _returns_alias(call.target._schema) and isinstance(arguments[0], StridedView):
        builder.shows(made, arguments[0].buffer)
    returned = [_result_of_call(builder, like, value) for like, value in zip(results, made, strict=True)]
    return returned if isinstance(call.node.meta.get("val"), (tuple, list)) else returned[0]


def lower_unfilled(call: Call) -> TensorValue | None:
    """Memory for a user's operator to write to, as torch gives it; None for any other call.

    Elsewhere it is filled with 0, which costs nothing in kernels.
    """
    node, builder = call.node, call.builder
    result: Any = node.meta.get("val")
    sizes = builder.sizes
    if kind_of(call.target) is not Kind.UNINITIALIZED or is_opaque(result):
        return None
    if not any(node in _written_by_users(user) for user in node.users):
        return None
    extents = sizes.extents(result.shape), sizes.strides(result.stride())
    (made,) = builder.extern(aten.empty_strided.default, (*extents, result.dtype, None, result.device, None), [result])
    assert isinstance(made, TensorValue)
    return made


def _written_by_users(node: Node) -> tuple[Node, ...]:
    """What the call of a user's operator writes to; nothing for torch's own."""
    return () if isinstance(node.target, OpOverload) and is_torchs_own(node.target) else mutated_arguments(node)


def resize_storage(call: Call) -> None:
    """Free the memory of an input, or give it memory again: a write to all inputs that lie in that storage.

    Memory of the graph's own is not the program's to free, so nothing is done there, where nobody sees the size.
    """
    resized, nbytes = call.args
    builder, aliases = call.builder, call.aliases
    root = aliases.root(call.node.all_input_nodes[0])
    if root.op == "call_function" and root not in aliases.returned:
        return
    view = builder.strided_view(resized) if isinstance(resized, TensorValue) else None
    if view is None or view.buffer not in builder.inputs:
        raise UnsupportedError(f"{call.target} on the storage of a tensor that is returned, or of a constant")
    written = (name for argument in mutated_arguments(call.node) for name in buffers_of(call.values[argument]))
    mutates = {view.buffer, *written}
    builder.extern(call.target, (view, _extern_argument(builder, nbytes)), (), tuple(sorted(mutates)))


# -- arguments --------------------------------------------------------------------------------------------------------


def _in_schema_order(schema: torch._C.FunctionSchema, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    """Every argument of a call, defaults filled in."""
    supplied = dict(zip((a.name for a in schema.arguments), args, strict=False)) | kwargs
    return [supplied.get(a.name, a.default_value) for a in schema.arguments]


Copies = list[tuple[TensorValue, StridedView]]
"""Tensors that an extern call writes to copies of, with those."""


def _arguments(call: Call, ordered: Sequence[Any]) -> tuple[tuple[Any, ...], tuple[str, ...], Copies]:
    """What a call is given, the buffers it writes to, and which of them are copies."""
    builder, node, target = call.builder, call.node, call.target
    known = _in_schema_order(target._schema, *torch.fx.map_arg((node.args, node.kwargs), lambda n: n.meta.get("val")))
    written = [value for k, value in enumerate(ordered) if is_written(target, k)]
    mutates = dict.fromkeys(_written_buffers(builder, target, written))
    exact = strides_taken(target) is not Strides.ANY
    copies: Copies = []
    arguments = tuple(
        _extern_argument(builder, a, like, exact=exact, copied=copies if is_written(target, k) else None)
        for k, (a, like) in enumerate(zip(ordered, known, strict=True))
    )
    return arguments, (*mutates, *(view.buffer for _, view in copies)), copies


def _extern_argument(
    builder: Builder, value: Any, known: Any = None, *, exact: bool = False, copied: Copies | None = None
) -> Any:
    """``value`` as an argument of an extern call; ``known`` is the fake value that eager gives it.

    Memory made for a tensor here is laid out as that of ``known``. With ``exact``, what lies in memory already and is
    laid out otherwise is copied, which ``copied`` is told.
    """
    if isinstance(value, TensorValue):
        view = _extern_tensor(builder, value, known if isinstance(known, torch.Tensor) else None, exact=exact)
        if copied is not None and view.buffer not in buffers_of(value):
            copied.append((value, view))
        return view
    if isinstance(value, OpaqueValue):
        return value.buffer.whole
    if isinstance(value, (list, tuple)):
        likes = known if isinstance(known, (list, tuple)) and len(known) == len(value) else [None] * len(value)
        return tuple(
            _extern_argument(builder, item, like, exact=exact, copied=copied)
            for item, like in zip(value, likes, strict=True)
        )
    return value if isinstance(value, Index) else plain_value(value)


def _extern_tensor(builder: Builder, value: TensorValue, known: torch.Tensor | None, *, exact: bool) -> StridedView:
    view = builder.strided_view(value)
    if known is None or known.layout is not torch.strided or (view is not None and not exact):
        return builder.materialize(value)
    strides = builder.sizes.strides(known.stride())
    if view is not None and same_strides(value.shape, view.strides, strides):
        return replace(view, strides=strides)  # those of dimensions of one element too
    if exact or is_dense(value.shape, strides):
        return stored_copy(builder, value, strides, known)
    return builder.materialize(value)


def _write_back(builder: Builder, target: torch._ops.OpOverload, value: TensorValue, copy: StridedView) -> None:
    """Store what a call wrote into a copy where the copy was made from."""
    place, buffer = value.value, builder.buffers[copy.buffer]
    if not isinstance(place, Load) or buffer.shape != value.shape:
        raise UnsupportedError(f"{target} writes to a value that is not in memory of its own")
    builder.store(builder.buffers[place.buffer], builder.read(buffer), value.dims, place.subscripts)


def _written_buffers(builder: Builder, target: torch._ops.OpOverload, values: Any) -> Iterator[str]:
    for value in torch.utils._pytree.tree_leaves(values):
        if isinstance(value, OpaqueValue):
            yield value.buffer.name
        if not isinstance(value, TensorValue):
            continue
        view = builder.strided_view(value)
        if view is None:  # a copy would be written to, and the value would stay as it was
            raise UnsupportedError(f"{target} writes to a value that is not in memory of its own")
        yield view.buffer


def buffers_of(value: Any) -> set[str]:
    return {load.buffer for load in ex.loads(value.value)} if isinstance(value, TensorValue) else set()


# -- results ----------------------------------------------------------------------------------------------------------


_RUN_TIME_NUMBERS = {torch.SymInt: torch.int64, torch.SymFloat: torch.float64, torch.SymBool: torch.bool}


def _result_in_memory(result: Any) -> Any:
    """A result as memory: a number known only at run time comes in a tensor. None for what is known already."""
    dtype = _RUN_TIME_NUMBERS.get(type(result))
    if dtype is not None:
        return NewTensor((), dtype)
    return result if isinstance(result, torch.Tensor) else None


def _result_of_call(builder: Builder, known: Any, made: Any) -> Any:
    if type(known) in _RUN_TIME_NUMBERS:
        return number_in(builder, known, made) if made is not None else None
    return made if isinstance(known, torch.Tensor) else known


def _makes_quantized(target: torch._ops.OpOverload, arguments: Sequence[Any]) -> bool:
    if target in _FROM_QUANTIZED:
        return False
    leaves = torch.utils._pytree.tree_leaves(arguments)
    return any(
        leaf.quantized if isinstance(leaf, OpaqueValue) else isinstance(leaf, torch.dtype) and leaf in QUANTIZED_DTYPES
        for leaf in leaves
    )


def is_used(node: Node, position: int) -> bool:
    """Whether anything uses the result at ``position`` of several. Unused results may differ from their fake shape."""
    if isinstance(node.meta.get("val"), torch.Tensor):
        return True
    return any(user.target is not operator.getitem or user.args[1] == position for user in node.users)


# -- views ------------------------------------------------------------------------------------------------------------


def _returns_alias(schema: torch._C.FunctionSchema) -> bool:
    return any(r.alias_info is not None for r in schema.returns)


def _lower_alias(
    builder: Builder, node: Node, target: torch._ops.OpOverload, ordered: list[Any], result: torch.Tensor
) -> TensorValue:
    """A view operator without a lowering: the same memory seen through the strides eager gives it."""
    base_node, base = node.all_input_nodes[0], ordered[0]
    known = base_node.meta["val"]
    sizes = builder.sizes
    if result.dtype == known.dtype:
        view = builder.materialize(base)
        strides = sizes.strides(known.stride())
        # Only as_strided can reach elements between those of its argument, which memory of ours may not have.
        reaches_between = target is aten.as_strided.default and not is_dense(sizes.extents(known.shape), strides)
        if not same_strides(base.shape, view.strides, strides) or reaches_between:
            view = builder.materialize(base, ix.contiguous_strides(base.shape))
        seen = _seen_as(builder, view, known, result) if same_strides(base.shape, view.strides, strides) else None
        if seen is not None:
            return seen
    copy = _copying_variant(target)
    if copy is None:
        raise UnsupportedError(f"view operator {target} of a tensor whose memory is not dense")
    # The same elements in memory of their own: nobody can tell, since the graph writes into no view.
    loops = base.dtype in SUPPORTED_DTYPES
    source = builder.materialize(base, ix.contiguous_strides(base.shape) if loops else None)
    arguments = (source, *(_extern_argument(builder, a) for a in ordered[1:]))
    return _called_for(builder, copy, arguments, result)


def _called_for(
    builder: Builder, target: torch._ops.OpOverload, arguments: tuple[Any, ...], result: torch.Tensor
) -> TensorValue:
    """The one result of an operator, of the sizes and dtype of ``result``."""
    expected = NewTensor(builder.sizes.extents(result.shape), result.dtype)
    (made,) = builder.extern(target, arguments, [expected])
    assert isinstance(made, TensorValue)
    return made


def lower_as_strided(call: Call) -> TensorValue | None:
    """``as_strided`` that nothing is written through; None where it is a view like any other."""
    if call.node in call.aliases.written_through:
        return None
    written = call.aliases.root(call.node) in call.aliases.written
    seen = _as_strided_of_input(call.builder, call.node, call.args, written=written)
    return _as_strided_of_root(call.builder, call.node, call.aliases, call.values) if seen is None else seen


def _as_strided_of_input(builder: Builder, node: Node, args: tuple[Any, ...], *, written: bool) -> TensorValue | None:
    """``as_strided`` by torch itself, of memory of an input; None where other strides over the same elements will do.

    Where an input starts in its storage is known to torch alone, and so is what lies around it. The result is a view,
    whose place in the storage the caller may go by, unless the graph writes to that memory.
    """
    base, arguments = args[0], [*args[1:], *([None] * (4 - len(args)))]
    known, result, sizes = node.all_input_nodes[0].meta["val"], node.meta["val"], builder.sizes
    view = builder.strided_view(base) if isinstance(base, TensorValue) else None
    if view is None or view.buffer not in builder.inputs:
        return None
    asked = (*sizes.extents(result.shape), *sizes.strides(result.stride()))
    dense = is_dense(sizes.extents(known.shape), sizes.strides(known.stride()))
    if arguments[2] is None and dense and not sizes.from_data(*asked):
        return None
    given = (view, *(_extern_argument(builder, a) for a in arguments))
    if written:
        return _called_for(builder, aten.as_strided_copy.default, given, result)
    (seen,) = builder.extern(aten.as_strided.default, given, [result])
    assert isinstance(seen, TensorValue)
    builder.shows((seen,), view.buffer)
    return seen


def _as_strided_of_root(
    builder: Builder, node: Node, aliases: Aliases, values: Mapping[Node, Any]
) -> TensorValue | None:
    """``as_strided`` of a tensor of the graph's own or of a view: other strides over that tensor, in eager's layout.

    It may reach elements that the view does not show.
    """
    root, result, sizes = aliases.root(node), node.meta["val"], builder.sizes
    known, value = root.meta.get("val"), values[root]
    if root.op == "placeholder" or not isinstance(value, TensorValue) or not isinstance(known, torch.Tensor):
        return None
    if known.dtype != result.dtype:
        return None
    strides = sizes.strides(known.stride())
    view = builder.strided_view(value)
    if view is None or not same_strides(value.shape, view.strides, strides):
        if root in aliases.written or not is_dense(value.shape, strides) or value.dtype not in SUPPORTED_DTYPES:
            return None
        view = builder.materialize(value, strides)
    whole = root.op == "call_function" and _fills_its_storage(builder, known)
    return _seen_as(builder, view, known, result, whole=whole)


def _seen_as(
    builder: Builder, view: StridedView, known: torch.Tensor, result: torch.Tensor, *, whole: bool = False
) -> TensorValue | None:
    """The memory of ``view``, which is ``known`` to torch, as torch shows it in ``result``."""
    sizes = builder.sizes
    offset = ix.extent(ix.as_index(sizes.extent(result.storage_offset())) - sizes.extent(known.storage_offset()))
    return as_strided(builder, view, sizes.extents(result.shape), sizes.strides(result.stride()), offset, whole=whole)


def _fills_its_storage(builder: Builder, known: torch.Tensor) -> bool:
    """Whether the storage of a tensor of eager's holds its elements and nothing else."""
    sizes = builder.sizes
    storage, elements = sizes.extent(known.untyped_storage().size()), ix.product(sizes.extents(known.shape))
    return sizes.extent(known.storage_offset()) == 0 and storage == ix.product((elements, known.itemsize))


def _copying_variant(target: torch._ops.OpOverload) -> torch._ops.OpOverload | None:
    """The operator that copies what ``target`` gives a view of, where it depends on values and not on memory."""
    packet = getattr(aten, f"{target._schema.name.removeprefix('aten::')}_copy", None)
    if packet is None or target is aten.as_strided.default or target._overloadname not in packet.overloads():
        return None
    found: torch._ops.OpOverload = getattr(packet, target._overloadname)
    return found
