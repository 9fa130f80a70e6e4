"""Higher-order operators: a call that holds lowered bodies, and the layouts the bodies are lowered for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.fx
from torch.fx import Node

from torchkiln.artifact.calls import Kind
from torchkiln.errors import UnsupportedError
from torchkiln.graph.fake import SYMBOLIC, is_symbolic
from torchkiln.ir import index as ix
from torchkiln.ir.expr import Expr, Load
from torchkiln.ir.higher_order import HigherOrder
from torchkiln.ir.index import Extent
from torchkiln.ir.program import ExternCall, PassInput, PlainValue, Program, StridedView
from torchkiln.lowering.builder import Builder, OpaqueValue, TensorValue, is_dense, same_strides

Strides = tuple[Extent, ...]


class Bodies:
    """The lowered bodies of one graph. A body called in several places with equal layouts is lowered once."""

    def __init__(self, lower: Callable[..., Program]) -> None:
        self._lower = lower
        self._found: dict[tuple[torch.fx.GraphModule, tuple[Strides | None, ...], bool], Program] = {}

    def program(self, body: Any, arguments: Sequence[Any], *, fresh_outputs: bool = True) -> Program:
        """``body`` lowered for arguments with the strides of ``arguments``."""
        strides = tuple(a.strides if isinstance(a, StridedView) else None for a in arguments)
        key = (_graph(body), strides, fresh_outputs)
        if key not in self._found:
            self._found[key] = self._lower(body, layouts=strides, fresh_outputs=fresh_outputs)
        return self._found[key]


def lower_higher_order(
    builder: Builder, node: Node, args: tuple[Any, ...], kwargs: dict[str, Any], bodies: Bodies
) -> Any:
    """The results of the higher-order operator of ``node``, as the tuple it returns."""
    target = node.target
    assert isinstance(target, torch._ops.HigherOrderOperator)
    name = target.name()
    if any(isinstance(leaf, OpaqueValue) for leaf in torch.utils._pytree.tree_leaves((args, kwargs))):
        raise UnsupportedError(f"a sparse, quantized or meta tensor given to the higher-order operator {name}")
    if name not in _LOWERINGS:
        called = f", which calls {args[1]}" if name == "with_effects" else ""
        raise UnsupportedError(f"the higher-order operator {name}{called}")
    return _LOWERINGS[name](builder, node, args, bodies)


def _lower_cond(builder: Builder, node: Node, args: tuple[Any, ...], bodies: Bodies) -> list[Any]:
    predicate, when_true, when_false, operands = args
    arguments = _operands(builder, operands, _inputs(when_true))
    programs = [bodies.program(body, arguments) for body in (when_true, when_false)]
    if isinstance(predicate, Expr):
        predicate = builder.pointwise((), torch.bool, lambda _: predicate)
    choice = builder.materialize(predicate) if isinstance(predicate, TensorValue) else predicate
    if not isinstance(choice, (bool, StridedView)):
        raise UnsupportedError(f"a cond on {choice}")
    return _call(builder, node, "cond", programs, [choice, *arguments])


def _lower_while_loop(builder: Builder, node: Node, args: tuple[Any, ...], bodies: Bodies) -> list[Any]:
    condition, body, carried, constant = args[:4]
    inputs = _inputs(body)
    arguments = _carried(builder, carried, inputs)
    arguments += _operands(builder, constant, inputs[len(carried) :])
    programs = [bodies.program(graph, arguments) for graph in (condition, body)]
    return _call(builder, node, "while_loop", programs, arguments, carried=len(carried))


def _lower_scan(builder: Builder, node: Node, args: tuple[Any, ...], bodies: Bodies) -> list[Any]:
    return _lower_slices(builder, node, "scan", args, bodies)


def _lower_map(builder: Builder, node: Node, args: tuple[Any, ...], bodies: Bodies) -> list[Any]:
    body, scanned, constant = args
    return _lower_slices(builder, node, "map", (body, (), scanned, constant), bodies)


def _lower_slices(builder: Builder, node: Node, kind: Kind, args: tuple[Any, ...], bodies: Bodies) -> list[Any]:
    body, carried, scanned, constant = args
    inputs = _inputs(body)
    first = _carried(builder, carried, inputs)
    whole = [builder.materialize(value) for value in scanned]
    rest = _operands(builder, constant, inputs[len(carried) + len(scanned) :])
    slices = [replace(view, shape=view.shape[1:], strides=view.strides[1:]) for view in whole]
    program = bodies.program(body, [*first, *slices, *rest])
    return _call(builder, node, kind, [program], [*first, *whole, *rest], carried=len(carried), scanned=len(scanned))


def _lower_invoke_subgraph(builder: Builder, node: Node, args: tuple[Any, ...], bodies: Bodies) -> list[Any]:
    body, _identifier, *operands = args
    arguments = _operands(builder, operands, _inputs(body))
    program = bodies.program(body, arguments, fresh_outputs=False)
    results = _call(builder, node, "call", [program], arguments)
    for position, output in enumerate(program.outputs):
        if isinstance(output, PassInput):  # the forward of a region hands what it saves to its backward so
            results[position] = operands[output.position]
    return results


def _call(
    builder: Builder,
    node: Node,
    kind: Kind,
    programs: Sequence[Program],
    arguments: Sequence[Any],
    *,
    carried: int = 0,
    scanned: int = 0,
) -> list[Any]:
    operations = [operation for program in programs for operation in program.operations]
    effect = any(isinstance(operation, ExternCall) and operation.has_effect for operation in operations)
    target = HigherOrder(kind, tuple(programs), carried, scanned, effect)
    expected = node.meta["val"]
    outputs = programs[-1].outputs
    known = [  # an input is not read out of the results
        value if isinstance(value, torch.Tensor) and not isinstance(output, PassInput) else None
        for value, output in zip(expected, outputs, strict=True)
    ]
    for value, output in zip(expected, outputs, strict=True):
        if isinstance(output, PlainValue) and (isinstance(value, torch.Tensor) or output.value is not None):
            raise UnsupportedError(f"a {kind} whose body returns a number")
    results = builder.extern(target, tuple(arguments), known)
    for program in programs:
        _note_shared_memory(builder, program, arguments, results)
    return list(results)


def _note_shared_memory(
    builder: Builder, program: Program, arguments: Sequence[Any], results: Sequence[TensorValue | None]
) -> None:
    """Tell of the results that are views of an argument, or lie in the memory of an earlier result."""
    given = {program_input.buffer: k for k, program_input in enumerate(program.inputs)}
    first: dict[str, TensorValue] = {}
    for output, result in zip(program.outputs, results, strict=False):
        if not isinstance(output, StridedView) or result is None:
            continue
        if output.buffer in given:
            argument = arguments[given[output.buffer]]
            builder.shows((result,), argument.buffer)
        elif (earlier := first.setdefault(output.buffer, result)) is not result:
            assert isinstance(earlier.value, Load)
            builder.shows((result,), earlier.value.buffer)


def _graph(body: Any) -> torch.fx.GraphModule:
    if isinstance(body, torch.fx.GraphModule):
        return body
    raise UnsupportedError(f"a higher-order operator whose body is a {type(body).__name__}, not a graph")


def _inputs(body: Any) -> list[Strides | None]:
    """For each input of a body, the strides it was traced with; None for what is not a tensor."""
    values = [node.meta.get("val") for node in _graph(body).graph.find_nodes(op="placeholder")]
    for value in values:
        if isinstance(value, SYMBOLIC):
            raise UnsupportedError("a number that is only known when the body of a higher-order operator runs")
        if is_symbolic(value):
            raise UnsupportedError("the body of a higher-order operator on sizes that are not fixed")
    return [tuple(v.stride()) if isinstance(v, torch.Tensor) else None for v in values]


def _operands(builder: Builder, values: Sequence[Any], layouts: Sequence[Strides | None]) -> list[Any]:
    return [_operand(builder, value, strides) for value, strides in zip(values, layouts, strict=True)]


def _operand(builder: Builder, value: Any, strides: Strides | None) -> Any:
    """An argument in memory, with the strides the body was traced with where that costs no more than a copy."""
    if not isinstance(value, TensorValue):
        return value
    view = builder.strided_view(value)
    if view is None or (strides is not None and not same_strides(value.shape, view.strides, strides)):
        return builder.materialize(value, _dense(value, strides))
    return view


def _carried(builder: Builder, values: Sequence[Any], layouts: Sequence[Strides | None]) -> list[Any]:
    """The first values of a loop, laid out densely, as the values an iteration returns are."""
    arguments = []
    for value, strides in zip(values, layouts, strict=False):
        if not isinstance(value, TensorValue):
            raise UnsupportedError("a loop that carries a number from one iteration to the next")
        arguments.append(_operand(builder, value, _dense(value, strides)))
    return arguments


def _dense(value: TensorValue, strides: Strides | None) -> Strides:
    """``strides`` where they lay ``value`` out densely, else those of contiguous memory."""
    if strides is not None and is_dense(value.shape, strides):
        return strides
    return ix.contiguous_strides(value.shape)


_LOWERINGS: dict[str, Callable[..., list[Any]]] = {
    "cond": _lower_cond,
    "while_loop": _lower_while_loop,
    "scan": _lower_scan,
    "map_impl": _lower_map,
    "invoke_subgraph": _lower_invoke_subgraph,
}
