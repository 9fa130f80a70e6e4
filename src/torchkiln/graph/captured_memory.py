"""Memory in captured graphs: which values share it, which calls write it, and where autograd or autocast is switched.

A captured graph may write to what it reads: ``x.add_(1)``, ``F.relu(x, inplace=True)``, ``out=``, batch norm in
training. Sharing is read from the storages of the fake tensors Dynamo computed; writing from the calls. A call that is
not known counts as writing all it is given and as a switch of a mode, so a rewrite that asks here stays away from it.
"""

from __future__ import annotations

import builtins
import inspect
import math
import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.fx
import torch.nn.functional as F

from torchkiln.graph.captured_calls import value_of
from torchkiln.graph.effects import mutated_arguments, writes
from torchkiln.graph.fake import tensors_of
from torchkiln.graph.nodes import nodes_in


@dataclass(frozen=True)
class Writes:
    """What a call does to memory it is given: the ``arguments`` it writes, and whether that is all that is known."""

    arguments: tuple[torch.fx.Node, ...] = ()
    known: bool = True
    reshapes: bool = False
    """Whether sizes or strides of an existing tensor change: fake values of earlier nodes then show the later ones."""


_NOTHING = Writes()
_INPLACE_NAMES = "iadd iand iconcat ifloordiv ilshift imatmul imod imul ior ipow irshift isub itruediv ixor"
_INPLACE_OPERATORS = frozenset(getattr(operator, name) for name in _INPLACE_NAMES.split())
# The operator module's functions with another effect than their result.
_EFFECTFUL_OPERATORS = frozenset({operator.delitem, operator.attrgetter, operator.methodcaller, operator.call})
_RESHAPING_NAMES = """
    unsqueeze_ squeeze_ t_ transpose_ swapaxes_ swapdims_ resize_ resize_as_ set_ as_strided_ sparse_resize_
    sparse_resize_and_clear_ rename_ swap_tensors detach_ requires_grad_
"""
_RESHAPING = frozenset(_RESHAPING_NAMES.split())
# Methods of Tensor written in Python that do nothing but compute.
_PYTHON_METHODS = frozenset(
    ["split", "norm", "unflatten", "stft", "istft", "unique", "unique_consecutive", "__rsub__", "__rdiv__", "__rpow__"]
)
_IMPURE_METHODS = frozenset({"retain_grad", "backward", "register_hook", "__setitem__", "__setstate__", "__delitem__"})
# Native functions that write running statistics without saying so in their name.
_IMPURE_NATIVE = ("batch_norm", "instance_norm", "fake_quant", "embedding_renorm", "_sync", "_functional_sym")


def writes_of(node: torch.fx.Node) -> Writes:
    """What ``node`` does to the memory of its inputs."""
    if node.op in ("placeholder", "get_attr", "output"):
        return _NOTHING
    found = None
    if node.op == "call_method":
        found = _method_writes(node, str(node.target))
    elif node.op == "call_function":
        found = _function_writes(node, node.target)
    return Writes(tuple(node.all_input_nodes), known=False) if found is None else found


# What a kind of call writes; None where that is not known.


def _method_writes(node: torch.fx.Node, name: str) -> Writes | None:
    if name in _IMPURE_METHODS or "out" in node.kwargs:
        return None
    by_operator = name.startswith("__i") and name not in ("__invert__", "__int__", "__index__")
    if _is_in_place(name) or by_operator:
        return Writes(nodes_in(node.args[0]), reshapes=name in _RESHAPING) if node.args else None
    method = getattr(torch.Tensor, name, None)
    native = inspect.ismethoddescriptor(method) and not inspect.isfunction(method)
    return _NOTHING if native or name in _PYTHON_METHODS else None


def _function_writes(node: torch.fx.Node, target: Any) -> Writes | None:
    if isinstance(target, torch._ops.OpOverload):
        if not writes(target):
            return _NOTHING if target._schema.returns else None
        return Writes(mutated_arguments(node), reshapes=torch.Tag.inplace_view in target.tags)
    if target in _INPLACE_OPERATORS or target is operator.setitem:
        return Writes(nodes_in(node.args[0]))
    if node.kwargs.get("out") is not None:
        # The result is given the size it needs, which is that of the argument only as a rule.
        return Writes(nodes_in(node.kwargs["out"]), reshapes=True)
    name = getattr(target, "__name__", "")
    if _is_in_place(name) and _is_native(target):
        return Writes(nodes_in(node.args[0]), reshapes=name in _RESHAPING) if node.args else None
    if getattr(target, "__module__", None) == F.__name__ and inspect.isfunction(target):
        return _functional_writes(node, target)
    return _NOTHING if _only_computes(target) else None


def _is_in_place(name: str) -> bool:
    return name.endswith("_") and not name.endswith("__")


