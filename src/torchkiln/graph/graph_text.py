"""A graph as text that is the same in every process: what a cache key says of it.

Nodes are numbered, so names, lines and files of the user's program are no part of it. Symbols of sizes are numbered in
the order they appear. What has no such text raises :class:`NoTextError`, and the graph is not cached: code of the
user's that a trace would look into, or an object of unknown type.
"""

from __future__ import annotations

import hashlib
import struct
import sys
import types
from collections.abc import Iterator
from typing import Any

import sympy
import torch
import torch.fx
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.sym_node import SymNode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.fx.node import _get_qualified_name
from torch.utils._sympy.symbol import SymT, symbol_is_type

from torchkiln.artifact.calls import TRITON_KERNEL_NAME
from torchkiln.graph.effects import is_of_users, is_ordered_effect
from torchkiln.graph.fake import SYMBOLIC
from torchkiln.native.tensor_classes import is_no_subclass


class NoTextError(Exception):
    """A graph holds something that has no text which is the same in every process; the message says what."""


# Modules whose functions are those of an installed version, which is part of a key.
_KNOWN_MODULES = ("torch", "_operator", "builtins", "math", "operator")

# Hashing takes a millisecond for each MiB.
_LARGEST_CONSTANT = 16 << 20

_PLAIN = (bool, int, str, bytes, types.NoneType, types.EllipsisType, torch.dtype, torch.device, torch.layout)


