"""The call of AOTAutograd: what it changes for the whole process, and which tangents the graphs are traced with."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._functorch.config as functorch_config

import torchkiln
from torchkiln.errors import UnsupportedError
from torchkiln.frontend.aot import _require_distinct_elements, _SharedRegistration
from torchkiln.graph.tangents import is_tangent, mark_tangent
from torchkiln.partition import min_cut_rematerialization_partition


class _Registry:
    """Refuses what torch's refuses: to register twice, and to end what is not registered."""

    def __init__(self) -> None:
        self.present = False
        self.times = 0

    def register(self) -> object:
        assert not self.present
        self.present, self.times = True, self.times + 1
        return self.end

    def end(self) -> None:
        assert self.present
        self.present = False


def test_a_registration_lasts_until_the_last_thread_leaves() -> None:
    registry = _Registry()
    shared = _SharedRegistration(registry.register)  # type: ignore[arg-type]
    entered, may_leave, seen = threading.Event(), threading.Event(), []

    def other() -> None:
        with shared:
            entered.set()
            may_leave.wait(10)
            seen.append(registry.present)

    thread = threading.Thread(target=other)
    with shared:
        thread.start()
        assert entered.wait(10)
    may_leave.set()
    thread.join(10)
    assert seen == [True]
    assert not registry.present
    with shared:
        assert registry.present
    assert (registry.present, registry.times) == (False, 2)


def test_a_registration_ends_with_an_error_too() -> None:
    registry = _Registry()
    shared = _SharedRegistration(registry.register)  # type: ignore[arg-type]
    try:
        with shared:
            raise KeyError
    except KeyError:
        pass
    assert not registry.present


def test_what_is_there_already_is_left_alone() -> None:
    with _SharedRegistration(lambda: None):
        pass


def _traced_strides(program: Callable[..., Any], *inputs: torch.Tensor) -> list[list[tuple[int, ...]]]:
    """The strides of the tangents of each joint graph that was partitioned."""
    found = []

    def split(joint: torch.fx.GraphModule, *arguments: Any, **facts: Any) -> Any:
        found.append([n.meta["val"].stride() for n in joint.graph.find_nodes(op="placeholder") if is_tangent(n)])
        return min_cut_rematerialization_partition(joint, *arguments, **facts)

    def backend(graph_module: torch.fx.GraphModule, examples: list[Any]) -> Any:
        return torchkiln.compile_fx(graph_module, examples, split=split)

    with functorch_config.patch(guess_tangent_strides_as_outputs=True):  # off by default in some versions of torch
        torch.compile(program, backend=backend, fullgraph=True, dynamic=False)(*inputs)
        assert functorch_config.guess_tangent_strides_as_outputs
    return found


def test_tangents_have_the_strides_of_outputs_whose_elements_have_places_of_their_own() -> None:
    x = torch.ones(4, 3, requires_grad=True)
    assert _traced_strides(lambda x: ((x * 2).t(), (x * 3)[::2]), x) == [[(1, 3), (6, 1)]]


def test_no_tangent_is_traced_with_strides_that_overlap() -> None:
    x = torch.ones(4, 3, requires_grad=True)
    assert _traced_strides(lambda x: (x * 2).unfold(0, 2, 1), x) == [[(6, 2, 1)]]
    assert _traced_strides(lambda x: (x * 2).as_strided((3, 2), (1, 1)), x) == [[(2, 1)]]
    assert _traced_strides(lambda x: (x * 2).expand(2, 4, 3), x) == [[(12, 3, 1)]]


def test_a_tangent_that_overlaps_in_spite_of_the_setting_is_refused() -> None:
    graph = torch.fx.Graph()
    tangent = graph.placeholder("gradient")
    tangent.meta["val"] = torch.empty(3, device="meta").expand(2, 3)
    mark_tangent(tangent, 0)
    graph.output(())
    joint = torch.fx.GraphModule({}, graph)
    with (
        functorch_config.patch(guess_tangent_strides_as_outputs=False),
        pytest.raises(UnsupportedError, match="one place in memory"),
    ):
        _require_distinct_elements(joint)