def _functional_writes(node: torch.fx.Node, target: Callable[..., Any]) -> Writes | None:
    try:
        bound = _signature(target).bind(*node.args, **node.kwargs)
    except TypeError:
        return None
    bound.apply_defaults()
    given = bound.arguments
    if given.get("inplace", False) is not False:
        return Writes(nodes_in(given.get("input", ())))
    if target in (F.batch_norm, F.instance_norm):
        updates = given["training" if target is F.batch_norm else "use_input_stats"]
        return _NOTHING if updates is False else Writes(nodes_in((given["running_mean"], given["running_var"])))
    if given.get("max_norm") is not None:  # embeddings are scaled in place
        return Writes(nodes_in(given["weight"]))
    return None if target is F.multi_head_attention_forward else _NOTHING


@cache
def _signature(target: Callable[..., Any]) -> inspect.Signature:
    return inspect.signature(target)


@cache
def _is_native(target: Any) -> bool:
    name = getattr(target, "__name__", "")
    homes = (torch._C._VariableFunctions, torch._C._nn, torch.special, torch.linalg, torch.fft)
    return any(getattr(home, name, None) is target for home in homes)


@cache
def _only_computes(target: Any) -> bool:
    name = getattr(target, "__name__", "")
    if _is_native(target):
        return not any(part in name for part in _IMPURE_NATIVE)
    if getattr(operator, name, None) is target:
        return target not in _EFFECTFUL_OPERATORS
    if getattr(target, "__module__", None) == torch.functional.__name__:
        return True
    return target is builtins.getattr or getattr(math, name, None) is target or name.startswith("sym_")


class Memory:
    """What is known about memory in one captured graph at the time of construction."""

    def __init__(self, graph_module: torch.fx.GraphModule) -> None:
        self._graph_module = graph_module
        self._position: dict[torch.fx.Node, int] = {}
        self._written: dict[int, list[int]] = {}
        self._switches: list[int] = []
        self.steady = True
        """Whether fake values can be trusted: nothing changes the sizes of a tensor that exists already."""
        for position, node in enumerate(graph_module.graph.nodes):
            self._position[node] = position
            writes = writes_of(node)
            if not writes.known:
                self._switches.append(position)
            self.steady &= not writes.reshapes
            for argument in writes.arguments:
                for storage in self.storages(argument) or ():
                    self._written.setdefault(storage, []).append(position)
        self._returned: set[int] = set()
        for value in graph_module.graph.output_node().all_input_nodes:
            self._returned |= self.storages(value) or set()

    def storages(self, node: torch.fx.Node) -> frozenset[int] | None:
        """The memory behind a value; None when it is not known."""
        value = value_of(self._graph_module, node)
        if value is None:
            return None
        try:
            return frozenset(tensor.untyped_storage()._cdata for tensor in tensors_of(value))
        except (NotImplementedError, RuntimeError):  # not strided
            return None

    def stands_for(self, new: torch.fx.Node, old: torch.fx.Node) -> None:
        """Note that ``new`` was put where ``old`` is."""
        self._position[new] = self._position[old]

    def undisturbed(self, values: Iterable[torch.fx.Node], first: torch.fx.Node, last: torch.fx.Node) -> bool:
        """Whether reading ``values`` at ``last`` instead of at ``first``, or the other way round, gives the same.

        To autograd too: no mode is switched in between.
        """
        start, end = self._position[first], self._position[last]
        if any(start < position < end for position in self._switches):
            return False
        return not any(self._is_written(value, start, end) for value in values)

    def may_be_shared(self, result: torch.fx.Node, source: torch.fx.Node) -> bool:
        """Whether ``result``, computed into memory of its own, may have the memory of ``source`` instead.

        Nobody may see the difference: the result does not leave the graph and neither is written from there on.
        """
        written = self.is_written_after(source, result) or self.is_written_after(result)
        return not written and not self.is_returned(result)

    def is_written_after(self, node: torch.fx.Node, place: torch.fx.Node | None = None) -> bool:
        """Whether memory of ``node`` is written after ``place``, or after itself; also where that is not known."""
        return self._is_written(node, self._position[node if place is None else place], math.inf)

    def precedes(self, left: torch.fx.Node, right: torch.fx.Node) -> bool:
        """Whether ``left`` is there when ``right`` is computed."""
        return self._position[left] < self._position[right]

    def is_returned(self, node: torch.fx.Node) -> bool:
        """Whether memory of ``node`` leaves the graph; also where that is not known."""
        storages = self.storages(node)
        return storages is None or bool(storages & self._returned)

    def same_region(self, left: torch.fx.Node, right: torch.fx.Node) -> bool:
        """Whether autograd, autocast and the like are as much on at the one as at the other."""
        low, high = sorted((self._position[left], self._position[right]))
        return not any(low < position < high for position in self._switches)

    def _is_written(self, node: torch.fx.Node, start: float, end: float) -> bool:
        storages = self.storages(node)
        if storages is None:
            return True
        return any(start < position < end for storage in storages for position in self._written.get(storage, ()))
