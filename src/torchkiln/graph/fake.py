"""Fake tensors on FX nodes: reading them, and recomputing them after a change."""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import lru_cache
from typing import Any

import sympy
import torch
import torch.fx
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv, has_free_symbols
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._sympy.functions import Max

from torchkiln.graph.fake_kernels import fake_kernel
from torchkiln.graph.source import blame

SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)

VALUE_KEYS = ("val", "example_value")
"""Where nodes keep fake values: those of ATen graphs, and those of Dynamo."""

TYPICAL_SIZE = 1024
"""Stands for a size that depends on data, of which torch has no example."""


def value_key(graph: torch.fx.Graph) -> str:
    """Which of ``VALUE_KEYS`` this graph keeps fake values under."""
    return next((key for node in graph.nodes for key in VALUE_KEYS if key in node.meta), VALUE_KEYS[0])


def fake_mode_of(graph: torch.fx.Graph) -> FakeTensorMode | None:
    """The mode the graph's fake tensors belong to; None when it has none."""
    key = value_key(graph)
    for node in graph.nodes:
        for leaf in _leaves(node.meta.get(key)):
            if isinstance(leaf, FakeTensor):
                return leaf.fake_mode
    return None


@contextmanager
def computing_with(mode: FakeTensorMode) -> Iterator[None]:
    """Operators called inside compute fake values, and add no guards on symbolic sizes.

    As AOTAutograd, with the Python dispatcher: kernels in C++ may ask for sizes as numbers (``constant_pad_nd`` does).
    """
    with mode, torch.no_grad(), enable_python_dispatcher() if mode.shape_env is not None else nullcontext():
        yield


@contextmanager
def outside_tracing() -> Iterator[None]:
    """Tensors made inside are real: modes of fake tensors, which AOTAutograd calls compilers with, are off."""
    with _disable_current_modes(), torch._C._DisablePythonDispatcher(), torch.no_grad():
        yield


def is_symbolic(value: object) -> bool:
    """Whether a fake value is, or has in its sizes or strides, an integer not known yet."""
    return any(
        isinstance(leaf, SYMBOLIC) or (isinstance(leaf, torch.Tensor) and has_free_symbols(leaf))
        for leaf in _leaves(value)
    )


def static_shape(value: torch.Tensor) -> tuple[int, ...]:
    """The sizes of a tensor that is not symbolic as plain numbers.

    A size that was symbolic when it was made and became known later (by a matmul with a weight of static shape) is
    still a ``SymInt``, though one without symbols: it cannot be hashed, and has no place in a graph.
    """
    return tuple(int(expression(size)) for size in value.shape)


def same_metadata(left: object, right: object) -> bool:
    """Whether two fake values look the same to a consumer: dtype, device, sizes and strides, or equal numbers."""
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        return _same_leaf(left, right)
    lefts, rights = _leaves(left), _leaves(right)
    return len(lefts) == len(rights) and all(map(_same_leaf, lefts, rights))


def has_one_dtype(node: torch.fx.Node) -> bool:
    """Whether all tensors that ``node`` reads have one dtype. torch refuses matmuls of two when they run, not while
    they are traced, so a pass that writes one in another form has to ask."""
    values = (source.meta.get("val") for source in node.all_input_nodes)
    return len({value.dtype for value in values if isinstance(value, torch.Tensor)}) < 2


def metadata_key(value: Any) -> Hashable:
    """Equal for values that look the same to an operator: tensors by what :func:`same_metadata` compares."""
    if isinstance(value, torch.Tensor):
        strides = map(stride_expression, value.stride()) if value.layout is torch.strided else ()
        sizes = tuple(map(_normal_form, value.size())), tuple(map(_normal_form, strides))
        return (value.dtype, value.device, value.layout, *sizes)
    if isinstance(value, SYMBOLIC):
        return expression(value)  # type: ignore[no-any-return]
    if isinstance(value, (list, tuple)):
        return tuple(map(metadata_key, value))
    if isinstance(value, dict):
        return tuple((name, metadata_key(item)) for name, item in value.items())
    return (type(value), value)  # 1, 1.0 and True differ


def _normal_form(number: Any) -> Any:
    return number if type(number) is int else _multiplied_out(expression(number))


