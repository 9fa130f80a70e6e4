"""The calling conventions of higher-order operators: which arguments are bodies, and what the bodies are given."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx


@dataclass(frozen=True)
class CallOfBodies:
    """A call with its arguments sorted.

    Every one of ``bodies`` takes ``inputs``. ``results`` says what the operator returns when the last body returns
    the values given.
    """

    bodies: tuple[torch.fx.GraphModule, ...]
    inputs: tuple[Any, ...]
    results: Callable[[Sequence[Any]], tuple[Any, ...]]


def _cond(args: Sequence[Any]) -> CallOfBodies:
    _predicate, when_true, when_false, operands = args
    return CallOfBodies((when_true, when_false), tuple(operands), tuple)


def _while_loop(args: Sequence[Any]) -> CallOfBodies:
    condition, body, carried, constant = args[:4]
    return CallOfBodies((condition, body), (*carried, *constant), tuple)


def _scan(args: Sequence[Any]) -> CallOfBodies:
    body, carried, scanned, constant = args
    return _over_slices(body, carried, scanned, constant)


def _map(args: Sequence[Any]) -> CallOfBodies:
    body, scanned, constant = args
    return _over_slices(body, (), scanned, constant)


def _over_slices(body: Any, carried: Sequence[Any], scanned: Sequence[Any], constant: Sequence[Any]) -> CallOfBodies:
    def results(returned: Sequence[Any]) -> tuple[Any, ...]:
        length = scanned[0].shape[0]
        stacked = [value.new_empty((length, *value.shape)) for value in returned[len(carried) :]]
        return (*returned[: len(carried)], *stacked)

    return CallOfBodies((body,), (*carried, *(whole[0] for whole in scanned), *constant), results)


def _invoke_subgraph(args: Sequence[Any]) -> CallOfBodies:
    body, _identifier, *operands = args
    return CallOfBodies((body,), tuple(operands), tuple)


# By the name of the operator; each reads the positional arguments, with bodies and values in place of nodes.
HIGHER_ORDER: dict[str, Callable[[Sequence[Any]], CallOfBodies]] = {
    "cond": _cond,
    "while_loop": _while_loop,
    "scan": _scan,
    "map_impl": _map,
    "invoke_subgraph": _invoke_subgraph,
}
