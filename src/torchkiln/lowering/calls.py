"""Calls: each node becomes loops by its lowering, a call of torch's operator, a store or arithmetic on sizes."""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx
from torch.fx import Node
from torch.utils._pytree import tree_leaves, tree_map

from torchkiln.errors import UnsupportedError
from torchkiln.graph.aliases import Aliases
from torchkiln.graph.checked_numbers import may_be_refused
from torchkiln.graph.effects import mutated_arguments, resizes_storage, writes
from torchkiln.ir import expr as ex
from torchkiln.ir import index as ix
from torchkiln.ir.expr import Constant, Expr, Load, Op, index_value
from torchkiln.ir.index import Extent, Index
from torchkiln.ir.ops import RANDOM
from torchkiln.ir.program import Loop
from torchkiln.lowering.builder import (
    SUPPORTED_DTYPES,
    Builder,
    Mark,
    NewTensor,
    OpaqueValue,
    TensorValue,
    elements_share_memory,
    indices,
    is_opaque,
    view_of,
)
from torchkiln.lowering.extern_calls import (
    Call,
    buffers_of,
    call_extern,
    lower_as_strided,
    lower_unfilled,
    resize_storage,
)
from torchkiln.lowering.higher_order import Bodies, lower_higher_order
from torchkiln.lowering.numbers import check_number, ignore_range, integer_arithmetic, read_number, scalar_arithmetic
from torchkiln.lowering.registry import LOWERINGS, NotLowered
from torchkiln.lowering.views import broadcast_to

_log = logging.getLogger(__name__)

aten = torch.ops.aten
_ON_NUMBERS: dict[Any, Callable[..., Any]] = {
    aten._local_scalar_dense.default: read_number,
    aten._assert_scalar.default: check_number,
    aten.sym_constrain_range.default: ignore_range,
    aten.sym_constrain_range_for_size.default: ignore_range,
}
_SIZE_OPERATORS = frozenset(
    (aten.sym_size.int, aten.sym_stride.int, aten.sym_numel.default, aten.sym_storage_offset.default)
)
# The parts of a sparse tensor. They are as long as it has values, and how many those are may differ in each call.
_PARTS_OF_SPARSE = frozenset(
    getattr(aten, name).default
    for part in ("values", "indices", "_values", "_indices", "col_indices", "row_indices")
    for name in (part, f"{part}_copy")
)
# Operators that take a number for a tensor, whatever its dtype.
_COPIES = (aten.copy.default, aten.copy_.default)


@dataclass(frozen=True)
class KeptCall:
    """What observers get of a node that no lowering computes: why it stays a call of torch's operator."""

    node: str
    reason: str


def lower_call(builder: Builder, node: Node, values: Mapping[Node, Any], bodies: Bodies, aliases: Aliases) -> Any:
    """The results of a node that calls something."""
    args: Any = torch.fx.map_arg(node.args, lambda n: values[n])
    kwargs: Any = torch.fx.map_arg(node.kwargs, lambda n: values[n])
    target = node.target
    if target is operator.getitem:
        return args[0][args[1]]
    if isinstance(target, torch._ops.HigherOrderOperator):
        return lower_higher_order(builder, node, args, kwargs, bodies)
    if not isinstance(target, torch._ops.OpOverload):
        return _lower_python_call(builder, node, args, kwargs)
    if target in _SIZE_OPERATORS:
        return builder.sizes.extent(node.meta["val"])
    opaque = any(isinstance(v, OpaqueValue) for v in tree_leaves([values[n] for n in node.all_input_nodes]))
    if opaque:
        _require_opaque_argument(target)
    if target in _ON_NUMBERS:
        return _ON_NUMBERS[target](builder, node, *args, **kwargs)
    args = _numbers_as_tensors(builder, target, args)
    call = Call(builder, node, target, args, kwargs, values, aliases)
    return _lower_operator(call, plain=not opaque and _is_plain(builder, node))


def _lower_operator(call: Call, *, plain: bool) -> Any:
    """A call that is ``plain`` where loops could compute it."""
    target = call.target
    _require_memory_to_write(call)
    if target is aten.copy_.default and plain:
        target_value, source = _on_device(call.builder, call.args[:2])
        return _lower_copy_into(call.builder, call.node, target_value, source)
    if target is aten.as_strided.default:
        seen = lower_as_strided(call)
        if seen is not None:
            return seen
    if resizes_storage(target):
        return resize_storage(call)
    unfilled = lower_unfilled(call)
    if unfilled is not None:
        return unfilled
    return call_extern(call) if writes(target) else _lower_to_loops(call, plain=plain)


