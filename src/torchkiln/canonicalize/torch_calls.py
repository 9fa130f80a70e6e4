"""One spelling for each operation: functions, methods and modules become one function with arguments by name.

``x.relu()``, ``F.relu(x)`` and ``nn.ReLU()`` become ``torch.relu(x)``; ``x.split(2, -1)`` becomes ``torch.split(x,
split_size_or_sections=2, dim=1)``. The operands come by position, in the order of the table below, the other arguments
by name and all of them, defaults too; dimensions count from the front where the rank is known. Every form computes the
same, shares memory the same way and is differentiated the same; a call that writes (``inplace=True``, ``out=``) stays
as it is. The later passes of this stage read these spellings only.
"""

from __future__ import annotations

import builtins
import operator
from collections.abc import Callable, Mapping
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
class Spelling:
    """The one way to write an operation: ``target``, operands by position, options by name with their defaults."""

    target: Callable[..., Any]
    operands: tuple[str, ...]
    options: Mapping[str, object] = field(default_factory=dict)
    operand_defaults: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class Form:
    """Another way to write it: the names of its positional arguments, in order; ``*name`` takes all that are left."""

    spelling: Spelling
    parameters: tuple[str, ...]


_functions: dict[Any, Form] = {}
_methods: dict[str, Form] = {}


def _spell(
    target: Any,
    operands: str,
    options: Mapping[str, object] | None = None,
    *,
    forms: Mapping[Any, str],
    operand_defaults: Mapping[str, object] | None = None,
) -> None:
    spelling = Spelling(target, tuple(operands.split()), options or {}, operand_defaults or {})
    for form, parameters in forms.items():
        table: dict[Any, Form] = _methods if isinstance(form, str) else _functions
        table[form] = Form(spelling, tuple(parameters.split()))


_UNARY = """
    abs neg exp exp2 expm1 log log1p log2 log10 sqrt rsqrt square reciprocal sin cos tan asin acos atan sinh cosh asinh
    acosh atanh erf erfc sigmoid tanh relu floor ceil round trunc frac sign isnan isinf isfinite logical_not bitwise_not
"""
for _name in _UNARY.split():
    _spell(getattr(torch, _name), "input", forms={getattr(torch, _name): "input", _name: "input"})
for _form in (F.sigmoid, F.tanh):
    _functions[_form] = _functions[getattr(torch, _form.__name__)]
_functions[F.relu] = Form(_methods["relu"].spelling, ("input", "inplace"))
_functions[operator.neg] = _functions[torch.neg]

_spell(F.silu, "input", forms={F.silu: "input inplace"})
_spell(F.gelu, "input", {"approximate": "none"}, forms={F.gelu: "input"})
_spell(F.leaky_relu, "input", {"negative_slope": 0.01}, forms={F.leaky_relu: "input negative_slope inplace"})
_spell(F.elu, "input", {"alpha": 1.0}, forms={F.elu: "input alpha inplace"})
_spell(F.hardswish, "input", forms={F.hardswish: "input inplace"})
_spell(F.hardsigmoid, "input", forms={F.hardsigmoid: "input inplace"})
_spell(
    torch.softmax,
    "input",
    {"dim": _REQUIRED, "dtype": None},
    forms={torch.softmax: "input dim dtype", "softmax": "input dim dtype", F.softmax: "input dim _stacklevel dtype"},
)
_BINARY = {
    torch.add: (operator.add, "add", "__add__"),
    torch.sub: (operator.sub, "sub", "__sub__", "subtract", torch.subtract),
    torch.mul: (operator.mul, "mul", "__mul__", "multiply", torch.multiply),
    torch.div: (operator.truediv, "div", "__truediv__", "divide", "true_divide", torch.divide, torch.true_divide),
    torch.matmul: (operator.matmul, "matmul", "__matmul__"),
}
for _target, _forms in _BINARY.items():
    _spell(_target, "input other", forms=dict.fromkeys((_target, *_forms), "input other"))

