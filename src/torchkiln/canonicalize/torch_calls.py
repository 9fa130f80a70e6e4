"""The canonical form of torch-level calls: functions, methods and modules become one function, arguments by name.

``x.relu()``, ``F.relu(x)`` and ``nn.ReLU()`` become ``torch.relu(x)``; ``x.split(2, -1)`` becomes ``torch.split(x,
split_size_or_sections=2, dim=1)``. The operands come by position, in the order of the table below, the other arguments
by name and all of them, defaults too; dimensions count from the front where the rank is known. Every form computes the
same, shares memory the same way and is differentiated the same; a call that writes (``inplace=True``, ``out=``) stays
as it is. The later passes of this stage read canonical calls only.
"""

from __future__ import annotations

import builtins
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
import torch.fx
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.module import _has_any_global_hook

from torchkiln.graph.captured_calls import tensor_of, value_of
from torchkiln.graph.captured_memory import writes_of

_REQUIRED = object()
_ABSENT = object()  # an option that makes a difference by being left out

# Names that forms of one operation use for the same thing.
_SYNONYMS = MappingProxyType(
    {
        "axis": "dim",
        "axis0": "dim0",
        "axis1": "dim1",
        "self": "input",
        "tensor": "input",
        "split_size": "split_size_or_sections",
        "split_sizes": "split_size_or_sections",
    }
)


@dataclass(frozen=True)
class CanonicalCall:
    """One operation: ``target``, operands by position, options by name; both with their defaults."""

    target: Callable[..., Any]
    operands: Mapping[str, object]
    options: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class Form:
    """A way to write it: the names of its positional arguments, in order; ``*name`` takes all that are left."""

    call: CanonicalCall
    parameters: tuple[str, ...]


_functions: dict[Any, Form] = {}
_methods: dict[str, Form] = {}


def _define(
    target: Any,
    operands: str,
    options: Mapping[str, object] | None = None,
    *,
    forms: Sequence[Any] = (),
    others: Mapping[Any, str] | None = None,
) -> None:
    """Make ``target`` the canonical form of an operation.

    It and ``forms`` (functions, and methods by name) take the operands and options in this order, and ``others`` the
    arguments that are given. An operand with a question mark is None where it is left out.
    """
    required = {name.rstrip("?"): None if name.endswith("?") else _REQUIRED for name in operands.split()}
    call = CanonicalCall(target, required, options or {})
    parameters = " ".join((*required, *call.options))
    for form, taken in {**dict.fromkeys((target, *forms), parameters), **(others or {})}.items():
        table: dict[Any, Form] = _methods if isinstance(form, str) else _functions
        table[form] = Form(call, tuple(taken.split()))


_UNARY = """
    abs neg exp exp2 expm1 log log1p log2 log10 sqrt rsqrt square reciprocal sin cos tan asin acos atan sinh cosh asinh
    acosh atanh erf erfc sigmoid tanh relu floor ceil round trunc frac sign isnan isinf isfinite logical_not bitwise_not
"""
_MORE_FORMS: dict[str, Any] = {"sigmoid": F.sigmoid, "tanh": F.tanh, "neg": operator.neg}
for _name in _UNARY.split():
    _forms = [_name, _MORE_FORMS[_name]] if _name in _MORE_FORMS else [_name]
    _define(getattr(torch, _name), "input", forms=_forms, others={F.relu: "input inplace"} if _name == "relu" else {})

_define(F.gelu, "input", {"approximate": "none"})
for _activation, _options in (
    (F.silu, {}),
    (F.leaky_relu, {"negative_slope": 0.01}),
    (F.elu, {"alpha": 1.0}),
    (F.hardswish, {}),
    (F.hardsigmoid, {}),
    (F.dropout, {"p": 0.5, "training": True}),
):
    _define(_activation, "input", _options, others={_activation: " ".join(("input", *_options, "inplace"))})
_SOFTMAX_OPTIONS = {"dim": _REQUIRED, "dtype": None}
_define(torch.softmax, "input", _SOFTMAX_OPTIONS, forms=["softmax"], others={F.softmax: "input dim _stacklevel dtype"})
_BINARY = {
    torch.add: (operator.add, "add", "__add__"),
    torch.sub: (operator.sub, "sub", "__sub__", "subtract", torch.subtract),
    torch.mul: (operator.mul, "mul", "__mul__", "multiply", torch.multiply),
    torch.div: (operator.truediv, "div", "__truediv__", "divide", "true_divide", torch.divide, torch.true_divide),
    torch.matmul: (operator.matmul, "matmul", "__matmul__"),
}
for _target, _written in _BINARY.items():
    _define(_target, "input other", forms=_written)

