"""Lowering a whole functional ATen graph to a :class:`Program`."""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.fx
from torch.fx.experimental.symbolic_shapes import is_nested_int

from torchkiln.errors import UnsupportedError
from torchkiln.graph.aliases import SAVED_ALONE, Aliases
from torchkiln.graph.checked_numbers import may_be_refused
from torchkiln.graph.effects import is_written, mutated_arguments, resizes_storage, writes
from torchkiln.graph.operators import Strides, strides_taken
from torchkiln.graph.source import blame, source_line
from torchkiln.ir import expr as ex
from torchkiln.ir import index as ix
from torchkiln.ir.expr import Constant, Expr, IndexValue, Load
from torchkiln.ir.index import Extent, Index
from torchkiln.ir.program import (
    WRITES_INTO,
    Input,
    Origin,
    Output,
    Program,
    SizeSource,
    StridedView,
)
from torchkiln.lowering.attention import ATTENTION
from torchkiln.lowering.builder import (
    QUANTIZED_DTYPES,
    SUPPORTED_DTYPES,
    Builder,
    NewTensor,
    OpaqueValue,
    TensorValue,
    as_strided,
    dimension_variables,
    elements_share_memory,
    indices,
    is_dense,
    is_opaque,
    product,
    same_strides,
)
from torchkiln.lowering.higher_order import Bodies, lower_higher_order
from torchkiln.lowering.numbers import check_number, ignore_range, number_in, read_number, run_time_number, whole_number
from torchkiln.lowering.outputs import lower_outputs, plain_value, stored_copy
from torchkiln.lowering.products import PRODUCTS
from torchkiln.lowering.registry import LOWERINGS, NotLowered
from torchkiln.lowering.views import broadcast_to
from torchkiln.target import Target

_log = logging.getLogger(__name__)

aten = torch.ops.aten
_ON_NUMBERS: dict[Any, Callable[..., Any]] = {
    aten._local_scalar_dense.default: read_number,
    aten._assert_scalar.default: check_number,
    aten.sym_constrain_range.default: ignore_range,
    aten.sym_constrain_range_for_size.default: ignore_range,
}
_SIZE_OPERATORS = frozenset(
    (aten.sym_size.int, aten.sym_stride.int, aten.sym_numel.default, aten.sym_storage_offset.default)
)
# What a sparse tensor is made of: as long as it has values, of which there may be another number in each call.
_PARTS_OF_SPARSE = frozenset(
    getattr(aten, name).default
    for part in ("values", "indices", "_values", "_indices", "col_indices", "row_indices")
    for name in (part, f"{part}_copy")
)
# Operators that make plain tensors of quantized ones.
_FROM_QUANTIZED = frozenset((aten.dequantize.self, aten.dequantize.tensors))
# Not among the lowerings of the registry, which other stages take to be loops of ours for any sizes.
_SMALL_PRODUCTS = PRODUCTS | ATTENTION
# Operators that take a number for a tensor, whatever its dtype.
_COPIES = (aten.copy.default, aten.copy_.default)
# Views that only mark the tensor, to be acted on by whoever reads it: here the work is done at once.
_EAGER_FORM = {aten._conj.default: aten._conj_physical.default, aten._neg_view.default: aten.neg.default}


