"""Models as programs to compile ahead of time: exported programs and captured graphs, with the weights as inputs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.fx
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from torchkiln.aot.program import GivenWeight, Program, WeightKind, make_program
from torchkiln.aot.signature import Range
from torchkiln.aot.size_guards import note_guards
from torchkiln.aot.size_ranges import as_traced, served_range, shape_env_of
from torchkiln.errors import PackageError
from torchkiln.frontend.flat_outputs import flatten_outputs
from torchkiln.graph.subgraphs import copy_graph_module


def export(
    model: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any] | None, dynamic_shapes: Any
) -> ExportedProgram:
    """The model as torch.export captures it."""
    return torch.export.export(model, tuple(args), dict(kwargs or {}), dynamic_shapes=dynamic_shapes, strict=False)


_KINDS: Mapping[InputKind, WeightKind] = {
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
            given.append(GivenWeight(node, _KINDS[spec.kind], spec.target, values[spec.target]))
        elif spec.kind is InputKind.USER_INPUT:
            called.append(node)
        else:
            raise PackageError(
                f"The model takes {spec.kind.name.lower().replace('_', ' ')} {spec.arg.name!r}, which a package cannot"
                " hold; compile it where it runs, with torch.compile."
            )
    fakes = [node.meta.get("val") for node in placeholders]
    note_guards(exported, [node.meta.get("val") for node in called], shape_env_of(fakes))
    _write_mutated(graph_module, exported)
    call = exported.call_spec
    return make_program(
        graph_module,
        given,
        called,
        _names_of_state(exported.state_dict, values),
        arguments=_required(call.in_spec),
        positional=_positional_names(exported, _required(call.in_spec).child(0).num_children),
        returned=_required(call.out_spec),
        ranges=_declared_ranges(exported, fakes),
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
    ranges = {s: served_range(found) for s, found in shapes.var_to_range.items()} if shapes is not None else {}
    return make_program(
        graph_module,
        given,
        called,
        state,
        arguments=arguments,
        positional=names,
        returned=returned,
        ranges=ranges,
    )


def _declared_ranges(exported: ExportedProgram, inputs: Sequence[Any]) -> dict[Any, Range]:
    shapes = shape_env_of(inputs)
    with as_traced(inputs):
        traced = dict(shapes.var_to_range) if shapes is not None else {}
    return {s: served_range(traced.get(s, found), found) for s, found in exported.range_constraints.items()}


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


def _lifted(graph_module: torch.fx.GraphModule, first: torch.fx.Node, mode: FakeTensorMode) -> Iterator[GivenWeight]:
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
            kind: WeightKind = "parameter" if isinstance(value, torch.nn.Parameter) else "buffer"
            yield GivenWeight(placeholder, kind, name, value)
        node.replace_all_uses_with(found[name])
        graph_module.graph.erase_node(node)
    graph_module.recompile()


def _inlined(
    graph_module: torch.fx.GraphModule, inputs: Sequence[Any], mode: FakeTensorMode
) -> tuple[torch.fx.GraphModule, list[GivenWeight], list[torch.fx.Node]]:
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
        GivenWeight(node, "parameter" if isinstance(value, torch.nn.Parameter) else "buffer", name, value)
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