_spell(
    torch.cat, "tensors", {"dim": 0}, forms=dict.fromkeys((torch.cat, torch.concat, torch.concatenate), "tensors dim")
)
_spell(torch.stack, "tensors", {"dim": 0}, forms={torch.stack: "tensors dim"})
_SPLIT = (torch.split, torch.split_with_sizes, "split", "split_with_sizes")
_spell(
    torch.split,
    "input",
    {"split_size_or_sections": _REQUIRED, "dim": 0},
    forms=dict.fromkeys(_SPLIT, "input split_size_or_sections dim"),
)
_spell(
    torch.chunk,
    "input",
    {"chunks": _REQUIRED, "dim": 0},
    forms={torch.chunk: "input chunks dim", "chunk": "input chunks dim"},
)
_spell(torch.unbind, "input", {"dim": 0}, forms={torch.unbind: "input dim", "unbind": "input dim"})
_spell(torch.squeeze, "input", {"dim": _ABSENT}, forms={torch.squeeze: "input dim", "squeeze": "input dim"})
_spell(torch.unsqueeze, "input", {"dim": _REQUIRED}, forms={torch.unsqueeze: "input dim", "unsqueeze": "input dim"})
_spell(torch.permute, "input", {"dims": _REQUIRED}, forms={torch.permute: "input dims", "permute": "input *dims"})
_TRANSPOSE = ("transpose", "swapaxes", "swapdims", torch.transpose, torch.swapaxes, torch.swapdims)
_spell(
    torch.transpose,
    "input",
    {"dim0": _REQUIRED, "dim1": _REQUIRED},
    forms=dict.fromkeys(_TRANSPOSE, "input dim0 dim1"),
)
_spell(
    torch.flatten,
    "input",
    {"start_dim": 0, "end_dim": -1},
    forms={torch.flatten: "input start_dim end_dim", "flatten": "input start_dim end_dim"},
)
_spell(torch.reshape, "input", {"shape": _REQUIRED}, forms={torch.reshape: "input shape", "reshape": "input *shape"})

_spell(F.linear, "input weight bias", forms={F.linear: "input weight bias"}, operand_defaults={"bias": None})
for _conv in (torch.conv1d, torch.conv2d, torch.conv3d):
    _spell(
        _conv,
        "input weight bias",
        {"stride": 1, "padding": 0, "dilation": 1, "groups": 1},
        forms={_conv: "input weight bias stride padding dilation groups"},
        operand_defaults={"bias": None},
    )
_spell(
    F.batch_norm,
    "input running_mean running_var weight bias",
    {"training": False, "momentum": 0.1, "eps": 1e-5},
    forms={F.batch_norm: "input running_mean running_var weight bias training momentum eps"},
    operand_defaults={"weight": None, "bias": None},
)
_spell(
    F.layer_norm,
    "input",
    {"normalized_shape": _REQUIRED, "weight": None, "bias": None, "eps": 1e-5},
    forms={F.layer_norm: "input normalized_shape weight bias eps"},
)
_spell(F.dropout, "input", {"p": 0.5, "training": True}, forms={F.dropout: "input p training inplace"})

_TARGETS = frozenset(form.spelling.target for form in (*_functions.values(), *_methods.values()))
_DIMENSIONS = frozenset({"dim", "dims", "dim0", "dim1", "start_dim", "end_dim"})
_ONE_MORE_DIMENSION = frozenset({torch.stack, torch.unsqueeze})


# Operations on single elements, as this pass spells them.
POINTWISE = frozenset(
    {
        *(getattr(torch, name) for name in _UNARY.split()),
        *(F.silu, F.gelu, F.leaky_relu, F.elu, F.hardswish, F.hardsigmoid),
        *(torch.add, torch.sub, torch.mul, torch.div),
    }
)
_WITH_EFFECTS = frozenset({F.dropout, F.batch_norm})


def only_computes(node: torch.fx.Node) -> bool:
    """Whether ``node`` is a call as this pass spells it that does nothing beyond its result."""
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
    spelling = form.spelling
    # Tensor operands only: + on sizes, or on a number and a tensor, has no torch function of the same meaning.
    first = given[spelling.operands[0]]
    by_operator = spelling.target in _BINARY or node.target is operator.neg
    if by_operator and tensor_of(graph_module, first) is None:
        return False
    args = [given.pop(name) for name in spelling.operands]
    rank = _rank(graph_module, args[0], spelling) if known_ranks else None
    kwargs = {name: _from_the_front(name, value, rank) for name, value in given.items()}
    target = spelling.target
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
            return _TURNED if rank == 2 and len(node.args) == 1 and not node.kwargs else None
        return _methods.get(name)
    if node.target is builtins.getattr and len(node.args) == 2:
        rank = _rank_of(graph_module, node.args[0])
        if rank is not None and (node.args[1] == "mT" or (node.args[1] == "T" and rank == 2)):
            return _TURNED
        return None
    try:
        return _functions.get(node.target)
    except TypeError:  # not hashable: not one of torch's functions
        return None


# x.t(), x.T and x.mT: the last two dimensions change places.
_TURNED = Form(
    Spelling(torch.transpose, ("input",), {"dim0": -2, "dim1": -1}),
    ("input", "_attribute"),
)
_IGNORED = frozenset({"_stacklevel", "_attribute"})


