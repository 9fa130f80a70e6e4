"""What a graph says of its steps: for error messages and profiles, apart from the code.

Object code names a text by its number, and a text names a line of the user's program by its position in a table. Code
for the same graph is then the same wherever the program was written, and serves moved lines with another table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from torchkiln.artifact.calls import Body, Call, HigherOrderCall

if TYPE_CHECKING:
    from torchkiln.artifact.artifact import Artifact


@dataclass(frozen=True)
class Description:
    """What runs, the nodes of the graph it is for, and the position of the user's line in ``Artifact.sources``."""

    what: str
    nodes: tuple[str, ...] = ()
    source: int | None = None

    def text(self, sources: Sequence[str]) -> str:
        """``aten.mm.default (mm_1), model.py:12 in forward: y = x @ w``, as error messages say it."""
        nodes = f" ({', '.join(self.nodes)})" if self.nodes else ""
        source = f", {sources[self.source]}" if self.source is not None else ""
        return f"{self.what}{nodes}{source}"


def with_sources(artifact: Artifact, moved: Mapping[str, str]) -> Artifact:
    """``artifact`` with the lines it names, in bodies too, replaced as ``moved`` says; other lines stay."""
    return _Moved(moved).artifact(artifact)


class _Moved:
    """Replaces lines in an artifact; a body that several calls share stays one."""

    def __init__(self, lines: Mapping[str, str]) -> None:
        self._lines = lines
        self._bodies: dict[int, Body] = {}

    def artifact(self, artifact: Artifact) -> Artifact:
        sources = tuple(self._lines.get(line, line) for line in artifact.sources)
        calls = tuple(self._call(call) for call in artifact.entry.python_calls)
        return replace(artifact, sources=sources, entry=replace(artifact.entry, python_calls=calls))

    def _call(self, call: Call) -> Call:
        if not isinstance(call, HigherOrderCall):
            return call
        return replace(call, bodies=tuple(self._body(body) for body in call.bodies))

    def _body(self, body: Body) -> Body:
        if id(body) not in self._bodies:
            self._bodies[id(body)] = replace(body, artifact=self.artifact(body.artifact))
        return self._bodies[id(body)]