def _same_leaf(left: object, right: object) -> bool:
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        if left.dtype != right.dtype or left.layout != right.layout or not _same_sizes(left.shape, right.shape):
            return False
        if left.layout is torch.strided and not same_strides(left, right):
            return False
        return left.device == right.device  # last, as that of a fake tensor is slow to read
    if isinstance(left, torch.Tensor) or isinstance(right, torch.Tensor):
        return False
    if isinstance(left, torch.SymInt) or isinstance(right, torch.SymInt):
        return _same_sizes((left,), (right,))
    return type(left) is type(right) and bool(left == right)


def _same_sizes(left: Any, right: Any, form: Callable[[Any], Any] | None = None) -> bool:
    # Symbolic sizes are compared as expressions: comparing them by value would add a guard to the user's program.
    if len(left) != len(right):
        return False
    for a, b in zip(left, right, strict=True):
        if type(a) is int and type(b) is int:  # nearly always: 6 us for two fake tensors instead of 10
            if a != b:
                return False
        elif not equal_expressions((form or expression)(a), (form or expression)(b)):
            return False
    return True


def equal_expressions(left: Any, right: Any) -> bool:
    """Whether two numbers or expressions of sizes are equal whatever the sizes are, as far as multiplying out shows."""
    return bool(left == right) or _multiplied_out(left) == _multiplied_out(right)


@lru_cache(maxsize=4096)
def _multiplied_out(number: Any) -> Any:
    # Sizes behind strided convolutions are sums, and their products come as powers, factors and sums of terms.
    return sympy.expand(number) if isinstance(number, sympy.Expr) else number


