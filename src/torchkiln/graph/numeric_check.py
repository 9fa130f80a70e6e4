"""Running a graph before and after a pass: are the numbers still the same?

The graph runs eagerly on copies of the example inputs, or on inputs made from fake tensors. What it returns and what
it leaves in its inputs is compared. The user's tensors, random numbers and autograd state stay as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.fx
from torch._subclasses.fake_tensor import FakeTensor

from torchkiln.errors import GraphCheckError, first_line
from torchkiln.graph.eager_run import OnCopies, copies_of, state_kept
from torchkiln.graph.fake import SYMBOLIC, outside_tracing, value_key

# Of the largest number in a result. Passes may add in another order, as folding weights does, and matmuls with much
# cancellation lose a few digits more than single operations.
_TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 4e-2, torch.float16: 5e-3}
_COMPLEX_PARTS = {torch.complex128: torch.float64, torch.complex64: torch.float32, torch.complex32: torch.float16}


class CannotRun(Exception):
    """The graph does not run on the example inputs, so that there is nothing to compare."""


WAY_OUT = "Skip it with the setting passes_skip."

_Results = dict[str, object]
"""What a run gave, by a name for the user: outputs, and the inputs as the run left them."""


class NumericCheck:
    """Compares runs of one graph, each with the one before."""

    def __init__(self, graph_module: torch.fx.GraphModule, inputs: Sequence[Any] | None) -> None:
        """Raises CannotRun when the graph fails, or when inputs cannot be made."""
        with outside_tracing():
            self._inputs = _real_inputs(graph_module, inputs)
            self._last = self._run(graph_module)

    def compare(self, graph_module: torch.fx.GraphModule, name: str) -> None:
        """Raise GraphCheckError, which names the pass, where the graph gives other numbers than the last time."""
        with outside_tracing():
            try:
                results = self._run(graph_module)
            except CannotRun as error:
                raise GraphCheckError(f"After pass {name} the graph does not run: {error}. {WAY_OUT}") from error
            _compare(self._last, results, name)
            self._last = results

    def accept(self, graph_module: torch.fx.GraphModule) -> None:
        """Take what the graph gives now for right: a pass ran that is meant to change the numbers."""
        with outside_tracing():
            self._last = self._run(graph_module)

    def _run(self, graph_module: torch.fx.GraphModule) -> _Results:
        inputs = copies_of(self._inputs)
        try:
            with state_kept():
                returned = OnCopies(graph_module).run(*inputs)
        except Exception as error:
            raise CannotRun(f"{type(error).__name__}: {first_line(error)}") from error
        leaves = returned if isinstance(returned, (tuple, list)) else (returned,)
        outputs = {f"output {position}": value for position, value in enumerate(leaves)}
        return outputs | {f"input {position} after the call": value for position, value in enumerate(inputs)}


def _real_inputs(graph_module: torch.fx.GraphModule, inputs: Sequence[Any] | None) -> list[Any]:
    placeholders = graph_module.graph.find_nodes(op="placeholder")
    if inputs is None:
        key = value_key(graph_module.graph)
        inputs = [node.meta.get(key) for node in placeholders]
    if len(inputs) != len(placeholders):
        raise CannotRun(f"the graph takes {len(placeholders)} inputs and {len(inputs)} are known")
    generator = torch.Generator()
    generator.manual_seed(0)
    return [_real(value, generator) for value in inputs]


def _real(value: Any, generator: torch.Generator) -> Any:
    if not isinstance(value, FakeTensor):
        return _hint(value)
    if value.layout is not torch.strided:
        raise CannotRun(f"an input has the layout {value.layout}")
    sizes, strides = [_hint(size) for size in value.shape], [_hint(stride) for stride in value.stride()]
    made = torch.empty_strided(sizes, strides, dtype=value.dtype, device=value.device)
    if value.dtype.is_floating_point or value.dtype.is_complex:
        made.copy_(torch.randn(sizes, generator=generator, dtype=_drawn(value.dtype)))
    elif value.dtype is torch.bool:
        made.copy_(torch.randint(0, 2, sizes, generator=generator))
    else:
        made.zero_()  # an index that every tensor has
    return made


def _drawn(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype.is_complex or dtype in (torch.float32, torch.float64) else torch.float32


def _hint(value: Any) -> Any:
    if not isinstance(value, SYMBOLIC):
        return value
    hint = value.node.hint
    if hint is None:
        raise CannotRun("a size is known only from data")
    return hint


def _compare(before: _Results, after: _Results, name: str) -> None:
    if before.keys() != after.keys():
        raise GraphCheckError(
            f"Pass {name} changed the number of outputs from {_outputs(before)} to {_outputs(after)}. {WAY_OUT}"
        )
    for place, old in before.items():
        problem = _difference(old, after[place])
        if problem is not None:
            raise GraphCheckError(f"Pass {name} changed the numbers of {place}: {problem}. {WAY_OUT}")


def _outputs(results: _Results) -> int:
    return sum(place.startswith("output") for place in results)


def _difference(old: Any, new: Any) -> str | None:
    if isinstance(old, torch.Tensor) and isinstance(new, torch.Tensor):
        return _tensor_difference(old, new)
    if isinstance(old, torch.Tensor) or isinstance(new, torch.Tensor):
        return f"{type(old).__name__} became {type(new).__name__}"
    if isinstance(old, (tuple, list)) and isinstance(new, (tuple, list)) and len(old) == len(new):
        problems = (_difference(left, right) for left, right in zip(old, new, strict=True))
        return next((problem for problem in problems if problem is not None), None)
    if isinstance(old, (int, float, bool)) and isinstance(new, (int, float, bool)):
        return None if old == new or (old != old and new != new) else f"{old} became {new}"
    return None


def _tensor_difference(old: torch.Tensor, new: torch.Tensor) -> str | None:
    if (old.dtype, old.shape, old.layout) != (new.dtype, new.shape, new.layout):
        return f"{old.dtype} of shape {tuple(old.shape)} became {new.dtype} of shape {tuple(new.shape)}"
    if old.layout is not torch.strided:
        old, new = old.to_dense(), new.to_dense()
    if old.numel() == 0:
        return None
    tolerance = _TOLERANCES.get(_COMPLEX_PARTS.get(old.dtype, old.dtype), 0.0)
    wide = torch.complex128 if old.dtype.is_complex else torch.float64
    exact = not (old.dtype.is_floating_point or old.dtype.is_complex)
    same = old == new if exact else (old == new) | (old.isnan() & new.isnan())
    left, right = old.to(wide), new.to(wide)
    finite = left.abs()[left.isfinite()]
    scale = finite.max().item() if finite.numel() else 0.0
    distance = (left - right).abs().masked_fill(same, 0.0)
    # A number that became infinite or NaN, or the other way round, is as far off as can be.
    distance = torch.where(distance.isnan(), torch.inf, distance)
    largest = distance.max().item()
    allowed = tolerance * max(scale, 1.0)
    if largest <= allowed:
        return None
    position = distance.argmax().item()
    index = tuple(int(part) for part in torch.unravel_index(torch.tensor(position), old.shape))
    at = f"{old[index].item()} became {new[index].item()} at {list(index)}"
    return f"the largest difference is {largest:.6g} ({at}), and at most {allowed:.3g} is expected"
