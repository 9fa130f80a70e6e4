"""The support functions as plain data: object code for processes that do not compile."""

from __future__ import annotations

from dataclasses import dataclass

from torchkiln.errors import ArtifactError
from torchkiln.native.binary_interface import binary_interface
from torchkiln.native.host import Processor
from torchkiln.native.levels import runs_code_for


@dataclass(frozen=True)
class SupportModule:
    """Object code, and the names of what it has for graphs and the run time."""

    exports: tuple[str, ...]
    code: bytes

    def __post_init__(self) -> None:
        if type(self.code) is not bytes or not all(type(name) is str for name in self.exports):
            raise TypeError("a module of support functions is not code and names")


@dataclass(frozen=True)
class SupportCode:
    """All support functions.

    ``interface`` are the items of :func:`binary_interface` of the process that compiled them. The other texts name the
    processor they were compiled for, as :class:`Processor` does.
    """

    interface: tuple[tuple[str, str], ...]
    triple: str
    cpu: str
    features: str
    modules: tuple[SupportModule, ...]

    def __post_init__(self) -> None:
        texts = (self.triple, self.cpu, self.features, *(text for item in self.interface for text in item))
        if not all(type(text) is str for text in texts) or not all(len(item) == 2 for item in self.interface):
            raise TypeError("what the support functions were compiled for is not text")
        if not all(type(module) is SupportModule for module in self.modules):
            raise TypeError("a module of support functions is none")

    def module_with(self, name: str) -> SupportModule | None:
        """The module that has a function or variable."""
        return next((module for module in self.modules if name in module.exports), None)

    def reject_other_process(self) -> None:
        """Raise :class:`ArtifactError` where this process cannot run the code."""
        reject_other_process(self.interface, Processor(self.triple, self.cpu, self.features))


def reject_other_process(interface: tuple[tuple[str, str], ...], processor: Processor) -> None:
    """Raise :class:`ArtifactError` where this process cannot run code for ``processor`` and for processes with
    ``interface``."""
    compiled_for, here = dict(interface), binary_interface()
    for name in sorted({*compiled_for, *here}):
        if compiled_for.get(name) != here.get(name):
            raise ArtifactError(
                f"This code was compiled for {name} {compiled_for.get(name)}, and this process has {name}"
                f" {here.get(name)}; compile it again."
            )
    if not runs_code_for(processor):
        raise ArtifactError(
            f"This code was compiled for a processor with more than this one has ({processor.name},"
            f" {processor.triple}); compile it again."
        )
