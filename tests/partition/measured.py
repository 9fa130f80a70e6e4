"""What a training step really keeps for backward, and the joint graph it came from."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx
from torch import Tensor
from torch.utils._pytree import tree_leaves

from torchkiln import compiler
from torchkiln.config import Settings
from torchkiln.graph.subgraphs import copy_graph_module


@contextmanager
def saved_storages() -> Iterator[dict[int, int]]:
    """Bytes of every distinct memory that autograd keeps inside the block, by address."""
    found: dict[int, int] = {}
    kept: list[Tensor] = []  # so that no address is used twice

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        found[storage.data_ptr()] = storage.nbytes()
        kept.append(tensor.detach())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield found


def saved_bytes(run: Callable[..., Any], inputs: Sequence[Tensor], owner: torch.nn.Module) -> int:
    """Bytes that ``run(*inputs)`` keeps for backward, without parameters, buffers, inputs and results."""
    with saved_storages() as found:
        results = run(*inputs)
    others = [*inputs, *owner.parameters(), *owner.buffers()]
    others += [leaf for leaf in tree_leaves(results) if isinstance(leaf, Tensor)]
    known = {tensor.untyped_storage().data_ptr() for tensor in others}
    return sum(size for address, size in found.items() if address not in known)


@dataclass(frozen=True)
class Joint:
    module: torch.fx.GraphModule
    num_fwd_outputs: int


@contextmanager
def joint_graphs() -> Iterator[list[Joint]]:
    """Copies of the joint graphs that are partitioned inside the block, as the partition is given them."""
    found: list[Joint] = []
    original = compiler.min_cut_rematerialization_partition

    def record(joint: torch.fx.GraphModule, inputs: Any, *, num_fwd_outputs: int, **facts: Any) -> Any:
        found.append(Joint(copy_graph_module(joint), num_fwd_outputs))
        return original(joint, inputs, num_fwd_outputs=num_fwd_outputs, **facts)

    compiler.min_cut_rematerialization_partition = record  # type: ignore[assignment]
    try:
        yield found
    finally:
        compiler.min_cut_rematerialization_partition = original


def joint_graph(function: Callable[..., Any], *inputs: Tensor, settings: Settings | None = None) -> Joint:
    """The joint graph of ``function``; nothing is compiled to code."""

    def interpret(gm: torch.fx.GraphModule, _inputs: Sequence[Any], **_facts: Any) -> Callable[..., Any]:
        def call(arguments: list[Any]) -> Any:
            return torch.fx.Interpreter(gm).run(*arguments)

        call._boxed_call = True  # type: ignore[attr-defined]
        return call

    settings = settings if settings is not None else Settings(fallback=False)
    torch._dynamo.reset()
    with joint_graphs() as found:
        torch.compile(
            function,
            fullgraph=True,
            dynamic=False,
            backend=lambda gm, args: compiler.compile_fx(gm, args, inner_compile=interpret, settings=settings),
        )(*inputs)
    (joint,) = found
    return joint
