"""Which nodes do more than compute their result: mutation, randomness, checks and other effects."""

from __future__ import annotations

import operator
from functools import lru_cache

import torch
import torch.fx
from torch._higher_order_ops.effects import has_effects

from torchkiln.graph.fake import attribute_of
from torchkiln.graph.nodes import argument, argument_names, fake_tensor, nodes_in

# Torch-level functions, as Dynamo records them, that are known to do nothing but compute. Others may update running
# statistics or draw random numbers, which their name does not tell.
_PURE_OPERATOR_NAMES = """
    getitem add sub mul truediv floordiv mod pow matmul neg pos invert and_ or_ xor eq ne lt le gt ge lshift rshift
    not_ is_ is_not
"""
_PURE_METHOD_NAMES = """
    size dim stride numel view reshape transpose permute expand unsqueeze squeeze flatten t to float half bfloat16
    double int long bool contiguous chunk split sum mean type_as clone detach unbind repeat softmax sigmoid tanh
    masked_fill
"""
_PURE_OPERATORS = frozenset(getattr(operator, name) for name in _PURE_OPERATOR_NAMES.split())
_PURE_METHODS = frozenset(_PURE_METHOD_NAMES.split())

# Higher-order operators that do nothing beyond what the bodies do that they call.
_EFFECTS_OF_BODIES = frozenset({"cond", "flex_attention", "invoke_subgraph", "map_impl", "scan", "while_loop"})

_NATIVE_NAMESPACES = frozenset({"aten", "mkldnn", "mkl", "onednn", "quantized"})

# Collectives: every process of a group must make the same calls in the same order, whether or not a result is read.
_COLLECTIVES = frozenset({"_c10d_functional", "c10d_functional", "_c10d_functional_autograd", "c10d", "symm_mem"})


def is_random(node: torch.fx.Node) -> bool:
    """Whether ``node`` draws from a random number generator, as far as its operator says so.

    Attention without dropout does not, though torch marks the operator.
    """
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or not draws_random_numbers(target):
        return False
    return "attention" not in target._opname or argument(node, "dropout_p") != 0


# Passes ask about every node, and what torch says about an operator is slow to read.
@lru_cache(maxsize=4096)
def draws_random_numbers(target: torch._ops.OpOverload) -> bool:
    """Whether torch marks ``target`` as drawing from a random number generator."""
    return torch.Tag.nondeterministic_seeded in target.tags


@lru_cache(maxsize=4096)
def writes(target: torch._ops.OpOverload) -> bool:
    """Whether ``target`` writes to an argument, or frees its memory or gives it other memory."""
    return target._schema.is_mutable or resizes_storage(target)


@lru_cache(maxsize=4096)
def resizes_storage(target: object) -> bool:
    """Whether ``target`` gives the storage of its first argument another size, which its schema does not call a write.

    What is read of that memory before must have been read, and its address is another one afterwards.
    """
    return isinstance(target, torch._ops.OpOverload) and target._schema.name == "inductor::resize_storage_bytes_"


@lru_cache(maxsize=4096)
def is_written(target: torch._ops.OpOverload, position: int) -> bool:
    """Whether ``target`` writes to the argument at ``position`` of its schema."""
    alias = target._schema.arguments[position].alias_info
    return alias is not None and alias.is_write if not resizes_storage(target) else position == 0


@lru_cache(maxsize=4096)
def _returns(target: torch._ops.OpOverload) -> bool:
    return bool(target._schema.returns)


def is_torchs_own(target: torch._ops.OpOverload) -> bool:
    """Whether ``target`` comes with torch. Others may be written in Python, raise anything and keep their arguments."""
    return target.namespace in _NATIVE_NAMESPACES


def is_of_users(target: torch._ops.OpOverload) -> bool:
    """Whether ``target`` comes neither with torch nor with this package."""
    if target.namespace not in _NATIVE_NAMESPACES:
        return target.namespace not in ("prims", "kiln", "quantized_decomposed")
    # torch defines these in C++; what Python defined there is the user's.
    return target.name() in torch.library._defs


