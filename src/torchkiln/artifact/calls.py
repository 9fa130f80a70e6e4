"""Calls that native code makes through Python: operators by name, and higher-order operators with their bodies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Union

import torch

from torchkiln.errors import ArtifactError

if TYPE_CHECKING:
    from torchkiln.artifact.artifact import Artifact

TRITON_KERNEL_NAME = "kiln::triton_kernel"
"""The operator that launches a kernel of a user (``graph/triton_kernels.py``), by a number that one process knows."""

Kind = Literal["call", "cond", "while_loop", "scan", "map"]
Strides = tuple[int, ...]


@dataclass(frozen=True)
class TensorArgument:
    """Stands for the tensor at ``position`` among those passed to a call."""

    position: int


@dataclass(frozen=True)
class NumberArgument:
    """Stands for the number at ``position`` among those passed to a call."""

    position: int


# The two above, or plain Python data in (nested) tuples.
Argument = Any


def fill(argument: Argument, tensors: Sequence[torch.Tensor], numbers: Sequence[int]) -> Any:
    """``argument`` of a call with these tensors and numbers. Tuples become lists, as operators take them."""
    if isinstance(argument, TensorArgument):
        return tensors[argument.position]
    if isinstance(argument, NumberArgument):
        return numbers[argument.position]
    if isinstance(argument, tuple):
        return [fill(item, tensors, numbers) for item in argument]
    return argument


@dataclass(frozen=True)
class OperatorCall:
    """An operator. ``arguments`` are in schema order, tensors as :class:`TensorArgument`, numbers known at run time as
    :class:`NumberArgument`. ``where`` is the number of the text that says what runs, for the message of a failure.
    """

    operator: str
    overload: str
    arguments: tuple[Argument, ...]
    results: int
    where: int

    @property
    def target(self) -> torch._ops.OpOverload:
        """The operator in this process; :class:`ArtifactError` where there is none of its name."""
        namespace, _, name = self.operator.partition("::")
        try:
            packet = getattr(getattr(torch.ops, namespace), name)
            overload: torch._ops.OpOverload = getattr(packet, self.overload or "default")
        except AttributeError as error:
            raise ArtifactError(f"{self.operator} is no operator in this process") from error
        return overload


@dataclass(frozen=True)
class Body:
    """The compiled body of a higher-order operator. ``strides`` are those of its inputs, None for one that is not a
    tensor."""

    artifact: Artifact
    strides: tuple[Strides | None, ...]


@dataclass(frozen=True)
class HigherOrderCall:
    """A higher-order operator; ``arguments``, ``results`` and ``where`` as in :class:`OperatorCall`.

    ``kind`` says how ``bodies`` are run, ``carried`` and ``scanned`` which of the arguments change from one iteration
    to the next (:class:`torchkiln.ir.higher_order.HigherOrder`).
    """

    kind: Kind
    bodies: tuple[Body, ...]
    carried: int
    scanned: int
    arguments: tuple[Argument, ...]
    results: int
    where: int


Call = Union[OperatorCall, HigherOrderCall]
