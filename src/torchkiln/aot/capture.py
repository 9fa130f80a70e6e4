"""Models as programs to compile ahead of time: exported programs and captured graphs, with the weights as inputs.

A program's graph takes the weights, then what a call gives, and returns a flat tuple of what it computes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import sympy
import torch
import torch.fx
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from torchkiln.aot.signature import (
    CONSTANT_TYPES,
    ComputedResult,
    ConstantInput,
    ConstantResult,
    Input,
    NumberInput,
    Range,
    Signature,
    Size,
    SymbolicSize,
    TensorInput,
    Weight,
)
from torchkiln.errors import PackageError
from torchkiln.frontend.flat_outputs import flatten_outputs
from torchkiln.graph.subgraphs import copy_graph_module
from torchkiln.native.tensor_classes import is_no_subclass

# What torch takes for the bound of a size that has none is close to the largest integer.
_UNBOUNDED = 2**62

_WeightKind = Literal["parameter", "buffer", "constant"]


@dataclass(frozen=True, eq=False)
class Program:
    """A model to compile: ``inputs`` are the fake inputs of ``graph``, ``weights`` the values of the first of them."""

    graph: torch.fx.GraphModule
    inputs: tuple[Any, ...]
    weights: Mapping[str, torch.Tensor]
    signature: Signature


def export(
    model: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any] | None, dynamic_shapes: Any
) -> ExportedProgram:
    """The model as torch.export captures it."""
    return torch.export.export(model, tuple(args), dict(kwargs or {}), dynamic_shapes=dynamic_shapes, strict=False)


@dataclass(frozen=True, eq=False)
class _Given:
    """A weight of a graph: its placeholder and its value."""

    node: torch.fx.Node
    kind: _WeightKind
    name: str
    value: torch.Tensor


_KINDS: Mapping[InputKind, _WeightKind] = {
    InputKind.PARAMETER: "parameter",
    InputKind.BUFFER: "buffer",
    InputKind.CONSTANT_TENSOR: "constant",
}


def program_of_export(exported: ExportedProgram) -> Program:
    """What torch.export captured. Buffers and inputs that it returns new values of are written to instead."""
    graph_module = copy_graph_module(exported.graph_module)
    placeholders = graph_module.graph.find_nodes(op="placeholder")
    given, called = [], []
    values = {**exported.constants, **exported.state_dict}
    for node, spec in zip(placeholders, exported.graph_signature.input_specs, strict=True):
        if spec.kind in _KINDS and spec.target is not None:
            given.append(_Given(node, _KINDS[spec.kind], spec.target, values[spec.target]))
        elif spec.kind is InputKind.USER_INPUT:
            called.append(node)
        else:
            raise PackageError(
                f"The model takes {spec.kind.name.lower().replace('_', ' ')} {spec.arg.name!r}, which a package cannot"
                " hold; compile it where it runs, with torch.compile."
            )
    _write_mutated(graph_module, exported)
    call = exported.call_spec
    return _program(
        graph_module,
        given,
        called,
        _names_of_state(exported.state_dict, values),
        arguments=_required(call.in_spec),
        positional=_positional_names(exported, _required(call.in_spec).child(0).num_children),
        returned=_required(call.out_spec),
        ranges={symbol: _range(found) for symbol, found in exported.range_constraints.items()},
    )


def program_of_graph(graph_module: torch.fx.GraphModule, inputs: Sequence[Any]) -> Program:
    """A captured graph; its parameters, buffers and constants become weights. Fake ``inputs`` may have symbolic sizes,
    others are compiled for the sizes they have."""
    graph_module = copy_graph_module(graph_module)
    graph = graph_module.graph
    names = tuple(str(node.target) for node in graph.find_nodes(op="placeholder"))
    if len(names) != len(inputs):
        raise PackageError(f"This graph takes {len(names)} inputs, and {len(inputs)} are given; give all of them.")
    mode = detect_fake_mode(inputs) or FakeTensorMode()
    fakes = [_fake(value, mode) for value in inputs]
    returned = flatten_outputs(graph_module)
    if graph.find_nodes(op="call_module"):
        graph_module, given, called = _inlined(graph_module, fakes, mode)
    else:
        called = graph.find_nodes(op="placeholder")
        for node, value in zip(called, fakes, strict=True):
            node.meta["val"] = value
        given = list(_lifted(graph_module, called[0] if called else next(iter(graph.nodes)), mode))
    arguments = pytree.tree_structure((tuple(None for _ in called), {}))
    state = {weight.name: weight.value for weight in given}
    shapes = getattr(mode, "shape_env", None)
    ranges = {symbol: _range(found) for symbol, found in shapes.var_to_range.items()} if shapes is not None else {}
    return _program(
        graph_module,
        given,
        called,
        state,
        arguments=arguments,
        positional=names,
        returned=returned,
        ranges=ranges,
    )


def _positional_names(exported: ExportedProgram, count: int) -> tuple[str, ...]:
    called = exported.module_call_graph[0].signature
    names = list((called.forward_arg_names if called is not None else None) or ())[:count]
    return (*names, *(f"argument {k}" for k in range(len(names), count)))


def _required(structure: pytree.TreeSpec | None) -> pytree.TreeSpec:
    if structure is None:
        raise PackageError("The exported program has lost the structure of its arguments; export the model again.")
    return structure


def _fake(value: Any, mode: FakeTensorMode) -> Any:
    if isinstance(value, torch.Tensor) and not isinstance(value, FakeTensor):
        return mode.from_tensor(value, static_shapes=True)
    return value


def _lifted(graph_module: torch.fx.GraphModule, first: torch.fx.Node, mode: FakeTensorMode) -> Iterator[_Given]:
    """Make inputs of the tensors that the graph itself holds."""
    found: dict[str, torch.fx.Node] = {}
    for node in graph_module.graph.find_nodes(op="get_attr"):
        name = str(node.target)
        value = _attribute(graph_module, name)
        if not isinstance(value, torch.Tensor):
            continue  # the body of a higher-order operator
        if name not in found:
            with graph_module.graph.inserting_before(first):
                placeholder = graph_module.graph.placeholder(f"weight_{len(found)}")
            placeholder.meta["val"] = _fake(value, mode)
            found[name] = placeholder
            kind: _WeightKind = "parameter" if isinstance(value, torch.nn.Parameter) else "buffer"
            yield _Given(placeholder, kind, name, value)
        node.replace_all_uses_with(found[name])
        graph_module.graph.erase_node(node)
    graph_module.recompile()


def _inlined(
    graph_module: torch.fx.GraphModule, inputs: Sequence[Any], mode: FakeTensorMode
) -> tuple[torch.fx.GraphModule, list[_Given], list[torch.fx.Node]]:
    """A graph that calls modules, traced through them: operators on its weights and its inputs."""
    state = {**dict(graph_module.named_parameters()), **dict(graph_module.named_buffers())}

    def call(weights: Sequence[torch.Tensor], values: Sequence[Any]) -> Any:
        return functional_call(graph_module, dict(zip(state, weights, strict=True)), tuple(values))

    fakes = [_fake(value, mode) for value in state.values()]
    with mode:
        traced = make_fx(call, pre_dispatch=True)(fakes, list(inputs))
    placeholders = traced.graph.find_nodes(op="placeholder")
    for node, value in zip(placeholders, (*fakes, *inputs), strict=True):
        node.meta["val"] = value
    given = [
        _Given(node, "parameter" if isinstance(value, torch.nn.Parameter) else "buffer", name, value)
        for node, (name, value) in zip(placeholders, state.items(), strict=False)
    ]
    flatten_outputs(traced)
    return traced, given, placeholders[len(state) :]


def _attribute(module: Any, name: str) -> Any:
    for part in name.split("."):
        module = getattr(module, part)
    return module


def _write_mutated(graph_module: torch.fx.GraphModule, exported: ExportedProgram) -> None:
    """Buffers and inputs whose new values a functional export returns: write to them, and return the results alone."""
    graph, signature = graph_module.graph, exported.graph_signature
    by_name = {node.name: node for node in graph.find_nodes(op="placeholder")}
    by_target = {spec.target: by_name[spec.arg.name] for spec in signature.input_specs if spec.target is not None}
    output = graph.output_node()
    returned: Any = output.args[0]
    results = []
    for value, spec in zip(returned, signature.output_specs, strict=True):
        if spec.kind is OutputKind.USER_OUTPUT:
            results.append(value)
            continue
        if spec.kind in (OutputKind.BUFFER_MUTATION, OutputKind.PARAMETER_MUTATION):
            written = by_target[spec.target]
        elif spec.kind is OutputKind.USER_INPUT_MUTATION:
            written = by_name[str(spec.target)]
        else:
            raise PackageError(
                f"The exported program returns {spec.kind.name.lower().replace('_', ' ')}, which a package cannot;"
                " export the model itself."
            )
        with graph.inserting_before(output):
            graph.call_function(torch.ops.aten.copy_.default, (written, value))
    output.args = (tuple(results),)
    graph_module.recompile()


def _names_of_state(state: Mapping[str, torch.Tensor], values: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    return {**{name: value for name, value in values.items() if isinstance(value, torch.Tensor)}, **state}


def _range(found: Any) -> Range:
    least, most = (int(b) if b.is_finite and abs(b) < _UNBOUNDED else None for b in (found.lower, found.upper))
    return Range(least, most)


def _program(
    graph_module: torch.fx.GraphModule,
    given: Sequence[_Given],
    called: Sequence[torch.fx.Node],
    state: Mapping[str, torch.Tensor],
    *,
    arguments: pytree.TreeSpec,
    positional: tuple[str, ...],
    returned: pytree.TreeSpec,
    ranges: Mapping[Any, Range],
) -> Program:
    symbols = _Symbols(ranges)
    names = _names(arguments, positional)
    inputs = tuple(_input(node, name, symbols) for node, name in zip(called, names, strict=True))
    for node, found in zip(called, inputs, strict=True):
        if isinstance(found, ConstantInput):
            node.replace_all_uses_with(found.value)  # type: ignore[arg-type]  # an argument of a node may be a constant
            graph_module.graph.erase_node(node)
    used = [weight for weight in given if weight.node.users]
    for weight in given:
        if weight not in used:
            graph_module.graph.erase_node(weight.node)
    results = _results(graph_module)
    graph_module.recompile()
    weights = {weight.name: _dense(weight) for weight in used}
    _reject_shared_memory(used)
    signature = Signature(
        inputs=inputs,
        weights=tuple(_weight(weight, weights[weight.name], state) for weight in used),
        results=results,
        ranges=symbols.found(),
        positional=positional,
        arguments=arguments,
        returned=returned,
    )
    fakes = tuple(node.meta["val"] for node in graph_module.graph.find_nodes(op="placeholder"))
    return Program(graph_module, fakes, weights, signature)


def _names(arguments: pytree.TreeSpec, positional: Sequence[str]) -> list[str]:
    """How errors name each leaf of the arguments: ``x``, ``batch['mask']``, ``states[0]``."""
    whole = pytree.tree_unflatten(list(range(arguments.num_leaves)), arguments)
    found = []
    for path, _ in pytree.tree_flatten_with_path(whole)[0]:
        first: Any = path[1]
        by_position = isinstance(first, pytree.SequenceKey)
        found.append((positional[first.idx] if by_position else str(first.key)) + pytree.keystr(path[2:]))
    return found


class _Symbols:
    """The symbols that sizes are made of, numbered as they are met, with their ranges."""

    def __init__(self, ranges: Mapping[Any, Range]) -> None:
        self._declared = ranges
        self._numbers: dict[Any, int] = {}

    def size(self, value: Any) -> Size:
        """A size as packages compare it."""
        if not isinstance(value, torch.SymInt):
            return int(value)
        expression = value.node.expr
        if expression.is_number:
            return int(expression)
        free = list(expression.free_symbols)
        if len(free) != 1:
            return None
        (symbol,) = free
        plus = expression.subs(symbol, 0)
        times = expression.subs(symbol, 1) - plus
        if sympy.expand(times * symbol + plus - expression) != 0 or not (plus.is_Integer and times.is_Integer):
            return None
        number = self._numbers.setdefault(symbol, len(self._numbers))
        return SymbolicSize(number, int(times), int(plus))

    def found(self) -> tuple[Range, ...]:
        """The ranges of all symbols met."""
        return tuple(self._declared.get(symbol, Range(None, None)) for symbol in self._numbers)


def _input(node: torch.fx.Node, name: str, symbols: _Symbols) -> Input:
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        return _tensor_input(value, name, symbols)
    if isinstance(value, torch.SymInt):
        return NumberInput(name, symbols.size(value))
    if isinstance(value, CONSTANT_TYPES):
        return ConstantInput(name, value)
    raise PackageError(
        f"The argument {name} is a {type(value).__name__}, which a package cannot check; give tensors, numbers, text"
        " or None."
    )


def _tensor_input(value: torch.Tensor, name: str, symbols: _Symbols) -> TensorInput:
    if value.device.type != "cpu" or value.layout is not torch.strided:
        raise PackageError(
            f"The argument {name} is {value.layout} on {value.device}; packages take strided CPU tensors."
        )
    order = _order(value)
    if order is None:
        raise PackageError(
            f"The argument {name} has gaps or overlaps in memory; compile with name.contiguous() in its place."
        )
    return TensorInput(name, value.dtype, tuple(symbols.size(size) for size in value.shape), order)


def _order(value: torch.Tensor) -> tuple[int, ...] | None:
    """The dimensions from the largest stride to the smallest; None for a tensor with gaps or overlaps."""
    hinted = [_hint(stride) for stride in value.stride()]
    order = tuple(sorted(range(value.dim()), key=lambda d: (-hinted[d], d)))
    expected = 1
    for dim in reversed(order):
        if _hint(value.shape[dim]) != 1 and hinted[dim] != expected:
            return None
        expected *= max(_hint(value.shape[dim]), 1)
    return order


def _hint(size: Any) -> int:
    if isinstance(size, torch.SymInt):
        return int(size.node.hint if size.node.hint is not None else size.node.expr)
    return int(size)


def _results(graph_module: torch.fx.GraphModule) -> tuple[ComputedResult | ConstantResult, ...]:
    """Leave only what is computed among what the graph returns; how its leaves are found again."""
    output = graph_module.graph.output_node()
    computed: list[torch.fx.Node] = []
    results: list[ComputedResult | ConstantResult] = []
    leaves: Any = output.args[0]
    for leaf in leaves:
        if isinstance(leaf, torch.fx.Node):
            results.append(ComputedResult(len(computed)))
            computed.append(leaf)
        elif isinstance(leaf, CONSTANT_TYPES):
            results.append(ConstantResult(leaf))
        else:
            raise PackageError(f"The model returns a {type(leaf).__name__}; return tensors, numbers, text or None.")
    output.args = (tuple(computed),)
    return tuple(results)


def _dense(weight: _Given) -> torch.Tensor:
    value = weight.value.detach()
    if not is_no_subclass(value) or value.device.type != "cpu" or value.layout is not torch.strided:
        raise PackageError(
            f"The weight {weight.name} is no strided CPU tensor; convert the model, or compile it where it runs."
        )
    return value


def _weight(weight: _Given, value: torch.Tensor, state: Mapping[str, torch.Tensor]) -> Weight:
    aliases = (name for name, other in state.items() if name != weight.name and _is_same(other, value))
    return Weight(
        names=(weight.name, *aliases),
        kind=weight.kind,
        dtype=value.dtype,
        shape=tuple(value.shape),
        strides=tuple(value.stride()),
    )


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (
        one.data_ptr() == other.data_ptr()
        and one.numel() > 0
        and (one.dtype, one.shape, one.stride()) == (other.dtype, other.shape, other.stride())
    )


def _reject_shared_memory(weights: Sequence[_Given]) -> None:
    """Weights that the graph takes are apart in a package; two that share memory may not be written to."""
    owners: defaultdict[int, list[_Given]] = defaultdict(list)
    for weight in weights:
        owners[weight.value.untyped_storage().data_ptr()].append(weight)
    for sharing in owners.values():
        written = [weight for weight in sharing if len(sharing) > 1 and _is_written(weight.node)]
        if written:
            others = ", ".join(weight.name for weight in sharing if weight is not written[0])
            raise PackageError(
                f"The model writes to {written[0].name}, which shares memory with {others}; give each its own memory."
            )


def _is_written(node: torch.fx.Node) -> bool:
    def writes(reader: torch.fx.Node) -> bool:
        schema = getattr(reader.target, "_schema", None)
        return schema is not None and schema.is_mutable

    return any(writes(reader) for reader in node.users)