def is_ordered_effect(target: object) -> bool:
    """Whether calls of ``target`` keep their order and are never dropped: collectives, and what torch knows as such."""
    if not isinstance(target, torch._ops.OpOverload):
        return False
    return target.namespace in _COLLECTIVES or bool(has_effects(target))


def runs_twice(graph: torch.fx.GraphModule) -> bool:
    """Whether a functional graph leaves no trace and ends, so that it can be run only to be timed."""

    def may_be_seen(node: torch.fx.Node) -> bool:
        of_users = isinstance(node.target, torch._ops.OpOverload) and not is_torchs_own(node.target)
        return has_effect(node) or of_users or may_end_the_process(node)

    return not any(may_be_seen(node) for node in graph.graph.nodes if node.op == "call_function")


def mutated_arguments(node: torch.fx.Node) -> tuple[torch.fx.Node, ...]:
    """The inputs whose memory the operator of ``node`` writes."""
    target = node.target
    if node.op != "call_function" or not isinstance(target, torch._ops.OpOverload) or not writes(target):
        return ()
    names = argument_names(target)
    written = nodes_in([argument(node, name) for place, name in enumerate(names) if is_written(target, place)])
    return tuple(dict.fromkeys((*written, *_inputs_beside(written[0])))) if resizes_storage(target) else written


def _inputs_beside(node: torch.fx.Node) -> list[torch.fx.Node]:
    """The inputs of the graph that lie in the storage of ``node``, by their fake tensors."""
    storage = storage_of(node.meta.get("val"))
    inputs = node.graph.find_nodes(op="placeholder") if storage is not None else []
    return [given for given in inputs if storage_of(given.meta.get("val")) == storage]


def storage_of(value: object) -> int | None:
    """What is equal for two tensors, be they fake, in one storage; None for what has none."""
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return None
    while torch._C._functorch.is_functorch_wrapped_tensor(value):  # of a transform inside the graph
        value = torch._C._functorch.get_unwrapped(value)
    return int(value.untyped_storage()._cdata)


def has_effect(node: torch.fx.Node) -> bool:
    """Whether a functional (ATen) graph may not drop ``node`` when nobody reads it.

    Drawing random numbers is an effect: without it, every later draw would differ from eager.
    """
    if node.op == "get_attr":
        return False
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        if is_random(node) or is_ordered_effect(target):
            return True
        return writes(target) or not _returns(target) or node.is_impure(impure_random=False)
    if isinstance(target, torch._ops.HigherOrderOperator):
        return target.name() not in _EFFECTS_OF_BODIES or any(has_effect(inner) for inner in _body_nodes(node))
    return node.op != "call_function" or node.is_impure()


def _body_nodes(node: torch.fx.Node) -> list[torch.fx.Node]:
    """The nodes of the bodies of a higher-order operator, without their inputs and outputs."""
    owner = node.graph.owning_module
    found: list[torch.fx.Node] = []
    for source in node.all_input_nodes:
        if source.op != "get_attr" or owner is None:
            continue
        body = attribute_of(owner, str(source.target))
        if isinstance(body, torch.fx.GraphModule):
            found += (inner for inner in body.graph.nodes if inner.op not in ("placeholder", "output"))
    return found


def may_have_effect(node: torch.fx.Node) -> bool:
    """As :func:`has_effect` for a graph of torch-level calls, where anything not known to be pure counts."""
    if node.op == "call_function":
        return node.target not in _PURE_OPERATORS or "out" in node.kwargs
    if node.op == "call_method":
        return node.target not in _PURE_METHODS
    return node.op != "get_attr"


def may_end_the_process(node: torch.fx.Node) -> bool:
    """Whether eager may divide the least integer by -1, which its truncating division does not survive."""
    if node.target not in (torch.ops.aten.div.Tensor_mode, torch.ops.aten.div.Scalar_mode):
        return False
    divisor, value = node.args[1], fake_tensor(node)
    integers = value is None or not value.dtype.is_floating_point
    return integers and node.kwargs.get("rounding_mode") == "trunc" and (not isinstance(divisor, int) or divisor == -1)