class GraphText:
    """Writes graphs and tensors; symbols keep their number over all that one object writes.

    A captured graph is traced once more, so only what is traced the same everywhere has a text. Of a ``functional``
    graph nothing is traced: operators of users are there by schema and tags, tensors of the graph by their content, and
    the metadata of each node is part of the text.
    """

    def __init__(self, *, functional: bool = False) -> None:
        self._functional = functional
        self._symbols: dict[sympy.Symbol, sympy.Symbol] = {}
        self._expressions: dict[sympy.Basic, str] = {}
        self._targets: dict[Any, str] = {}

    @property
    def symbols(self) -> tuple[sympy.Symbol, ...]:
        """The symbols seen so far; the position of each is its number."""
        return tuple(self._symbols)

    def graph(self, graph_module: torch.fx.GraphModule) -> Iterator[str]:
        """A line for each node; those of subgraphs are indented below the node that names them."""
        if type(graph_module.graph._codegen) is not torch.fx.graph.CodeGen:
            raise NoTextError("a graph with a calling convention of its own")
        names: dict[torch.fx.Node, str] = {}
        for number, node in enumerate(graph_module.graph.nodes):
            names[node] = f"%{number}"
            arguments = [self.value(argument, names) for argument in node.args]
            arguments += [f"{name}={self.value(argument, names)}" for name, argument in node.kwargs.items()]
            noted = self._noted(node)
            if node.op == "get_attr":
                yield f"%{number} = {self._attribute(graph_module, node)}{noted}"
                inner = _attribute_of(graph_module, node)
                if isinstance(inner, torch.fx.GraphModule):
                    yield from (f"  {line}" for line in self.graph(inner))
            elif node.op == "placeholder":
                yield f"%{number} = input{noted}"
            elif node.op == "output":
                yield f"return {', '.join(arguments)}"
            else:
                yield f"%{number} = {self._target(node)}({', '.join(arguments)}){noted}"

    def _noted(self, node: torch.fx.Node) -> str:
        """What the meta of a node says that compiling depends on."""
        custom = node.meta.get("custom")
        parts = [self.value(custom)] if custom else []
        if self._functional:
            tag = node.meta.get("partitioner_tag")
            parts += [f"{tag}"] if tag else []
            called = node.meta.get("original_aten", node.target)  # an error may be that operator's
            parts += [f"of {called}"] if str(called) != str(node.target) else []
            parts += [f"binds {len(node.meta['unbacked_bindings'])}"] if node.meta.get("unbacked_bindings") else []
            parts += [self.metadata(node.meta.get("val"))]
        return f" {' '.join(parts)}" if parts else ""

    def metadata(self, value: Any) -> str:
        """What a node computes: tensors, numbers, and containers of them."""
        if isinstance(value, torch.Tensor):
            return self.tensor(value)
        if isinstance(value, (tuple, list)):
            return f"({', '.join(map(self.metadata, value))})"
        return self.value(value)

    def value(self, value: Any, names: dict[torch.fx.Node, str] | None = None) -> str:
        """An argument of a node; ``names`` are the texts of nodes."""
        kind = type(value)
        if kind is torch.fx.Node and names is not None:
            return names[value]
        if kind in _PLAIN or isinstance(value, torch.memory_format):
            return repr(value)
        if kind is float:
            return _float(value)
        if kind is complex:
            return f"complex({_float(value.real)}, {_float(value.imag)})"
        if isinstance(value, dict):
            items = ", ".join(f"{self.value(k, names)}: {self.value(v, names)}" for k, v in value.items())
            return f"{_class_of(value, dict)}{{{items}}}"
        if isinstance(value, slice):
            return "slice" + self.value((value.start, value.stop, value.step), names)
        if isinstance(value, (tuple, list)):
            name = _class_of(value, tuple, list, torch.Size)
            parts = ", ".join(self.value(item, names) for item in value)
            return f"{name}[{parts}]" if isinstance(value, list) else f"{name}({parts})"
        if isinstance(value, SYMBOLIC):
            return self.number(value)
        if isinstance(value, (OpOverload, OpOverloadPacket, HigherOrderOperator)) or callable(value):
            return self._function(value)
        raise NoTextError(f"an argument of type {kind.__module__}.{kind.__qualname__}")

    def number(self, value: Any) -> str:
        """A size: a number, or an expression over numbered symbols."""
        if not isinstance(value, SYMBOLIC):
            return repr(value)
        if not isinstance(value.node, SymNode):  # such as the length of a ragged dimension
            raise NoTextError(f"a number that is {value}")
        return self.expression(value.node.expr)

    def expression(self, expression: sympy.Basic) -> str:
        known = self._expressions.get(expression)
        if known is None:
            known = self._expressions[expression] = str(expression.xreplace(self._numbered(expression)))
        return known

    def _numbered(self, expression: sympy.Basic) -> dict[sympy.Basic, sympy.Basic]:
        # An expression orders its terms by the names of symbols: those of the first use decide.
        for symbol in sorted(expression.free_symbols - self._symbols.keys(), key=str):
            number = f"{_kind_of_symbol(symbol)}{len(self._symbols)}"
            self._symbols[symbol] = sympy.Symbol(number, **symbol.assumptions0)
        return {symbol: self._symbols[symbol] for symbol in expression.free_symbols}

    def tensor(self, tensor: torch.Tensor) -> str:
        """Dtype, sizes, strides, offset and what else compiling depends on, but for its values and its memory."""
        if not is_no_subclass(tensor) and type(tensor) is not FakeTensor:
            raise NoTextError(f"a tensor of type {type(tensor).__module__}.{type(tensor).__qualname__}")
        if tensor.layout is not torch.strided or tensor.is_quantized:
            raise NoTextError(f"a tensor that is {'quantized' if tensor.is_quantized else tensor.layout}")
        sizes, strides = (",".join(map(self.number, numbers)) for numbers in (tensor.shape, tensor.stride()))
        facts = {
            "requires_grad": tensor.requires_grad,
            "not_leaf": not tensor.is_leaf,
            "view": tensor._is_view(),
            "inference": tensor.is_inference(),
            "conj": tensor.is_conj(),
            "neg": tensor.is_neg(),
            "zero": tensor._is_zerotensor(),
        }
        noted = " ".join(name for name, holds in facts.items() if holds)
        offset = self.number(tensor.storage_offset())
        dtype = str(tensor.dtype).removeprefix("torch.")
        return f"{dtype}[{sizes}] strides [{strides}] offset {offset} {tensor.device} {noted}".rstrip()

    def _target(self, node: torch.fx.Node) -> str:
        if node.op == "call_method":
            return f".{node.target}"
        if node.op != "call_function":
            raise NoTextError(f"a node that is a {node.op}")
        return self._function(node.target)

    def _function(self, target: Any) -> str:
        found = self._targets.get(target)
        if found is None:
            found = self._targets[target] = _name(target, users=self._functional)
        return found

    def _attribute(self, graph_module: torch.fx.GraphModule, node: torch.fx.Node) -> str:
        value = _attribute_of(graph_module, node)
        if isinstance(value, torch.fx.GraphModule):
            # A trace looks there, for the policy of a checkpointed region and the options of a nested one.
            return f"graph {self.value(value.meta)}" if value.meta and not self._functional else "graph"
        if isinstance(value, torch.Tensor):
            return f"constant {self.tensor(value)} {self._content(value)}"
        return self.value(value)

    def _content(self, tensor: torch.Tensor) -> str:
        if not self._functional or isinstance(tensor, FakeTensor) or tensor.device.type != "cpu":
            raise NoTextError("a tensor of the graph itself")
        if tensor.nbytes > _LARGEST_CONSTANT:
            raise NoTextError("a large tensor of the graph itself")
        plain = tensor.detach().resolve_conj().resolve_neg().reshape(-1)
        content = plain.view(torch.uint8).numpy().tobytes() if plain.numel() else b""
        return hashlib.sha256(content).hexdigest()


