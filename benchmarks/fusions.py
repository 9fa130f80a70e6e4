"""Times of activations and sums inside oneDNN's calls and in kernels after them: the table that compilations read.

    python -m benchmarks.fusions [--only convolution] [--dtypes float32] [--rounds 20] [--write]

For each kind of call, dtype and fusion, compiled functions with and without it run in turns on one thread. Prints both
times in microseconds, the sum over a few sizes, and how many times as fast the fused form is. ``--write`` puts them
into ``src/torchkiln/passes/freezing/onednn/fusion_times.csv``, in place of those of this processor.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchkiln.config import Settings
from torchkiln.passes.freezing.onednn import fusion
from torchkiln.passes.freezing.onednn.fusion_times import TABLE, FusionTime, fusion_times
from torchkiln.target import capture_target

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "hardsigmoid": F.hardsigmoid,
    "hardswish": F.hardswish,
    "hardtanh": F.relu6,
    "leaky_relu": F.leaky_relu,
    "relu": F.relu,
    "sigmoid": torch.sigmoid,
    "silu": F.silu,
    "tanh": torch.tanh,
}
BINARY: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"add": torch.add, "mul": torch.mul, "sub": torch.sub}


def _convolution(channels: int, results: int, window: int) -> nn.Module:
    return nn.Conv2d(channels, results, window, padding=window // 2)


# Kind of call: layers, and the sizes of what each takes.
LAYERS: dict[str, list[tuple[Callable[[], nn.Module], tuple[int, ...]]]] = {
    "convolution": [
        (lambda: _convolution(64, 64, 3), (1, 64, 28, 28)),
        (lambda: _convolution(64, 256, 1), (1, 64, 56, 56)),
        (lambda: _convolution(256, 256, 1), (4, 256, 14, 14)),
    ],
    "transposed convolution": [
        (lambda: nn.ConvTranspose2d(64, 32, 4, 2, 1), (1, 64, 28, 28)),
        (lambda: nn.ConvTranspose2d(128, 64, 2, 2), (2, 128, 14, 14)),
    ],
    "linear": [
        (lambda: nn.Linear(768, 768), (16, 768)),
        (lambda: nn.Linear(256, 1024), (128, 256)),
        (lambda: nn.Linear(768, 3072), (128, 768)),
    ],
}


class _Layer(nn.Module):
    """A layer and what follows it; ``binary`` has a second tensor of the size of the layer's result."""

    def __init__(self, layer: nn.Module, binary: str, activation: str) -> None:
        super().__init__()
        self.layer, self.binary, self.activation = layer, binary, activation

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        if self.binary:
            y = BINARY[self.binary](y, other)
        return ACTIVATIONS[self.activation](y) if self.activation else y


def fusions_of(call: str) -> Iterator[tuple[str, str]]:
    """The binary operations and activations that the library has for a kind of call, "" for none."""
    yield from (("", activation) for activation in ACTIVATIONS)
    if call != "transposed convolution":
        yield from ((binary, "") for binary in BINARY)
    if call == "convolution":
        yield from ((binary, "relu") for binary in BINARY)


def measure(call: str, dtype: torch.dtype, binary: str, activation: str, rounds: int) -> tuple[float, float]:
    """Microseconds of the call and a kernel, and of the fused call, over all sizes."""
    separate = fused = 0.0
    for make, shape in LAYERS[call]:
        module = _Layer(make(), binary, activation).eval().to(dtype)
        images = len(shape) == 4
        layout: Any = {"memory_format": torch.channels_last} if images else {}
        x = torch.randn(shape).to(dtype, **layout)
        other = torch.randn_like(module.layer(x)).to(**layout) if images else torch.randn_like(module.layer(x))
        variants = [_compiled(module, x, other, fuses=fuses) for fuses in (False, True)]
        best = _best(variants, rounds)
        separate, fused = separate + best[0], fused + best[1]
    return separate, fused


def _compiled(module: nn.Module, x: Tensor, other: Tensor, *, fuses: bool) -> Callable[[], Any]:
    torch._dynamo.reset()
    skipped = () if fuses else ("library_fusions",)
    options = {"adaptive": False, "fallback": False, "cache": False, "passes_skip": skipped}
    # A function of its own, which keeps what it is compiled to.
    run = torch.compile(_Layer.forward.__get__(module), backend="kiln", options=options)
    with mock.patch.object(fusion, "pays", return_value=True):
        run(x, other)
    return lambda: run(x, other)


def _best(functions: list[Callable[[], Any]], rounds: int) -> list[float]:
    best = [float("inf")] * len(functions)
    for _ in range(rounds + 2):
        for place, function in enumerate(functions):
            start = time.thread_time()
            function()
            best[place] = min(best[place], 1e6 * (time.thread_time() - start))
    return best


def write(found: list[FusionTime]) -> None:
    """Put ``found`` into the table, in place of what it says of the same."""
    known = {dataclasses.astuple(t)[:4]: t for t in fusion_times()} | {dataclasses.astuple(t)[:4]: t for t in found}
    with TABLE.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(field.name for field in dataclasses.fields(FusionTime))
        for row in sorted(map(dataclasses.astuple, known.values())):
            writer.writerow((*row[:4], *(f"{value:.0f}" for value in row[4:])))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default=",".join(LAYERS), help="kinds of calls")
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--write", action="store_true", help="put the times into the table")
    options = parser.parse_args()
    torch.set_num_threads(1)
    target = capture_target(Settings())
    found: list[FusionTime] = []
    with torch.no_grad():
        for call in options.only.split(","):
            for name in options.dtypes.split(","):
                dtype = getattr(torch, name)
                if not target.packs_weights_of(dtype):
                    print(f"{call} of {name}: oneDNN packs no such weights here")
                    continue
                for binary, activation in fusions_of(call):
                    fused = "_".join(filter(None, (binary, activation)))
                    times = measure(call, dtype, binary, activation, options.rounds)
                    found.append(FusionTime(target.cpu, call, name, fused, *times))
                    ratio = times[0] / times[1]
                    print(f"{call:<24}{name:<10}{fused:<18}{times[0]:>8.0f}{times[1]:>8.0f}{ratio:>8.2f}", flush=True)
    if options.write:
        write(found)


if __name__ == "__main__":
    main()
