"""Lowering a whole functional ATen graph to a :class:`Program`."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.fx

from torchkiln.errors import UnsupportedError
from torchkiln.graph.aliases import Aliases
from torchkiln.graph.source import blame, source_line
from torchkiln.ir import index as ix
from torchkiln.ir.expr import Constant, Load
from torchkiln.ir.program import Input, Origin, Output, PassInput, PlainValue, Program, StridedView
from torchkiln.lowering.builder import SUPPORTED_DTYPES, Builder, TensorValue, as_strided, is_dense, same_strides
from torchkiln.lowering.higher_order import Bodies, lower_higher_order
from torchkiln.lowering.registry import LOWERINGS, NotLowered
from torchkiln.lowering.views import broadcast_to

aten = torch.ops.aten
# Views that only mark the tensor, to be acted on by whoever reads it: here the work is done at once.
_EAGER_FORM = {aten._conj.default: aten._conj_physical.default, aten._neg_view.default: aten.neg.default}


def lower_graph(
    gm: torch.fx.GraphModule,
    *,
    exact_half: bool = False,
    layouts: Sequence[Sequence[int] | None] | None = None,
    fresh_outputs: bool = False,
) -> Program:
    """Turn every node into loops, views or an extern call. Node values need ``meta["val"]`` with static sizes.

    ``layouts`` are the strides of the inputs where they are not those of their fake tensors. With ``fresh_outputs``
    no output shows memory of an input.
    """
    bodies = Bodies(partial(lower_graph, exact_half=exact_half))
    strides = iter(layouts or ())
    written = Aliases(gm.graph).written
    builder = Builder(exact_half=exact_half)
    values: dict[torch.fx.Node, Any] = {}
    inputs: list[Input] = []
    constants: list[tuple[str, torch.Tensor]] = []
    outputs: tuple[Output, ...] = ()
    for node in gm.graph.nodes:
        builder.node = node
        builder.origin = Origin((node.name,), source_line(node))
        with blame(node):
            if node.op == "placeholder":
                values[node] = _lower_placeholder(builder, node, inputs, next(strides, None))
            elif node.op == "get_attr":
                values[node] = _lower_attribute(builder, gm, node, constants)
            elif node.op == "call_function":
                values[node] = _lower_call(builder, node, values, bodies)
                if node in written:
                    values[node] = _in_memory(builder, values[node])
            elif node.op == "output":
                outputs = _lower_outputs(builder, node, values)
                if fresh_outputs:
                    outputs = tuple(_fresh_output(builder, output, inputs) for output in outputs)
            else:
                raise UnsupportedError(f"node kind {node.op!r} in a functional graph")
    return Program(tuple(inputs), tuple(constants), builder.buffers, tuple(builder.operations), outputs)


def _lower_placeholder(
    builder: Builder, node: torch.fx.Node, inputs: list[Input], strides: Sequence[int] | None
) -> Any:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or not node.users:  # what nobody reads may be anything
        inputs.append(Input(node.name, None))
        return value
    _require_plain_memory(value)
    if value.is_neg() or value.is_conj():
        raise UnsupportedError("an input whose negation or conjugation is still to be done (see Tensor.resolve_neg)")
    if strides is None:
        strides = tuple(map(int, value.stride()))
    buffer = builder.add_buffer("a", value.dtype, tuple(map(int, value.shape)), strides)
    inputs.append(Input(node.name, buffer.name))
    return builder.read(buffer)


def _in_memory(builder: Builder, value: Any) -> Any:
    """``value`` in memory of its own, for an operator that writes to it; a constant or a range has none before."""
    if not isinstance(value, TensorValue) or builder.strided_view(value) is not None:
        return value
    view = builder.materialize(value, builder.layout_for(value.shape))
    return builder.read(builder.buffers[view.buffer])


def _require_plain_memory(value: Any) -> None:
    for tensor in _tensors(value):
        if tensor.device.type != "cpu" or tensor.layout != torch.strided:
            raise UnsupportedError(
                f"a {tensor.layout} tensor on {tensor.device}: only strided CPU tensors can be compiled"
            )


def _lower_attribute(
    builder: Builder, gm: torch.fx.GraphModule, node: torch.fx.Node, constants: list[tuple[str, torch.Tensor]]
) -> Any:
    target: Any = gm
    for part in str(node.target).split("."):
        target = getattr(target, part)
    if not isinstance(target, torch.Tensor):
        return target
    buffer = builder.add_buffer("c", target.dtype, tuple(target.shape), target.stride())
    constants.append((buffer.name, target))
    return builder.read(buffer)


def _lower_call(builder: Builder, node: torch.fx.Node, values: dict[torch.fx.Node, Any], bodies: Bodies) -> Any:
    args: Any = torch.fx.map_arg(node.args, lambda n: values[n])
    kwargs: Any = torch.fx.map_arg(node.kwargs, lambda n: values[n])
    target = node.target
    if target is operator.getitem:
        return args[0][args[1]]
    if isinstance(target, torch._ops.HigherOrderOperator):
        return lower_higher_order(builder, node, args, kwargs, bodies)
    if not isinstance(target, torch._ops.OpOverload):
        return _lower_python_call(node, args, kwargs)
    _require_plain_memory(node.meta.get("val"))
    args = _numbers_as_tensors(target, args)
    if target is aten.copy_.default:
        return _lower_copy_into_input(builder, args[0], args[1])
    if target._schema.is_mutable:
        return _call_extern(builder, node, target, args, kwargs)
    lowering = LOWERINGS.get(target)
    if lowering is not None and _is_plain(node):
        before = len(builder.operations), len(builder.buffers)
        try:
            result = lowering(builder, *args, **kwargs)
            _verify(node, result)
            return result
        except NotLowered:
            # Whatever the lowering began is dropped, so that an extern call starts from a clean slate.
            del builder.operations[before[0] :]
            for name in list(builder.buffers)[before[1] :]:
                del builder.buffers[name]
    return _call_extern(builder, node, target, args, kwargs)


def _numbers_as_tensors(target: torch._ops.OpOverload, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Numbers in place of every tensor, as vmap leaves them: 0-dimensional tensors of the default dtype."""
    if any(isinstance(leaf, TensorValue) for leaf in torch.utils._pytree.tree_leaves(args)):
        return args  # a number beside a tensor takes part in promotion as a number
    return tuple(
        TensorValue((), torch.tensor(value).dtype, (), Constant(value, torch.tensor(value).dtype))
        if isinstance(value, (bool, int, float)) and declared.type.kind() == "TensorType"
        else value
        for value, declared in zip(args, target._schema.arguments, strict=False)
    )


