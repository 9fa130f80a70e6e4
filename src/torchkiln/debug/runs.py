"""Runs of a program on copies of its inputs: its outputs, its gradients, and the same in float64."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch
import torch.fx
from torch import Tensor
from torch.utils._pytree import tree_leaves

from torchkiln.debug.accuracy import Expected, Results
from torchkiln.debug.float64 import InFloat64, widened
from torchkiln.debug.rounding import rounded_anew
from torchkiln.graph.eager_run import OnCopies, copies_of, state_kept
from torchkiln.graph.strides import returned_nodes
from torchkiln.graph.weights import is_marked_static
from torchkiln.passes.post_grad.effect_tokens import returned_tokens

_SEED = 7
_GRADIENT = "gradient of input "
Program = Callable[..., Any]


def interpreted(graph_module: torch.fx.GraphModule) -> Program:
    """A graph as a function that runs it node by node and writes to no tensor of its module."""
    return lambda *inputs: OnCopies(graph_module).run(*inputs)


def results_of(program: Program, inputs: Sequence[Any], *, gradients: bool = True) -> Results:
    """What ``program`` returns for copies of ``inputs``, the gradients they ask for, and what it left in each.

    Random numbers are the same in every run, and so are the gradients that backward begins with. Outputs that are None
    have no result.
    """
    with state_kept(), torch.enable_grad() if gradients else torch.no_grad():
        given = _leaves(inputs)
        torch.manual_seed(_SEED)
        outputs = tree_leaves(program(*given))
        found: dict[str, Any] = {_output(k): value for k, value in enumerate(outputs) if value is not None}
        if gradients:
            found |= _gradients(*_ends(outputs, given))
        found |= {_after_call(k): value for k, value in enumerate(given) if isinstance(value, Tensor)}
        return {name: value.detach() if isinstance(value, Tensor) else value for name, value in found.items()}


def expected_of(program: Program, inputs: Sequence[Any], *, gradients: bool = True) -> Expected:
    """What other programs are to give for these inputs, as ``program`` is eager's own.

    Strides of gradients are free: a backward that autograd traced may give others than the one it runs.
    """
    eager = results_of(program, inputs, gradients=gradients)
    return Expected(
        eager,
        reference_of(program, inputs, gradients=gradients),
        cache(lambda: rounded_anew(lambda: results_of(program, inputs, gradients=gradients))),
        strides={name for name in eager if not name.startswith(_GRADIENT)},
    )


def expected_of_functional(graph_module: torch.fx.GraphModule, inputs: Sequence[Any]) -> Expected:
    """:func:`expected_of` a functional graph: without tokens, and without the inputs that it left as they were.

    Its code may reuse the memory of inputs that nobody reads afterwards.
    """
    expected = expected_of(interpreted(graph_module), inputs, gradients=False)
    left_out = {_output(k) for k in returned_tokens(graph_module.graph)}
    left_out |= {
        _after_call(k)
        for k, value in enumerate(inputs)
        if isinstance(value, Tensor) and _same(expected.eager[_after_call(k)], value)
    }
    kept = {name: value for name, value in expected.eager.items() if name not in left_out}
    return replace(expected, eager=kept)


def saved_values(graph_module: torch.fx.GraphModule, forward_results: int | None) -> set[str]:
    """The names of the results of a forward graph that are for backward alone."""
    count = len(returned_nodes(graph_module.graph))
    return set() if forward_results is None else {_output(k) for k in range(forward_results, count)}


def _same(left: Tensor, right: Tensor) -> bool:
    """Whether all numbers are the same; tensors without strides count as the same."""
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    if torch.strided not in (left.layout, right.layout):
        return True
    return bool(((left == right) | ((left != left) & (right != right))).all())


def _output(position: int) -> str:
    return f"output {position}"


def _after_call(position: int) -> str:
    return f"input {position} after the call"


def reference_of(program: Program, inputs: Sequence[Any], *, gradients: bool = True) -> Results | None:
    """:func:`results_of` in float64; None where the program does not run so."""
    try:
        wide = widened(list(inputs))
        with InFloat64():
            return results_of(program, wide, gradients=gradients)
    except Exception:  # such as a view in another dtype; results are then compared with eager's alone
        return None


def seconds_of(program: Program, inputs: Sequence[Any], *, gradients: bool = True) -> float:
    """How long ``program`` and its backward take, without the copies of ``inputs`` that it is given.

    What stays the same from call to call is given as it is: copies of weights would be prepared anew.
    """
    with state_kept(), torch.enable_grad() if gradients else torch.no_grad():
        copies = zip(_leaves(inputs), inputs, strict=True)
        given = [value if is_marked_static(value) else copy for copy, value in copies]
        torch.manual_seed(_SEED)
        start = time.perf_counter()
        returned = program(*given)
        taken = time.perf_counter() - start
        if gradients:
            ends = _ends(tree_leaves(returned), given)
            start = time.perf_counter()
            _gradients(*ends)
            taken += time.perf_counter() - start
        return taken


def _leaves(inputs: Sequence[Any]) -> list[Any]:
    copies = copies_of([value.detach() if isinstance(value, Tensor) else value for value in inputs])
    return [
        copy.requires_grad_(value.requires_grad) if isinstance(value, Tensor) else copy
        for copy, value in zip(copies, inputs, strict=True)
    ]


def _ends(outputs: Sequence[Any], inputs: Sequence[Any]) -> tuple[dict[int, Tensor], list[Tensor], list[Tensor]]:
    """The inputs that ask for gradients, the outputs that have any, and what backward begins with."""
    wanted = {k: value for k, value in enumerate(inputs) if isinstance(value, Tensor) and value.requires_grad}
    ends = [value for value in outputs if isinstance(value, Tensor) and value.requires_grad]
    generator = torch.Generator()
    generator.manual_seed(_SEED)
    # Quarters from -2 to 2, which every float dtype holds: the reference begins with the same numbers.
    starts = [torch.randint(-8, 9, value.shape, generator=generator).div(4).to(value.dtype) for value in ends]
    return wanted, ends, starts


def _gradients(wanted: Mapping[int, Tensor], ends: Sequence[Tensor], starts: Sequence[Tensor]) -> Results:
    if not wanted or not ends:
        return {}
    gradients = torch.autograd.grad(list(ends), list(wanted.values()), starts, allow_unused=True)
    return {f"{_GRADIENT}{k}": value for k, value in zip(wanted, gradients, strict=True) if value is not None}