def lower_graph(
    gm: torch.fx.GraphModule,
    target: Target,
    *,
    exact_half: bool = False,
    layouts: Sequence[Sequence[Extent] | None] | None = None,
    fresh_outputs: bool = False,
    kind: str = "inference",
) -> Program:
    """Turn every node into loops, views or an extern call. Node values need ``meta["val"]``.

    ``layouts`` are the strides of the inputs where they are not those of their fake tensors. With ``fresh_outputs``
    no output shows memory of an input. ``kind`` is inference, forward or backward.
    """
    bodies = Bodies(partial(lower_graph, target=target, exact_half=exact_half))
    strides = iter(layouts or ())
    aliases = Aliases(gm.graph)
    builder = Builder(target, exact_half=exact_half)
    values: dict[torch.fx.Node, Any] = {}
    inputs: list[Input] = []
    constants: list[tuple[str, torch.Tensor]] = []
    outputs: tuple[Output, ...] = ()
    sources = _size_sources(builder, gm.graph.find_nodes(op="placeholder"))
    for node in gm.graph.nodes:
        builder.node = node
        builder.origin = Origin((node.name,), source_line(node))
        with blame(node):
            if node.op == "placeholder":
                values[node] = _lower_placeholder(
                    builder, node, inputs, next(strides, None), sources, any_strides=kind == "backward"
                )
            elif node.op == "get_attr":
                values[node] = _lower_attribute(builder, gm, node, constants)
            elif node.op == "call_function":
                present = len(builder.buffers)
                values[node] = _lower_call(builder, node, values, bodies, aliases)
                if aliases.written and aliases.root(node) is node and node.target is not operator.getitem:
                    own = set(list(builder.buffers)[present:])
                    values[node] = _in_own_memory(builder, values[node], own, written=node in aliases.written)
                elif node in aliases.written:
                    values[node] = _in_memory(builder, values[node])
            elif node.op == "output":
                outputs = lower_outputs(builder, node, values, inputs, aliases, kind=kind, fresh=fresh_outputs)
            else:
                raise UnsupportedError(f"node kind {node.op!r} in a functional graph")
    builder.sizes.require_found()
    return Program(tuple(inputs), tuple(constants), builder.buffers, tuple(builder.operations), outputs, tuple(sources))


def _size_sources(builder: Builder, placeholders: Sequence[torch.fx.Node]) -> list[SizeSource]:
    """Where every symbol among the sizes of the inputs is read: from an input that is a number where there is one."""
    sizes, sources = builder.sizes, []
    values = [node.meta.get("val") for node in placeholders]
    for position, value in enumerate(values):
        known = isinstance(value, torch.SymInt) and not is_nested_int(value)
        size = sizes.given(value) if known else None
        if size is not None:
            sources.append(SizeSource(size, position))
            if size.bounds[0] < 0:  # no size of anything
                sizes.numbers.add(size)
    for position, value in enumerate(values):
        if not isinstance(value, torch.Tensor):
            continue
        for dim, number in enumerate(value.shape):
            size = sizes.given(number)
            if size is not None:
                sources.append(SizeSource(size, position, dim, False))
        for dim, stride in enumerate(() if is_opaque(value) else sizes.strides(value.stride())):
            size = sizes.decide(stride)
            if size is not None:
                sources.append(SizeSource(size, position, dim, True))
    sizes.inputs_are_known()
    return sources


def _lower_placeholder(
    builder: Builder,
    node: torch.fx.Node,
    inputs: list[Input],
    strides: Sequence[Extent] | None,
    sources: Sequence[SizeSource],
    *,
    any_strides: bool,
) -> Any:
    value = node.meta.get("val")
    if isinstance(value, torch.SymInt):
        inputs.append(Input(node.name, None))
        # The name of a ragged dimension stands for no number: it may be handed out again, and nothing else.
        return value if is_nested_int(value) else builder.sizes.extent(value)
    if isinstance(value, (torch.SymFloat, torch.SymBool)):
        raise UnsupportedError(f"the input {node.name}, a number known only at run time that is no size")
    unread = not node.users and all(source.position != len(inputs) for source in sources)
    if not isinstance(value, torch.Tensor) or unread:  # what nobody reads may be anything
        inputs.append(Input(node.name, None))
        return value
    if is_opaque(value):
        opaque = builder.add_opaque("a", value)
        inputs.append(Input(node.name, opaque.name))
        return OpaqueValue(opaque, value.dtype in QUANTIZED_DTYPES)
    sizes = builder.sizes
    if strides is None:
        strides = sizes.strides(value.stride())
    buffer = builder.add_buffer("a", value.dtype, sizes.extents(value.shape), strides)
    inputs.append(Input(node.name, buffer.name, spare=bool(node.meta.get(SAVED_ALONE)), any_strides=any_strides))
    if value.is_neg() or value.is_conj():  # still to be done, and to be done by torch: memory holds the opposite
        view = builder.materialize(builder.read(buffer))
        (done,) = builder.extern(aten.clone.default, (view, None), [value.resolve_neg().resolve_conj()])
        return done
    builder.inputs.add(buffer.name)
    return builder.read(buffer)


