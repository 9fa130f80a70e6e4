"""What recording costs: the first training step of a transformer, with recording off, collected, and traced to files.

Each figure is the best of some processes, which take turns. ``--against SOURCES`` compares recording that is off with
another version of torchkiln, such as one from before there was any.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parent.parent


def first_step(layers: int, *, collect: bool) -> float:
    """Seconds of a first step, forward and backward, in this process; of its recording too, where one is collected."""
    import torch

    from examples.transformer import Transformer

    torch.manual_seed(0)
    model, tokens = Transformer(layers=layers), torch.randint(0, 256, (4, 64))
    # Dynamo, AOTAutograd and LLVM are loaded and warm.
    torch.compile(lambda x: (x.sin() + 1).sum(), backend="kiln")(torch.randn(8, requires_grad=True)).backward()
    compiled = torch.compile(model, backend="kiln")
    start = time.perf_counter()
    if collect:
        from torchkiln.debug.recording.collector import Collector
        from torchkiln.recorder import observe

        collector = Collector()
        with observe(collector):
            start = time.perf_counter()
            compiled(tokens).sum().backward()
        collector.recording("first step")  # assembly and tables are made here
    else:
        compiled(tokens).sum().backward()
    return time.perf_counter() - start


def main(
    layers: Annotated[int, typer.Option(help="Layers of the transformer.")] = 6,
    rounds: Annotated[int, typer.Option(help="Processes for each figure.")] = 3,
    against: Annotated[Path | None, typer.Option(help="Folder of other sources (its src).")] = None,
    measure: Annotated[str, typer.Option(hidden=True)] = "",
) -> None:
    """Print the seconds of a first step in each way, and the ratios to recording that is off."""
    if measure:
        print(first_step(layers, collect=measure == "collected"))
        return
    ways = [*(["before"] if against else []), "off", "collected", "traced"]
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(rounds):
        for way in ways:
            sources = against if way == "before" and against else ROOT / "src"
            seconds[way].append(_in_process(way, layers, sources))
    table = Table("recording", "seconds", "times off")
    for way in ways:
        best = min(seconds[way])
        table.add_row(way, f"{best:.3f}", f"{best / min(seconds['off']):.3f}")
    Console(width=100).print(table)


def _in_process(way: str, layers: int, sources: Path) -> float:
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "PYTHONPATH": f"{sources}:{ROOT}", "KILN_CACHE": "0"}
        if way == "traced":
            environment["KILN_TRACE"] = folder
        command = [sys.executable, str(Path(__file__)), "--layers", str(layers), "--measure", way]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return float(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    typer.run(main)