def same_sizes(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two fake tensors have the same sizes; symbolic ones are compared as expressions."""
    return _same_sizes(left.shape, right.shape)


def same_strides(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two fake tensors have the same strides; symbolic ones are compared as expressions."""
    return _same_sizes(left.stride(), right.stride(), stride_expression)


def stride_expression(stride: Any) -> Any:
    """As :func:`expression`, of a stride.

    Torch steps over a dimension without elements as if it had one, ``Max(1, s - 2)``, in some operators and not in
    others. Where that shows there is no element, so the size itself stands here.
    """
    return stride if type(stride) is int else _with_plain_sizes(expression(stride))


@lru_cache(maxsize=4096)
def _with_plain_sizes(stride: Any) -> Any:
    if not isinstance(stride, sympy.Expr) or not stride.has(Max):
        return stride
    return stride.replace(
        lambda part: isinstance(part, Max) and sympy.S.One in part.args,
        lambda part: Max(*(argument for argument in part.args if argument != 1)),
    )


def is_packed(value: torch.Tensor, order: Iterable[int]) -> bool:
    """Whether a fake tensor lies in memory without gaps, its dimensions in this order, innermost first.

    Of symbolic sizes, where that is so for all of them.
    """
    expected: Any = 1
    for dim in order:
        if not equal_expressions(stride_expression(value.stride(dim)), expected):
            return False
        size = expression(value.shape[dim])
        # Strides step over a dimension without elements as if it had one.
        expected = expected * (1 if type(size) is int and size == 0 else size)
    return True


def is_row_major(value: torch.Tensor) -> bool:
    """Whether a fake tensor has the strides of one made in row-major order, whatever symbolic sizes turn out to be."""
    return is_packed(value, reversed(range(value.dim())))


def is_channels_last(value: torch.Tensor) -> bool:
    """Whether the channels of a batch of images, or of volumes, lie next to each other."""
    if value.dim() not in (4, 5):
        return False
    if not is_symbolic(value):
        channels_last = torch.channels_last if value.dim() == 4 else torch.channels_last_3d
        return value.is_contiguous(memory_format=channels_last)
    return is_packed(value, (1, *reversed(range(2, value.dim())), 0))


def is_dense(value: torch.Tensor) -> bool:
    """Whether a fake tensor fills a piece of memory in some order of its dimensions, whatever symbolic sizes are."""
    strides = value.stride()
    return is_packed(value, sorted(range(value.dim()), key=lambda dim: size_hint(strides[dim])))


def memory_order(value: torch.Tensor) -> list[int]:
    """The dimensions from the largest stride to the smallest."""
    strides = [size_hint(stride) for stride in value.stride()]
    return sorted(range(len(strides)), key=lambda dim: -strides[dim])


def inverse_order(order: Sequence[int]) -> list[int]:
    """The permutation that undoes ``order``."""
    return sorted(range(len(order)), key=order.__getitem__)


def may_overlap(value: object) -> bool:
    """Whether two elements of a fake tensor may be one place in memory; of symbolic sizes nothing is said.

    That there are none is shown by nesting: each dimension steps over all elements of those with smaller strides.
    """
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided or is_symbolic(value):
        return False
    shape = static_shape(value)
    strides = (int(expression(stride)) for stride in value.stride())
    reach = 0
    for stride, size in sorted((stride, size) for stride, size in zip(strides, shape, strict=True) if size != 1):
        if stride <= reach:
            return 0 not in shape
        reach += stride * (size - 1)
    return False


def size_hint(size: Any) -> int:
    """A size, or what it is in the example where it is symbolic: it decides what is fast, not what is right."""
    if isinstance(size, int):
        return size
    hint = size.node.hint
    return 1 if hint is None else int(hint)


def symbol_examples(shape_env: ShapeEnv) -> Mapping[sympy.Symbol, sympy.Expr]:
    """The example values of the symbols that do not depend on data."""
    # The name differs between versions of torch.
    newer = hasattr(shape_env, "backed_var_to_val")
    examples: Mapping[sympy.Symbol, sympy.Expr] = shape_env.backed_var_to_val if newer else shape_env.var_to_val
    return examples


def has_hint(size: Any) -> bool:
    """Whether :func:`size_hint` knows more of a size than that it is one."""
    return isinstance(size, int) or size.node.hint is not None


def expression(number: Any) -> Any:
    """A symbolic number as the expression to compare it by; any other as it is."""
    return number.node.expr if isinstance(number, SYMBOLIC) else number


def update_fake_values(graph_module: torch.fx.GraphModule, *, everything: bool = False) -> dict[torch.fx.Node, object]:
    """Give every node without a fake value one, and recompute nodes downstream of a value that changed.

    With ``everything``, all nodes are recomputed. Nodes that made new symbols of unknown value keep theirs: recomputing
    them would make new ones. Does nothing when the inputs carry no fake values. Returns the nodes whose value
    looks different from before, with what it was.
    """
    graph = graph_module.graph
    key = value_key(graph)
    mode = fake_mode_of(graph)
    if mode is None or any(key not in node.meta for node in graph.nodes if node.op == "placeholder"):
        return {}
    changed: dict[torch.fx.Node, object] = {}
    with computing_with(mode):
        for node in graph.nodes:
            if node.op in ("placeholder", "output") or node.meta.get("unbacked_bindings"):
                continue
            known = key in node.meta
            if known and not everything and changed.keys().isdisjoint(node.all_input_nodes):
                continue
            with blame(node):
                value = _compute(graph_module, node, key, mode)
            if value is _UNKNOWN or (known and same_metadata(node.meta[key], value)):
                continue
            changed[node] = node.meta.get(key)
            node.meta[key] = value
    return {node: before for node, before in changed.items() if before is not None}


_UNKNOWN = object()


def _compute(graph_module: torch.fx.GraphModule, node: torch.fx.Node, key: str, mode: FakeTensorMode) -> object:
    if node.op == "get_attr":
        attribute = attribute_of(graph_module, str(node.target))
        if isinstance(attribute, torch.Tensor) and not isinstance(attribute, FakeTensor):
            return mode.from_tensor(attribute, static_shapes=True)
        return attribute
    if any(key not in source.meta and source.op != "get_attr" for source in node.all_input_nodes):
        return _UNKNOWN
    if isinstance(node.target, torch._ops.HigherOrderOperator) and mode.shape_env is None and key in node.meta:
        return _UNKNOWN  # loops make symbols for what they carry, which takes a mode that has them

    def value_of(source: torch.fx.Node) -> Any:
        return source.meta[key] if key in source.meta else attribute_of(graph_module, str(source.target))

    args, kwargs = torch.fx.map_arg((node.args, node.kwargs), value_of)
    if node.op == "call_function":
        return fake_kernel(node.target)(*args, **kwargs)
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    return _UNKNOWN


def attribute_of(graph_module: torch.fx.GraphModule, target: str) -> Any:
    """What a ``get_attr`` node with this dotted ``target`` reads."""
    return operator.attrgetter(target)(graph_module)


def tensors_of(value: object) -> list[torch.Tensor]:
    """The tensors in a fake value, or in arguments."""
    return [leaf for leaf in _leaves(value) if isinstance(leaf, torch.Tensor)]


def _leaves(value: object) -> list[object]:
    found: list[object] = []
    pending = [value]
    while pending:
        item = pending.pop()
        if isinstance(item, (tuple, list)):
            pending.extend(reversed(item))
        elif isinstance(item, dict):
            pending.extend(reversed(item.values()))
        else:
            found.append(item)
    return found
