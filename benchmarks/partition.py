"""Processor seconds to partition joint graphs of 1,250 to 20,000 nodes, by budget, and the growth per doubling.

The graphs are residual blocks of a normalization, two matrix products with GELU between, dropout from a seed and the
gradients of all of that, made directly: tracing graphs of this size takes far longer than partitioning them.
"""

from __future__ import annotations

import operator
import time
from typing import Annotated, Any

import torch
import torch.fx
import typer
from rich.console import Console
from rich.table import Table
from torch._subclasses.fake_tensor import FakeTensorMode

from torchkiln.config import Settings
from torchkiln.graph.seeded import RANDOM
from torchkiln.graph.tangents import mark_tangent
from torchkiln.partition import min_cut_rematerialization_partition
from torchkiln.target import capture_target

aten = torch.ops.aten
ROWS, WIDTH = 64, 32


class JointGraph:
    """Builds the joint graph of ``blocks`` residual blocks."""

    def __init__(self, blocks: int) -> None:
        self.graph = torch.fx.Graph()
        with FakeTensorMode():
            self._matrix = torch.empty(ROWS, WIDTH)
            self._wide = torch.empty(ROWS, 4 * WIDTH)
            self._up, self._down = torch.empty(WIDTH, 4 * WIDTH), torch.empty(4 * WIDTH, WIDTH)
            self._row, self._column = torch.empty(WIDTH), torch.empty(ROWS, 1)
            self._mask = torch.empty(ROWS, WIDTH, dtype=torch.bool)
            self._seed = torch.empty((), dtype=torch.int64)
        x = self._placeholder("primals_x", self._matrix)
        seed = self._placeholder("primals_seed", self._seed)
        weights = [
            (self._placeholder(f"primals_up_{k}", self._up), self._placeholder(f"primals_down_{k}", self._down))
            for k in range(blocks)
        ]
        gradient = self._placeholder("tangents_1", self._matrix)
        mark_tangent(gradient, 0)
        kept = []
        for k, (up, down) in enumerate(weights):
            x, saved = self._block(x, seed, up, down, k)
            kept.append(saved)
        results: list[torch.fx.Node] = [x]
        for (up, down), saved in zip(reversed(weights), reversed(kept), strict=True):
            gradient, found = self._gradient(gradient, up, down, *saved)
            results += found
        self.graph.output((*results, gradient))

    def _placeholder(self, name: str, value: torch.Tensor) -> torch.fx.Node:
        node = self.graph.placeholder(name)
        node.meta["val"] = value
        return node

    def _call(self, target: Any, value: Any, *args: Any, **kwargs: Any) -> torch.fx.Node:
        node = self.graph.call_function(target, args, kwargs)
        node.meta["val"] = value
        return node

    def _block(
        self, x: torch.fx.Node, seed: torch.fx.Node, up: torch.fx.Node, down: torch.fx.Node, stream: int
    ) -> tuple[torch.fx.Node, tuple[torch.fx.Node, ...]]:
        call, small = self._call, self._matrix
        values = (small, self._column, self._column)
        norm = call(aten.native_layer_norm.default, values, x, [WIDTH], None, None, 1e-5)
        y, mean, rstd = (call(operator.getitem, values[k], norm, k) for k in range(3))
        first = call(aten.mm.default, self._wide, y, up)
        active = call(aten.gelu.default, self._wide, first)
        second = call(aten.mm.default, small, active, down)
        numbers = call(RANDOM, small, seed, stream, "uniform", [ROWS, WIDTH], None, torch.float32)
        mask = call(aten.gt.Scalar, self._mask, numbers, 0.1)
        dropped = call(aten.mul.Tensor, small, second, mask)
        scaled = call(aten.mul.Tensor, small, dropped, 1.1)
        return call(aten.add.Tensor, small, x, scaled), (x, mean, rstd, y, first, active, mask)

    def _gradient(
        self, gradient: torch.fx.Node, up: torch.fx.Node, down: torch.fx.Node, *saved: torch.fx.Node
    ) -> tuple[torch.fx.Node, list[torch.fx.Node]]:
        x, mean, rstd, y, first, active, mask = saved
        call, small = self._call, self._matrix
        scaled = call(aten.mul.Tensor, small, gradient, 1.1)
        masked = call(aten.mul.Tensor, small, scaled, mask)
        turned = call(aten.t.default, self._down.t(), down)
        inner = call(aten.mm.default, self._wide, masked, turned)
        down_grad = call(aten.mm.default, self._down, call(aten.t.default, self._wide.t(), active), masked)
        inner = call(aten.gelu_backward.default, self._wide, inner, first)
        up_grad = call(aten.mm.default, self._up, call(aten.t.default, self._matrix.t(), y), inner)
        outer = call(aten.mm.default, small, inner, call(aten.t.default, self._up.t(), up))
        values = (small, None, None)
        target = aten.native_layer_norm_backward.default
        back = call(target, values, outer, x, [WIDTH], mean, rstd, None, None, [True, False, False])
        own = call(operator.getitem, small, back, 0)
        return call(aten.add.Tensor, small, gradient, own), [up_grad, down_grad]


def seconds_for(blocks: int, settings: Settings, repetitions: int) -> tuple[int, float]:
    """Nodes, and the best of ``repetitions`` times."""
    best = float("inf")
    target = capture_target(settings)
    for _ in range(repetitions):
        module = torch.fx.GraphModule(torch.nn.Module(), JointGraph(blocks).graph)
        start = time.process_time()
        min_cut_rematerialization_partition(module, None, num_fwd_outputs=1, settings=settings, target=target)
        best = min(best, time.process_time() - start)
    return len(module.graph.nodes), best


def main(
    most: Annotated[int, typer.Option(help="nodes of the largest graph")] = 20_000,
    repetitions: Annotated[int, typer.Option(help="times each is run; the best counts")] = 3,
    budgets: Annotated[str, typer.Option(help="memory budgets, with commas")] = "1,0.5",
) -> None:
    torch.set_num_threads(1)
    shares = [float(text) for text in budgets.split(",")]
    seconds_for(4, Settings(memory_budget=0.5), 1)  # imports, rates of the machine
    table = Table("nodes", *(text for share in shares for text in (f"budget {share:g}: s", "growth")))
    before: dict[float, float] = {}
    per_block = 28
    sizes = [count for count in (1_250, 2_500, 5_000, 10_000, 20_000) if count <= most]
    for count in sizes:
        cells = []
        for share in shares:
            nodes, seconds = seconds_for(count // per_block, Settings(memory_budget=share), repetitions)
            growth = f"x{seconds / before[share]:.2f}" if share in before else ""
            before[share] = seconds
            cells += [f"{seconds:.3f}", growth]
        table.add_row(f"{nodes:,}", *cells)
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