def _bind(form: Form, node: torch.fx.Node) -> dict[str, Any] | None:
    """The arguments by the names of the spelling, with defaults; None when the call says something else."""
    given: dict[str, Any] = {}
    for position, name in enumerate(form.parameters):
        if position >= len(node.args):
            break
        if name.startswith("*"):
            given[name[1:]] = _all_that_are_left(node.args[position:])
            break
        given[name] = node.args[position]
    else:
        if len(node.args) > len(form.parameters):
            return None
    spelling = form.spelling
    for keyword, value in node.kwargs.items():
        name = keyword if keyword in spelling.options else _SYNONYMS.get(keyword, keyword)
        if name in given:
            return None
        given[name] = value
    if given.pop("inplace", False) is not False:
        return None
    for name in _IGNORED:
        given.pop(name, None)
    bound: dict[str, Any] = {}
    defaults = {**dict.fromkeys(spelling.operands, _REQUIRED), **spelling.operand_defaults, **spelling.options}
    for name, default in defaults.items():
        value = given.pop(name, default)
        if value is _REQUIRED or (spelling.target is torch.softmax and name == "dim" and value is None):
            return None
        if value is not _ABSENT:
            bound[name] = value
    if given.get("rounding_mode", 0) is None:
        del given["rounding_mode"]
    if given.get("alpha", 0) == 1 and spelling.target in (torch.add, torch.sub):
        del given["alpha"]
    return None if given else bound


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


def _rank(graph_module: torch.fx.GraphModule, operand: Any, spelling: Spelling) -> int | None:
    if isinstance(operand, (tuple, list)):
        ranks = {_rank_of(graph_module, item) for item in operand}
        # cat passes over empty vectors among tensors of another rank.
        rank = ranks.pop() if len(ranks) == 1 else None
    else:
        rank = _rank_of(graph_module, operand)
    return None if rank is None else rank + (spelling.target in _ONE_MORE_DIMENSION)


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
    inlined = _function_of_module(module)
    if inlined is None:
        return False
    target, names, options = inlined
    values: list[Any] = [node.args[0]]
    with node.graph.inserting_before(node):
        for name in names:
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


_WITHOUT_PARAMETERS: Mapping[type[nn.Module], tuple[Callable[..., Any], str]] = MappingProxyType(
    {
        nn.ReLU: (F.relu, "inplace"),
        nn.Sigmoid: (torch.sigmoid, ""),
        nn.Tanh: (torch.tanh, ""),
        nn.SiLU: (F.silu, "inplace"),
        nn.GELU: (F.gelu, "approximate"),
        nn.LeakyReLU: (F.leaky_relu, "negative_slope inplace"),
        nn.ELU: (F.elu, "alpha inplace"),
        nn.Hardswish: (F.hardswish, "inplace"),
        nn.Hardsigmoid: (F.hardsigmoid, "inplace"),
        nn.Softmax: (F.softmax, "dim"),
        nn.Flatten: (torch.flatten, "start_dim end_dim"),
        nn.Dropout: (F.dropout, "p training inplace"),
    }
)
_CONVOLUTIONS: Mapping[type[nn.Module], Callable[..., Any]] = MappingProxyType(
    {nn.Conv1d: torch.conv1d, nn.Conv2d: torch.conv2d, nn.Conv3d: torch.conv3d}
)

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def _function_of_module(module: nn.Module) -> tuple[Callable[..., Any], tuple[str, ...], dict[str, Any]] | None:
    kind = type(module)  # a class of the user's that inherits may do something else
    if kind in _WITHOUT_PARAMETERS:
        target, names = _WITHOUT_PARAMETERS[kind]
        return target, (), {name: getattr(module, name) for name in names.split()}
    if isinstance(module, nn.Linear) and kind is nn.Linear:
        return F.linear, ("weight", "bias"), {}
    if isinstance(module, nn.LayerNorm) and kind is nn.LayerNorm:
        return F.layer_norm, ("weight", "bias"), {"normalized_shape": module.normalized_shape, "eps": module.eps}
    if kind in _CONVOLUTIONS and isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d)):
        if module.padding_mode != "zeros":
            return None
        options: dict[str, Any] = {name: getattr(module, name) for name in ("stride", "padding", "dilation", "groups")}
        return _CONVOLUTIONS[kind], ("weight", "bias"), options
    if kind in _BATCH_NORMS and isinstance(module, (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)):
        if module.training or module.running_mean is None or module.running_var is None:
            return None  # counts batches, or reads the statistics of this one
        options = {"training": False, "momentum": module.momentum, "eps": module.eps}
        return F.batch_norm, ("running_mean", "running_var", "weight", "bias"), options
    return None
