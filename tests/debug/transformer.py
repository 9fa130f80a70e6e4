"""Every planted bug in a transformer: what shadow, bisect and minify find, as a table (``make planted-bugs``)."""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import nn

from tests.debug.planted import plant, run_file
from tests.debug.seeded import SEEDED
from torchkiln.debug import bisect, minify, shadow

_MOST_NODES, _MOST_SECONDS = 10, 300
_LAYERS = 6


class Transformer(nn.Module):
    """An encoder whose end meets one of the bugs."""

    def __init__(self, name: str, layers: int = _LAYERS) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True, dropout=0.0, activation="relu")
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.end = nn.Linear(64, 64)
        self.weight = nn.Parameter(torch.randn(64, 64) / 8)
        self.meets = SEEDED[name].program

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.encoder(x).reshape(-1, 64)[:64]
        return self.end(self.meets(rows, self.weight).expand(64, 64))


def _check(name: str, folder: Path) -> str:
    torch.manual_seed(0)
    model, x = Transformer(name), torch.randn(4, 16, 64)
    file = folder / f"{name}.py"
    undo = plant(name)
    try:
        finding = shadow(model, x).first
        found = bisect(model, x)
        setup = f"from tests.debug.planted import plant\nplant({name!r})"
        start = time.monotonic()
        report = minify(model, x, output=file, setup=setup)
        seconds = time.monotonic() - start
    finally:
        undo()
    fixed = run_file(file, WITHOUT_BUGS="1").returncode == 0
    named = finding is not None and str(finding.node).startswith(SEEDED[name].node)
    kind, action = SEEDED[name].action
    blamed = found.action is not None and found.action.kind == kind
    blamed = blamed and found.action is not None and found.action.name.startswith(action)
    small = report.verified and report.nodes <= _MOST_NODES and seconds <= _MOST_SECONDS
    good = "" if named and blamed and small and fixed else "FAILED "
    return (
        f"{good}{name}: shadow {finding.node if finding else None}, bisect {found.action} in {found.trials} runs,"
        f" minify {report.nodes} of {report.nodes_before} nodes in {seconds:.0f} s, fixed without the bug: {fixed}"
    )


def main() -> int:
    failed = False
    with tempfile.TemporaryDirectory() as folder:
        for name in sys.argv[1:] or SEEDED:
            torch._dynamo.reset()
            line = _check(name, Path(folder))
            failed |= line.startswith("FAILED")
            print(line, flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
