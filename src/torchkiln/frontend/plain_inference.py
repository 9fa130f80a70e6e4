"""Inference calls of graphs that have no special cases: the native function right after Dynamo's own code.

AOTAutograd's wrapper serves mutation, aliases of inputs, tensor subclasses, tokens and autocast, switches gradients
off, and does so through seven calls in Python, 6 µs together. Where a graph has none of that, nothing is left to do:
native code makes new plain tensors without gradients, and switches gradients off for operators itself. The first call
still goes AOTAutograd's way, for what it looks at once. Inputs are as compiled for: Dynamo's guards have compared them,
and the native function compares dtype, sizes and strides again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.fx
from torch._functorch._aot_autograd.schemas import PlainTensorMeta
from torch._guards import TracingContext
from torch._subclasses.fake_tensor import FakeTensor

from torchkiln.frontend.dynamic_marks import marks, with_marks
from torchkiln.frontend.plain_training import returns_plain_tensors
from torchkiln.runtime.executable import CompiledGraph

Function = Callable[..., Any]


class PlainInference:
    """Finds the way past AOTAutograd's wrapper for one captured graph of so many ``inputs``, in the present autocast.

    ``inference`` is handed what was compiled; ``call`` is, after the first call, a function of one list of inputs that
    returns a list, or None where there is no such way.
    """

    def __init__(self, inputs: int) -> None:
        self.call: Function | None = None
        self._inputs = inputs
        self._autocast = torch._C._is_any_autocast_enabled()  # AOTAutograd has it off where it compiles
        self._after_first_call: Function | None = None

    def inference(self, graph: torch.fx.GraphModule, compiled: Function) -> None:
        """Told while AOTAutograd compiles the inference graph."""
        context = TracingContext.try_get()
        metadata = None if context is None else context.fw_metadata
        if metadata is None or len(metadata.input_info) != self._inputs or self._autocast:
            return
        if _is_plain(metadata, graph) and isinstance(compiled, CompiledGraph):
            self._after_first_call = compiled.function

    def was_called(self, results: Sequence[Any]) -> None:
        """Told after a call has gone AOTAutograd's way, with what came back."""
        if self._after_first_call is not None:
            self.call = with_marks(self._after_first_call, marks(results))


def _is_plain(metadata: Any, graph: torch.fx.GraphModule) -> bool:
    placeholders = graph.graph.find_nodes(op="placeholder")
    plain_inputs = len(placeholders) == len(metadata.input_info) and all(
        type(node.meta.get("val")) in (FakeTensor, torch.SymInt, int) for node in placeholders
    )
    subclasses = (*metadata.subclass_inp_meta, *metadata.subclass_fw_graph_out_meta)
    special = (
        metadata.num_mutated_inp_runtime_indices,
        metadata.num_mutated_graph_handled_indices,
        metadata.num_intermediate_bases,
        metadata.num_outputs_rng_offset,
        getattr(metadata, "num_graphsafe_rng_states", 0),
        len(metadata.tokens),
        not all(isinstance(meta, PlainTensorMeta) for meta in subclasses),
    )
    return plain_inputs and returns_plain_tensors(metadata) and not any(special)
