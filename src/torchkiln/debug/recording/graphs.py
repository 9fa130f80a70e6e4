"""FX graphs as text and as nodes of a recording, with the user's lines and module paths."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import torch.fx

from torchkiln.debug.recording.model import Argument, Line, Node
from torchkiln.graph.fake import value_key
from torchkiln.graph.subgraphs import subgraphs

_FRAME = re.compile(r'^ *File "(.+)", line (\d+), in ', re.M)  # not a line of source that looks like one
_ROOT = re.compile(r"""^[LG]\[['"][^'"]*['"]\]\.?""")
_ITEM = re.compile(r"""(?:\._modules)?\[['"]?([^'"\]]+)['"]?\]""")
_TORCHS, _OURS = f"{Path(torch.__file__).parent}/", f"{Path(__file__).parents[2]}/"


def graph_text(graph_module: torch.fx.GraphModule) -> str:
    """A line for each node: name, dtype, sizes, call, and the user's line; then the graphs of bodies."""
    parts = ["\n".join(_node_lines(graph_module.graph))]
    for body in subgraphs(graph_module):
        parts.append("\n".join(["body:", *(f"  {line}" for line in _node_lines(body.graph))]))
    return "\n".join(parts)


def _node_lines(graph: torch.fx.Graph) -> Iterable[str]:
    key = value_key(graph)
    for node in graph.nodes:
        if node.op == "output":
            yield f"return {_text_of(node.args[0])}"
            continue
        value = _type_text(node.meta.get(key))
        lines = lines_of(node)
        place = f"  # {Path(lines[0].file).name}:{lines[0].line}" if lines else ""
        if node.op == "placeholder":
            yield f"{node.name}: {value} = input{place}"
            continue
        given = [_text_of(a) for a in node.args] + [f"{name}={_text_of(a)}" for name, a in node.kwargs.items()]
        yield f"{node.name}: {value} = {target_text(node)}({', '.join(given)}){place}"


def _text_of(argument: Any) -> str:
    if isinstance(argument, (tuple, list)):
        inner = ", ".join(map(_text_of, argument))
        return f"[{inner}]" if isinstance(argument, list) else f"({inner})"
    if isinstance(argument, dict):
        return "{" + ", ".join(f"{name}: {_text_of(value)}" for name, value in argument.items()) + "}"
    return str(argument)


def _type_text(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{dtype_text(value)}{list(sizes_of(value.shape))}".replace("'", "")
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(_type_text, value))})"
    return "?" if value is None else type(value).__name__


def target_text(node: torch.fx.Node) -> str:
    """What a node calls: ``aten.add.Tensor``, ``torch.relu``, ``operator.add``, ``.sum`` for a method."""
    target = node.target
    if isinstance(target, str):
        return f".{target}" if node.op == "call_method" else target
    if isinstance(target, (torch._ops.OpOverload, torch._ops.HigherOrderOperator)):
        return str(target)
    module = str(getattr(target, "__module__", None) or "torch").removeprefix("_")
    return f"{module}.{getattr(target, '__name__', type(target).__name__)}"


def nodes_of(
    graph_module: torch.fx.GraphModule, comes_from: Mapping[str, Sequence[str]] | None = None
) -> tuple[Node, ...]:
    """The nodes of a graph, without those of bodies; ``comes_from`` says which nodes of the stage before."""
    graph, known = graph_module.graph, comes_from or {}
    key = value_key(graph)
    return tuple(_node(node, node.meta.get(key), known.get(node.name, ())) for node in graph.nodes)


def _node(node: torch.fx.Node, value: Any, comes_from: Sequence[str]) -> Node:
    shown = value[0] if isinstance(value, (tuple, list)) and value else value
    tensor = shown if isinstance(shown, torch.Tensor) else None
    target = target_text(node)
    return Node(
        id=node.name,
        op=node.op,
        target=target,
        label=_label(node, target),
        module=module_path(node),
        lines=lines_of(node),
        dtype="" if tensor is None else dtype_text(tensor),
        sizes=() if tensor is None else sizes_of(tensor.shape),
        reads=tuple(argument.name for argument in node.all_input_nodes),
        comes_from=tuple(comes_from),
    )


def _label(node: torch.fx.Node, target: str) -> str:
    """A short word for drawings: the operator without namespace and overload."""
    if node.op != "call_function":
        return target.lstrip(".") if node.op == "call_method" else node.name
    parts = target.split(".")
    return parts[1] if isinstance(node.target, torch._ops.OpOverload) and len(parts) > 1 else parts[-1]


