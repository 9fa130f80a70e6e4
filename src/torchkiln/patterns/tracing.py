"""Tracing the functions of a rewrite into graphs like those that compiling makes.

A pattern only matches if it looks like the graphs it is matched against, so functions go the way of the user's
program: made functional, with the same decompositions, and through the passes that come before any rewrite.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx
from torch._functorch._aot_autograd.functional_utils import from_fun, to_fun
from torch._guards import TracingContext, detect_fake_mode, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensorMode
from torch.fx.experimental import symbolic_shapes
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, make_fx

from torchkiln import canonicalize
from torchkiln.graph.dead_code import eliminate_dead_code
from torchkiln.graph.decompositions import decompositions
from torchkiln.graph.effects import has_effect
from torchkiln.graph.fake import update_fake_values
from torchkiln.graph.tangents import mark_tangent

Function = Callable[..., Any]


@dataclass(frozen=True)
class Traced:
    """A function as a graph. ``arguments`` are the names of its inputs in order; ``tangents_1`` and so on come last."""

    graph_module: torch.fx.GraphModule
    arguments: tuple[str, ...]


Tracer = Callable[..., Traced]
"""Takes a function, the names of its arguments, and their values; for training, also the gradients of its results."""


def fwd_only(function: Function, names: Sequence[str], values: Sequence[Any]) -> Traced:
    """``function`` as inference computes it. ``values`` are tensors, which become inputs, and numbers, which do not."""
    mode, tensors, call = _prepared(function, names, values)
    inputs = [_fresh(mode, value, grad=False) for value in tensors.values()]

    def forward(given: Sequence[torch.Tensor]) -> tuple[Any, ...]:
        with FunctionalTensorMode():  # what the function does in place is written as new values
            results = call([to_fun(value) for value in given])
        return tuple(from_fun(value) for value in results)

    with mode, torch.no_grad(), _context_of_its_own(mode):
        graph_module = make_fx(forward, decomposition_table=decompositions())(inputs)
    _canonicalize(graph_module)
    return Traced(graph_module, tuple(tensors))


def joint_fwd_bwd(
    function: Function, names: Sequence[str], values: Sequence[Any], tangents: Sequence[torch.Tensor] | None = None
) -> Traced:
    """``function`` and the gradients of its results with respect to the ``values`` that ask for them, as one graph.

    ``tangents`` say how the gradients of the results are strided, which decides what backward looks like; without
    them, as the results are.
    """
    mode, tensors, call = _prepared(function, names, values)
    inputs = [_fresh(mode, value, grad=value.requires_grad) for value in tensors.values()]

    def joint(given: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]) -> tuple[Any, ...]:
        with FunctionalTensorMode():
            inside = [to_fun(value) for value in given]
            results = call(inside)
            wanted = [value for value in inside if value.requires_grad]
            slopes = torch.autograd.grad(results, wanted, [to_fun(value) for value in gradients], allow_unused=True)
        return tuple(from_fun(value) for value in (*results, *slopes))

    with mode, torch.enable_grad(), _context_of_its_own(mode):
        if tangents is None:
            tangents = [result.detach() for result in call(inputs)]
        fresh = [_fresh(mode, value, grad=False) for value in tangents]
        graph_module = make_fx(joint, decomposition_table=decompositions())(inputs, fresh)
    for position, node in enumerate(graph_module.graph.find_nodes(op="placeholder")[len(inputs) :]):
        mark_tangent(node, position)
    _canonicalize(graph_module)
    return Traced(graph_module, (*tensors, *(f"tangents_{k + 1}" for k in range(len(fresh)))))


def torch_level(function: Function, names: Sequence[str], values: Sequence[Any]) -> Traced:
    """``function`` as calls of torch functions and methods, such as Dynamo captures."""
    mode, tensors, call = _prepared(function, names, values)
    tracer = torch.fx.Tracer()
    tracer.graph = graph = torch.fx.Graph(tracer_cls=type(tracer))
    tracer.root = torch.nn.Module()
    inputs = [graph.placeholder(f"input_{position}") for position in range(len(tensors))]
    for node, value in zip(inputs, tensors.values(), strict=True):
        fake = value if detect_fake_mode([value]) else mode.from_tensor(value, static_shapes=True)
        node.meta["example_value"] = fake
    results = call([torch.fx.Proxy(node, tracer) for node in inputs])
    graph.output(tuple(value.node if isinstance(value, torch.fx.Proxy) else value for value in results))
    graph_module = torch.fx.GraphModule(tracer.root, graph)
    update_fake_values(graph_module)
    for item in canonicalize.CAPTURED:
        item.run(graph_module)
    update_fake_values(graph_module)
    return Traced(graph_module, tuple(tensors))


@contextmanager
def _context_of_its_own(mode: FakeTensorMode) -> Iterator[None]:
    """The context of the program being compiled describes that program; and its tracing must not see ours."""
    with disable_proxy_modes_tracing(), tracing(TracingContext(mode)):
        yield


class NeedsGuard(Exception):
    """Tracing asked something about symbolic sizes that the program has not decided yet."""


@contextmanager
def without_new_guards(values: Sequence[Any]) -> Iterator[None]:
    """Raises :class:`NeedsGuard` where the block would add a guard to the program that ``values`` belong to."""
    mode = detect_fake_mode(values)
    environment = None if mode is None else mode.shape_env
    if environment is None:
        yield
        return
    before = len(environment.guards)
    logger = logging.getLogger(symbolic_shapes.__name__)
    logger.addFilter(_is_no_refusal)
    try:
        with _refused_guards(environment):
            yield
    except _GUARD_ERRORS as error:
        raise NeedsGuard(str(error).rpartition(": ")[2]) from error
    finally:
        logger.removeFilter(_is_no_refusal)
    if len(environment.guards) > before:
        raise NeedsGuard(str(environment.guards[-1].expr))


@contextmanager
def _refused_guards(environment: symbolic_shapes.ShapeEnv) -> Iterator[None]:
    if hasattr(environment, "error_on_new_guards"):
        with environment.error_on_new_guards():
            yield
        return

    # torch 2.11 asks this method before it adds a guard.
    def refuse(expression: object, *_: object) -> None:
        raise NeedsGuard(str(expression))

    vars(environment)["_check_frozen"] = refuse
    try:
        yield
    finally:
        del vars(environment)["_check_frozen"]


def _is_no_refusal(record: logging.LogRecord) -> bool:
    """False for torch's warning about an evaluation that was refused: here that is an answer, not a failure."""
    return not str(record.msg).startswith("failed during evaluate_expr")