def _in_own_memory(builder: Builder, value: Any, own: set[str], *, written: bool) -> Any:
    """``value`` where no write into another tensor changes it, and in memory if it is ``written`` itself.

    A lowering may give back what it was given, seen in another way, although eager gives a new tensor.
    """
    if isinstance(value, (list, tuple)):
        return [_in_own_memory(builder, item, own, written=written) for item in value]
    if not isinstance(value, TensorValue):
        return value
    if all(load.buffer in own for load in ex.loads(value.value)):
        return _in_memory(builder, value) if written else value
    view = builder.materialize(value, builder.layout_for(value.shape))
    return builder.read(builder.buffers[view.buffer])


def _in_memory(builder: Builder, value: Any) -> Any:
    """``value`` in memory of its own, for an operator that writes to it; a constant or a range has none before."""
    if not isinstance(value, TensorValue) or builder.strided_view(value) is not None:
        return value
    view = builder.materialize(value, builder.layout_for(value.shape))
    return builder.read(builder.buffers[view.buffer])


def _lower_attribute(
    builder: Builder, gm: torch.fx.GraphModule, node: torch.fx.Node, constants: list[tuple[str, torch.Tensor]]
) -> Any:
    target: Any = gm
    for part in str(node.target).split("."):
        target = getattr(target, part)
    if not isinstance(target, torch.Tensor):
        return target
    if is_opaque(target):
        opaque = builder.add_opaque("c", target)
        constants.append((opaque.name, target))
        return OpaqueValue(opaque, target.dtype in QUANTIZED_DTYPES)
    buffer = builder.add_buffer("c", target.dtype, tuple(target.shape), target.stride())
    constants.append((buffer.name, target))
    builder.constants.add(buffer.name)
    return builder.read(buffer)


def _lower_call(
    builder: Builder, node: torch.fx.Node, values: dict[torch.fx.Node, Any], bodies: Bodies, aliases: Aliases
) -> Any:
    args: Any = torch.fx.map_arg(node.args, lambda n: values[n])
    kwargs: Any = torch.fx.map_arg(node.kwargs, lambda n: values[n])
    target = node.target
    if target is operator.getitem:
        return args[0][args[1]]
    if isinstance(target, torch._ops.HigherOrderOperator):
        return lower_higher_order(builder, node, args, kwargs, bodies)
    if not isinstance(target, torch._ops.OpOverload):
        return _lower_python_call(builder, node, args, kwargs)
    if target in _SIZE_OPERATORS:
        return builder.sizes.extent(node.meta["val"])
    given = [leaf for n in node.all_input_nodes for leaf in _opaque_values(values[n])]
    if given:
        _require_opaque_argument(node, target)
    if target in _ON_NUMBERS:
        return _ON_NUMBERS[target](builder, node, *args, **kwargs)
    args = _numbers_as_tensors(builder, target, args)
    for written in mutated_arguments(node):
        root = aliases.root(written)
        _require_memory_of_root(target, values[written], values[root])
        if isinstance(values[root], OpaqueValue) and aliases.is_viewed(root):
            raise UnsupportedError(f"{target} on a sparse, quantized or meta tensor that the graph has views of")
        if root.op == "placeholder" and not builder.inputs.issuperset(_buffers(values[root])):
            raise UnsupportedError(f"{target} on an input whose negation or conjugation is still to be done")
    plain = not given and _is_plain(node)
    if target is aten.copy_.default and plain:
        return _lower_copy_into(builder, node, args[0], args[1])
    if target is aten.as_strided.default and node not in aliases.written_through:
        seen = _as_strided_of_input(builder, node, args, written=aliases.root(node) in aliases.written)
        if seen is None:
            seen = _as_strided_of_root(builder, node, aliases, values)
        if seen is not None:
            return seen
    if resizes_storage(target):
        return _resize_storage(builder, node, target, args, values, aliases)
    if writes(target):
        return _call_extern(builder, node, target, args, kwargs)
    lowering = LOWERINGS.get(target) or _SMALL_PRODUCTS.get(target)
    reason: object = "there is no lowering of it"
    if lowering is not None and plain and may_be_refused(node):
        reason = "a number that the dtype does not hold, which torch may refuse"
    elif lowering is not None and plain:
        before = builder.mark()
        try:
            return _verified(builder, node, lowering(builder, *args, **kwargs))
        except NotLowered as declined:
            # Whatever the lowering began is dropped, so that an extern call starts from a clean slate.
            builder.rollback(before)
            reason = declined
    elif lowering is not None:
        reason = "a tensor of a dtype, device or layout that loops do not compute with"
    _log.debug("%s stays a call of %s: %s (%s)", node.name, target, reason, builder.origin.source)
    return _call_extern(builder, node, target, args, kwargs)


