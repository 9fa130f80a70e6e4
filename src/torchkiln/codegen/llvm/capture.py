"""Whether launches of a graph can be captured as a CUDA graph, read off its plan.

A capture notes what is launched with its addresses and numbers, and runs nothing. What the CPU does meanwhile is done
once, and not when the CUDA graph is replayed. A capture that CUDA breaks off leaves torch's random generator unusable,
so operators that nobody has looked at are not tried.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from torchkiln.codegen.llvm.plan_facts import mentioned, written_inputs
from torchkiln.graph.effects import draws_random_numbers, is_of_users, is_ordered_effect, resizes_storage
from torchkiln.graph.operators import is_declared, named_operators, overloads
from torchkiln.ir.higher_order import HigherOrder
from torchkiln.ir.native_calls import is_native
from torchkiln.ir.program import ExternCall, ReadNumber
from torchkiln.schedule.dependencies import tensors_of
from torchkiln.schedule.plan import InConstant, Launch, Plan, Step

_aten = torch.ops.aten
_LOOKS_AT_VALUES = frozenset(
    {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output, torch.Tag.cudagraph_unsafe}
)
# Of those in the table of operators: their kernels on a card wait for it, or bring numbers from the CPU.
_WAITS = frozenset(overload for name in ("mode", "lstm", "put", "masked_scatter") for overload in overloads(name))
# Random numbers that one kernel draws, by the state of the generator that a replay advances.
_DRAWS = frozenset(
    overload
    for name in (
        *("rand", "rand_like", "randn", "randn_like", "randint", "randint_like", "normal", "uniform", "exponential"),
        *("bernoulli", "native_dropout", "random", "normal_functional", "cauchy", "log_normal", "geometric"),
        *("_scaled_dot_product_flash_attention", "_scaled_dot_product_cudnn_attention"),
        "_scaled_dot_product_efficient_attention",
    )
    for overload in overloads(name)
)
_INDEXED = frozenset(
    overload
    for name in ("index", "_unsafe_index", "index_put", "index_put_", "_unsafe_index_put")
    for overload in overloads(name)
)
_COPIES = frozenset(named_operators("copy_"))


def sized_inputs(plan: Plan) -> tuple[int, ...]:
    """The inputs that come with other sizes or strides in other calls."""
    buffers = plan.program.buffers
    sized = {
        position
        for position, given in enumerate(plan.program.inputs)
        if given.buffer is not None
        and not all(isinstance(n, int) for n in (*buffers[given.buffer].shape, *buffers[given.buffer].strides))
    }
    return tuple(sorted(sized | {source.position for source in plan.program.sizes if source.dim is not None}))


def why_not_captured(plan: Plan) -> str:
    """Why calls of a graph with a card cannot be captured and replayed; empty where they can."""
    return next(_obstacles(plan), "")


def _obstacles(plan: Plan) -> Iterator[str]:
    for position in written_inputs(plan):
        given = plan.program.inputs[position]
        if not given.static:
            yield f"it writes to its input {given.name}, which is no parameter or buffer"
    for step in plan.steps:
        if isinstance(step, ReadNumber):
            yield f"the CPU waits for a number that the card computes ({_name(step)})"
    for step in plan.steps:
        obstacle = _obstacle(step, plan)
        if obstacle:
            yield obstacle
    if not any(isinstance(step, (Launch, ExternCall)) for step in plan.steps):
        yield "it launches nothing"


def _obstacle(step: Step, plan: Plan) -> str:
    for name in sorted(mentioned(step)):
        if plan.program.buffers[name].device == "cpu" and not isinstance(plan.storage[name], InConstant):
            return f"{_name(step)} has a tensor on the CPU"
    return _obstacle_of_call(step, plan) if isinstance(step, ExternCall) else ""


def _obstacle_of_call(call: ExternCall, plan: Plan) -> str:
    target = call.target
    if isinstance(target, HigherOrder):
        return f"the CPU decides in {target} what runs"
    if is_native(call):
        return f"{_name(call)} runs on the CPU"
    if is_of_users(target) or is_ordered_effect(target) or target.namespace not in ("aten", "prims"):
        return f"nobody knows what {target} does beside its launches"
    if resizes_storage(target):
        return f"{target} gives memory to a tensor, or takes it"
    if _LOOKS_AT_VALUES & set(target.tags) or target in _WAITS:
        return f"the CPU waits for what {target} finds"
    if target in _INDEXED and any(view.dtype in (torch.bool, torch.uint8) for view in tensors_of(call.arguments[1])):
        return f"the CPU waits for what the mask of {target} selects"
    if any(isinstance(argument, torch.Generator) for argument in call.arguments):
        return f"{target} draws from a generator of its own"
    return _obstacle_of_random_numbers(call, target) or _obstacle_of_unknown(target)


def _obstacle_of_random_numbers(call: ExternCall, target: torch._ops.OpOverload) -> str:
    """Efficient attention leaves the state of its random numbers on the CPU, or on the card while it is captured, and
    its backward reads it where it expects it: the two must not be mixed."""
    given = {a.name: value for a, value in zip(target._schema.arguments, call.arguments, strict=True)}
    dropout = given.get("dropout_p", 0.0)
    if "efficient_attention" in target._opname and dropout != 0:
        return f"{target} leaves the state of its random numbers on the CPU"
    drawn = draws_random_numbers(target) and not ("attention" in target._opname and dropout == 0)
    return f"{target} may draw random numbers on the CPU" if drawn and target not in _DRAWS else ""


def _obstacle_of_unknown(target: torch._ops.OpOverload) -> str:
    known = is_declared(target) or target in _DRAWS or target in _COPIES or draws_random_numbers(target)
    return "" if known else f"it is not known whether {target} waits for the card"


def _name(step: Step) -> str:
    if isinstance(step, ExternCall):
        return str(step.target)
    nodes = step.origin.nodes
    return ", ".join(nodes[:3]) or "a step"