def module_path(node: torch.fx.Node) -> str:
    """``layers.0.attention`` for the innermost module that made ``node``, in backward too; empty outside of modules."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    if not stack or node.op in ("placeholder", "output"):
        return ""
    path = str(list(stack.values())[-1][0])
    return _readable_path(path)


@lru_cache(maxsize=4096)
def _readable_path(path: str) -> str:
    return _ITEM.sub(r".\1", _ROOT.sub("", path)).strip(".")


def lines_of(node: torch.fx.Node) -> tuple[Line, ...]:
    """The user's line that made ``node``, then the lines that called it; those of torch where there are no others.

    A model of torch's own modules that a tool calls is called from no line of the user's.
    """
    trace = node.meta.get("stack_trace")
    return _lines_in(trace) if isinstance(trace, str) else ()


@lru_cache(maxsize=16384)
def _lines_in(trace: str) -> tuple[Line, ...]:
    frames = [Line(file, int(line)) for file, line in reversed(_FRAME.findall(trace)) if not file.startswith(_OURS)]
    users = [frame for frame in frames if not frame.file.startswith(_TORCHS)]
    return tuple(users or frames)


def dtype_text(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def sizes_of(sizes: Iterable[Any]) -> tuple[int | str, ...]:
    """Numbers, or expressions where sizes are symbolic."""
    return tuple(size if isinstance(size, int) else str(size) for size in sizes)


def argument_of(name: str, value: Any) -> Argument:
    """An input of a graph, as a fake or a real value."""
    if not isinstance(value, torch.Tensor):
        kinds = {torch.SymInt: "int", torch.SymFloat: "float", torch.SymBool: "bool"}
        kind = kinds.get(type(value), type(value).__name__ if isinstance(value, (bool, int, float)) else "")
        return Argument(name, kind, value="" if value is None else str(value))
    strides = sizes_of(value.stride()) if value.layout is torch.strided else ()
    return Argument(
        name, dtype_text(value), sizes_of(value.shape), strides, str(value.device), bool(value.requires_grad)
    )


def arguments_of(graph: torch.fx.Graph) -> tuple[Argument, ...]:
    key = value_key(graph)
    return tuple(argument_of(node.name, node.meta.get(key)) for node in graph.find_nodes(op="placeholder"))


def traced_from(traced: torch.fx.Graph, captured: torch.fx.Graph) -> dict[str, tuple[str, ...]]:
    """For each node of a graph that AOTAutograd traced, the nodes of the captured graph that it comes from.

    Torch notes them for forward. A node of backward has the number of the autograd function that it is the derivative
    of, and so has the forward node. Inputs are in the same order; a tangent is of no captured node.
    """
    known = {node.name for node in captured.nodes}
    found: dict[str, tuple[str, ...]] = {}
    by_function: dict[Any, tuple[str, ...]] = {}
    for node in traced.nodes:
        origins = tuple(dict.fromkeys(s.name for s in node.meta.get("from_node") or () if s.name in known))
        if origins:
            found[node.name] = origins
            by_function.setdefault(node.meta.get("seq_nr"), origins)
    for node in traced.nodes:
        function = node.meta.get("seq_nr")
        if node.name not in found and function is not None and function in by_function:
            found[node.name] = by_function[function]
    inputs = traced.find_nodes(op="placeholder")
    for one, other in zip(inputs, captured.find_nodes(op="placeholder"), strict=False):
        found.setdefault(one.name, (other.name,))
    found.setdefault(traced.output_node().name, (captured.output_node().name,))
    return found


class Replacements:
    """Which nodes took the place of which while passes edit a graph; made before they do."""

    def __init__(self, graph_module: torch.fx.GraphModule) -> None:
        self._before = {node.name for node in graph_module.graph.nodes}
        self._replaced: dict[str, list[str]] = {}
        self._graph_module = graph_module
        graph_module._register_replace_node_hook(self._note)

    def _note(self, old: torch.fx.Node, new: str, user: torch.fx.Node) -> None:
        noted = self._replaced.setdefault(str(new), [])
        if old.name not in noted and old.name != str(new):
            noted.append(old.name)

    def finish(self) -> dict[str, tuple[str, ...]]:
        """For each node of the graph now, those of the graph before; the hook is gone then."""
        self._graph_module._unregister_replace_node_hook(self._note)
        nodes = self._graph_module.graph.nodes
        found = {node.name: self._origins(node.name, set()) for node in nodes}
        for node in reversed(nodes):
            if not found[node.name]:  # made on the way to a node that took the place of another
                made_for = (user.name for user in node.users if user.name not in self._before)
                found[node.name] = tuple(dict.fromkeys(origin for name in made_for for origin in found[name]))
        return found

    def _origins(self, name: str, seen: set[str]) -> tuple[str, ...]:
        """A node that was there stands for itself, and for those whose uses it took over."""
        seen.add(name)
        found = [name] if name in self._before else []
        for old in self._replaced.get(name, ()):
            if old not in seen:
                found += self._origins(old, seen)
        return tuple(dict.fromkeys(found))