_define(torch.cat, "tensors", {"dim": 0}, forms=[torch.concat, torch.concatenate])
_define(torch.stack, "tensors", {"dim": 0})
_SPLIT = [torch.split_with_sizes, "split", "split_with_sizes"]
_define(torch.split, "input", {"split_size_or_sections": _REQUIRED, "dim": 0}, forms=_SPLIT)
_define(torch.chunk, "input", {"chunks": _REQUIRED, "dim": 0}, forms=["chunk"])
_define(torch.unbind, "input", {"dim": 0}, forms=["unbind"])
_define(torch.squeeze, "input", {"dim": _ABSENT}, forms=["squeeze"])
_define(torch.unsqueeze, "input", {"dim": _REQUIRED}, forms=["unsqueeze"])
_define(torch.permute, "input", {"dims": _REQUIRED}, others={"permute": "input *dims"})
_TRANSPOSE = ["transpose", "swapaxes", "swapdims", torch.swapaxes, torch.swapdims]
_define(torch.transpose, "input", {"dim0": _REQUIRED, "dim1": _REQUIRED}, forms=_TRANSPOSE)
_define(torch.flatten, "input", {"start_dim": 0, "end_dim": -1}, forms=["flatten"])
_define(torch.reshape, "input", {"shape": _REQUIRED}, others={"reshape": "input *shape"})

_define(F.linear, "input weight bias?")
for _conv in (torch.conv1d, torch.conv2d, torch.conv3d):
    _define(_conv, "input weight bias?", {"stride": 1, "padding": 0, "dilation": 1, "groups": 1})
_BATCH_NORM_OPTIONS = {"training": False, "momentum": 0.1, "eps": 1e-5}
_define(F.batch_norm, "input running_mean running_var weight? bias?", _BATCH_NORM_OPTIONS)
_define(F.layer_norm, "input", {"normalized_shape": _REQUIRED, "weight": None, "bias": None, "eps": 1e-5})

_TARGETS = frozenset(form.call.target for form in (*_functions.values(), *_methods.values()))
_DIMENSIONS = frozenset({"dim", "dims", "dim0", "dim1", "start_dim", "end_dim"})
_ONE_MORE_DIMENSION = frozenset({torch.stack, torch.unsqueeze})


# Operations on single elements, in canonical form.
POINTWISE = frozenset(
    {
        *(getattr(torch, name) for name in _UNARY.split()),
        *(F.silu, F.gelu, F.leaky_relu, F.elu, F.hardswish, F.hardsigmoid),
        *(torch.add, torch.sub, torch.mul, torch.div),
    }
)
_WITH_EFFECTS = frozenset({F.dropout, F.batch_norm})


def only_computes(node: torch.fx.Node) -> bool:
    """Whether ``node`` is a canonical call that does nothing beyond its result."""
    return node.op == "call_function" and node.target in _TARGETS - _WITH_EFFECTS and node.kwargs.get("out") is None


def normalize_calls(graph_module: torch.fx.GraphModule) -> bool:
    changed = False
    steady = not any(writes_of(node).reshapes for node in graph_module.graph.nodes)
    for node in list(graph_module.graph.nodes):
        if node.op == "call_module":
            changed |= _inline_module(graph_module, node)
        if node.op in ("call_function", "call_method"):
            changed |= _normalize(graph_module, node, known_ranks=steady)
    return changed


def _normalize(graph_module: torch.fx.GraphModule, node: torch.fx.Node, *, known_ranks: bool) -> bool:
    form = _form_of(graph_module, node)
    if form is None:
        return False
    given = _bind(form, node)
    if given is None:
        return False
    target = form.call.target
    args = [given.pop(name) for name in form.call.operands]
    # Tensor operands only: + on sizes, or on a number and a tensor, has no torch function of the same meaning.
    if (target in _BINARY or node.target is operator.neg) and tensor_of(graph_module, args[0]) is None:
        return False
    rank = _rank(graph_module, args[0], target) if known_ranks else None
    kwargs = {name: _from_the_front(name, value, rank) for name, value in given.items()}
    if target is torch.chunk:
        part = _part_of_chunks(graph_module, args[0], kwargs) if known_ranks else None
        if part is not None:
            target, kwargs = torch.split, {"split_size_or_sections": part, "dim": kwargs["dim"]}
    if target in (torch.cat, torch.stack) and isinstance(args[0], (tuple, list)):
        args[0] = list(args[0])
    return _rewrite(node, target, tuple(args), kwargs)