_GUARD_ERRORS: tuple[type[Exception], ...] = tuple(
    getattr(symbolic_shapes, name) for name in ("_ShapeEnvGuardError",) if hasattr(symbolic_shapes, name)
)


def _prepared(
    function: Function, names: Sequence[str], values: Sequence[Any]
) -> tuple[FakeTensorMode, dict[str, torch.Tensor], Callable[[Sequence[Any]], tuple[Any, ...]]]:
    """The mode to trace in, the tensors among the arguments, and ``function`` of those alone, which gives a tuple."""
    mode = detect_fake_mode(values) or FakeTensorMode(allow_non_fake_inputs=True)
    arguments = dict(zip(names, values, strict=True))
    tensors = {name: value for name, value in arguments.items() if isinstance(value, torch.Tensor)}

    def call(given: Sequence[Any]) -> tuple[Any, ...]:
        bound = {**arguments, **dict(zip(tensors, given, strict=True))}
        results = function(*(bound[name] for name in names))
        return tuple(results) if isinstance(results, (tuple, list)) else (results,)

    return mode, tensors, call


def _canonicalize(graph_module: torch.fx.GraphModule) -> None:
    """What the user's graphs go through before the first rewrite."""
    for item in canonicalize.JOINT:
        item.run(graph_module)
    eliminate_dead_code(graph_module.graph, has_effect)


def _fresh(mode: FakeTensorMode, value: torch.Tensor, *, grad: bool) -> torch.Tensor:
    """A leaf like ``value``, without memory."""
    with mode:
        return torch.empty_strided(
            value.size(), value.stride(), dtype=value.dtype, device=value.device, requires_grad=grad
        )