def _lower_to_loops(call: Call, *, plain: bool) -> Any:
    """What the operator's lowering makes of a ``plain`` call; a call of torch's operator where there is none."""
    builder, target = call.builder, call.target
    lowering = LOWERINGS.get(target)
    reason: object = "there is no lowering of it"
    if builder.through_python and _has_eager_form(target):
        return call_extern(call)
    if lowering is not None and plain and may_be_refused(call.node):
        reason = "a number that the dtype does not hold, which torch may refuse"
    elif lowering is not None and plain:
        before = builder.mark()
        try:
            made = lowering(builder, *_on_device(builder, call.args), **_on_device(builder, call.kwargs))
            _require_computable(builder, before, made)
            return _verified(builder, call.node, made)
        except NotLowered as declined:
            # Whatever the lowering began is dropped, so that an extern call starts from a clean slate.
            builder.rollback(before)
            reason = declined
    elif lowering is not None:
        reason = "a tensor of a dtype, device or layout that loops do not compute with"
    builder.watch("kept call", lambda: KeptCall(call.node.name, str(reason)))
    _log.debug("%s stays a call of %s: %s (%s)", call.node.name, target, reason, builder.origin.source)
    return call_extern(call)


def _require_computable(builder: Builder, before: Mark, made: Any) -> None:
    """Decline what kernels of the target cannot compute; most targets compute all."""
    machine = builder.computes_on
    if not machine.is_gpu:
        return
    loops = (operation for operation in builder.operations[before[0] :] if isinstance(operation, Loop))
    values = (value.value for value in tree_leaves(made) if isinstance(value, TensorValue))
    for node in ex.walk((*(loop.value for loop in loops), *values)):
        if not isinstance(node, Op):
            continue
        dtype = node.dtype if node.name in RANDOM else node.args[0].dtype
        if not machine.computes(node.name, dtype):
            raise NotLowered(f"no {node.name} of {dtype} is written for this device")


def _has_eager_form(target: torch._ops.OpOverload) -> bool:
    """Whether torch can be called for what a lowering computes; views stay views of the same memory."""
    return target.namespace == "aten" and not target.is_view


# -- what is given ----------------------------------------------------------------------------------------------------


def _require_opaque_argument(target: torch._ops.OpOverload) -> None:
    """Raise where an operator tells more of an opaque tensor than fake tensors know."""
    if target in _ON_NUMBERS:
        raise UnsupportedError(f"{target} on a sparse, quantized or meta tensor")
    if target in _PARTS_OF_SPARSE:
        raise UnsupportedError(f"{target}, whose size is the number of values that a sparse tensor holds at run time")


def _is_plain(builder: Builder, node: Node) -> bool:
    """Whether every tensor of a node is strided memory of one device, of a dtype loops compute with.

    On a card, numbers on the CPU may be among what it takes.
    """
    given = [t for t in tree_leaves([n.meta.get("val") for n in node.all_input_nodes]) if isinstance(t, torch.Tensor)]
    made = [t for t in tree_leaves(node.meta.get("val")) if isinstance(t, torch.Tensor)]
    here = [*made, *(t for t in given if builder.device == "cpu" or t.dim() > 0)]
    return all(not is_opaque(t) and t.dtype in SUPPORTED_DTYPES for t in (*made, *given)) and all(
        builder.place_of(t) == builder.device for t in here
    )


def _on_device(builder: Builder, arguments: Any) -> Any:
    """``arguments`` with numbers on the CPU as loops of the card take them, where the node's results are there."""
    if builder.device != "cuda":
        return arguments

    def moved(value: Any) -> Any:
        on_cpu = isinstance(value, TensorValue) and builder.device_of(value) == "cpu"
        return builder.as_parameter(value) if on_cpu else value

    return tree_map(moved, arguments, is_leaf=lambda value: isinstance(value, TensorValue))


