"""Packages against the peer's: time to compile, size, time to import what loads, to load, of the first and later calls.

Each way compiles in a process of its own, and loads and calls in another, as a deployment does; the file is in the page
cache then, as it is after a deployment copied it. Later calls are timed in rounds that alternate between the ways.
Shown are medians. A way that cannot compile here (the peer's needs a C++ compiler) is a line that says so. Run as
``python -m benchmarks.aot``.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

WAYS = ("kiln", "inductor")


class _Bert(nn.Module):
    """BERT-base that takes token ids and a mask, and returns a tuple."""

    def __init__(self) -> None:
        from transformers import BertConfig, BertModel

        super().__init__()
        self.model = BertModel(BertConfig())

    def forward(self, ids: Tensor, mask: Tensor) -> Any:
        return self.model(input_ids=ids, attention_mask=mask, return_dict=False)


class _ResNet(nn.Module):
    """ResNet-50 that returns logits."""

    def __init__(self) -> None:
        from transformers import ResNetConfig, ResNetForImageClassification

        super().__init__()
        self.model = ResNetForImageClassification(ResNetConfig(num_labels=1000))

    def forward(self, image: Tensor) -> Any:
        return self.model(image, return_dict=False)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[Tensor, ...]]]] = {
    "bert-base": (_Bert, lambda: (torch.randint(1000, (1, 128)), torch.ones(1, 128, dtype=torch.int64))),
    "resnet-50": (_ResNet, lambda: (torch.randn(1, 3, 224, 224),)),
}


@dataclass(frozen=True)
class Figures:
    """What is measured of one way and model, in seconds and bytes."""

    model: str
    way: str
    compile_seconds: float
    package_bytes: int
    import_seconds: float
    load_seconds: float
    first_call: float
    later_call: float


def _compile(way: str, model: str, path: Path) -> float:
    make, inputs = MODELS[model]
    torch.manual_seed(0)
    network, example = make().eval(), inputs()
    start = time.perf_counter()
    if way == "kiln":
        import torchkiln

        torchkiln.aot_compile(network, example, path=path)
    else:
        from torch._inductor import aoti_compile_and_package

        with torch.no_grad():
            aoti_compile_and_package(torch.export.export(network, example), package_path=str(path))
    return time.perf_counter() - start


def _loader(way: str) -> Callable[[str], Callable[..., Any]]:
    if way == "kiln":
        import torchkiln

        return torchkiln.load
    from torch._inductor import aoti_load_package

    return aoti_load_package


def _serve(way: str, model: str, path: Path) -> None:
    """Answer orders from the standard input with seconds: a worker that loads once and calls as often as asked."""
    example = MODELS[model][1]()
    start = time.perf_counter()
    load = _loader(way)
    print(time.perf_counter() - start, flush=True)
    start = time.perf_counter()
    call = load(str(path))
    print(time.perf_counter() - start, flush=True)
    for _ in sys.stdin:
        start = time.perf_counter()
        with torch.no_grad():
            call(*example)
        print(time.perf_counter() - start, flush=True)


class _Worker:
    """A process with a loaded package."""

    def __init__(self, way: str, model: str, path: Path) -> None:
        command = [sys.executable, "-m", "benchmarks.aot", "--serve", f"{way},{model},{path}"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.import_seconds = self._answer()
        self.load_seconds = self._answer()

    def call(self) -> float:
        assert self._process.stdin is not None
        self._process.stdin.write("call\n")
        self._process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        self._process.communicate()

    def _answer(self) -> float:
        assert self._process.stdout is not None
        return float(self._process.stdout.readline())


def _measure(model: str, ways: list[str], rounds: int, folder: Path) -> list[Figures]:
    compiled, workers = {}, {}
    for way in ways:
        path = folder / f"{model}.{'kiln' if way == 'kiln' else 'pt2'}"
        command = [sys.executable, "-m", "benchmarks.aot", "--compile", f"{way},{model},{path}"]
        done = subprocess.run(command, capture_output=True, check=False, text=True)
        if done.returncode:
            print(f"{model}: {way} does not compile here: {(done.stderr.strip().splitlines() or ['no message'])[-1]}")
        else:
            compiled[way] = (float(done.stdout.split()[-1]), path)
    ways = list(compiled)
    first: dict[str, float] = {}
    later: dict[str, list[float]] = {way: [] for way in ways}
    for way in ways:
        workers[way] = _Worker(way, model, compiled[way][1])
        first[way] = workers[way].call()
    for number in range(rounds):
        for way in ways if number % 2 else reversed(ways):
            later[way].append(workers[way].call())
    for worker in workers.values():
        worker.close()
    return [
        Figures(
            model,
            way,
            seconds,
            path.stat().st_size,
            workers[way].import_seconds,
            workers[way].load_seconds,
            first[way],
            statistics.median(later[way]),
        )
        for way, (seconds, path) in compiled.items()
    ]


def _table(figures: list[Figures]) -> Table:
    table = Table("model", "way", "compile s", "size MB", "import ms", "load ms", "first ms", "later ms")
    for row in figures:
        table.add_row(
            *(row.model, row.way, f"{row.compile_seconds:.1f}", f"{row.package_bytes / 1e6:.1f}"),
            *(f"{1e3 * s:.1f}" for s in (row.import_seconds, row.load_seconds, row.first_call, row.later_call)),
        )
    return table


def main(
    models: Annotated[str, typer.Option(help="Models, with commas.")] = ",".join(MODELS),
    ways: Annotated[str, typer.Option(help="Compilers, with commas.")] = ",".join(WAYS),
    rounds: Annotated[int, typer.Option(help="Later calls of each.")] = 20,
    output: Annotated[Path | None, typer.Option("--json", help="Write the figures here.")] = None,
    compile_: Annotated[str, typer.Option("--compile", hidden=True)] = "",
    serve: Annotated[str, typer.Option(hidden=True)] = "",
) -> None:
    """Measure packages of some models; the hidden options are for the processes this starts."""
    if compile_ or serve:
        way, model, path = (compile_ or serve).split(",")
        if compile_:
            print(_compile(way, model, Path(path)))
        else:
            _serve(way, model, Path(path))
        return
    figures = []
    with tempfile.TemporaryDirectory() as folder:
        for model in models.split(","):
            figures += _measure(model, ways.split(","), rounds, Path(folder))
    Console(width=120).print(_table(figures))
    if output is not None:
        output.write_text(json.dumps([vars(row) for row in figures], indent=1))


if __name__ == "__main__":
    typer.run(main)
