"""The call of AOTAutograd: a captured graph in, a function over functional graphs that others compile out."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch._functorch.config as functorch_config
import torch.fx
from torch._functorch.aot_autograd import aot_module_simplified
from torch._guards import TracingContext, detect_fake_mode, tracing
from torch._higher_order_ops.effects import _register_effectful_op, has_effects
from torch._library.effects import EffectType
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode

from torchkiln.errors import UnsupportedError
from torchkiln.frontend.derivatives import differentiate_whole
from torchkiln.frontend.dynamo_counters import counted
from torchkiln.graph.fake import may_overlap
from torchkiln.graph.tangents import is_tangent, mark_tangent
from torchkiln.runtime.tracing import not_traced

GraphCompiler = Callable[[torch.fx.GraphModule, Sequence[Any]], Callable[..., Any]]
Partition = Callable[..., tuple[torch.fx.GraphModule, torch.fx.GraphModule]]

_ACCEPTED = frozenset(inspect.signature(aot_module_simplified).parameters)


def trace_with_autograd(
    graph_module: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    forward_compiler: GraphCompiler,
    backward_compiler: GraphCompiler,
    inference_compiler: GraphCompiler,
    partition: Partition,
    decompositions: Mapping[OpOverload, Callable[..., Any]],
) -> Callable[..., Any]:
    """Trace ``graph_module`` into functional graphs, compile them with the compilers given, and wrap the result.

    The result takes the inputs of ``graph_module`` as positional arguments. The backward is compiled when it first
    runs, unless sizes are symbolic. No two elements of a tangent share a place in memory, in the graphs as in the calls
    of the result.
    """

    def checked_partition(joint: torch.fx.GraphModule, inputs: Any, **facts: Any) -> Any:
        _require_distinct_elements(joint)
        _mark_tangents_of_region(joint)
        return partition(joint, inputs, **facts)

    options: dict[str, Any] = {
        "fw_compiler": forward_compiler,
        "bw_compiler": backward_compiler,
        "inference_compiler": inference_compiler,
        "partition_fn": checked_partition,
        "decompositions": dict(decompositions),
        "keep_inference_input_mutations": True,
    }
    unknown = options.keys() - _ACCEPTED
    if unknown:  # a torch outside the supported range; better said here than by a TypeError from inside
        raise RuntimeError(f"this version of torch has no {', '.join(sorted(unknown))} in aot_module_simplified")
    with (
        _tracing_context(example_inputs),
        _checks_of_linear_algebra,
        _whole_derivatives,
        _without_cache_of_torch(),
        counted(),
    ):
        compiled: Callable[..., Any]
        try:
            compiled = aot_module_simplified(graph_module, example_inputs, **options)
        except _TangentOverlapsError:
            with functorch_config.patch({_TANGENTS_LIKE_OUTPUTS: False}):
                compiled = aot_module_simplified(graph_module, example_inputs, **options)
    return compiled


def _without_cache_of_torch() -> AbstractContextManager[None]:
    """Keeps AOTAutograd from storing what is compiled, which it cannot; ``aot_compile`` asks it to for any backend."""
    name = "force_autograd_cache"
    return functorch_config.patch({name: False}) if hasattr(functorch_config, name) else nullcontext()


# Off, tangents are contiguous or have their channels last. It is asked where they are traced and by nothing later: what
# AOTAutograd's wrapper makes of a gradient is noted then.
_TANGENTS_LIKE_OUTPUTS = "guess_tangent_strides_as_outputs"


class _TangentOverlapsError(Exception):
    """The graph was traced for a tangent of which several elements are one place in memory."""


def _require_distinct_elements(joint: torch.fx.GraphModule) -> None:
    """Refuse a joint graph with a tangent of overlapping strides, which it has where the output is such a view.

    Elements of the output that share a place have gradients of their own, and would overwrite each other where a
    gradient is laid out with these strides. The graph is traced anew rather than changed: which of its operations are
    views and which copies, and what ``as_strided`` reads, depends on the strides it was traced with.
    """
    if any(may_overlap(node.meta.get("val")) for node in joint.graph.find_nodes(op="placeholder") if is_tangent(node)):
        if getattr(functorch_config, _TANGENTS_LIKE_OUTPUTS, False):
            raise _TangentOverlapsError
        raise UnsupportedError("the gradient of an output of which several elements are one place in memory")


def _mark_tangents_of_region(joint: torch.fx.GraphModule) -> None:
    """The joint graph of a nested region comes from AOTAutograd without descriptions of its inputs, only named by it.

    Its tangents are values inside the graph that calls it: nobody lays them out.
    """
    for position, node in enumerate(joint.graph.find_nodes(op="placeholder")):
        if "desc" not in node.meta and str(node.target).startswith("tangents_"):
            mark_tangent(node, position)


class _SharedRegistration:
    """What ``register`` registers for the whole process, held while any thread is inside; it returns what ends it.

    ``register`` is called by the first thread to enter, and what it returned by the last to leave.
    """

    def __init__(self, register: Callable[[], Callable[[], None] | None]) -> None:
        self._register = register
        self._lock = threading.Lock()
        self._inside = 0
        self._end: Callable[[], None] | None = None

    def __enter__(self) -> None:
        with self._lock:
            if self._inside == 0:
                self._end = self._register()
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
            if self._inside == 0 and self._end is not None:
                self._end()


def _keep_checks_of_linear_algebra() -> Callable[[], None] | None:
    """Keep checks such as that of a singular matrix, which torch before 2.13 drops while tracing: nobody reads them."""
    check = torch.ops.aten._linalg_check_errors.default
    if has_effects(check):
        return None
    end: Callable[[], None] = _register_effectful_op(check, EffectType.ORDERED).destroy
    return end


_checks_of_linear_algebra = _SharedRegistration(_keep_checks_of_linear_algebra)
_whole_derivatives = _SharedRegistration(differentiate_whole)


@contextmanager
def _tracing_context(example_inputs: Sequence[Any]) -> Iterator[None]:
    """The tracing context Dynamo sets up, for graphs that are compiled without Dynamo."""
    if TracingContext.try_get() is not None:
        yield
        return
    mode = detect_fake_mode(example_inputs) or FakeTensorMode()
    with tracing(TracingContext(mode)):
        yield


def takes_list(compiled: Callable[..., Any], graph_module: torch.fx.GraphModule) -> Callable[[list[Any]], Any]:
    """``compiled``, the result of tracing ``graph_module``, as a function of one list of inputs, which it empties.

    Inputs that only the list holds are then freed after their last use: positional arguments live through the call.
    """
    inner = getattr(compiled, "__wrapped__", None)
    adds_inputs = any(True for _ in (*graph_module.parameters(), *graph_module.buffers()))
    return inner if callable(inner) and not adds_inputs else lambda inputs: compiled(*inputs)


def with_one_list(function: Callable[..., Any]) -> Callable[[list[Any]], Any]:
    """``function`` as AOTAutograd calls compiled graphs: with one list of arguments, which it empties."""

    @not_traced
    def call(arguments: list[Any]) -> Any:
        values = tuple(arguments)
        arguments.clear()
        return function(*values)

    call._boxed_call = True  # type: ignore[attr-defined]
    return call


def static_input_indices() -> tuple[int, ...]:
    """While a forward is compiled: positions of inputs, such as parameters, whose memory stays where it is."""
    metadata = forward_metadata()
    return tuple(getattr(metadata, "static_input_indices", None) or ())


def keep_saved_tensors() -> None:
    """While a forward is compiled: say that its backward does not reuse the memory of saved tensors.

    torch would refuse ``retain_graph=True`` after a first backward otherwise, to protect memory that was reused.
    """
    metadata = forward_metadata()
    if metadata is not None and hasattr(metadata, "bw_donated_idxs"):
        metadata.bw_donated_idxs = []


def keep_versions_of_outputs() -> None:
    """While a forward is compiled: say that no output of it is a view, for AOTAutograd to hand them out as they are.

    It would give an output that is a view of a saved tensor a version of its own otherwise, and a write to that output
    before backward would go unnoticed.
    """
    metadata = forward_metadata()
    if metadata is not None and hasattr(metadata, "num_unsafe_view_outputs"):
        metadata.unsafe_view_out_indices = []
        metadata.num_unsafe_view_outputs = 0


def forward_metadata() -> Any:
    """While AOTAutograd compiles a graph: what it knows of the captured one; None where nothing is traced."""
    context = TracingContext.try_get()
    return context.fw_metadata if context is not None else None
