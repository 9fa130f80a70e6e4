"""A change of strides is followed through graphs of symbolic sizes as torch would have it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.fx
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from torchkiln.graph import strides
from torchkiln.graph.fake import is_dense, metadata_key
from torchkiln.graph.strides import propagate_strides

aten = torch.ops.aten

FOLLOWED: dict[str, Callable[[Tensor, Tensor, Tensor], Any]] = {
    "activation": lambda x, y, c: aten.hardtanh(x, 0.0, 6.0),
    "other dtype": lambda x, y, c: aten.gt.Scalar(x, 0.0),
    "sum of equal layouts": lambda x, y, c: aten.relu(x) + x,
    "norm": lambda x, y, c: aten._native_batch_norm_legit_no_training(x, None, None, c, c, 0.1, 1e-5)[0],
    "norm in training": lambda x, y, c: aten._native_batch_norm_legit_functional(x, None, None, c, c, True, 0.1, 1e-5)[
        0
    ],
    "backward of a norm": lambda x, y, c: aten.native_batch_norm_backward(
        aten.sin(x), x, None, c, c, c, c, True, 1e-5, [True, True, True]
    )[0],
}
COMPUTED: dict[str, Callable[[Tensor, Tensor, Tensor], Any]] = {
    "sum of two layouts": lambda x, y, c: x + y,
    "broadcast": lambda x, y, c: x * x.sum((2, 3), keepdim=True),
    "a part": lambda x, y, c: aten.cos(x[:, 2:5]),
    "asked for": lambda x, y, c: aten.clone(x, memory_format=torch.contiguous_format),
}


def symbolic_images() -> tuple[Tensor, Tensor, Tensor]:
    """Two images row by row, and a number for each channel."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    dynamic, fixed = DimDynamic.DYNAMIC, DimDynamic.STATIC
    context = StatelessSymbolicContext(dynamic_sizes=[dynamic, fixed, dynamic, dynamic])
    first = mode.from_tensor(torch.empty(2, 8, 6, 10), symbolic_context=context)
    with mode:
        return first, torch.empty_like(first), torch.empty(8)


def with_channels_last(
    body: Callable[[Tensor, Tensor, Tensor], Any], monkeypatch: pytest.MonkeyPatch
) -> tuple[Any, int]:
    """The graph of ``body`` after its first input has its channels last, and how many calls torch was asked about."""
    graph = make_fx(body, tracing_mode="real")(*symbolic_images()).graph
    image = next(iter(graph.nodes))
    before = image.meta["val"]
    with before.fake_mode:
        image.meta["val"] = torch.empty_like(before, memory_format=torch.channels_last)
    asked = []
    ask = strides._call
    monkeypatch.setattr(strides, "_call", lambda node: (asked.append(node), ask(node))[1])
    propagate_strides(graph, {image: before})
    return graph, sum(isinstance(node.target, torch._ops.OpOverload) for node in asked)


def assert_as_torch_has_it(graph: torch.fx.Graph) -> None:
    for node in graph.nodes:
        if node.op == "call_function":
            args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda source: source.meta["val"])
            value: Any = node.meta["val"]
            leaf = value if isinstance(value, Tensor) else value[0] if isinstance(value, (tuple, list)) else None
            if leaf is not None:
                with leaf.fake_mode, torch.no_grad():
                    expected = node.target(*args, **kwargs)
                assert metadata_key(value) == metadata_key(expected), node


@pytest.mark.parametrize("name", FOLLOWED)
def test_calls_that_keep_a_layout_are_not_computed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    graph, asked = with_channels_last(FOLLOWED[name], monkeypatch)
    assert asked == 0
    assert_as_torch_has_it(graph)
    (result,) = graph.output_node().all_input_nodes
    assert result.meta["val"].stride()[1] == 1


@pytest.mark.parametrize("name", COMPUTED)
def test_other_calls_are(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    graph, asked = with_channels_last(COMPUTED[name], monkeypatch)
    assert asked > 0
    assert_as_torch_has_it(graph)


def test_what_fills_memory_in_some_order_is_dense() -> None:
    image, _, _ = symbolic_images()
    with image.fake_mode:
        assert is_dense(image)
        assert is_dense(image.permute(0, 2, 3, 1))
        assert is_dense(torch.empty_like(image, memory_format=torch.channels_last))
        assert not is_dense(image[:, 2:5])
        assert not is_dense(image[:, :1].expand(-1, 4, -1, -1))
        assert not is_dense(image[..., ::2])
