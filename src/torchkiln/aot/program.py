"""Programs to compile ahead of time: a graph with its weights, and the signature that its calls have."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import sympy
import torch
import torch.fx
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
from torchkiln.aot.size_guards import size_conditions
from torchkiln.aot.size_ranges import shape_env_of
from torchkiln.errors import PackageError
from torchkiln.native.tensor_classes import is_no_subclass

WeightKind = Literal["parameter", "buffer", "constant"]


@dataclass(frozen=True, eq=False)
class Program:
    """A model to compile. Its graph takes the weights, then what a call gives, and returns a flat tuple of what it
    computes. ``inputs`` are the fake inputs of ``graph``, ``weights`` the values of the first of them. ``ranges`` are
    the values of the symbols in sizes that code must be for.
    """

    graph: torch.fx.GraphModule
    inputs: tuple[Any, ...]
    weights: Mapping[str, torch.Tensor]
    signature: Signature
    ranges: Mapping[Any, Range]


@dataclass(frozen=True, eq=False)
class GivenWeight:
    """A weight of a graph: its placeholder and its value."""

    node: torch.fx.Node
    kind: WeightKind
    name: str
    value: torch.Tensor


def make_program(
    graph_module: torch.fx.GraphModule,
    given: Sequence[GivenWeight],
    called: Sequence[torch.fx.Node],
    state: Mapping[str, torch.Tensor],
    *,
    arguments: pytree.TreeSpec,
    positional: tuple[str, ...],
    returned: pytree.TreeSpec,
    ranges: Mapping[Any, Range],
) -> Program:
    """A program of a graph that takes weights, ``given``, and what a call gives, ``called``; both are edited in place.

    ``state`` are all names that the model has for tensors. Structures and names are those of :class:`Signature`.
    """
    symbols = _Symbols(ranges)
    shape_env = shape_env_of([node.meta.get("val") for node in called])
    names = _names(arguments, positional)
    inputs = tuple(_input(node, name, symbols) for node, name in zip(called, names, strict=True))
    symbols.reject_untold()
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
    described = tuple(_weight(weight, weights[weight.name], state) for weight in used)
    read = {name for weight in described for name in weight.names}
    signature = Signature(
        inputs=inputs,
        weights=described,
        unread=tuple(name for name in state if name not in read),
        results=results,
        ranges=symbols.found(),
        conditions=size_conditions(shape_env, symbols.names),
        positional=positional,
        arguments=arguments,
        returned=returned,
    )
    fakes = tuple(node.meta["val"] for node in graph_module.graph.find_nodes(op="placeholder"))
    return Program(graph_module, fakes, weights, signature, ranges)


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
        self.names: dict[Any, tuple[int, str]] = {}
        """The number of each symbol met, and what a user calls it."""
        self._told: set[Any] = set()
        self._derived: dict[Any, str] = {}

    def size(self, value: Any, name: str) -> Size:
        """A size, which a user calls ``name``, as packages compare it."""
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
        found = SymbolicSize(self.names.get(symbol, (len(self.names),))[0], int(times), int(plus))
        if expression == symbol:
            self._told.add(symbol)
        else:
            self._derived.setdefault(symbol, f"{name} is {_described(found)}")
        self.names.setdefault(symbol, (found.symbol, _solved(name, found)))
        return found

    def reject_untold(self) -> None:
        """Raise :class:`PackageError` for a symbol that no size is by itself: native code does not solve for it."""
        for symbol, derived in self._derived.items():
            if symbol not in self._told:
                raise PackageError(
                    f"The size {derived} a Dim that no size of an argument is by itself; declare it by a Dim of its"
                    " own."
                )

    def found(self) -> tuple[Range, ...]:
        """The ranges of all symbols met."""
        return tuple(self._declared.get(symbol, Range(None, None)) for symbol in self.names)


def _described(size: SymbolicSize) -> str:
    times = f"{size.times} times " if size.times != 1 else ""
    return f"{size.plus} plus {times}".rstrip() if size.plus else times.rstrip()


def _solved(name: str, size: SymbolicSize) -> str:
    """The symbol of a size that is called ``name``: ``(x.size(0) - 1)/2``."""
    if size.plus:
        name = f"({name} {'-' if size.plus > 0 else '+'} {abs(size.plus)})"
    return name if size.times == 1 else f"{name}/{size.times}"


def _input(node: torch.fx.Node, name: str, symbols: _Symbols) -> Input:
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        return _tensor_input(value, name, symbols)
    if isinstance(value, torch.SymInt):
        return NumberInput(name, symbols.size(value, name))
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
            f"The argument {name} has gaps or overlaps in memory; compile with {name}.contiguous() in its place."
        )
    sizes = tuple(symbols.size(size, f"{name}.size({dim})") for dim, size in enumerate(value.shape))
    return TensorInput(name, value.dtype, sizes, order)


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


def _dense(weight: GivenWeight) -> torch.Tensor:
    value = weight.value.detach()
    if not is_no_subclass(value) or value.device.type != "cpu" or value.layout is not torch.strided:
        raise PackageError(
            f"The weight {weight.name} is no strided CPU tensor; convert the model, or compile it where it runs."
        )
    return value


def _weight(weight: GivenWeight, value: torch.Tensor, state: Mapping[str, torch.Tensor]) -> Weight:
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


def _reject_shared_memory(weights: Sequence[GivenWeight]) -> None:
    """Weights that the graph takes are apart in a package; two that share memory may not be written to."""
    owners: defaultdict[int, list[GivenWeight]] = defaultdict(list)
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
