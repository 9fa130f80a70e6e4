"""The scheduled graph: kernels and extern calls in order, and where every buffer lives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Union

from torchkiln.ir.higher_order import HigherOrder
from torchkiln.ir.index import Extent, Size
from torchkiln.ir.program import NO_ORIGIN, CheckFits, CheckSizes, ExternCall, Origin, Program, ReadNumber
from torchkiln.schedule.kernel import Kernel


@dataclass(frozen=True)
class InInput:
    """The memory of graph input ``position``."""

    position: int

    def __str__(self) -> str:
        return f"input {self.position}"


@dataclass(frozen=True)
class InConstant:
    """The memory of ``Program.constants[position]``."""

    position: int

    def __str__(self) -> str:
        return f"constant {self.position}"


@dataclass(frozen=True)
class InArena:
    """``offset`` bytes into the graph's arena, 64-byte aligned."""

    offset: int

    def __str__(self) -> str:
        return f"arena + {self.offset}"


@dataclass(frozen=True)
class InSlot:
    """Slot ``number`` of an arena laid out at each call, for symbolic sizes."""

    number: int

    def __str__(self) -> str:
        return f"slot {self.number}"


@dataclass(frozen=True)
class InDonatedInput:
    """``offset`` bytes into the memory of graph input ``position``, which nothing reads any more by then."""

    position: int
    offset: int

    def __str__(self) -> str:
        return f"input {self.position} + {self.offset}"


@dataclass(frozen=True)
class OwnTensor:
    """A tensor of its own: allocated before its first step (or returned by its extern call), freed after its last."""

    def __str__(self) -> str:
        return "its own tensor"


Storage = Union[InInput, InConstant, InArena, InSlot, InDonatedInput, OwnTensor]


@dataclass(frozen=True)
class Launch:
    """One run of ``kernel`` with the data pointers of ``buffers`` and the numbers ``sizes``, in the kernel's order.

    A number is known here or when the graph runs.
    """

    kernel: Kernel
    buffers: tuple[str, ...]
    sizes: tuple[Size | int, ...] = ()
    origin: Origin = NO_ORIGIN


Step = Union[Launch, ExternCall, ReadNumber, CheckSizes, CheckFits]


@dataclass(frozen=True)
class Plan:
    """Everything code generation for a whole graph needs.

    ``frees[k]`` are the :class:`OwnTensor` buffers whose last use is step ``k``; outputs are never in it. The arena is
    ``arena_bytes`` long or, with symbolic sizes, as long as ``slots`` one after the other: each holds the largest of
    its entries, in bytes. ``peak_bytes`` is then what typical sizes come to.

    ``reused`` are the inputs in whose memory buffers lie (:class:`InDonatedInput`), with the bytes of each in use. In a
    call whose caller still holds one of them, other memory takes its place.
    """

    program: Program
    steps: tuple[Step, ...]
    storage: Mapping[str, Storage]
    frees: tuple[tuple[str, ...], ...]
    arena_bytes: int
    peak_bytes: int
    slots: tuple[tuple[Extent, ...], ...] = ()
    reused: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "storage", MappingProxyType(dict(self.storage)))

    def __str__(self) -> str:
        lines = [f"arena of {self.arena_bytes} bytes, peak {self.peak_bytes}"]
        lines += [f"{name} in {place}" for name, place in self.storage.items()]
        lines += [f"slot {k} of max{tuple(map(str, sizes))} bytes" for k, sizes in enumerate(self.slots)]
        kernels: dict[Kernel, str] = {}
        for step, freed in zip(self.steps, self.frees, strict=True):
            if isinstance(step, Launch):
                name = kernels.setdefault(step.kernel, f"kernel{len(kernels)}")
                lines.append(f"{name}({', '.join(map(str, (*step.buffers, *step.sizes)))})")
            else:
                lines.append(str(step))
            lines += [f"free {name}" for name in freed]
        lines += [f"{name}: {kernel}" for kernel, name in kernels.items()]
        return "\n".join(lines)


def all_steps(plan: Plan) -> list[Step]:
    """The steps of a plan and of the bodies its higher-order operators call, each body once."""
    found: list[Step] = []
    plans, pending = {id(plan)}, [plan]
    while pending:
        steps = pending.pop().steps
        found += steps
        for step in steps:
            if isinstance(step, ExternCall) and isinstance(step.target, HigherOrder):
                new = {id(body): body for body in step.target.bodies if id(body) not in plans}
                plans |= new.keys()
                pending += new.values()
    return found
