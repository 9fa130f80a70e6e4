"""What a loaded graph counts as, whether it was compiled in this process or not."""

from __future__ import annotations

from torchkiln.artifact import GraphSummary
from torchkiln.recorder import Recorder
from torchkiln.runtime.freed_memory import freed_memory


def account_for(summary: GraphSummary, recorder: Recorder, *, keep_memory: bool) -> None:
    """Count a graph that was loaded; with ``keep_memory``, freed memory is kept for what each call of it allocates.

    A graph of weights runs when one has changed. To keep as much as all prepared weights take would only hold memory.
    """
    recorder.compiled(
        summary.kind,
        nodes=summary.nodes,
        operations=summary.operations,
        kernels=summary.kernels,
        launches=summary.launches,
        extern_calls=dict(summary.extern_calls),
    )
    if keep_memory and summary.kind != "weights":
        freed_memory().keep(summary.allocated_bytes)
