"""Writes through views of which several elements are one place in memory, such as expanded ones.

Eager refuses most of them where two elements do share a place. Making a graph functional gives them some meaning
instead, and adds and subtracts to write through ``expand``: ``base + (written - base)``, which rounds and makes NaN of
infinities. So they are looked for before that.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch
import torch.fx
import torch.utils._pytree as pytree
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols, statically_known_true

from torchkiln.errors import UnsupportedError
from torchkiln.graph.effects import storage_of
from torchkiln.graph.source import blame

# In name only: what they change is not the elements.
_METADATA = frozenset(
    {
        *("as_strided_", "detach_", "requires_grad_", "rename_", "resize_", "resize_as_", "set_", "share_memory_"),
        *("squeeze_", "swapaxes_", "swapdims_", "t_", "transpose_", "unsqueeze_"),
    }
)
_IN_PLACE = frozenset(
    {
        *(operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.ifloordiv, operator.imod),
        *(operator.ipow, operator.iand, operator.ior, operator.ixor, operator.setitem),
    }
)
# Eager does not refuse these. Those that write one value everywhere mean the same in whatever order it is done.
_ONE_VALUE = frozenset({"fill_", "zero_"})
_NOT_REFUSED = frozenset(
    {
        *("conj_physical_", "fill_", "fill_diagonal_", "index_fill_", "index_put_", "masked_fill_", "tril_", "triu_"),
        "zero_",
    }
)
_EXPANDS: frozenset[Any] = frozenset({"expand", "expand_as", "broadcast_to", torch.broadcast_to})
_REFUSED_BY_EAGER = (
    "unsupported operation: more than one element of the written-to tensor refers to a single memory location."
    " Please clone() the tensor before performing the operation."
)


def rewrite_overlapping_writes(graph_module: torch.fx.GraphModule) -> None:
    """Give writes through expanded views of the captured graph eager's meaning.

    An ``expand`` that repeats nothing becomes a view of another kind. A part of which no two elements share a place is
    written to a copy, which is stored at the places it was read from. Where no two elements of the whole do, or all get
    one value, the first element of a copy is stored; where the data decides that, the graph checks it. Raises
    UnsupportedError, naming the node, for all other writes: run eagerly, the graph does what eager does, or raises its
    error at the user's line.
    """
    graph = graph_module.graph
    for node in list(graph.nodes):
        if _writes(node) and node.args and _tensor(node.args[0]) is not None:
            with blame(node):
                _rewrite_write(graph, node)


def _rewrite_write(graph: torch.fx.Graph, node: torch.fx.Node) -> None:
    for view in list(_chain(node.args[0])):
        if _expands(view) and _repeats_nothing(view):
            _replace_with_another_view(graph, view)
    target = node.args[0]
    written = _tensor(target)
    assert isinstance(target, torch.fx.Node)
    assert written is not None
    real = [view for view in _chain(target) if _expands(view)]
    if not real and (_is_empty(written) or not _repeated(written)):
        return
    if _is_empty(written) and real != [target]:
        _write_a_copy(graph, node, target)
    elif real and not _repeated(written):
        _write_places(graph, node, target, real[-1])
    elif real == [target] and _may_be_written(node, written):
        _write_the_first(graph, node, target)
    else:
        raise UnsupportedError("a write into a tensor of which several elements are one place in memory")


def _may_be_written(node: torch.fx.Node, written: torch.Tensor) -> bool:
    """Whether no two elements get other values, or the graph can check, as eager does, that none share a place."""
    if _is_empty(written) or _name(node) in _ONE_VALUE:
        return True
    return bool(free_unbacked_symbols(tuple(written.shape))) and _name(node) not in _NOT_REFUSED


def _writes(node: torch.fx.Node) -> bool:
    if node.op == "call_function":
        return node.target in _IN_PLACE
    if node.op != "call_method":
        return False
    name = str(node.target)
    return name.endswith("_") and not name.endswith("__") and name not in _METADATA


def _name(node: torch.fx.Node) -> str:
    return str(node.target) if node.op == "call_method" else ""


def _tensor(node: Any) -> torch.Tensor | None:
    """What a node of the captured graph is known as, where that is memory with strides."""
    value = node.meta.get("example_value") if isinstance(node, torch.fx.Node) else None
    return value if isinstance(value, torch.Tensor) and value.layout is torch.strided else None


def _chain(node: Any) -> Iterator[torch.fx.Node]:
    """``node`` and the views it is made from, as far as they show the memory of one tensor."""
    storage = storage_of(_tensor(node))
    while isinstance(node, torch.fx.Node):
        known = _tensor(node)
        if known is not None and storage_of(known) != storage:
            return
        yield node
        node = node.args[0] if node.op in ("call_method", "call_function") and node.args else None


def _expands(node: torch.fx.Node) -> bool:
    return node.op in ("call_method", "call_function") and node.target in _EXPANDS


def _is_empty(value: torch.Tensor) -> bool:
    return any(isinstance(size, int) and size == 0 for size in value.shape)


def _repeated(value: torch.Tensor) -> list[int]:
    """Dimensions of which all elements are, or may be, one place."""
    # Symbolic strides are not asked: their answer would become a guard.
    return [
        dim
        for dim, (stride, size) in enumerate(zip(value.stride(), value.shape, strict=True))
        if isinstance(stride, int) and stride == 0 and not (isinstance(size, int) and size <= 1)
    ]


def _repeats_nothing(view: torch.fx.Node) -> bool:
    base, expanded = _tensor(view.args[0]), _tensor(view)
    return base is not None and expanded is not None and not _expanded_dimensions(base, expanded)


def _replace_with_another_view(graph: torch.fx.Graph, view: torch.fx.Node) -> None:
    base, expanded = _tensor(view.args[0]), _tensor(view)
    assert base is not None
    assert expanded is not None
    lead = expanded.dim() - base.dim()
    with graph.inserting_after(view):
        if lead:
            made = graph.call_function(operator.getitem, (view.args[0], (None,) * lead))
        else:
            made = graph.call_method("view_as", (view.args[0], view.args[0]))
    made.meta = dict(view.meta)
    view.replace_all_uses_with(made)
    graph.erase_node(view)


def _write_a_copy(graph: torch.fx.Graph, write: torch.fx.Node, target: torch.fx.Node) -> torch.fx.Node:
    """Let ``write`` change a copy of ``target``, which is returned, and its users see ``target``."""
    with graph.inserting_before(write):
        copy = _call(graph, target, torch.clone, target)
    write.replace_all_uses_with(target)
    write.update_arg(0, copy)
    return copy


def _write_the_first(graph: torch.fx.Graph, write: torch.fx.Node, view: torch.fx.Node) -> None:
    """Write into a copy of ``view``, an ``expand``, and store its first element, if there is one, in place of all.

    Along each repeated dimension that is the first element of the copy followed by the old one.
    """
    written, base = _tensor(view), _tensor(view.args[0])
    assert written is not None
    assert base is not None
    if not _is_empty(written) and _name(write) not in _ONE_VALUE:
        _check(graph, write, view, written)
    following = write.next
    first = _write_a_copy(graph, write, view)
    lead = written.dim() - base.dim()
    with graph.inserting_before(following):
        old = _call(graph, view, operator.getitem, view.args[0], (None,) * lead) if lead else view.args[0]
        sizes: list[Any] = [_number(graph, view, dim, size) for dim, size in enumerate(written.shape)]
        for dim in _expanded_dimensions(base, written):
            sizes[dim] = 1
            both = _call(graph, view, torch.cat, [first, _call(graph, view, torch.Tensor.expand, old, sizes)], dim)
            first = _call(graph, view, torch.narrow, both, dim, 0, 1)
        stored = graph.call_method("copy_", (old, first))
        stored.meta = {**write.meta, "example_value": _value(old)}


def _write_places(graph: torch.fx.Graph, write: torch.fx.Node, target: torch.fx.Node, expand: torch.fx.Node) -> None:
    """Write into a copy of ``target``, a part of what ``expand`` gives, and store it where each element comes from.

    The places are those of the base, numbered and seen through the same views.
    """
    base: Any = expand.args[0]
    known, written = _tensor(base), _tensor(target)
    assert known is not None
    assert written is not None
    if known.dtype != written.dtype:
        raise UnsupportedError("a write into a part of an expanded tensor, seen as another dtype")
    chain = list(_chain(target))
    following = write.next
    with graph.inserting_before(write):
        count: Any = known.numel()
        if not isinstance(count, int):
            count = graph.call_method("numel", (base,))
            count.meta["example_value"] = known.numel()
        places = _call(graph, expand, torch.Tensor.view_as, _call(graph, expand, torch.arange, count), base)
        for view in reversed(chain[: chain.index(expand) + 1]):
            if not _writes(view):
                function = getattr(torch.Tensor, str(view.target)) if view.op == "call_method" else view.target
                places = _call(graph, view, function, places, *view.args[1:], **view.kwargs)
    copy = _write_a_copy(graph, write, target)
    with graph.inserting_before(following):
        flat, at, values = (_call(graph, target, torch.reshape, node, (-1,)) for node in (base, places, copy))
        changed = _call(graph, target, torch.scatter, flat, 0, at, values)
        stored = graph.call_method("copy_", (base, _call(graph, target, torch.Tensor.view_as, changed, base)))
        stored.meta = {**write.meta, "example_value": known}


def _expanded_dimensions(base: torch.Tensor, expanded: torch.Tensor) -> list[int]:
    """Dimensions of ``expanded`` that may be larger than those of ``base``."""
    sizes = (*(1 for _ in range(expanded.dim() - base.dim())), *base.shape)
    pairs = enumerate(zip(sizes, expanded.shape, strict=True))
    return [dim for dim, (a, b) in pairs if not statically_known_true(a == b)]


def _check(graph: torch.fx.Graph, write: torch.fx.Node, view: torch.fx.Node, written: torch.Tensor) -> None:
    """Raise eager's error, when the graph gets to ``write``, where two elements of ``view`` are one place."""
    with graph.inserting_before(write):
        count = graph.call_method("numel", (view,))
        count.meta["example_value"] = written.numel()
        for dim in _repeated(written):
            more = _call(graph, view, operator.sub, _number(graph, view, dim, written.shape[dim]), 1)
            # Not negative either: without elements in this dimension there are none at all.
            alone = _call(graph, view, operator.eq, _call(graph, view, operator.mul, count, more), 0)
            graph.call_function(torch.ops.aten._assert_scalar.default, (alone, _REFUSED_BY_EAGER))


def _number(graph: torch.fx.Graph, view: torch.fx.Node, dim: int, size: Any) -> Any:
    if isinstance(size, int):
        return size
    node = graph.call_method("size", (view, dim))
    node.meta["example_value"] = size
    return node


def _call(graph: torch.fx.Graph, like: torch.fx.Node, function: Any, *args: Any, **kwargs: Any) -> torch.fx.Node:
    """A call of ``function``, from the user's line that made ``like``."""
    values, named = torch.fx.map_arg((args, kwargs), _value)
    made = graph.call_function(function, args, kwargs)
    mode = next((v.fake_mode for v in pytree.tree_leaves((_tensor(like), values)) if hasattr(v, "fake_mode")), None)
    with mode or nullcontext():
        made.meta = {**like.meta, "example_value": function(*values, **named)}
    return made


def _value(node: Any) -> Any:
    return node.meta["example_value"]
