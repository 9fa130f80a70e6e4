"""Tracing functions of a rewrite into graphs of torch-level calls, such as Dynamo captures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.fx
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensorMode

from torchkiln import canonicalize
from torchkiln.graph.fake import update_fake_values
from torchkiln.patterns.tracing import Traced


def torch_level(function: Callable[..., Any], names: Sequence[str], values: Sequence[Any]) -> Traced:
    """``function`` as calls of torch functions and methods; tensors among ``values`` become its inputs."""
    arguments = dict(zip(names, values, strict=True))
    tensors = {name: value for name, value in arguments.items() if isinstance(value, torch.Tensor)}
    mode = detect_fake_mode(list(tensors.values())) or FakeTensorMode()
    tracer = torch.fx.Tracer()
    graph = torch.fx.Graph(tracer_cls=type(tracer))
    tracer.graph = graph
    tracer.root = torch.nn.Module()
    bound = dict(arguments)
    for position, (name, value) in enumerate(tensors.items()):
        node = graph.placeholder(f"input_{position}")
        fake = value if detect_fake_mode([value]) else mode.from_tensor(value, static_shapes=True)
        node.meta["example_value"] = fake
        bound[name] = torch.fx.Proxy(node, tracer)
    results = function(*(bound[name] for name in names))
    flat = tuple(results) if isinstance(results, (tuple, list)) else (results,)
    graph.output(tuple(value.node if isinstance(value, torch.fx.Proxy) else value for value in flat))
    graph_module = torch.fx.GraphModule(tracer.root, graph)
    normalize(graph_module)
    update_fake_values(graph_module)
    return Traced(graph_module, tuple(tensors))


def normalize(graph_module: torch.fx.GraphModule) -> None:
    """What captured graphs go through before the first rewrite."""
    update_fake_values(graph_module)
    for item in canonicalize.CAPTURED:
        item.run(graph_module)