def _numbers_as_tensors(builder: Builder, target: torch._ops.OpOverload, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Numbers in place of every tensor, as vmap leaves them, and numbers that are copied: 0-dimensional tensors."""
    if target not in _COPIES and any(
        isinstance(leaf, TensorValue) for leaf in torch.utils._pytree.tree_leaves(args)
    ):
        return args  # a number beside a tensor takes part in promotion as a number
    return tuple(
        _number_as_tensor(builder, value) if declared.type.kind() == "TensorType" else value
        for value, declared in zip(args, target._schema.arguments, strict=False)
    )


def _number_as_tensor(builder: Builder, value: Any) -> Any:
    """A number, known while compiling or not, as a tensor of the dtype torch gives it; anything else as it is."""
    if isinstance(value, complex):  # of which no loop computes: torch makes the tensor
        arguments = (value, torch.complex128, None, torch.device("cpu"), None)
        (made,) = builder.extern(aten.scalar_tensor.default, arguments, [NewTensor((), torch.complex128)])
        return made
    if isinstance(value, (bool, int, float)):
        dtype = torch.tensor(value).dtype
        return TensorValue((), dtype, (), Constant(value, dtype))
    if isinstance(value, Index):
        return TensorValue((), torch.int64, (), IndexValue(value, torch.int64))
    return TensorValue((), value.dtype, (), value) if isinstance(value, Expr) else value


def _verified(builder: Builder, node: torch.fx.Node, result: Any) -> Any:
    """``result``, which must have the dtype and shape eager gives: a mistake here would be silent later.

    A size that torch writes in another way is written torch's way from here on.
    """
    expected = node.meta.get("val")
    if isinstance(expected, torch.Tensor):
        return _verified_one(builder, node, expected, result, 0)
    if not isinstance(expected, (tuple, list)):
        return result
    return [
        _verified_one(builder, node, known, made, position)
        for position, (known, made) in enumerate(zip(expected, result, strict=True))
    ]


def _verified_one(builder: Builder, node: torch.fx.Node, known: Any, made: Any, position: int) -> Any:
    if not isinstance(known, torch.Tensor) or not isinstance(made, TensorValue):
        return made
    shape = builder.sizes.extents(known.shape)
    if made.dtype == known.dtype and made.shape == shape:
        return made
    if made.dtype != known.dtype or not _may_be_equal(made.shape, shape):
        raise AssertionError(
            f"result {position} of {node.target} was lowered as {made.dtype}{list(made.shape)}, "
            f"eager gives {known.dtype}{list(known.shape)}"
        )
    dims = dimension_variables(shape)
    return TensorValue(shape, made.dtype, dims, made.at(indices(dims)))


def _may_be_equal(made: Sequence[Extent], known: Sequence[Extent]) -> bool:
    """Whether shapes differ at most in how a size that is not a number is written: at typical sizes they agree."""
    return len(made) == len(known) and all(
        a == b or (not (isinstance(a, int) and isinstance(b, int)) and ix.hint_of(a) == ix.hint_of(b))
        for a, b in zip(made, known, strict=True)
    )


def _lower_python_call(builder: Builder, node: torch.fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Arithmetic on sizes: torch has worked out what comes of it."""
    value = node.meta.get("val")
    if isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool):
        return whole_number(builder, node, args)
    if isinstance(value, (torch.SymFloat, torch.SymBool)):
        return run_time_number(node, args)
    if any(isinstance(a, TensorValue) for a in torch.utils._pytree.tree_leaves((args, kwargs))):
        raise UnsupportedError(f"{node.target} on tensors is not an ATen operator")
    if not callable(node.target):
        raise UnsupportedError(f"{node.target} is not callable")
    return node.target(*args, **kwargs)


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _is_plain(node: torch.fx.Node) -> bool:
    """Whether every tensor of a node is a strided CPU tensor of a dtype loops compute with."""
    involved = _tensors(node.meta.get("val"))
    for source in node.all_input_nodes:
        involved += _tensors(source.meta.get("val"))
    return all(not is_opaque(t) and t.dtype in SUPPORTED_DTYPES for t in involved)


