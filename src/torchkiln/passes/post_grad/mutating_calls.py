"""Calls of operators that write to their arguments, from their functional form.

While torch traces, such a call is a function of the tensors it writes to (the *bases*, of which arguments may be
views) that returns their new values. Here it becomes the call itself: on the memory of a base where the old value is
not needed any more, on a copy of it otherwise. Within one call, what is written shares memory with another argument
only where it does in the program.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx
from torch._higher_order_ops.auto_functionalize import (
    AliasViewInfo,
    AsStridedViewInfo,
    SliceViewInfo,
    auto_functionalized,
    get_mutable_args,
    read_view_information_from_args,
)

from torchkiln.errors import UnsupportedError
from torchkiln.graph.aliases import Aliases, view_source
from torchkiln.graph.fake import same_strides, update_fake_values
from torchkiln.graph.insertion import insert_call
from torchkiln.graph.nodes import calls_of, fake_tensor, replace
from torchkiln.graph.program_memory import NOTED, ProgramMemory, tensors_in_memory
from torchkiln.graph.source import blame
from torchkiln.graph.strides import restrided_for
from torchkiln.passes.shared_arguments import mutating_calls

_aten = torch.ops.aten


@dataclass(frozen=True)
class _Call:
    """A functional form of a mutating call, read.

    ``views`` says for each written argument which part of which base it is (a list for a list of tensors); ``others``
    are the arguments that are only read, by name. ``created`` are arguments that are written before they are read,
    of which only size, strides, dtype and device are given. ``memory`` is the memory of each base in the program, where
    known, and ``program`` that of ``others``, by name.
    """

    target: torch._ops.OpOverload
    bases: tuple[torch.fx.Node | None, ...]
    views: dict[str, Any]
    others: dict[str, Any]
    created: dict[str, tuple[Any, ...]]
    memory: tuple[ProgramMemory | None, ...] = ()
    program: dict[str, Any] = field(default_factory=dict)

    def memory_of(self, position: int) -> ProgramMemory | None:
        """The memory of a base in the program, where known."""
        return self.memory[position] if position < len(self.memory) else None

    def base_shared_with(self, memory: object) -> int | None:
        """The first base that is in ``memory`` in the program."""
        return self.memory.index(memory) if isinstance(memory, ProgramMemory) and memory in self.memory else None


@dataclass(frozen=True)
class _Whole:
    """A written argument that is its base itself."""

    base_index: int


def call_mutating_operators(graph_module: torch.fx.GraphModule) -> bool:
    graph = graph_module.graph
    found = mutating_calls(graph)
    for node in found:
        with blame(node):
            _replace(node, _read(node))
    if found:
        for copy in calls_of(graph, _aten.copy_.default):
            if copy.args[0] is copy.args[1] and not copy.users:
                graph.erase_node(copy)
        update_fake_values(graph_module)
    return bool(found)


def _read(node: torch.fx.Node) -> _Call:
    target = node.args[0]
    if not isinstance(target, torch._ops.OpOverload):
        raise UnsupportedError(f"the higher-order operator {target} with a body that writes to its arguments")
    given: dict[str, Any] = dict(node.kwargs)
    noted: dict[str, Any] = node.meta.get(NOTED, {})
    names, types = get_mutable_args(target)
    if node.target is auto_functionalized:
        return _read_first_form(target, names, given, noted)
    bases: Any = given.pop("_all_bases", ())
    given.pop("_only_clone_these_bases", None)
    if not bases and all(f"_{name}_size" in given and f"_{name}_base_index" not in given for name in names):
        facts = ("size", "stride", "dtype", "device")
        created = {name: tuple(given.pop(f"_{name}_{fact}") for fact in facts) for name in names}
        return _Call(target, (), {}, given, created)
    views = read_view_information_from_args(names, types, given, bases)
    return _Call(target, tuple(bases), views, given, {}, tuple(noted.get("_all_bases", ())), noted)


def _read_first_form(
    target: torch._ops.OpOverload, names: Sequence[str], given: dict[str, Any], noted: dict[str, Any]
) -> _Call:
    """The older form, in which every written argument is a base of its own."""
    given.pop("_only_clone_these_tensors", None)
    bases: list[torch.fx.Node | None] = []
    memory: list[ProgramMemory | None] = []
    views: dict[str, Any] = {}

    def take(value: Any, known: Any) -> Any:
        if value is None:
            return None
        if isinstance(value, (list, tuple)):
            return [take(item, shown) for item, shown in zip(value, known or (None,) * len(value), strict=True)]
        bases.append(value)
        memory.append(known)
        return _Whole(len(bases) - 1)

    for name in names:
        views[name] = take(given.pop(name), noted.get(name))
    return _Call(target, tuple(bases), views, given, {}, tuple(memory), noted)


def _replace(node: torch.fx.Node, call: _Call) -> None:
    graph = node.graph
    with graph.inserting_before(node):
        arguments = _Arguments(node, call)
        written = {name: arguments.view(view) for name, view in call.views.items()}
        for name, (size, stride, dtype, device) in call.created.items():
            options = {"dtype": dtype, "device": device}
            written[name] = insert_call(node, _aten.empty_strided.default, list(size), list(stride), **options)
        others = {name: arguments.read(value, call.program.get(name)) for name, value in call.others.items()}
        args, kwargs = _in_schema_order(call.target, {**others, **written})
        made = graph.call_function(call.target, args, kwargs)
    made.meta = {key: value for key, value in node.meta.items() if key not in ("val", NOTED)}
    if call.created:
        created = [written[name] for name in call.created]
        replace(node, created[0] if len(created) == 1 else created)
    else:
        _replace_results(node, call, made, arguments.bases)


class _Arguments:
    """The arguments of a mutating call: which bases it writes in place, and copies in place of the others."""

    def __init__(self, node: torch.fx.Node, call: _Call) -> None:
        self._node = node
        self._call = call
        self._aliases = Aliases(node.graph)
        self._stays = _bases_that_stay(node.graph, self._aliases, node, call)
        self.bases: list[torch.fx.Node | None] = []
        """What the call writes in place of each base."""
        for position, base in enumerate(call.bases):
            shared = call.base_shared_with(call.memory_of(position))
            if base is None or self._stays[position]:
                self.bases.append(base)
            elif shared is not None and shared < position:
                self.bases.append(self._same_part(base, shared))
            else:
                self.bases.append(_copied(node, call.target, base))

    def read(self, value: Any, memory: Any) -> Any:
        """An argument that is only read, from the copy of a base where it shares memory with that base."""
        if isinstance(value, (list, tuple)):
            known = memory if isinstance(memory, (list, tuple)) else (None,) * len(value)
            return [self.read(item, shown) for item, shown in zip(value, known, strict=True)]
        shared = self._call.base_shared_with(memory)
        if shared is None:
            return value
        base = self._call.bases[shared]
        if self._stays[shared] and base is not None and self._aliases.root(value) is self._aliases.root(base):
            return value
        return self._same_part(value, shared)

    def _same_part(self, value: torch.fx.Node, position: int) -> torch.fx.Node:
        """The part of what is written in place of a base that ``value`` is of the base."""
        base, instead = self._call.bases[position], self.bases[position]
        assert instead is not None
        steps: list[torch.fx.Node] = []
        while value is not base:
            source = view_source(value)
            if source is None:
                raise UnsupportedError(f"{self._call.target} with arguments in one memory, of which passes made two")
            steps.append(value)
            value = source
        for step in reversed(steps):
            moved = {view_source(step): instead}
            instead = step.graph.node_copy(step, lambda source: moved.get(source, source))  # noqa: B023 (called here)
        return instead

    def view(self, view: Any) -> Any:
        """An argument that is written: the part of a base that ``view`` describes."""
        if view is None:
            return None
        if isinstance(view, (list, tuple)):
            return [self.view(item) for item in view]
        node, base = self._node, self.bases[view.base_index]
        if isinstance(view, SliceViewInfo):
            return insert_call(node, _aten.slice.Tensor, base, view.dim, view.start, view.end)
        if isinstance(view, AliasViewInfo):
            return insert_call(node, _aten.alias.default, base)
        if not isinstance(view, AsStridedViewInfo):
            return base
        original = self._call.bases[view.base_index]
        assert original is not None
        known = original.meta["val"]
        if not self._stays[view.base_index] and torch.empty_like(known).stride() != known.stride():
            raise UnsupportedError(f"{self._call.target} on a view of memory that is not dense and still needed")
        # The offset of the base in its storage may differ at each call; the view's offset from there does not.
        distance = view.storage_offset - known.storage_offset()
        if not (isinstance(distance, int) and distance == 0):
            base = insert_call(node, _aten.as_strided.default, base, [known.numel()], [1])
            base = insert_call(node, _aten.slice.Tensor, base, 0, distance)
        return insert_call(node, _aten.as_strided.default, base, list(view.size), list(view.stride))


def _copied(node: torch.fx.Node, target: torch._ops.OpOverload, base: torch.fx.Node) -> torch.fx.Node:
    """A copy of ``base``, with its very strides where the operator needs them: a clone has no gaps."""
    known = fake_tensor(base) if torch.Tag.needs_exact_strides in target.tags else None
    if known is not None and not same_strides(torch.empty_like(known), known):
        return restrided_for(node, base, known)[-1]
    return insert_call(node, _aten.clone.default, base)


def _bases_that_stay(graph: torch.fx.Graph, aliases: Aliases, node: torch.fx.Node, call: _Call) -> list[bool]:
    """Which bases the call may write in place.

    Not those that a pass put into memory of another argument; those that share memory in the program stay together.
    """
    last = _last_readers(graph, aliases)
    shown = [(aliases.root(value), memory) for value, memory in tensors_in_memory(call.others, call.program)]
    may: list[bool] = []
    for position, base in enumerate(call.bases):
        if base is None:
            may.append(True)
            continue
        root, memory = aliases.root(base), call.memory_of(position)
        alone = all(other is not root or (memory is not None and known == memory) for other, known in shown)
        unused = root.op != "get_attr" and (root not in last or last[root] <= node)
        may.append(alone and unused and (root.op != "placeholder" or _caller_sees(root, aliases, node, call, position)))
        if may[-1]:
            shown.append((root, memory))
    together = {memory for memory, stays in zip(call.memory, may, strict=False) if memory is not None and not stays}
    return [stays and call.memory_of(position) not in together for position, stays in enumerate(may)]


def _last_readers(graph: torch.fx.Graph, aliases: Aliases) -> dict[torch.fx.Node, torch.fx.Node]:
    """The last node that reads each memory; a ``copy_`` only writes its first argument."""
    last: dict[torch.fx.Node, torch.fx.Node] = {}
    for node in graph.nodes:
        for source in node.all_input_nodes:
            if node.target is not _aten.copy_.default or source is not node.args[0]:
                last[aliases.root(source)] = node
    return last


def _caller_sees(given: torch.fx.Node, aliases: Aliases, node: torch.fx.Node, call: _Call, position: int) -> bool:
    """Whether the caller is to see the new value of a base in the input ``given``, and no result shares its memory."""
    place = max(len(call.target._schema.returns), 1) + position
    if any(aliases.root(user) in aliases.returned for user in node.users if user.args[1] == place):
        return False
    return any(copy.args[0] is given for copy in calls_of(node.graph, _aten.copy_.default))


def _in_schema_order(target: torch._ops.OpOverload, given: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for argument in target._schema.arguments:
        value = given.get(argument.name, argument.default_value)
        if argument.kwarg_only:
            kwargs[argument.name] = value
        else:
            args.append(value)
    return tuple(args), kwargs


def _replace_results(
    node: torch.fx.Node, call: _Call, made: torch.fx.Node, bases: Sequence[torch.fx.Node | None]
) -> None:
    """Let readers of the results and new values of ``node`` read them from the call and the bases."""
    results = len(call.target._schema.returns)
    for item in list(node.users):
        position = item.args[1]
        assert item.target is operator.getitem
        assert isinstance(position, int)
        if position < results and results > 1:
            item.args = (made, position)
            continue
        replacement = made if position < max(results, 1) else bases[position - max(results, 1)]
        assert replacement is not None
        replace(item, replacement)
    node.graph.erase_node(node)
