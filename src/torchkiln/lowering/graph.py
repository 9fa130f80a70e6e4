"""Lowering a whole functional ATen graph to a :class:`Program`: its inputs, its constants, and node after node."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.fx
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import is_nested_int

from torchkiln.actions import Actions
from torchkiln.errors import UnsupportedError
from torchkiln.graph.aliases import DONATED, STATIC_INPUT, Aliases
from torchkiln.graph.attention_states import is_state
from torchkiln.graph.saved_values import saved_for_backward
from torchkiln.graph.source import blame
from torchkiln.graph.weights import is_packed_weight
from torchkiln.ir import expr as ex
from torchkiln.ir.index import Extent
from torchkiln.ir.program import Input, Output, Program, SizeSource
from torchkiln.lowering.builder import SUPPORTED_DTYPES, Builder, TensorValue, is_opaque
from torchkiln.lowering.calls import lower_call
from torchkiln.lowering.higher_order import Bodies
from torchkiln.lowering.outputs import lower_outputs
from torchkiln.target import Target

aten = torch.ops.aten


def lower_graph(
    gm: torch.fx.GraphModule,
    target: Target,
    *,
    exact_half: bool = False,
    layouts: Sequence[Sequence[Extent] | None] = (),
    fresh_outputs: bool = False,
    kind: str = "inference",
    actions: Actions | None = None,
) -> Program:
    """Turn every node into loops, views or an extern call. Node values need ``meta["val"]``.

    ``layouts`` are the strides of the inputs where they are not those of their fake tensors. With ``fresh_outputs``
    no output shows memory of an input. ``kind`` is inference, forward or backward. ``actions`` counts calls.
    """
    bodies = Bodies(partial(lower_graph, target=target, exact_half=exact_half, actions=actions))
    builder = Builder(target, exact_half=exact_half, actions=actions)
    return _GraphLowering(gm, builder, bodies, iter(layouts), fresh_outputs, kind).program()


@dataclass
class _GraphLowering:
    """The walk over one graph, with what each node became."""

    gm: torch.fx.GraphModule
    builder: Builder
    bodies: Bodies
    layouts: Iterator[Sequence[Extent] | None]
    fresh_outputs: bool
    kind: str
    values: dict[Node, Any] = field(default_factory=dict)
    inputs: list[Input] = field(default_factory=list)
    constants: list[tuple[str, torch.Tensor]] = field(default_factory=list)
    outputs: tuple[Output, ...] = ()

    def __post_init__(self) -> None:
        self.aliases = Aliases(self.gm.graph)
        self.sources = _size_sources(self.builder, self.gm.graph.find_nodes(op="placeholder"))

    def program(self) -> Program:
        builder = self.builder
        steps: dict[str, Callable[[Node], Any]] = {
            "placeholder": self._placeholder,
            "get_attr": self._attribute,
            "call_function": self._call,
            "output": self._output,
        }
        for node in self.gm.graph.nodes:
            builder.lower_for(node)
            with blame(node):
                if node.op not in steps:
                    raise UnsupportedError(f"node kind {node.op!r} in a functional graph")
                self.values[node] = steps[node.op](node)
        builder.sizes.require_found()
        return Program(
            inputs=tuple(self.inputs),
            constants=(*self.constants, *builder.tables),
            buffers=builder.buffers,
            operations=tuple(builder.operations),
            outputs=self.outputs,
            sizes=tuple(self.sources),
            card=builder.card,
            saved=tuple(sorted(saved_for_backward(self.gm.graph.output_node()))),
        )

    def _placeholder(self, node: Node) -> Any:
        builder, value, strides = self.builder, node.meta.get("val"), next(self.layouts, None)
        if isinstance(value, torch.SymInt):
            self.inputs.append(Input(node.name, None))
            # The name of a ragged dimension stands for no number: it may be handed out again, and nothing else.
            return value if is_nested_int(value) else builder.sizes.extent(value)
        if isinstance(value, (torch.SymFloat, torch.SymBool)):
            raise UnsupportedError(f"the input {node.name}, a number known only at run time that is no size")
        unused = not node.users and all(source.position != len(self.inputs) for source in self.sources)
        if not isinstance(value, torch.Tensor) or unused:  # may be anything
            self.inputs.append(Input(node.name, None))
            return value
        opaque = is_packed_weight(node) or is_state(node)
        buffer = builder.add_buffer_for("a", value, strides=strides, opaque=opaque)
        if buffer.opaque:
            self.inputs.append(Input(node.name, buffer.name))
            return builder.value_of(buffer)
        donated, any_strides = bool(node.meta.get(DONATED)), self.kind == "backward"
        static = bool(node.meta.get(STATIC_INPUT))
        self.inputs.append(Input(node.name, buffer.name, donated, any_strides, static))
        if value.is_neg() or value.is_conj():  # still to be done, and to be done by torch: memory holds the opposite
            (done,) = builder.extern(aten.clone.default, (buffer.whole, None), [value.resolve_neg().resolve_conj()])
            return done
        builder.inputs.add(buffer.name)
        return builder.read(buffer)

    def _attribute(self, node: Node) -> Any:
        target: Any = operator.attrgetter(str(node.target))(self.gm)
        if not isinstance(target, torch.Tensor):
            return target
        buffer = self.builder.add_buffer_for("c", target)
        self.constants.append((buffer.name, target))
        if not buffer.opaque:
            self.builder.constants.add(buffer.name)
        if target.dim() == 0 and target.dtype in SUPPORTED_DTYPES and node not in self.aliases.written:
            self.builder.known_numbers[buffer.name] = target.item()
        return self.builder.value_of(buffer)

    def _call(self, node: Node) -> Any:
        builder, aliases = self.builder, self.aliases
        present = len(builder.buffers)
        value = lower_call(builder, node, self.values, self.bodies, aliases)
        written = node in aliases.written
        if aliases.written and aliases.root(node) is node and node.target is not operator.getitem:
            return _in_own_memory(builder, value, set(list(builder.buffers)[present:]), written=written)
        return _in_memory(builder, value) if written else value

    def _output(self, node: Node) -> None:
        self.outputs = lower_outputs(
            self.builder, node, self.values, self.inputs, self.aliases, kind=self.kind, fresh=self.fresh_outputs
        )


def _size_sources(builder: Builder, placeholders: Sequence[Node]) -> list[SizeSource]:
    """Where every symbol among the sizes of the inputs is read: from an input that is a number where there is one."""
    sizes, sources = builder.sizes, []
    values = [node.meta.get("val") for node in placeholders]
    for position, value in enumerate(values):
        known = isinstance(value, torch.SymInt) and not is_nested_int(value)
        size = sizes.given(value) if known else None
        if size is not None:
            sources.append(SizeSource(size, position))
            if size.bounds[0] < 0:  # no size of anything
                sizes.numbers.add(size)
    for position, value in enumerate(values):
        if not isinstance(value, torch.Tensor):
            continue
        for dim, number in enumerate(value.shape):
            size = sizes.given(number)
            if size is not None:
                sources.append(SizeSource(size, position, dim, False))
        for dim, stride in enumerate(() if is_opaque(value) else sizes.strides(value.stride())):
            size = sizes.decide(stride)
            if size is not None:
                sources.append(SizeSource(size, position, dim, True))
    sizes.inputs_are_known()
    return sources


def _in_own_memory(builder: Builder, value: Any, own: set[str], *, written: bool) -> Any:
    """``value`` where no write into another tensor changes it, and in memory if it is ``written`` itself.

    A lowering may give back what it was given, seen in another way, although eager gives a new tensor.
    """
    if isinstance(value, (list, tuple)):
        return [_in_own_memory(builder, item, own, written=written) for item in value]
    if not isinstance(value, TensorValue):
        return value
    if all(load.buffer in own for load in ex.loads(value.value)):
        return _in_memory(builder, value) if written else value
    return builder.copy(value)


def _in_memory(builder: Builder, value: Any) -> Any:
    """``value`` in memory of its own, for an operator that writes to it; a constant or a range has none before."""
    if not isinstance(value, TensorValue) or builder.strided_view(value) is not None:
        return value
    return builder.copy(value)