def _verify(node: torch.fx.Node, result: Any) -> None:
    """A lowering must give the dtype and shape eager gives: a mistake here would be silent later."""
    expected = node.meta.get("val")
    if isinstance(expected, torch.Tensor):
        expected, result = [expected], [result]
    if not isinstance(expected, (tuple, list)):
        return
    for position, (known, made) in enumerate(zip(expected, result, strict=True)):
        if not isinstance(known, torch.Tensor) or not isinstance(made, TensorValue):
            continue
        if made.dtype != known.dtype or made.shape != tuple(known.shape):
            raise AssertionError(
                f"result {position} of {node.target} was lowered as {made.dtype}{list(made.shape)}, "
                f"eager gives {known.dtype}{list(known.shape)}"
            )


def _lower_python_call(node: torch.fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Arithmetic on sizes, which are plain integers here."""
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
    return all(
        t.dtype in SUPPORTED_DTYPES and t.device.type == "cpu" and t.layout == torch.strided and not t.is_quantized
        for t in involved
    )


def _lower_copy_into_input(builder: Builder, target: TensorValue, source: TensorValue) -> TensorValue:
    view = builder.strided_view(target)
    if view is None or not isinstance(target.value, Load):
        raise UnsupportedError("copy_ into something that is not a graph input")
    buffer = builder.buffers[view.buffer]
    if view.shape != buffer.shape or view.strides != builder.strided_view(builder.read(buffer)).strides:  # type: ignore[union-attr]
        raise UnsupportedError("copy_ into a view of a graph input")
    builder.store(buffer, broadcast_to(source, buffer.shape))
    return target


def _call_extern(
    builder: Builder, node: torch.fx.Node, target: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    target = _EAGER_FORM.get(target, target)
    schema = target._schema
    supplied = dict(zip((a.name for a in schema.arguments), args, strict=False)) | kwargs
    ordered = [supplied.get(a.name, a.default_value) for a in schema.arguments]
    result = node.meta.get("val")
    if _returns_alias(schema) and not schema.is_mutable and isinstance(result, torch.Tensor):
        return _lower_alias(builder, node, target, ordered, result)
    written = [
        value
        for value, declared in zip(ordered, schema.arguments, strict=True)
        if declared.alias_info is not None and declared.alias_info.is_write
    ]
    mutates = tuple(dict.fromkeys(_written_buffers(builder, target, written)))
    arguments = tuple(_extern_argument(builder, a) for a in ordered)
    flat, rebuild = _flatten_results(result)
    if schema.is_mutable and _returns_alias(schema):
        if not isinstance(args[0], TensorValue) or builder.strided_view(args[0]) is None:
            raise UnsupportedError(f"{target} on a value that is not in memory")
        builder.extern(target, arguments, [None for _ in flat], mutates)
        returned: Any = args[0]
    else:
        returned = rebuild(
            builder.extern(target, arguments, [r if isinstance(r, torch.Tensor) else None for r in flat], mutates)
        )
    return returned


def _written_buffers(builder: Builder, target: torch._ops.OpOverload, values: Any) -> Iterator[str]:
    for value in torch.utils._pytree.tree_leaves(values):
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
    if result.dtype == known.dtype:
        view = builder.materialize(base)
        if tuple(view.strides) != tuple(known.stride()) or not is_dense(known.shape, known.stride()):
            view = builder.materialize(base, ix.contiguous_strides(base.shape))
        if tuple(view.strides) == tuple(known.stride()):
            offset = int(result.storage_offset()) - int(known.storage_offset())
            seen = as_strided(builder, view, tuple(result.shape), tuple(result.stride()), offset)
            if seen is not None:
                return seen
    copy = _copying_variant(target)
    if copy is None:
        raise UnsupportedError(f"view operator {target} of a tensor whose memory is not dense")
    # The same elements in memory of their own: nobody can tell, since the graph writes into no view.
    loops = base.dtype in SUPPORTED_DTYPES
    source = builder.materialize(base, ix.contiguous_strides(base.shape) if loops else None)
    arguments = (source, *(_extern_argument(builder, a) for a in ordered[1:]))
    made = builder.extern(copy, arguments, [torch.empty(result.shape, dtype=result.dtype, device="meta")])[0]
    assert made is not None
    return made


def _copying_variant(target: torch._ops.OpOverload) -> torch._ops.OpOverload | None:
    """The operator that copies what ``target`` gives a view of, where it depends on values and not on memory."""
    packet = getattr(aten, f"{target._schema.name.removeprefix('aten::')}_copy", None)
    if packet is None or target is aten.as_strided.default or target._overloadname not in packet.overloads():
        return None
    found: torch._ops.OpOverload = getattr(packet, target._overloadname)
    return found


def _extern_argument(builder: Builder, value: Any) -> Any:
    if isinstance(value, TensorValue):
        return builder.materialize(value)
    if isinstance(value, (list, tuple)):
        return tuple(_extern_argument(builder, v) for v in value)
    return value


def _flatten_results(result: Any) -> tuple[list[Any], Any]:
    if isinstance(result, (tuple, list)):
        if any(isinstance(r, (tuple, list)) for r in result):
            raise UnsupportedError("an operator that returns nested lists")
        return list(result), lambda values: list(values)
    return [result], lambda values: values[0]


def _lower_outputs(builder: Builder, node: torch.fx.Node, values: dict[torch.fx.Node, Any]) -> tuple[Output, ...]:
    placeholders = [n for n in node.graph.nodes if n.op == "placeholder"]
    positions = {n: k for k, n in enumerate(placeholders)}
    returned = node.args[0]
    if not isinstance(returned, (tuple, list)):
        returned = (returned,)  # a graph made by hand may return a single value
    return tuple(_lower_output(builder, item, values, positions) for item in returned)


def _lower_output(
    builder: Builder, item: Any, values: dict[torch.fx.Node, Any], positions: dict[torch.fx.Node, int]
) -> Output:
    if not isinstance(item, torch.fx.Node):
        return PlainValue(item)
    if item in positions:
        return PassInput(positions[item])
    value = values[item]
    if not isinstance(value, TensorValue):
        return PlainValue(value)
    builder.node = item
    builder.origin = Origin((item.name,), source_line(item))
    expected: Sequence[int] = tuple(map(int, item.meta["val"].stride()))
    view = builder.strided_view(value)
    if view is None or not same_strides(value.shape, view.strides, expected):
        if not is_dense(value.shape, expected):
            return _materialize_overlapping(builder, value, expected)
        view = builder.materialize(value, expected)
    return StridedView(view.buffer, view.dtype, view.shape, tuple(expected), view.offset)


def _fresh_output(builder: Builder, output: Output, inputs: Sequence[Input]) -> Output:
    """A copy of an output that shows memory of an input."""
    names = [graph_input.buffer for graph_input in inputs]
    name = names[output.position] if isinstance(output, PassInput) else None
    if isinstance(output, StridedView):
        name = output.buffer if output.buffer in names else None
    if name is None:
        return output
    buffer = builder.buffers[name]
    if isinstance(output, StridedView):
        value = as_strided(builder, output, output.shape, output.strides, 0)
        if value is None:
            raise UnsupportedError("a body that returns a view of an argument")
        return builder.materialize(value, ix.contiguous_strides(output.shape))
    value = builder.read(buffer)
    dense = is_dense(buffer.shape, buffer.strides)
    return builder.materialize(value, buffer.strides if dense else ix.contiguous_strides(buffer.shape))


def _materialize_overlapping(builder: Builder, value: TensorValue, strides: Sequence[int]) -> StridedView:
    """Memory for strides with gaps or zeros: dimensions of stride 0 are stored once.

    Where the values do vary along such a dimension, the strides cannot be eager's (some fake implementations give
    the strides of an expanded argument), and the result is contiguous.
    """
    if any(stride == 0 and dim in value.value.variables for stride, dim in zip(strides, value.dims, strict=True)):
        return builder.materialize(value, ix.contiguous_strides(value.shape))
    shape = tuple(1 if stride == 0 else size for size, stride in zip(value.shape, strides, strict=True))
    stored = [stride if stride else 1 for stride in strides]
    copy = builder.pointwise(
        shape,
        value.dtype,
        lambda i: value.at(i),
        stored,
    )
    view = builder.strided_view(copy)
    assert view is not None
    return StridedView(view.buffer, view.dtype, value.shape, tuple(strides), view.offset)