def _form_of(graph_module: torch.fx.GraphModule, node: torch.fx.Node) -> Form | None:
    if node.op == "call_method":
        name = str(node.target)
        if name == "t":
            rank = _rank_of(graph_module, node.args[0])
            return _TRANSPOSED if rank == 2 and len(node.args) == 1 and not node.kwargs else None
        return _methods.get(name)
    if node.target is builtins.getattr and len(node.args) == 2:
        rank = _rank_of(graph_module, node.args[0])
        if rank is not None and rank >= 2 and (node.args[1] == "mT" or (node.args[1] == "T" and rank == 2)):
            return _TRANSPOSED
        return None
    try:
        return _functions.get(node.target)
    except TypeError:  # not hashable: not one of torch's functions
        return None


# x.t(), x.T and x.mT: the last two dimensions change places.
_TRANSPOSED = Form(
    CanonicalCall(torch.transpose, {"input": _REQUIRED}, {"dim0": -2, "dim1": -1}), ("input", "_attribute")
)
_IGNORED = frozenset({"_stacklevel", "_attribute"})


def _bind(form: Form, node: torch.fx.Node) -> dict[str, Any] | None:
    """The arguments by the names of the canonical call, with defaults; None when the call says something else."""
    call = form.call
    given = _by_position(form.parameters, node.args)
    if given is None:
        return None
    for keyword, value in node.kwargs.items():
        name = keyword if keyword in call.options else _SYNONYMS.get(keyword, keyword)
        if name in given:
            return None
        given[name] = value
    if given.pop("inplace", False) is not False:
        return None
    for name in _IGNORED:
        given.pop(name, None)
    bound: dict[str, Any] = {}
    for name, default in {**call.operands, **call.options}.items():
        value = given.pop(name, default)
        if value is _REQUIRED or (call.target is torch.softmax and name == "dim" and value is None):
            return None
        if value is not _ABSENT:
            bound[name] = value
    if given.get("rounding_mode", 0) is None:
        del given["rounding_mode"]
    if given.get("alpha", 0) == 1 and call.target in (torch.add, torch.sub):
        del given["alpha"]
    return None if given else bound


def _by_position(parameters: Sequence[str], args: Sequence[Any]) -> dict[str, Any] | None:
    """The positional arguments by name; None when there are too many."""
    given: dict[str, Any] = {}
    for position, name in enumerate(parameters[: len(args)]):
        if name.startswith("*"):
            return given | {name[1:]: _all_that_are_left(tuple(args[position:]))}
        given[name] = args[position]
    return given if len(args) <= len(parameters) else None


def _all_that_are_left(rest: tuple[Any, ...]) -> Any:
    """The arguments one by one, or the one that holds them all: a tuple, or the node of one such as ``x.shape``."""
    if len(rest) == 1:
        only = rest[0]
        if isinstance(only, (tuple, list)):
            return tuple(only)
        if isinstance(only, torch.fx.Node) and isinstance(only.meta.get("example_value"), (tuple, list)):
            return only
    return rest


def _rank_of(graph_module: torch.fx.GraphModule, node: Any) -> int | None:
    value = value_of(graph_module, node) if isinstance(node, torch.fx.Node) else None
    return value.dim() if isinstance(value, torch.Tensor) else None


def _rank(graph_module: torch.fx.GraphModule, operand: Any, target: Any) -> int | None:
    if isinstance(operand, (tuple, list)):
        ranks = {_rank_of(graph_module, item) for item in operand}
        # cat passes over empty vectors among tensors of another rank.
        rank = ranks.pop() if len(ranks) == 1 else None
    else:
        rank = _rank_of(graph_module, operand)
    return None if rank is None else rank + (target in _ONE_MORE_DIMENSION)