def _buffers(value: Any) -> set[str]:
    return {load.buffer for load in ex.loads(value.value)} if isinstance(value, TensorValue) else set()


def _require_memory_of_root(target: torch._ops.OpOverload, written: Any, root: Any) -> None:
    """A view that was lowered as a copy would be written to instead of what it shows."""
    if not isinstance(written, TensorValue) or not isinstance(root, TensorValue):
        return
    here, there = written.value, root.value
    if not isinstance(here, Load) or not isinstance(there, Load) or here.buffer != there.buffer:
        raise UnsupportedError(f"{target} on a value that is not in memory")


def _lower_copy_into(builder: Builder, node: torch.fx.Node, target: TensorValue, source: TensorValue) -> TensorValue:
    """Store ``source`` where ``target`` lies: in an input, or in a view of memory of the graph."""
    place = target.value
    assert isinstance(place, Load)
    buffer = builder.buffers[place.buffer]
    if elements_share_memory(buffer.shape, buffer.strides) or not _one_place_each(builder, node.args[0], target):
        # The functional graph takes the elements for independent ones: which of two values to keep is not known here.
        raise UnsupportedError("a tensor is changed in place of which several elements lie at one place in memory")
    wide = broadcast_to(source, target.shape)
    elsewhere = any(
        load.buffer == place.buffer and load.subscripts != place.subscripts
        for load in ex.loads(wide.at(indices(target.dims)))
    )
    if elsewhere:  # everything is read before anything is written
        copy = builder.materialize(wide, ix.contiguous_strides(wide.shape))
        wide = builder.read(builder.buffers[copy.buffer])
    builder.store(buffer, wide, target.dims, place.subscripts)
    return target


def _one_place_each(builder: Builder, node: Any, view: TensorValue) -> bool:
    """Whether no two elements of a view of elements that lie apart are one element."""
    assert isinstance(view.value, Load)
    known = node.meta.get("val")
    if isinstance(known, torch.Tensor):
        sizes = builder.sizes
        if not elements_share_memory(sizes.extents(known.shape), sizes.strides(known.stride())):
            return True
    # With sizes that are no numbers it may be easier to see that every dimension moves a subscript of its own.
    moved: list[Any] = []
    for subscript in view.value.subscripts:
        variables = subscript.variables()
        if len(variables) > 1 or any(subscript.coefficient(v) in (None, 0) for v in variables):
            return False
        moved += variables
    return len(moved) == len(set(moved)) and set(moved) >= {dim for dim in view.dims if dim.extent != 1}


