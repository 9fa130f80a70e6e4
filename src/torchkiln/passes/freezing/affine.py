"""Scales and shifts by constants, before and after a layer, become part of the layer's weight and bias.

A walk goes from a layer over what only one node reads: operations with constants, views that keep the channels apart,
and casts to wider dtypes and back, as autocast leaves them. What is folded begins and ends with the dtype of the layer:
a result that stays in a wider dtype would be rounded to the layer's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx

from torchkiln.graph.dead_code import eliminate_dead_code
from torchkiln.graph.effects import has_effect
from torchkiln.graph.fake import equal_expressions, expression, same_sizes
from torchkiln.graph.insertion import insert_call
from torchkiln.graph.nodes import argument, fake_tensor
from torchkiln.graph.operators import CASTS
from torchkiln.graph.strides import keep_output_strides, propagate_strides, returned_values
from torchkiln.passes.freezing.layers import Layer, Step, layers, may_fold, remade_after, remade_before, widest

_aten = torch.ops.aten
_VIEWS = frozenset({_aten.view.default, _aten._unsafe_view.default, _aten.reshape.default})


@dataclass(frozen=True)
class Read:
    """``steps`` that lead from one value to ``result``, which has its sizes."""

    steps: tuple[Step, ...]
    result: torch.fx.Node


ReadSteps = Callable[[torch.fx.Node, torch.fx.Node, int, int, frozenset[torch.fx.Node]], Read | None]
"""Steps of a node on a value: takes node, value, dimension of channels, their number, and the constant nodes."""


@dataclass(frozen=True)
class _Path:
    """From a layer to ``end``: the steps on the way, the views to make again, the dtypes that occur."""

    steps: tuple[Step, ...]
    views: tuple[torch.fx.Node, ...]
    end: torch.fx.Node
    dtypes: frozenset[torch.dtype]


def fold_after(graph_module: torch.fx.GraphModule, read: ReadSteps) -> bool:
    """Fold what ``read`` reads of operations on results of layers; returns whether the graph changed."""
    return _fold_each(graph_module, lambda layer, constant: _fold_results(layer, constant, read))


def fold_before(graph_module: torch.fx.GraphModule, read: ReadSteps, pays: Callable[[torch.fx.Node], bool]) -> bool:
    """Fold operations on inputs of layers, where ``pays`` says so of the value that the layer would read instead."""
    return _fold_each(graph_module, lambda layer, constant: _fold_input(layer, constant, read, pays))


_Replaced = tuple[torch.fx.Node, Any]


def _fold_each(
    graph_module: torch.fx.GraphModule, fold: Callable[[Layer, frozenset[torch.fx.Node]], _Replaced | None]
) -> bool:
    graph = graph_module.graph
    eliminate_dead_code(graph, has_effect)  # a dead node would count as a reader
    promised = returned_values(graph)
    replaced = dict(filter(None, (fold(layer, constant) for layer, constant in layers(graph))))
    eliminate_dead_code(graph, has_effect)
    if replaced:
        propagate_strides(graph, replaced)
        keep_output_strides(graph, promised)
    return bool(replaced)


def _fold_results(layer: Layer, constant: frozenset[torch.fx.Node], read: ReadSteps) -> _Replaced | None:
    path = _path_after(layer, constant, read)
    if path is None:
        return None
    made = remade_after(layer, path.steps, widest(path.dtypes), path.end)
    for view in path.views:
        made = _again(view, made, path.end)
    return _replace(path.end, made)


def _fold_input(
    layer: Layer, constant: frozenset[torch.fx.Node], read: ReadSteps, pays: Callable[[torch.fx.Node], bool]
) -> _Replaced | None:
    path = _path_before(layer, constant, read)
    if path is None or not pays(path.end):
        return None
    given = path.end
    for view in reversed(path.views):
        given = _again(view, given, layer.node)
    return _replace(layer.node, remade_before(layer, path.steps, given, widest(path.dtypes), layer.node))


def _again(view: torch.fx.Node, source: torch.fx.Node, before: torch.fx.Node) -> torch.fx.Node:
    assert callable(view.target)
    return insert_call(before, view.target, source, *view.args[1:], **view.kwargs)


def _replace(old: torch.fx.Node, new: torch.fx.Node) -> _Replaced:
    known = old.meta["val"]
    old.replace_all_uses_with(new)
    return new, known


def _path_after(layer: Layer, constant: frozenset[torch.fx.Node], read: ReadSteps) -> _Path | None:
    node, dim, channels = layer.node, layer.dim, layer.outputs
    steps, views, dtypes = list[Step](), list[torch.fx.Node](), {layer.dtype}
    best: _Path | None = None
    while len(node.users) == 1:
        (reader,) = node.users
        moved = _moved(reader, dim, channels)
        if moved is not None:
            views.append(reader)
            node, dim = reader, moved
            continue
        if not _widens(reader, layer.dtype):
            found = read(reader, node, dim, channels, constant)
            if found is None or not may_fold(layer, (*steps, *found.steps)):
                break
            steps += found.steps
            reader = found.result
        node = reader
        dtypes.add(node.meta["val"].dtype)
        if steps and node.meta["val"].dtype is layer.dtype:
            best = _Path(tuple(steps), tuple(views), node, frozenset(dtypes))
    return best


def _path_before(layer: Layer, constant: frozenset[torch.fx.Node], read: ReadSteps) -> _Path | None:
    node, dim = layer.input, layer.dim
    channels = int(layer.input.meta["val"].shape[dim])
    steps, views, dtypes = list[Step](), list[torch.fx.Node](), {layer.dtype}
    best: _Path | None = None
    while len(node.users) == 1 and node.op == "call_function":
        source = _operand(node, constant)
        if source is None:
            break
        before = _moved_back(node, dim, channels)
        if before is not None:
            views.append(node)
            node, dim = source, before
            continue
        if not _widens(node, layer.dtype):
            found = read(node, source, dim, channels, constant)
            if found is None or not (layer.adds_before or _only_scales(found.steps)):
                break
            if not may_fold(layer, (*reversed(steps), *reversed(found.steps))):
                break
            steps[:0] = found.steps
        node = source
        dtypes.add(node.meta["val"].dtype)
        if steps and node.meta["val"].dtype is layer.dtype:
            best = _Path(tuple(steps), tuple(views), node, frozenset(dtypes))
    return best


def _only_scales(steps: Sequence[Step]) -> bool:
    return all(step.operation in (_aten.mul.Tensor, _aten.div.Tensor) for step in steps)


def _operand(node: torch.fx.Node, constant: frozenset[torch.fx.Node]) -> torch.fx.Node | None:
    """The one operand that is not constant, and not a size."""
    found = [source for source in node.all_input_nodes if source not in constant and fake_tensor(source) is not None]
    return found[0] if len(found) == 1 else None


def _moved(view: torch.fx.Node, dim: int, channels: int) -> int | None:
    """The dimension of channels after a view that keeps them apart; None for anything else."""
    if view.target is _aten.permute.default:
        dims: list[int] = argument(view, "dims")
        return [given % len(dims) for given in dims].index(dim)
    if view.target in _VIEWS:
        source, value = fake_tensor(view.args[0]), fake_tensor(view)
        if source is not None and value is not None and dim == source.dim() - 1 and value.dim() > 0:
            return value.dim() - 1 if expression(value.shape[-1]) == channels else None
    return None


def _moved_back(view: torch.fx.Node, dim: int, channels: int) -> int | None:
    """The dimension of channels before such a view."""
    if view.target is _aten.permute.default:
        dims: list[int] = argument(view, "dims")
        return dims[dim] % len(dims)
    if view.target in _VIEWS:
        source, value = fake_tensor(view.args[0]), fake_tensor(view)
        if source is not None and value is not None and dim == value.dim() - 1 and source.dim() > 0:
            return source.dim() - 1 if equal_expressions(expression(source.shape[-1]), channels) else None
    return None


def _widens(node: torch.fx.Node, dtype: torch.dtype) -> bool:
    """Whether ``node`` is a cast to a dtype that has the values of ``dtype``: nothing is rounded but at the end."""
    value = fake_tensor(node)
    if node.target not in CASTS or value is None or not value.dtype.is_floating_point:
        return False
    source = fake_tensor(node.args[0])
    if source is None or node.kwargs.get("memory_format") is not None or not same_sizes(source, value):
        return False
    return torch.promote_types(value.dtype, dtype) is value.dtype