def _attribute_of(graph_module: torch.fx.GraphModule, node: torch.fx.Node) -> Any:
    value: Any = graph_module
    for name in str(node.target).split("."):
        value = getattr(value, name)
    return value


def _float(value: float) -> str:
    """Every bit of it: two values that are not a number may differ in sign."""
    return value.hex() if value == value else f"nan({struct.pack('>d', value).hex()})"


def _class_of(container: Any, *plain: type) -> str:
    """The name of a container's class, such as a namedtuple's; empty for ``plain`` ones and those of FX."""
    kind = type(container)
    return "" if kind in plain or kind.__module__.startswith("torch.fx") else _name(kind)


def _kind_of_symbol(symbol: sympy.Symbol) -> str:
    """A letter: tracing treats a size without an example in a way of its own, and floats unlike integers."""
    if symbol_is_type(symbol, (SymT.UNBACKED_INT, SymT.UNBACKED_FLOAT)):
        return "u" if symbol.is_integer else "v"
    return "z" if symbol.is_integer else "y"


def _name(target: Any, *, users: bool = False) -> str:
    """The qualified name of a function or class of torch or Python; with ``users``, an operator of theirs too."""
    if isinstance(target, OpOverload):
        if target.name() == TRITON_KERNEL_NAME:
            raise NoTextError(f"{target}, which names its kernel by a number of this process")
        if not is_of_users(target):
            return str(target)
        if users:
            ordered = " ordered" if is_ordered_effect(target) else ""
            return f"{target._schema} {sorted(map(str, target.tags))}{ordered}"
        raise NoTextError(f"{target}, an operator of the user's")
    if isinstance(target, OpOverloadPacket):
        overloads = [_name(getattr(target, overload), users=users) for overload in target.overloads()]
        return f"{target} of {', '.join(overloads)}"
    if isinstance(target, HigherOrderOperator):
        if not _is_known(type(target).__module__):
            raise NoTextError(f"{target.name()}, a higher-order operator of the user's")
        if target.name().startswith("triton_kernel_wrapper"):
            raise NoTextError(f"{target.name()}, which names its kernel by a number of this process")
        return f"higher_order.{target.name()}"
    module = getattr(target, "__module__", None) or type(target).__module__
    if not _is_known(module) or not hasattr(target, "__name__"):
        raise NoTextError(f"a call of {module}.{getattr(target, '__qualname__', target)}")
    name = str(_get_qualified_name(target)) if not isinstance(target, type) else f"{module}.{target.__qualname__}"
    if not _is_what_its_name_says(target, name):
        raise NoTextError(f"a call of {name}, or of what has its name")
    return name


def _is_known(module: str) -> bool:
    return module.partition(".")[0] in _KNOWN_MODULES


def _is_what_its_name_says(target: Any, name: str) -> bool:
    """Whether ``name`` leads to ``target``, and its code is torch's: ``functools.wraps`` copies names, too."""
    if isinstance(target, types.FunctionType) and not _is_known(str(target.__globals__.get("__name__"))):
        return False
    module, _, rest = name.rpartition(".")
    while module and module not in sys.modules:
        module, _, outer = module.rpartition(".")
        rest = f"{outer}.{rest}"
    found: Any = sys.modules.get(module)
    for part in rest.split("."):
        found = getattr(found, part, None)
    # Methods of C classes are made anew each time they are asked for.
    return found is target or (isinstance(target, types.BuiltinMethodType) and found == target)


def size_lines(text: GraphText, shape_env: ShapeEnv | None) -> list[str]:
    """What is known of the symbols that ``text`` has seen: their ranges, and the guards there are so far."""
    if shape_env is None or not text.symbols:
        return []
    symbols = set(text.symbols)
    lines = [f"{text.expression(s)} in {shape_env.var_to_range.get(s)}" for s in text.symbols]
    guards = (guard.expr for guard in shape_env.guards)
    lines += sorted({text.expression(expr) for expr in guards if expr.free_symbols and expr.free_symbols <= symbols})
    return lines
