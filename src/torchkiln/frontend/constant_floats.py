"""Floats that become constants: Dynamo is asked to capture without them before AOTAutograd traces in vain.

With ``dynamic=True`` Dynamo takes each float it meets for one that may change and makes it an input of the graph. Most
are handed to operators that take plain numbers (the epsilon of a norm, the probability of a dropout) and are guarded to
be what they are. AOTAutograd looks for these when its traces are done, and has Dynamo capture the frame again without
such inputs. The captured graph tells as much before they begin.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Iterator
from typing import Any

import sympy
import torch
import torch.fx
import torch.nn.functional as F
from torch._dynamo import utils
from torch._dynamo.exc import TensorifyScalarRestartAnalysis
from torch._dynamo.symbolic_convert import TensorifyState
from torch.fx.experimental.sym_node import SymNode
from torch.utils._sympy.symbol import SymT, symbol_is_type

from torchkiln.graph.fake import SYMBOLIC, fake_mode_of, symbol_examples

# AOTAutograd makes tensors of the floats these are given, which stay inputs.
_ARITHMETIC = frozenset({operator.add, operator.mul, operator.truediv})
# Hand a float on to an operator that takes it as a number, or make no use of it.
_TAKE_NUMBERS = frozenset({F.embedding, F.hardtanh})


def capture_without_constant_floats(graph_module: torch.fx.GraphModule) -> None:
    """Raise what makes Dynamo capture again where AOTAutograd would raise it after tracing this graph.

    Where one of the floats may stay an input or not, nothing is raised: AOTAutograd could ask for one more capture.
    """
    mode = fake_mode_of(graph_module.graph)
    if mode is None or mode.shape_env is None or not _floats_become_tensors() or not _is_captured(graph_module.graph):
        return
    floats = [symbol for symbol in _floats(mode.shape_env) if not TensorifyState.should_specialize(symbol.name)]
    if not floats:
        return
    readers = _readers(graph_module.graph)
    constants = []
    for symbol in floats:
        its_readers = readers.get(symbol, set())
        if _is_known(symbol, mode.shape_env) or its_readers <= _TAKE_NUMBERS:
            constants.append(symbol)
        elif not its_readers <= _ARITHMETIC:
            return
    for symbol in constants:
        TensorifyState.specialize(symbol.name)
    if constants:
        raise TensorifyScalarRestartAnalysis


def _is_known(symbol: sympy.Symbol, shape_env: Any) -> bool:
    """Whether a float was found to be a number, and not only to equal another one."""
    replacement = shape_env.replacements.get(symbol)
    return replacement is not None and not replacement.free_symbols


def _floats_become_tensors() -> bool:
    """Whether AOTAutograd looks for such floats at all, which a variable of the environment can turn off."""
    enabled = getattr(utils, "_is_tensorify_enabled", None)
    if enabled is not None:
        return bool(enabled())
    return os.getenv("TENSORIFY_PYTHON_SCALARS") not in ("0", "FALSE")


def _floats(shape_env: Any) -> Iterator[sympy.Symbol]:
    for symbol, value in symbol_examples(shape_env).items():
        if symbol_is_type(symbol, SymT.FLOAT) and isinstance(value, sympy.Float):
            yield symbol


def _readers(graph: torch.fx.Graph) -> dict[sympy.Symbol, set[Any]]:
    """What is called with numbers made of a symbol and gives something else than a number."""
    found: dict[sympy.Symbol, set[Any]] = {}
    for node in graph.nodes:
        if _is_number(node):
            # The symbols as they were before one was found to be a constant.
            for symbol in node.meta["example_value"].node._expr.free_symbols:
                found.setdefault(symbol, set()).update(user.target for user in node.users if not _is_number(user))
    return found


def _is_captured(graph: torch.fx.Graph) -> bool:
    """Whether Dynamo has made the graph, and hears what is raised."""
    return any("example_value" in node.meta for node in graph.find_nodes(op="placeholder"))


def _is_number(node: torch.fx.Node) -> bool:
    value = node.meta.get("example_value")
    # Numbers of other kinds, such as the lengths of nested tensors, are made of no symbols.
    return isinstance(value, SYMBOLIC) and isinstance(value.node, SymNode)
