"""Random operators become functions of a seed, which is drawn once per call from torch's generator.

Random numbers can then be recomputed: backward saves eight bytes instead of a mask, and a kernel that needs the numbers
computes them in place. One seed serves the forward part of a graph, another the backward part, since backward may run
again; each random operator has a stream number of its own.

Operators with a user's generator, and those that are not elementwise (multinomial, randperm) or rare (poisson,
binomial, geometric, ...), stay and draw what eager draws.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.fx

from torchkiln.config import Settings
from torchkiln.graph.dtypes import FLOATS
from torchkiln.graph.effects import is_random
from torchkiln.graph.fake import has_hint, is_symbolic, memory_order
from torchkiln.graph.insertion import insert_call
from torchkiln.graph.native_operators import CHECK
from torchkiln.graph.nodes import fake_tensor, replace
from torchkiln.graph.operators import CONVERT, named_operators
from torchkiln.graph.seeded import RANDINT, RANDOM
from torchkiln.graph.tangents import after_tangents

_aten = torch.ops.aten
# Numbers over all of int64 are how seeds are drawn; these draws stay.
_SEED_RANGE = (-(1 << 63), (1 << 63) - 1)


def is_fused(settings: Settings) -> bool:
    """Whether random numbers are to be made by kernels."""
    return settings.rng == "fused"


def seed_random_numbers(graph_module: torch.fx.GraphModule) -> bool:
    graph = graph_module.graph
    drawn = [node for node in graph.nodes if _is_replaceable(node)]
    seeds: dict[bool, torch.fx.Node] = {}
    late = after_tangents(graph) if drawn else ()
    changed = False
    for stream, node in enumerate(drawn):
        if node in late:  # its replacement depends on a seed only, and would not be known to belong to backward
            node.meta["partitioner_tag"] = "is_backward"
        replacement = _REPLACEMENTS[node.target](_Editor(node, seeds, stream), *node.args, **node.kwargs)
        if replacement is not None:
            replace(node, replacement)
            changed = True
    return changed


def _is_replaceable(node: torch.fx.Node) -> bool:
    if node.op != "call_function" or not is_random(node) or node.target not in _REPLACEMENTS:
        return False
    if node.kwargs.get("generator") is not None or node.kwargs.get("pin_memory"):
        return False
    values = node.meta.get("val")
    for value in values if isinstance(values, (tuple, list)) else (values,):
        if not isinstance(value, torch.Tensor) or value.device.type != "cpu" or value.layout is not torch.strided:
            return False
    return not any(isinstance(argument, torch.Generator) for argument in node.args)


@dataclass(frozen=True)
class _Editor:
    """Adds the nodes that stand for one random operator; they inherit what is known about it."""

    node: torch.fx.Node
    seeds: dict[bool, torch.fx.Node]
    stream: int

    @property
    def value(self) -> torch.Tensor:
        value = self.node.meta["val"]
        first: torch.Tensor = value[0] if isinstance(value, (tuple, list)) else value
        return first

    def add(self, target: Callable[..., Any], *args: Any) -> torch.fx.Node:
        return insert_call(self.node, target, *args)

    def random(
        self, distribution: str, dtype: torch.dtype, scale: float = 1.0, shift: float = 0.0
    ) -> torch.fx.Node | None:
        size = self.size() if dtype in FLOATS else None
        if size is None:
            return None
        return self.add(RANDOM, self.seed(), self.stream, distribution, size, self.order(), dtype, scale, shift)

    def randint(self, low: int, high: int) -> torch.fx.Node | None:
        size = self.size()
        return None if size is None else self.add(RANDINT, self.seed(), self.stream, low, high, size, self.order())

    def seed(self) -> torch.fx.Node:
        """The seed of this part of the graph, drawn where it is first needed."""
        part = self.node.meta.get("partitioner_tag") == "is_backward"
        if part not in self.seeds:
            seed = self.add(_aten.randint.low, *_SEED_RANGE, [1])
            # Drawing again would give other numbers, so no checkpoint may ask for that.
            seed.meta.pop("recompute", None)
            self.seeds[part] = seed
        return self.seeds[part]

    def size(self) -> list[Any] | None:
        """The sizes of the result as arguments: numbers, or nodes for symbolic ones."""
        shape = self.value.shape
        if not is_symbolic(self.value):
            return [int(n) for n in shape]  # a symbol that was given its number still has the type of one
        first = self.node.args[0] if self.node.args else None
        if isinstance(first, (list, tuple)):
            return list(first)
        like = fake_tensor(first)
        if like is None or like.dim() != len(shape):
            return None
        return [self.add(_aten.sym_size.int, first, k) if is_symbolic(n) else n for k, n in enumerate(shape)]

    def order(self) -> list[int] | None:
        """Dimensions from the largest stride to the smallest; None where that is their own order."""
        if not all(map(has_hint, self.value.stride())):
            return None
        order = memory_order(self.value)
        return None if order == sorted(order) else order

    def converted(self, node: torch.fx.Node, dtype: torch.dtype) -> torch.fx.Node:
        return self.add(CONVERT, node, dtype)


def _uniform_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type of the numbers that decide a comparison: wide enough not to show in the result's probability."""
    return torch.float64 if dtype == torch.float64 else torch.float32


# -- replacements: the operator's arguments in, the node or nodes of its results out; None leaves it as it is ----------


def _standard(distribution: str, edit: _Editor, *_args: Any, **_kwargs: Any) -> torch.fx.Node | None:
    return edit.random(distribution, edit.value.dtype)


def _uniform(edit: _Editor, x: Any, low: Any = 0.0, high: Any = 1.0, **_kwargs: Any) -> torch.fx.Node | None:
    if not _are_numbers(low, high) or not low <= high:
        return None
    return edit.random("uniform", edit.value.dtype, high - low, low)


