"""Symbolic numbers as arguments: an expression of sizes is computed by nodes, from those that have its symbols."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import sympy
import torch
import torch.fx
from torch.fx.experimental.symbolic_shapes import find_symbol_binding_fx_nodes
from torch.fx.proxy import GraphAppendingTracer
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import PythonReferenceAnalysis

from torchkiln.errors import UnsupportedError
from torchkiln.graph.fake import expression
from torchkiln.graph.tangents import is_tangent

_aten = torch.ops.aten


class SizeNodes:
    """Writes numbers where a graph is being inserted to, each expression once; ``made`` has the nodes added.

    They are for readers of ``source``, so that symbols which only a node before it tells are found too. A number that
    the graph has no symbols for is refused, as lowering would refuse it.
    """

    def __init__(self, source: torch.fx.Node) -> None:
        self.made: list[torch.fx.Node] = []
        self._source, self._graph = source, source.graph
        self._tracer = GraphAppendingTracer(source.graph)
        self._known: dict[Any, Any] = {}
        self._bindings: dict[sympy.Symbol, torch.fx.Node] | None = None

    def argument(self, number: Any) -> Any:
        """An ``int``, a ``torch.SymInt`` or an expression as an argument: a number, or a node that has it."""
        expr = expression(number)
        if type(expr) is int or expr.is_Integer:
            return int(expr)
        if expr not in self._known:
            symbols = sorted(expr.free_symbols, key=str)
            env = {symbol: torch.fx.Proxy(self._symbol(symbol), self._tracer) for symbol in symbols}
            try:
                found = sympy_interp(PythonReferenceAnalysis, env, expr).node
            except (AttributeError, KeyError, NotImplementedError, TypeError) as error:
                raise UnsupportedError(f"the size {expr}, computed by the graph") from error
            self._known[expr] = self._with_values(found)
        return self._known[expr]

    def _with_values(self, node: torch.fx.Node) -> torch.fx.Node:
        """``node``, just written; it and what it was written with get the numbers they stand for."""
        if "val" not in node.meta:
            for source in node.all_input_nodes:
                self._with_values(source)
            assert callable(node.target)
            args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda source: source.meta["val"])
            node.meta["val"] = node.target(*args, **kwargs)
            self.made.append(node)
        return node

    def _symbol(self, symbol: sympy.Symbol) -> torch.fx.Node:
        if symbol not in self._known:
            self._known[symbol] = self._found(symbol)
        found: torch.fx.Node = self._known[symbol]
        return found

    def _found(self, symbol: sympy.Symbol) -> torch.fx.Node:
        if self._bindings is None:
            self._bindings = find_symbol_binding_fx_nodes(self._graph)
        if symbol in self._bindings:
            return self._bindings[symbol]
        for node in self._sources():
            value = node.meta.get("val")
            if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
                continue
            for target, numbers in ((_aten.sym_size.int, value.shape), (_aten.sym_stride.int, value.stride())):
                for dim, number in enumerate(numbers):
                    if expression(number) == symbol:
                        return self._with_values(self._graph.call_function(target, (node, dim)))
        raise UnsupportedError(f"the size {symbol}, which nothing before {self._source.name} tells")

    def _sources(self) -> Iterator[torch.fx.Node]:
        """Nodes that are there wherever the source is: inputs of forward, and what it is computed from."""
        inputs = self._graph.find_nodes(op="placeholder")
        yield from (node for node in inputs if not is_tangent(node))
        seen, waiting = {self._source}, [self._source]
        while waiting:
            node = waiting.pop()
            yield node
            new = [source for source in node.all_input_nodes if source not in seen]
            seen.update(new)
            waiting += new
