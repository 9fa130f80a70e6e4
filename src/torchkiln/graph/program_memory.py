"""Which arguments of a mutating call share memory in the program, as noted in its functional form.

Passes may read an argument of the functional form from other memory with the same values, so that two arguments become
one node. The operator sees a difference: what it writes to one of them shows in the other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch.fx

NOTED = "program_memory"
"""In the meta of a mutating call: its keyword arguments with :class:`ProgramMemory` in place of every node."""


@dataclass(frozen=True)
class ProgramMemory:
    """Equal for two tensors of one call that share memory in the program."""

    number: int


def memory_of_its_own(arguments: dict[str, Any]) -> dict[str, Any]:
    """For a call that a pass makes: no two arguments share memory, be they one node."""
    numbers = count()

    def memory(_: torch.fx.Node) -> Any:
        return ProgramMemory(next(numbers))

    noted: dict[str, Any] = torch.fx.map_arg(arguments, memory)
    return noted


def tensors_in_memory(values: Any, memory: Any) -> Iterator[tuple[torch.fx.Node, ProgramMemory | None]]:
    """Every node in ``values``, with the memory it shows in the program where ``memory`` says that."""
    if isinstance(values, torch.fx.Node):
        yield values, memory
    elif isinstance(values, dict):
        for name, value in values.items():
            yield from tensors_in_memory(value, memory.get(name))
    elif isinstance(values, (list, tuple)):
        known = memory if isinstance(memory, (list, tuple)) else (None,) * len(values)
        for value, shown in zip(values, known, strict=True):
            yield from tensors_in_memory(value, shown)


def arguments_sharing_memory(node: torch.fx.Node) -> list[torch.fx.Node]:
    """The arguments of a noted call that share memory with another one of them in the program."""
    found = list(tensors_in_memory(dict(node.kwargs), node.meta[NOTED]))
    times = Counter(memory for _, memory in found)
    return [value for value, memory in found if memory is not None and times[memory] > 1]