def _normal(edit: _Editor, x: Any, mean: Any = 0.0, std: Any = 1.0, **_kwargs: Any) -> torch.fx.Node | None:
    if not _are_numbers(mean, std) or not std >= 0:
        return None
    return edit.random("normal", edit.value.dtype, std, mean)


def _normal_of_tensor(edit: _Editor, mean: Any, std: Any = 1.0, **_kwargs: Any) -> torch.fx.Node | None:
    """``normal`` around a tensor of means. A tensor of deviations is checked by eager, which is left to do so."""
    if not isinstance(mean, torch.fx.Node) or not _are_numbers(std) or not std >= 0:
        return None
    noise = edit.random("normal", edit.value.dtype, std)
    return None if noise is None else edit.add(_aten.add.Tensor, noise, mean)


def _exponential(edit: _Editor, x: Any, rate: Any = 1.0, **_kwargs: Any) -> torch.fx.Node | None:
    if edit.value.dtype not in FLOATS or not _are_numbers(rate) or not rate > 0:
        return None
    # In a half type the fraction would have few values, and its logarithm no tail.
    drawn = edit.random("open", _uniform_dtype(edit.value.dtype))
    if drawn is None:
        return None
    scaled = edit.add(_aten.mul.Scalar, edit.add(_aten.log.default, drawn), -1 / rate)
    return scaled if scaled.meta["val"].dtype == edit.value.dtype else edit.converted(scaled, edit.value.dtype)


def _bernoulli(edit: _Editor, x: torch.fx.Node, p: Any = None, **_kwargs: Any) -> torch.fx.Node | None:
    """With a number for all, with a tensor of probabilities in second place, or with ``x`` being that tensor."""
    probabilities = x if p is None else p
    if isinstance(probabilities, torch.fx.Node):
        mask = _mask_of_tensor(edit, probabilities)
    elif _are_numbers(probabilities) and 0 <= probabilities <= 1:
        mask = _mask(edit, probabilities)
    else:
        mask = None  # eager says what is wrong with it
    return None if mask is None else edit.converted(mask, edit.value.dtype)


def _mask_of_tensor(edit: _Editor, probabilities: torch.fx.Node) -> torch.fx.Node | None:
    value = fake_tensor(probabilities)
    if value is None or value.dtype not in FLOATS:
        return None
    drawn = edit.random("uniform", _uniform_dtype(value.dtype))
    if drawn is None:
        return None
    low, high = edit.add(_aten.ge.Scalar, probabilities, 0), edit.add(_aten.le.Scalar, probabilities, 1)
    good = edit.add(_aten.logical_and.default, low, high)
    bad = edit.add(_aten.any.default, edit.add(_aten.logical_not.default, good))
    edit.add(CHECK, bad, "RuntimeError", "Expected p_in >= 0 && p_in <= 1 to be true, but got false: probabilities")
    return edit.add(_aten.lt.Tensor, drawn, probabilities)


def _mask(edit: _Editor, probability: float) -> torch.fx.Node | None:
    drawn = edit.random("uniform", _uniform_dtype(edit.value.dtype))
    return None if drawn is None else edit.add(_aten.lt.Scalar, drawn, float(probability))


def _native_dropout(
    edit: _Editor, x: torch.fx.Node, p: Any, train: Any = True
) -> tuple[torch.fx.Node, torch.fx.Node] | None:
    if train is False or not _are_numbers(p) or not 0 <= p <= 1:
        return None
    mask = _mask(edit, 1 - p)
    if mask is None:
        return None
    kept = edit.add(_aten.mul.Tensor, x, mask)
    return edit.add(_aten.mul.Scalar, kept, 0.0 if p == 1 else 1 / (1 - p)), mask


def _randint(edit: _Editor, *args: Any, **kwargs: Any) -> torch.fx.Node | None:
    names = (argument.name for argument in edit.node.target._schema.arguments)  # type: ignore[union-attr]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    low: Any = given.get("low", given.get("from", 0))
    high: Any = given.get("high", given.get("to"))
    dtype = edit.value.dtype
    if not _are_numbers(low, high, types=(int,)) or not low < high or (low, high) == _SEED_RANGE or dtype.is_complex:
        return None
    if not _holds(dtype, low) or not _holds(dtype, high - 1):
        return None  # eager says so
    drawn = edit.randint(low, high)
    return drawn if drawn is None or dtype == torch.int64 else edit.converted(drawn, dtype)


def _holds(dtype: torch.dtype, value: int) -> bool:
    if dtype.is_floating_point:
        return abs(value) <= 1 << {torch.float16: 11, torch.bfloat16: 8, torch.float32: 24}.get(dtype, 53)
    if dtype == torch.bool:
        return value in (0, 1)
    return torch.iinfo(dtype).min <= value <= torch.iinfo(dtype).max


def _are_numbers(*values: Any, types: tuple[type, ...] = (int, float)) -> bool:
    return all(isinstance(value, types) and not isinstance(value, bool) for value in values)


_BY_NAME: dict[str, Callable[..., Any]] = {
    "rand rand_like": partial(_standard, "uniform"),
    "randn randn_like": partial(_standard, "normal"),
    "uniform": _uniform,
    "normal_functional": _normal,
    "normal.Tensor_float": _normal_of_tensor,
    "exponential": _exponential,
    "bernoulli.default,p,Tensor": _bernoulli,
    "native_dropout": _native_dropout,
    "randint.default,low randint_like.default,low_dtype random.from,to": _randint,
}
_REPLACEMENTS: dict[Any, Callable[..., Any]] = {
    operator: replacement for names, replacement in _BY_NAME.items() for operator in named_operators(names)
}
