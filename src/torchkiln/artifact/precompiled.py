"""A compiled captured graph in a file of torch's. It is found by no key of ours, so it says itself what it is for."""

from __future__ import annotations

from dataclasses import dataclass

from torchkiln.artifact.convention import CompiledFunction
from torchkiln.artifact.support import reject_other_process
from torchkiln.errors import ArtifactError
from torchkiln.native.host import Processor


@dataclass(frozen=True, eq=False)
class PrecompiledFunction:
    """A compiled function, and the process, the processor and the torchkiln that it was compiled for.

    ``interface``, ``triple``, ``cpu`` and ``features`` are as in :class:`SupportCode`. ``source`` is a digest of the
    code of this package, ``settings`` are name and value of those that were in force around ``torch.compile``.
    """

    function: CompiledFunction
    interface: tuple[tuple[str, str], ...]
    triple: str
    cpu: str
    features: str
    source: str
    settings: tuple[tuple[str, str], ...]
    keep_memory: bool

    def __post_init__(self) -> None:
        pairs = (*self.interface, *self.settings)
        texts = (self.triple, self.cpu, self.features, self.source, *(text for pair in pairs for text in pair))
        if not all(type(text) is str for text in texts) or not all(len(pair) == 2 for pair in pairs):
            raise TypeError("what the function was compiled for is not text")
        if type(self.function) is not CompiledFunction or type(self.keep_memory) is not bool:
            raise TypeError("a precompiled function is none")

    def reject_other_process(self, source: str) -> None:
        """Raise :class:`ArtifactError` where this process, whose package has the digest ``source``, cannot run it."""
        reject_other_process(self.interface, Processor(self.triple, self.cpu, self.features))
        if self.source != source:
            raise ArtifactError("This code was compiled by another state of torchkiln; compile it again.")

    def reject_other_settings(self, settings: tuple[tuple[str, str], ...]) -> None:
        """Raise :class:`ArtifactError` where it was compiled under other ``settings``."""
        compiled_under, here = dict(self.settings), dict(settings)
        for name in sorted({*compiled_under, *here}):
            if compiled_under.get(name) != here.get(name):
                raise ArtifactError(
                    f"This code was compiled with {name}={compiled_under.get(name)}, and the setting is"
                    f" {here.get(name)} now; compile it again."
                )
