"""What a training step really keeps for backward and takes at its peak, and the joint graph it came from."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx
from torch import Tensor
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile
from torch.utils._pytree import tree_leaves

from torchkiln import compiler
from torchkiln.config import Settings
from torchkiln.graph.subgraphs import copy_graph_module
from torchkiln.runtime.arena import arena_stats, clear_arena


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


def step_peak(run: Callable[..., Tensor], inputs: Sequence[Tensor]) -> int:
    """The most bytes at one time that ``run(*inputs)`` and its backward allocate and free again, with kiln's arenas.

    Gradients and results stay, and so are not counted; the code must have run before, and no gradient be there.
    """
    clear_arena()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        result = run(*inputs)
        gradient = torch.ones_like(result)
        forward_arena, between = arena_stats().bytes, time.time_ns()
        clear_arena()
        result.backward(gradient)
        backward_arena = arena_stats().bytes
    before, after = _peaks(profiled, between)
    return max(before + forward_arena, after + backward_arena)


def _peaks(profiled: Any, between: int) -> tuple[int, int]:
    """Peaks before and after the time ``between`` of what is allocated and freed again."""
    open_at: dict[int, tuple[int, int]] = {}
    changes: list[tuple[int, int]] = []
    for when, address, size in sorted(_allocations(profiled.profiler.kineto_results.experimental_event_tree())):
        if size > 0:
            open_at[address] = (when, size)
        elif address in open_at:
            start, amount = open_at.pop(address)
            changes += [(start, amount), (when, -amount)]
    held = 0
    peaks = [0, 0]
    for when, change in sorted(changes):
        held += change
        part = int(when > between)
        # What forward saved is held when backward begins, before it allocates anything.
        peaks[part] = max(peaks[part], held, held - change if part else 0)
    return peaks[0], peaks[1]


def _allocations(events: Iterable[Any]) -> Iterable[tuple[int, int, int]]:
    pending = list(events)
    while pending:
        event = pending.pop()
        pending.extend(event.children)
        if event.tag == _EventType.Allocation:
            fields = event.typed[1]
            yield event.start_time_ns, fields.ptr, fields.alloc_size


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
