"""Running higher-order operators: which compiled body is called, how often, and with what.

A body is handed a list that alone holds the carried tensors, so that it can free each after its last use.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torchkiln.artifact.calls import Body, HigherOrderCall, fill
from torchkiln.runtime.tracing import not_traced

Loaded = Callable[[list[Any]], list[Any]]
Runner = Callable[[list[Any]], list[Any]]


def run_bodies(
    call: HigherOrderCall, load: Callable[[Body], Loaded]
) -> Callable[[list[torch.Tensor], list[int]], list[Any]]:
    """The operator as a function of the tensors among its arguments, which it may empty the list of, and the numbers
    known at run time."""
    run = _RUNNERS[call.kind](call, [load(body) for body in call.bodies])

    @not_traced
    def function(tensors: list[torch.Tensor], numbers: list[int]) -> list[Any]:
        arguments = [fill(argument, tensors, numbers) for argument in call.arguments]
        tensors.clear()
        return run(arguments)

    return function


def _fitted(value: Any, strides: tuple[int, ...] | None) -> Any:
    """``value`` with these strides: itself where it has them already."""
    if strides is None or value.stride() == strides:
        return value
    if all(size == 1 or a == b for size, a, b in zip(value.shape, value.stride(), strides, strict=True)):
        return value
    return torch.empty_strided(value.shape, strides, dtype=value.dtype).copy_(value)


def _call(call: HigherOrderCall, bodies: list[Loaded]) -> Runner:
    return bodies[0]


def _cond(call: HigherOrderCall, bodies: list[Loaded]) -> Runner:
    when_true, when_false = bodies

    def run(arguments: list[Any]) -> list[Any]:
        predicate = arguments.pop(0)
        return when_true(arguments) if predicate else when_false(arguments)

    return run


def _while_loop(call: HigherOrderCall, bodies: list[Loaded]) -> Runner:
    goes_on, iterate = bodies
    count = call.carried
    layouts = call.bodies[1].strides[:count]

    def run(arguments: list[Any]) -> list[Any]:
        carried, constant = arguments[:count], arguments[count:]
        arguments.clear()
        if not goes_on([*carried, *constant])[0]:
            return [value.clone() for value in carried]  # a result has memory of its own
        more = True
        while more:
            inputs = [*carried, *constant]
            carried.clear()
            carried += (_fitted(value, strides) for value, strides in zip(iterate(inputs), layouts, strict=True))
            more = goes_on([*carried, *constant])[0]
        return carried

    return run


def _scan(call: HigherOrderCall, bodies: list[Loaded]) -> Runner:
    (iterate,) = bodies
    count, scanned = call.carried, call.scanned
    layouts = call.bodies[0].strides[:count]

    def run(arguments: list[Any]) -> list[Any]:
        carried, sliced = arguments[:count], arguments[count : count + scanned]
        constant = arguments[count + scanned :]
        arguments.clear()
        length = sliced[0].shape[0]
        stacked: list[torch.Tensor] = []
        for step in range(length):
            inputs = [*carried, *(values[step] for values in sliced), *constant]
            carried.clear()
            results = iterate(inputs)
            carried += (_fitted(value, strides) for value, strides in zip(results[:count], layouts, strict=True))
            if not stacked:
                stacked = [value.new_empty((length, *value.shape)) for value in results[count:]]
            for whole, value in zip(stacked, results[count:], strict=True):
                whole[step] = value
        return [*carried, *stacked]

    return run


_RUNNERS: dict[str, Callable[[HigherOrderCall, list[Loaded]], Runner]] = {
    "call": _call,
    "cond": _cond,
    "while_loop": _while_loop,
    "scan": _scan,
    "map": _scan,
}