def _from_the_front(name: str, value: Any, rank: int | None) -> Any:
    if name in ("dims", "shape") and isinstance(value, list):
        value = tuple(value)
    if name not in _DIMENSIONS or rank is None:
        return value
    if isinstance(value, (tuple, list)):
        return tuple(_from_the_front(name, item, rank) for item in value)
    return value + rank if type(value) is int and -rank <= value < 0 else value


def _part_of_chunks(graph_module: torch.fx.GraphModule, operand: Any, options: Mapping[str, Any]) -> int | None:
    """The size of the parts ``chunk`` makes, where that is known; splitting into such parts is the same thing."""
    tensor, chunks, dim = tensor_of(graph_module, operand), options["chunks"], options["dim"]
    if tensor is None or type(chunks) is not int or type(dim) is not int or not 0 <= dim < tensor.dim():
        return None
    size = tensor.shape[dim]
    # Nothing in chunks is that many empty parts.
    return -(-size // chunks) if type(size) is int and size > 0 and chunks > 0 else None


def _rewrite(node: torch.fx.Node, target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    same = node.op == "call_function" and node.target is target and node.args == args
    if same and list(node.kwargs.items()) == list(kwargs.items()):
        return False
    node.op = "call_function"
    node.target = target
    node.args = args
    node.kwargs = kwargs
    return True


def _inline_module(graph_module: torch.fx.GraphModule, node: torch.fx.Node) -> bool:
    """Call the function behind a module of torch, with its parameters as attributes of the graph module."""
    module = graph_module.get_submodule(str(node.target))
    if len(node.args) != 1 or node.kwargs or _has_hooks(module):
        return False
    inlined = _MODULES.get(type(module))  # a class of the user's that inherits may do something else
    if inlined is None or not _is_its_function(module):
        return False
    target, names, attributes = inlined
    options = {name: getattr(module, name) for name in attributes.split()}
    values: list[Any] = [node.args[0]]
    with node.graph.inserting_before(node):
        for name in names.split():
            present = getattr(module, name) is not None
            values.append(node.graph.get_attr(f"{node.target}.{name}") if present else None)
    if target is F.layer_norm:
        options |= {"weight": values.pop(1), "bias": values.pop(1)}
    node.op = "call_function"
    node.target = target
    node.args = tuple(values)
    node.kwargs = options
    return True


def _has_hooks(module: nn.Module) -> bool:
    own = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return any(own) or bool(_has_any_global_hook())


# The function behind a module, its parameters and buffers that are operands, and its attributes that are options.
_MODULES: Mapping[type[nn.Module], tuple[Callable[..., Any], str, str]] = MappingProxyType(
    {
        nn.ReLU: (F.relu, "", "inplace"),
        nn.Sigmoid: (torch.sigmoid, "", ""),
        nn.Tanh: (torch.tanh, "", ""),
        nn.SiLU: (F.silu, "", "inplace"),
        nn.GELU: (F.gelu, "", "approximate"),
        nn.LeakyReLU: (F.leaky_relu, "", "negative_slope inplace"),
        nn.ELU: (F.elu, "", "alpha inplace"),
        nn.Hardswish: (F.hardswish, "", "inplace"),
        nn.Hardsigmoid: (F.hardsigmoid, "", "inplace"),
        nn.Softmax: (F.softmax, "", "dim"),
        nn.Flatten: (torch.flatten, "", "start_dim end_dim"),
        nn.Dropout: (F.dropout, "", "p training inplace"),
        nn.Linear: (F.linear, "weight bias", ""),
        nn.LayerNorm: (F.layer_norm, "weight bias", "normalized_shape eps"),
        nn.Conv1d: (torch.conv1d, "weight bias", "stride padding dilation groups"),
        nn.Conv2d: (torch.conv2d, "weight bias", "stride padding dilation groups"),
        nn.Conv3d: (torch.conv3d, "weight bias", "stride padding dilation groups"),
        **dict.fromkeys(
            (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d),
            (F.batch_norm, "running_mean running_var weight bias", "training momentum eps"),
        ),
    }
)


def _is_its_function(module: nn.Module) -> bool:
    """Whether calling the module is calling the function, at the values of its attributes now."""
    if isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d)):
        return module.padding_mode == "zeros"
    if isinstance(module, (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)):
        # Otherwise it counts batches, or reads the statistics of this one.
        return not module.training and module.running_mean is not None and module.running_var is not None
    return True
