"""Where the time of a step goes: parts within the whole, every launch and call listed, nothing else changed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from rich.console import Console
from torch import nn
from typer.testing import CliRunner

import torchkiln
from torchkiln.bench.cells import Cell, Job, Precision, Shapes
from torchkiln.bench.profile import Part, Profile, profile
from torchkiln.bench.profile_table import parts_table, totals_table
from torchkiln.cli import app
from torchkiln.debug.recording.model import Bandwidth, Limits
from torchkiln.errors import KilnError
from torchkiln.runtime.timing import profiled

TIMED = {"fallback": False, "adaptive": False, "profile": True}
MLP = Cell("mlp-64", Job.training, Precision.float32, Shapes.static)


@pytest.fixture(scope="module")
def trained() -> Profile:
    return profile(MLP, seconds=0.05)


def test_the_parts_add_up_to_no_more_than_the_whole(trained: Profile) -> None:
    assert 0 < trained.native_seconds < trained.seconds
    assert trained.outside_seconds == pytest.approx(trained.seconds - sum(trained.by_kind().values()))
    assert all(part.seconds > 0 for part in trained.parts)
    assert [part.seconds for part in trained.parts] == sorted((p.seconds for p in trained.parts), reverse=True)


def test_every_launch_and_every_call_is_listed() -> None:
    torchkiln.reset_stats()
    found = profile(MLP, seconds=0.0)
    stats = torchkiln.stats()
    listed = {kind: sum(p.calls for p in found.parts if p.kind == kind) for kind in ("kernel", "copy", "library")}
    assert listed["kernel"] + listed["copy"] == stats.launches
    assert listed["library"] == sum(stats.extern_calls.values())
    assert {part.graph for part in found.parts} == {1, 2}
    assert sum(part.calls for part in found.parts if part.kind == "entry") == 4


def test_products_are_counted_as_they_are_by_hand(trained: Profile) -> None:
    """Layers of 32 rows: three of 64 × 64, one of 64 × 10; twice as much in backward less the gradient of the input."""
    products = 3 * 2 * 32 * 64 * 64 + 2 * 32 * 64 * 10
    counted = sum(part.operations for part in trained.parts if part.kind == "library")
    assert counted == 3 * products - 2 * 32 * 64 * 64


def test_results_are_those_without_a_profile(everything_compiled: None) -> None:
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 4))
    x = torch.randn(8, 16)
    results = []
    for wanted in (False, True):
        torch._dynamo.reset()
        model.zero_grad()
        compiled = torch.compile(model, backend="kiln", options={**TIMED, "profile": wanted})
        loss = compiled(x).square().sum()
        loss.backward()
        results.append([loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)])
    assert len(results[0]) == 7
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_a_copy_is_told_from_a_kernel_and_measured_in_bytes() -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x.t().contiguous(), (x * 2 + 1).exp()

    before = set(profiled())
    x = torch.randn(64, 32)
    compiled = torch.compile(function, backend="kiln", options={**TIMED, "fuse": False})
    for _ in range(3):
        compiled(x)
    (graph,) = [times for times in profiled() if times not in before]
    steps = [one for one in graph.read() if one.step.kind != "entry"]
    assert {one.calls for one in steps} == {3}
    assert all(0 < one.calls * one.least_nanoseconds <= one.nanoseconds for one in steps)
    (copy,) = [one.step for one in steps if one.step.kind == "copy"]
    assert copy.bytes == 2 * 64 * 32 * 4
    assert copy.operations == 0
    computed = [one.step for one in steps if one.step.kind == "kernel"]
    assert sum(step.operations for step in computed) == 3 * 64 * 32
    assert all(step.bytes == 2 * 64 * 32 * 4 for step in computed)


def _counted(name: str, run: Callable[[], torch.Tensor]) -> list[float]:
    """The operations counted of each step called so, in forward and backward of what ``run`` compiles and calls."""
    before = set(profiled())
    run().sum().backward()
    return [
        one.step.operations
        for times in profiled()
        if times not in before
        for one in times.read()
        if name in one.step.name
    ]


@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("transposed", [False, True])
def test_convolutions_are_counted_as_they_are_by_hand(groups: int, transposed: bool) -> None:
    kind = nn.ConvTranspose2d if transposed else nn.Conv2d
    layer = kind(8, 16, 3, groups=groups, bias=False)
    x = torch.randn(2, 8, 10, 10, requires_grad=True)
    counted = _counted("convolution", lambda: torch.compile(layer, backend="kiln", options=TIMED)(x))
    # Each pixel of the smaller side meets 3 × 3 others in each channel of its group.
    pixels, channels = (2 * 8 * 10 * 10, 16 // groups) if transposed else (2 * 16 * 8 * 8, 8 // groups)
    once = 2 * pixels * channels * 9
    assert counted == [once, 2 * once]


def test_attention_is_counted_as_it_is_by_hand() -> None:
    q, k, v = (torch.randn(2, 3, length, 16, requires_grad=True) for length in (8, 12, 12))
    attend = torch.compile(
        nn.functional.scaled_dot_product_attention, backend="kiln", options=TIMED
    )
    counted = _counted("attention", lambda: attend(q, k, v))
    one_product = 2 * (2 * 3) * 8 * 12 * 16
    assert counted == [2 * one_product, 5 * one_product]


def test_sizes_known_at_run_time_and_a_loop_with_a_body_are_timed_too() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        def body(i: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return i + 1, y.sin() * 2

        _, y = torch.ops.higher_order.while_loop(lambda i, y: i < 3, body, (torch.tensor(0), x), ())
        return (y @ y.t()).relu()

    before = set(profiled())
    x = torch.randn(6, 5)
    assert torch.allclose(torch.compile(function, backend="kiln", options=TIMED)(x), function(x), atol=1e-5)
    (graph,) = [times for times in profiled() if times not in before]
    kinds = [one.step.kind for one in graph.read()]
    assert kinds.count("python") == 1
    assert "library" in kinds

    torch._dynamo.reset()
    before = set(profiled())
    compiled = torch.compile(lambda x: (x * 2).sum(0), backend="kiln", dynamic=True, options=TIMED)
    for rows in (7, 9):
        given = torch.randn(rows, 5)
        assert torch.allclose(compiled(given), (given * 2).sum(0))
    (graph,) = [times for times in profiled() if times not in before]
    assert {one.calls for one in graph.read()} == {2}


def test_a_graph_without_the_setting_keeps_no_times() -> None:
    before = set(profiled())
    torch.compile(lambda x: x + 1, backend="kiln", options={"fallback": False})(torch.ones(3))
    assert set(profiled()) <= before


def test_what_cannot_be_compiled_says_so_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KILN_PASSES_SKIP", "no-such-pass")
    with pytest.raises(KilnError, match="mlp-64 training float32 static cannot be profiled: ") as caught:
        profile(MLP, seconds=0.0)
    assert "\n" not in str(caught.value)


def _text(shown: object) -> str:
    console = Console(width=220)
    with console.capture() as captured:
        console.print(shown)
    return captured.get()


MADE_UP = Profile(
    MLP,
    0.010,
    5,
    (
        Part(1, "aten.mm.default 2×3, 3×4", "library", 2, 0.006, 6e6, 30e6, ("mm", "mm_1")),
        Part(1, "kernel0", "kernel", 1, 0.002, 10e6, 0, ("add",)),
        Part(1, "reading inputs", "entry", 1, 0.001, 0, 0, ()),
    ),
    Limits((Bandwidth(10**6, 20e9), Bandwidth(4 * 10**6, 10e9), Bandwidth(10**7, 10e9)), 50e9),
)


def test_the_tables_show_shares_and_rates() -> None:
    totals = [line.replace("│", " ").split() for line in _text(totals_table(MADE_UP)).splitlines()]
    assert ["calls", "of", "torch's", "library", "6.000", "60.0%"] in totals
    assert ["outside", "of", "native", "calls", "1.000", "10.0%"] in totals
    rows = [line.replace("│", " ").split() for line in _text(parts_table(MADE_UP)).splitlines()]
    kernel = "kernel0 kernel 1 2.000 20.0% 10.00 5.0 50% add"
    assert kernel.split() in rows
    library = "mm 2×3, 3×4 library 2 6.000 60.0% 6.00 1.0 10% 5.0 10% mm, mm_1"
    assert library.split() in rows
    assert "mm, mm_1 and 1 more" in _text(parts_table(replace(MADE_UP, parts=(_with_operators("mm", "mm_1", "mm_2"),))))


def _with_operators(*names: str) -> Part:
    return replace(MADE_UP.parts[0], operators=names)


def test_a_part_is_compared_with_a_copy_of_as_much() -> None:
    limits = Limits((Bandwidth(100, 4.0), Bandwidth(1000, 3.0), Bandwidth(10000, 2.0)), 1.0)
    amounts = (0, 100, 101, 1000, 5000, 10**9)
    assert [limits.bytes_per_second(moved) for moved in amounts] == [4.0, 4.0, 3.0, 3.0, 2.0, 2.0]


def test_many_parts_end_in_one_line_for_the_rest() -> None:
    many = tuple(replace(MADE_UP.parts[1], name=f"kernel{k}", seconds=0.0001) for k in range(45))
    text = _text(parts_table(replace(MADE_UP, parts=many)))
    assert "kernel39" in text
    assert "kernel40" not in text
    rest = next(line.split() for line in text.splitlines() if "others" in line)
    assert rest == ["5", "others", "5", "0.500", "5.0%"]


def test_the_command_prints_a_profile() -> None:
    typed = "bench --profile mlp-64 --jobs inference --quick --threads 1"
    result = CliRunner().invoke(app, typed.split())
    assert result.exit_code == 0, result.output
    assert "mlp-64 inference float32 static: a step takes" in result.output
    assert "outside of native calls" in result.output
    assert "mm 32×64, 64×64" in result.output
