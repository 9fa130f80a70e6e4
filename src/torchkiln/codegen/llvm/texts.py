"""The texts that the steps of one graph name by number; they are data of the artifact and no part of the code."""

from __future__ import annotations

from torchkiln.artifact.texts import Description
from torchkiln.ir.program import Origin


class TextTable:
    """Texts in the order they are first asked for, and the distinct lines of the user's program they name."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[str, tuple[str, ...]], int] = {}
        self._texts: list[Description] = []
        self._sources: list[str] = []
        self._positions: dict[str, int] = {}

    @property
    def texts(self) -> tuple[Description, ...]:
        return tuple(self._texts)

    @property
    def sources(self) -> tuple[str, ...]:
        return tuple(self._sources)

    def number(self, what: str, origin: Origin) -> int:
        """The number of the text that says ``what`` runs for the nodes and the line of ``origin``."""
        # The nodes decide the line. Lines are left out, so that numbers do not depend on which nodes share one.
        key = what, origin.nodes
        if key not in self._numbers:
            self._numbers[key] = len(self._texts)
            self._texts.append(Description(what, origin.nodes, self.source(origin)))
        return self._numbers[key]

    def source(self, origin: Origin) -> int | None:
        """The position among :attr:`sources` of the line of ``origin``."""
        if not origin.source:
            return None
        if origin.source not in self._positions:
            self._positions[origin.source] = len(self._sources)
            self._sources.append(origin.source)
        return self._positions[origin.source]

    def text(self, number: int) -> str:
        return self._texts[number].text(self._sources)
