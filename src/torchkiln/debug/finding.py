"""What shadow finds: the stage, the pass, the node and the user's line where results first go wrong."""

from __future__ import annotations

from dataclasses import dataclass

from torchkiln.debug.accuracy import Divergence


@dataclass(frozen=True)
class Finding:
    """The first thing that went wrong.

    ``stage`` is the part of the flow, ``graph`` the kind of graph ("captured", "joint", "forward", ...). ``graph_pass``
    is "stage/name" and ``number`` its number, where a pass did it. ``node`` is the first node whose value diverges,
    ``source`` the user's line of it. ``kernel`` is the kernel or call that computes it in compiled
    code. ``divergence`` says how results differ; ``failure`` is an exception or a signal in place of it.
    """

    stage: str
    graph: str
    graph_pass: str | None = None
    number: int | None = None
    node: str | None = None
    source: str | None = None
    kernel: str | None = None
    divergence: Divergence | None = None
    failure: str | None = None

    def __str__(self) -> str:
        by = f"pass {self.graph_pass} (number {self.number})" if self.graph_pass else self.stage
        on = f" on the {self.graph} graph" if self.graph else ""
        lines = [f"{by}{on}: {self.divergence or self.failure}"]
        if self.node:
            lines.append(f"  first at node {self.node}")
        if self.source:
            lines.append(f"  {self.source}")
        if self.kernel:
            lines.append(f"  computed by {self.kernel}")
        return "\n".join(lines)


@dataclass(frozen=True)
class ShadowReport:
    """What :func:`torchkiln.shadow` found in each captured graph: ``findings`` is empty where all results agree.

    ``checked`` are the programs that were compared, in order; ``without_reference`` how many of the captured graphs do
    not run in float64, so that results were compared with eager's alone. ``notes`` say which graphs were not judged.
    """

    graphs: int
    checked: tuple[str, ...] = ()
    findings: tuple[Finding, ...] = ()
    without_reference: int = 0
    notes: tuple[str, ...] = ()

    @property
    def first(self) -> Finding | None:
        """The first finding, or None."""
        return self.findings[0] if self.findings else None

    def __str__(self) -> str:
        compared = f"{self.graphs} captured graphs, {len(self.checked)} programs compared with eager and float64"
        if self.without_reference:
            compared += f" ({self.without_reference} of the graphs do not run in float64)"
        found = [str(finding) for finding in self.findings] or ["no result diverges"] * (len(self.notes) < self.graphs)
        return "\n".join([compared, *found, *self.notes])
