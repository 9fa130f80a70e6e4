"""Graphs whose inputs are lists, tuples and dictionaries of tensors."""

from __future__ import annotations

import operator
import weakref
from typing import Any

import pytest
import torch
import torch.fx
from torch.utils import _pytree as pytree

from torchkiln import compile_fx
from torchkiln.config import Settings
from torchkiln.errors import FallbackWarning
from torchkiln.frontend.flat_inputs import flatten_inputs

_alive: list[bool] = []
_watched: list[weakref.ref[torch.Tensor]] = []


@torch.library.custom_op("kiln_tests::look_whether_alive", mutates_args=())
def look_whether_alive(x: torch.Tensor) -> torch.Tensor:
    _alive.append(_watched[0]() is not None)
    return x.clone()


@look_whether_alive.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def _function(tensors: list[Any], scale: torch.Tensor, more: dict[str, Any]) -> tuple[Any, ...]:
    nested = tensors[1]  # and nobody reads tensors[2]
    return torch.cat([tensors[0], nested[0], nested[1]]).sin() * scale, more["a"][0] + 1


def _inputs() -> list[Any]:
    row = torch.arange(3.0)
    return [[row, (row + 1, row + 2), row + 9], torch.tensor(2.0), {"a": [row * 3]}]


def _graph() -> torch.fx.GraphModule:
    return torch.fx.symbolic_trace(_function)


def test_results_are_those_of_the_nested_graph() -> None:
    run = compile_fx(_graph(), _inputs(), settings=Settings(fallback=False))
    for _ in range(3):
        torch.testing.assert_close(run(*_inputs()), _function(*_inputs()))


def test_gradients_flow_into_the_parts_of_a_list() -> None:
    def inputs() -> tuple[list[Any], torch.Tensor]:
        given = _inputs()
        return given, given[0][1][0].requires_grad_()

    run = compile_fx(_graph(), inputs()[0], settings=Settings(fallback=False))
    for _ in range(3):
        gradients = []
        for function in (run, _function):
            given, part = inputs()
            gradients += torch.autograd.grad(function(*given)[0].sum(), part)
        torch.testing.assert_close(*gradients)


def test_a_list_that_is_read_as_a_whole() -> None:
    graph = torch.fx.Graph()
    tensors = graph.placeholder("tensors")
    graph.output((graph.call_function(torch.cat, (tensors,), {"dim": 0}),))
    gm = torch.fx.GraphModule({}, graph)
    x = [torch.ones(2), torch.zeros(3)]
    torch.testing.assert_close(compile_fx(gm, [x], settings=Settings(fallback=False))(x)[0], torch.cat(x))


def test_the_flat_graph_takes_the_leaves_in_order() -> None:
    flat = flatten_inputs(_graph(), _inputs())
    torch.testing.assert_close(list(flat.inputs), pytree.tree_leaves(_inputs()))
    assert len(flat.graph_module.graph.find_nodes(op="placeholder")) == len(flat.inputs)
    torch.testing.assert_close(flat.graph_module(*flat.inputs), _function(*_inputs()))


def _stealing_graph() -> torch.fx.GraphModule:
    graph = torch.fx.Graph()
    tensors = graph.placeholder("tensors")
    tensors.meta["steal_arg"] = True
    first = graph.call_function(operator.getitem, (tensors, 0))
    total = graph.call_function(torch.sum, (graph.call_function(torch.sin, (first,)),))
    graph.output((graph.call_function(torch.ops.kiln_tests.look_whether_alive.default, (total,)),))
    return torch.fx.GraphModule({}, graph)


def test_a_list_that_is_handed_over_is_emptied_and_its_tensors_are_freed_when_nothing_reads_them() -> None:
    run = compile_fx(_stealing_graph(), [[torch.ones(4)]], settings=Settings(fallback=False))
    for _ in range(3):
        given = [torch.full((4,), 0.5)]
        _watched[:], _alive[:] = [weakref.ref(given[0])], []
        (total,) = run(given)
        assert given == []
        assert _alive == [False]
        torch.testing.assert_close(total, 4 * torch.tensor(0.5).sin())


def test_what_cannot_be_compiled_runs_eagerly_with_its_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    from torchkiln import compiler

    def fail(*arguments: Any, **options: Any) -> Any:
        raise RuntimeError("not today")

    monkeypatch.setattr(compiler, "trace_with_autograd", fail)
    with pytest.warns(FallbackWarning, match="not today"):
        run = compile_fx(_graph(), _inputs(), settings=Settings())
    torch.testing.assert_close(run(*_inputs()), _function(*_inputs()))
