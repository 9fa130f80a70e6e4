"""Kernels that users wrote in Triton: ``torch.ops.kiln.triton_kernel`` launches one, as torch's operator for it does.

torch keeps such kernels, and what of their arguments no graph can hold, in tables of the process, by numbers that
``torch._dynamo.reset`` gives away again. Compiled code may outlive that, so what it launches is kept here too. Such
code is for this process alone.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table, triton_kernel_wrapper_mutation

from torchkiln.errors import ArtifactError

_PROCESS = f"{os.getpid()} {time.time_ns()}"

# What a launch is given, as JSON: lists and objects stand for themselves, and these for what JSON has not.
_TUPLE, _WRITTEN, _READ, _NUMBER = "tuple", "written", "read", "number"


@dataclass
class _Kernel:
    """A kernel, with arguments that are the same in each launch, and the numbers that torch has for them."""

    kernel: Any
    constants: dict[str, Any]
    number: int
    constants_number: int

    def numbers(self) -> tuple[int, int]:
        """The numbers in torch's tables, into which both are put again if they are there no more."""
        if kernel_side_table.id_to_kernel.get(self.number) is not self.kernel:
            self.number = kernel_side_table.add_kernel(self.kernel)
        if kernel_side_table.constant_args.get(self.constants_number) is not self.constants:
            self.constants_number = kernel_side_table.add_constant_args(self.constants)
        return self.number, self.constants_number


_kernels: list[_Kernel] = []


def _kept(number: int, constants_number: int) -> int:
    """The place in the table of this module of what torch has by these numbers now."""
    kernel = kernel_side_table.get_kernel(number)
    _kernels.append(_Kernel(kernel, kernel_side_table.get_constant_args(constants_number), number, constants_number))
    return len(_kernels) - 1


class Description:
    """Writes what a launch is given as text, and collects the tensors and numbers that the text names by place.

    ``kind_of`` says what an item that is none of plain Python stands for: ``written``, ``read`` or ``number``.
    """

    def __init__(self, kind_of: Callable[[Any], str]) -> None:
        self._kind_of = kind_of
        self.given: dict[str, list[Any]] = {_WRITTEN: [], _READ: [], _NUMBER: []}

    def text(self, kernel: int, constants: int, grid: Any, descriptors: Any, arguments: dict[str, Any]) -> str:
        """The call of torch's operator."""
        rest = [self._form(item) for item in (grid, descriptors, arguments)]
        return json.dumps([_PROCESS, _kept(kernel, constants), *rest])

    def _form(self, item: Any) -> Any:
        if item is None or isinstance(item, (bool, int, float, str)):
            return item
        if isinstance(item, tuple):
            return {_TUPLE: [self._form(part) for part in item]}
        if isinstance(item, list):
            return [self._form(part) for part in item]
        if isinstance(item, dict):
            return {"": [[name, self._form(part)] for name, part in item.items()]}
        kind = self._kind_of(item)
        given = self.given[kind]
        if item not in given:
            given.append(item)
        return {kind: given.index(item)}


def _filled(form: Any, given: dict[str, Sequence[Any]]) -> Any:
    """What :class:`Description` wrote, with tensors and numbers in their places."""
    if isinstance(form, list):
        return [_filled(part, given) for part in form]
    if not isinstance(form, dict):
        return form
    ((kind, content),) = form.items()
    if kind == _TUPLE:
        return tuple(_filled(content, given))
    if kind == "":
        return {name: _filled(part, given) for name, part in content}
    return given[kind][content]


def _launch(written: list[Tensor], read: list[Tensor], numbers: list[int], text: str) -> None:
    process, place, *forms = json.loads(text)
    if process != _PROCESS:
        raise ArtifactError("This code calls a Triton kernel of the process that compiled it; compile it here.")
    given: dict[str, Sequence[Any]] = {_WRITTEN: written, _READ: read, _NUMBER: numbers}
    grid, descriptors, arguments = (_filled(form, given) for form in forms)
    kernel, constants = _kernels[place].numbers()
    triton_kernel_wrapper_mutation(
        kernel_idx=kernel,
        constant_args_idx=constants,
        grid=grid,
        tma_descriptor_metadata=descriptors,
        kwargs=arguments,
    )


@cache
def _library() -> torch.library.Library:
    """The registration, which lives as long as the process."""
    library = torch.library.Library("kiln", "FRAGMENT")
    schema = "triton_kernel(Tensor(a!)[] written, Tensor[] read, SymInt[] numbers, str text) -> ()"
    library.define(schema, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides))
    library.impl("triton_kernel", _launch, "CompositeExplicitAutograd")
    torch.library.register_fake("kiln::triton_kernel", lambda *_: None, lib=library)
    return library


_library()
TRITON_KERNEL: torch._ops.OpOverload = torch.ops.kiln.triton_kernel.default
"""Launches a kernel that writes to ``written`` and reads ``read``; ``text`` is what :class:`Description` writes."""