def _numbers_as_tensors(builder: Builder, target: torch._ops.OpOverload, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Numbers in place of every tensor, as vmap leaves them, and numbers that are copied: 0-dimensional tensors."""
    if target not in _COPIES and any(isinstance(leaf, TensorValue) for leaf in tree_leaves(args)):
        return args  # a number beside a tensor takes part in promotion as a number
    return tuple(
        _number_as_tensor(builder, value) if declared.type.kind() == "TensorType" else value
        for value, declared in zip(args, target._schema.arguments, strict=False)
    )


def _number_as_tensor(builder: Builder, value: Any) -> Any:
    """A number, known while compiling or not, as a tensor of the dtype torch gives it; anything else as it is."""
    if isinstance(value, complex):  # no loop computes complex numbers: torch makes the tensor
        arguments = (value, torch.complex128, None, torch.device("cpu"), None)
        (made,) = builder.extern(aten.scalar_tensor.default, arguments, [NewTensor((), torch.complex128)])
        return made
    if isinstance(value, (bool, int, float)):
        dtype = torch.tensor(value).dtype
        return TensorValue((), dtype, (), Constant(value, dtype))
    if isinstance(value, Index):
        value = index_value(value)
    return TensorValue((), value.dtype, (), value) if isinstance(value, Expr) else value


def _require_memory_to_write(call: Call) -> None:
    """Raise where an operator would write elsewhere than into the memory that eager's writes to."""
    target, values = call.target, call.values
    for written in mutated_arguments(call.node):
        root = call.aliases.root(written)
        _require_memory_of_root(target, values[written], values[root])
        if isinstance(values[root], OpaqueValue) and call.aliases.is_viewed(root):
            raise UnsupportedError(f"{target} on a sparse, quantized or meta tensor that the graph has views of")
        if root.op == "placeholder" and not call.builder.inputs.issuperset(buffers_of(values[root])):
            raise UnsupportedError(f"{target} on an input whose negation or conjugation is still to be done")


def _require_memory_of_root(target: torch._ops.OpOverload, written: Any, root: Any) -> None:
    """A view that was lowered as a copy would be written to instead of what it shows."""
    if not isinstance(written, TensorValue) or not isinstance(root, TensorValue):
        return
    here, there = written.value, root.value
    if not isinstance(here, Load) or not isinstance(there, Load) or here.buffer != there.buffer:
        raise UnsupportedError(f"{target} on a value that is not in memory")


# -- results of lowerings ---------------------------------------------------------------------------------------------


def _verified(builder: Builder, node: Node, result: Any) -> Any:
    """``result``, which must have the dtype and shape eager gives: a mistake here would be silent later.

    A size that torch writes in another way is written torch's way from here on.
    """
    known = node.meta.get("val")
    if not isinstance(known, (tuple, list)):
        return _verified_one(builder, node, known, result, 0)
    return [_verified_one(builder, node, *pair, k) for k, pair in enumerate(zip(known, result, strict=True))]


def _verified_one(builder: Builder, node: Node, known: Any, made: Any, position: int) -> Any:
    if not isinstance(known, torch.Tensor) or not isinstance(made, TensorValue):
        return made
    shape = builder.sizes.extents(known.shape)
    if made.dtype == known.dtype and made.shape == shape:
        return made
    if made.dtype != known.dtype or not _may_be_equal(made.shape, shape):
        raise AssertionError(
            f"result {position} of {node.target} was lowered as {made.dtype}{list(made.shape)}, "
            f"eager gives {known.dtype}{list(known.shape)}"
        )
    return view_of(made, shape, lambda i: i)


def _may_be_equal(made: Sequence[Extent], known: Sequence[Extent]) -> bool:
    """Whether shapes differ at most in how a size that is not a number is written: at typical sizes they agree."""
    return len(made) == len(known) and all(
        a == b or (not (isinstance(a, int) and isinstance(b, int)) and ix.hint_of(a) == ix.hint_of(b))
        for a, b in zip(made, known, strict=True)
    )


# -- calls without a lowering -----------------------------------------------------------------------------------------


def _lower_python_call(builder: Builder, node: Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Arithmetic on sizes: torch has worked out what comes of it."""
    value = node.meta.get("val")
    if isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool):
        return integer_arithmetic(builder, node, args)
    if isinstance(value, (torch.SymFloat, torch.SymBool)):
        return scalar_arithmetic(node, args)
    if any(isinstance(a, TensorValue) for a in tree_leaves((args, kwargs))):
        raise UnsupportedError(f"{node.target} on tensors is not an ATen operator")
    if not callable(node.target):
        raise UnsupportedError(f"{node.target} is not callable")
    return node.target(*args, **kwargs)


def _lower_copy_into(builder: Builder, node: Node, target: TensorValue, source: TensorValue) -> TensorValue:
    """Store ``source`` where ``target`` lies: in an input, or in a view of memory of the graph."""
    place = target.value
    assert isinstance(place, Load)
    buffer = builder.buffers[place.buffer]
    if elements_share_memory(buffer.shape, buffer.strides) or not _one_place_each(builder, node.args[0], target):
        # The functional graph takes the elements for independent ones: which of two values to keep is not known here.
        raise UnsupportedError("a tensor is changed in place of which several elements lie at one place in memory")
    wide = broadcast_to(source, target.shape)
    elsewhere = any(
        load.buffer == place.buffer and load.subscripts != place.subscripts
        for load in ex.loads(wide.at(indices(target.dims)))
    )
    if elsewhere:  # everything is read before anything is written
        wide = builder.copy(wide, ix.contiguous_strides(wide.shape))
    builder.store(buffer, wide, target.dims, place.subscripts)
    return target


def _one_place_each(builder: Builder, node: Any, view: TensorValue) -> bool:
    """Whether no two elements of a view of elements that lie apart are one element."""
    assert isinstance(view.value, Load)
    known = node.meta.get("val")
    if isinstance(known, torch.Tensor):
        sizes = builder.sizes
        if not elements_share_memory(sizes.extents(known.shape), sizes.strides(known.stride())):
            return True
    # With sizes that are no numbers it may be easier to see that every dimension moves a subscript of its own.
    moved: list[Any] = []
    for subscript in view.value.subscripts:
        variables = subscript.variables()
        if len(variables) > 1 or any(subscript.coefficient(v) in (None, 0) for v in variables):
            return False
        moved += variables
    return len(moved) == len(set(moved)) and set(moved) >= {dim for dim in view.dims if dim.extent != 1}