def _call_extern(
    builder: Builder,
    node: torch.fx.Node,
    target: torch._ops.OpOverload,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    target = _EAGER_FORM.get(target, target)
    schema = target._schema
    ordered = _in_schema_order(schema, args, kwargs)
    known = _in_schema_order(schema, *torch.fx.map_arg((node.args, node.kwargs), lambda n: n.meta.get("val")))
    result = node.meta.get("val")
    if (
        _returns_alias(schema)
        and not schema.is_mutable
        and isinstance(result, torch.Tensor)
        and isinstance(ordered[0], TensorValue)
        and not is_opaque(result)
    ):
        return _lower_alias(builder, node, target, ordered, result)
    written = [value for k, value in enumerate(ordered) if is_written(target, k)]
    mutates = list(dict.fromkeys(_written_buffers(builder, target, written)))
    exact = strides_taken(target) is not Strides.ANY
    to_write_back: list[_Copied] = []
    arguments = tuple(
        _extern_argument(builder, a, like, exact=exact, copied=to_write_back if is_written(target, k) else None)
        for k, (a, like) in enumerate(zip(ordered, known, strict=True))
    )
    mutates += [copied.view.buffer for copied in to_write_back]
    flat, rebuild = _flatten_results(result)
    if schema.is_mutable and _returns_alias(schema):
        given = args[0]
        if not isinstance(given, OpaqueValue) and (
            not isinstance(given, TensorValue) or builder.strided_view(given) is None
        ):
            raise UnsupportedError(f"{target} on a value that is not in memory")
        builder.extern(target, arguments, [None for _ in flat], tuple(mutates))
        returned: Any = given
    else:
        all_of_them = target in WRITES_INTO
        wanted = [
            _result_in_memory(r) if all_of_them or _is_read(node, k) else None
            for k, r in enumerate(flat)
        ]
        quantized = _makes_quantized(target, ordered)
        made = builder.extern(target, arguments, wanted, tuple(mutates), quantized=quantized)
        if _returns_alias(schema) and isinstance(arguments[0], StridedView):
            builder.shows(made, arguments[0].buffer)
        returned = rebuild([_result_of_call(builder, like, value) for like, value in zip(flat, made, strict=True)])
    for copied in to_write_back:
        _write_back(builder, target, copied)
    return returned


def _resize_storage(
    builder: Builder,
    node: torch.fx.Node,
    target: torch._ops.OpOverload,
    args: tuple[Any, ...],
    values: dict[torch.fx.Node, Any],
    aliases: Aliases,
) -> None:
    """Free the memory of an input, or give it memory again: a write to all inputs that lie in that storage.

    Memory of the graph's own is not the program's to free, so nothing is done there, where nobody sees the size.
    """
    resized, nbytes = args
    root = aliases.root(node.all_input_nodes[0])
    if root.op == "call_function" and root not in aliases.returned:
        return
    view = builder.strided_view(resized) if isinstance(resized, TensorValue) else None
    if view is None or view.buffer not in builder.inputs:
        raise UnsupportedError(f"{target} on the storage of a tensor that is returned, or of a constant")
    mutates = {view.buffer, *(name for written in mutated_arguments(node) for name in _buffers(values[written]))}
    builder.extern(target, (view, _extern_argument(builder, nbytes)), (), tuple(sorted(mutates)))


def _write_back(builder: Builder, target: torch._ops.OpOverload, copied: _Copied) -> None:
    """Store what a call wrote into a copy where the copy was made from."""
    place, buffer = copied.value.value, builder.buffers[copied.view.buffer]
    if not isinstance(place, Load) or buffer.shape != copied.value.shape:
        raise UnsupportedError(f"{target} writes to a value that is not in memory of its own")
    builder.store(builder.buffers[place.buffer], builder.read(buffer), copied.value.dims, place.subscripts)


def _in_schema_order(schema: torch._C.FunctionSchema, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    """Every argument of a call, defaults filled in."""
    supplied = dict(zip((a.name for a in schema.arguments), args, strict=False)) | kwargs
    return [supplied.get(a.name, a.default_value) for a in schema.arguments]


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


def _opaque_values(value: Any) -> list[OpaqueValue]:
    if isinstance(value, (list, tuple)):
        return [found for item in value for found in _opaque_values(item)]
    return [value] if isinstance(value, OpaqueValue) else []


def _require_opaque_argument(node: torch.fx.Node, target: torch._ops.OpOverload) -> None:
    """Raise where an operator tells more of an opaque tensor than fake tensors know."""
    if target in _ON_NUMBERS:
        raise UnsupportedError(f"{target} on a sparse, quantized or meta tensor")
    if target in _PARTS_OF_SPARSE:
        raise UnsupportedError(f"{target}, whose size is the number of values that a sparse tensor holds at run time")


def _makes_quantized(target: torch._ops.OpOverload, arguments: Sequence[Any]) -> bool:
    if target in _FROM_QUANTIZED:
        return False
    leaves = torch.utils._pytree.tree_leaves(arguments)
    return any(
        leaf.quantized if isinstance(leaf, OpaqueValue) else isinstance(leaf, torch.dtype) and leaf in QUANTIZED_DTYPES
        for leaf in leaves
    )


def _is_read(node: torch.fx.Node, position: int) -> bool:
    """Whether anybody takes the result at ``position`` of several.

    What nobody takes need not have the size it is said to have: an operator may compute more than it was asked for.
    """
    if isinstance(node.meta.get("val"), torch.Tensor):
        return True
    return any(user.target is not operator.getitem or user.args[1] == position for user in node.users)


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


def _returns_alias(schema: torch._C.FunctionSchema) -> bool:
    return any(r.alias_info is not None for r in schema.returns)


def _lower_alias(
    builder: Builder, node: torch.fx.Node, target: torch._ops.OpOverload, ordered: list[Any], result: torch.Tensor
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
        if same_strides(base.shape, view.strides, strides):
            start = ix.as_index(sizes.extent(result.storage_offset()))
            offset = ix.extent(start - sizes.extent(known.storage_offset()))
            seen = as_strided(builder, view, sizes.extents(result.shape), sizes.strides(result.stride()), offset)
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


def _as_strided_of_input(
    builder: Builder, node: torch.fx.Node, args: tuple[Any, ...], *, written: bool
) -> TensorValue | None:
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
    builder: Builder, node: torch.fx.Node, aliases: Aliases, values: dict[torch.fx.Node, Any]
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
    offset = ix.extent(ix.as_index(sizes.extent(result.storage_offset())) - sizes.extent(known.storage_offset()))
    whole = root.op == "call_function" and _fills_its_storage(builder, known)
    return as_strided(builder, view, sizes.extents(result.shape), sizes.strides(result.stride()), offset, whole=whole)


def _fills_its_storage(builder: Builder, known: torch.Tensor) -> bool:
    """Whether the storage of a tensor of eager's holds its elements and nothing else."""
    sizes = builder.sizes
    storage, elements = sizes.extent(known.untyped_storage().size()), product(sizes.extents(known.shape))
    return sizes.extent(known.storage_offset()) == 0 and storage == product((elements, known.itemsize))


def _copying_variant(target: torch._ops.OpOverload) -> torch._ops.OpOverload | None:
    """The operator that copies what ``target`` gives a view of, where it depends on values and not on memory."""
    packet = getattr(aten, f"{target._schema.name.removeprefix('aten::')}_copy", None)
    if packet is None or target is aten.as_strided.default or target._overloadname not in packet.overloads():
        return None
    found: torch._ops.OpOverload = getattr(packet, target._overloadname)
    return found


@dataclass(frozen=True)
class _Copied:
    """A tensor that an extern call is given a copy of, at ``view``."""

    value: TensorValue
    view: StridedView


def _extern_argument(
    builder: Builder, value: Any, known: Any = None, *, exact: bool = False, copied: list[_Copied] | None = None
) -> Any:
    """``value`` as an argument of an extern call; ``known`` is the fake value that eager gives it.

    Memory made for a tensor here is laid out as that of ``known``. With ``exact``, what lies in memory already and is
    laid out otherwise is copied, which ``copied`` is told.
    """
    if isinstance(value, TensorValue):
        view = _extern_tensor(builder, value, known if isinstance(known, torch.Tensor) else None, exact=exact)
        if copied is not None and view.buffer not in _buffers(value):
            copied.append(_Copied(value, view))
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


def _flatten_results(result: Any) -> tuple[list[Any], Any]:
    if isinstance(result, (tuple, list)):
        if any(isinstance(r, (tuple, list)) for r in result):
            raise UnsupportedError("an operator that returns nested lists")
        return list(result), lambda values: list(values)
    return [result], lambda values: values[0]
