"""The memory report: its figures are those of a real step, it changes nothing, and what it writes is whole."""

from __future__ import annotations

import copy
import random
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import torchkiln
from tests.partition.measured import saved_bytes
from tests.partition.models import ConvNet, Llama, Mlp, Transformer
from torchkiln.errors import KilnError, OptionError, UnsupportedError
from torchkiln.memory import MemoryReport
from torchkiln.memory.amounts import bytes_text, line_text, seconds_text

MAKERS = {
    "mlp": (lambda: Mlp(depth=2), lambda: torch.randn(32, 64)),
    "transformer": (lambda: Transformer(depth=1), lambda: torch.randint(50, (2, 16))),
    "convnet": (lambda: ConvNet(depth=1), lambda: torch.randn(2, 3, 12, 12)),
    "llama": (lambda: Llama(depth=1), lambda: torch.randn(2, 16, 32)),
}


@pytest.fixture(scope="module")
def report() -> MemoryReport:
    torch.manual_seed(0)
    return torchkiln.memory_report(Llama(depth=2), torch.randn(2, 16, 32))


@pytest.mark.parametrize("name", MAKERS)
def test_the_figures_are_those_of_eager_and_of_a_compiled_step(name: str) -> None:
    make, make_input = MAKERS[name]
    model, inputs = make(), (make_input(),)
    report = torchkiln.memory_report(model, *inputs)
    assert report.graphs == 1
    assert report.outside_bytes == 0
    assert report.eager_bytes == saved_bytes(model, inputs, model)
    run = torch.compile(model, backend="kiln", fullgraph=True, options={"fallback": False})
    measured = saved_bytes(run, inputs, model)
    assert abs(report.default.saved_bytes - measured) <= 0.01 * measured
    assert report.default.saved_bytes <= report.eager_bytes


def test_the_point_in_force_is_what_a_step_at_that_budget_saves() -> None:
    model, x = Mlp(depth=3), torch.randn(32, 64)
    with torchkiln.settings(memory_budget=0.5):
        report = torchkiln.memory_report(model, x)
    run = torch.compile(model, backend="kiln", fullgraph=True, options={"fallback": False, "memory_budget": 0.5})
    measured = saved_bytes(run, (x,), model)
    assert report.chosen.budget == 0.5
    assert abs(report.chosen.saved_bytes - measured) <= 0.01 * measured
    assert report.chosen.saved_bytes < report.default.saved_bytes
    assert "0.5 (in force)" in str(report)


def test_a_budget_in_bytes_is_a_point_of_its_own() -> None:
    model, x = Mlp(depth=2), torch.randn(32, 64)
    with torchkiln.settings(memory_budget="90KiB"):
        report = torchkiln.memory_report(model, x)
    assert report.chosen.peak_bytes <= 90 * 1024 < report.default.peak_bytes
    assert "90KiB (in force)" in str(report)
    with torchkiln.settings(memory_budget="64B"), pytest.raises(OptionError, match="take at least"):
        torchkiln.memory_report(model, x)


def test_lines_add_up_and_are_the_users(report: MemoryReport) -> None:
    for point in report.points:
        assert sum(use.saved_bytes for use in point.lines) == point.saved_bytes
    assert sum(use.eager_bytes for use in report.default.lines) == report.eager_bytes
    largest = report.default.lines[0]
    assert "self.down(F.silu(self.gate(y)) * self.up(y))" in largest.line
    # What ``gate`` and ``up`` give in each of two blocks: [2, 16, 3 * 32] of four bytes.
    products = [tensor for tensor in largest.saved if tensor.operator == "mm"]
    assert [tensor.bytes for tensor in products] == [2 * 16 * 96 * 4] * 4
    assert all(tensor.dtype == "float32" and tensor.module == "Linear" for tensor in products)
    assert "mul" in {tensor.operator for tensor in largest.recomputed} | {tensor.operator for tensor in largest.saved}


def test_budgets_fall_to_zero_with_less_memory_and_more_work(report: MemoryReport) -> None:
    budgets = [point.budget for point in report.points]
    assert budgets[0] == 1
    assert budgets[-1] == 0
    peaks = [point.peak_bytes for point in report.points]
    assert peaks == sorted(peaks, reverse=True)
    assert report.points[-1].extra_seconds > report.points[0].extra_seconds
    assert report.points[-1].saved_bytes < 0.5 * report.points[0].saved_bytes


class _Restless(nn.Module):
    """Batch norm, dropout, a counter, a list and a buffer that is replaced."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)
        self.calls = 0
        self.seen: list[int] = []
        self.register_buffer("last", torch.zeros(4, 8))

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        x += 1
        self.calls += 1
        self.seen.append(self.calls)
        result = nn.functional.dropout(self.norm(self.linear(x)) * scale)
        self.last = result.detach()
        return result


def test_nothing_of_the_user_changes() -> None:
    model = _Restless()
    model(torch.randn(4, 8)).sum().backward()
    x = torch.randn(4, 8)
    before = copy.deepcopy(model.state_dict())
    gradients = [parameter.grad for parameter in model.parameters()]
    values = [gradient.clone() for gradient in gradients]
    kept_x, buffer = x.clone(), model.last
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()

    torchkiln.memory_report(model, x, scale=2.0)

    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert np.random.get_state()[1].tolist() == states[2]
    assert torch.equal(x, kept_x)
    assert model.calls == 1
    assert model.seen == [1]
    assert model.last is buffer
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    for parameter, gradient, value in zip(model.parameters(), gradients, values, strict=True):
        assert parameter.grad is gradient
        assert torch.equal(gradient, value)
    assert model.training


def test_a_function_may_name_its_modules() -> None:
    norm = nn.BatchNorm1d(8)

    def run(x: Tensor) -> Tensor:
        return norm(x).exp()

    report = torchkiln.memory_report(run, torch.randn(4, 8))
    assert report.model == "run"
    assert torch.equal(norm.running_mean, torch.zeros(8))
    # Batch norm keeps its input, which is the caller's, and eight means and eight deviations; exp is the result.
    assert report.eager_bytes == 2 * 8 * 4


def test_gradients_need_not_be_on_and_a_compiled_model_is_looked_into() -> None:
    model, x = Mlp(depth=1), torch.randn(4, 64)
    run = torch.compile(model, backend="kiln", options={"fallback": False})
    with torch.no_grad():
        report = torchkiln.memory_report(run, x)
    assert report.model == "Mlp"
    assert report.eager_bytes == saved_bytes(model, (x,), model)


def test_code_the_user_compiled_stays_and_reports_do_not_add_to_it() -> None:
    model, x = Mlp(depth=1), torch.randn(4, 64)
    run = torch.compile(model, backend="kiln", options={"fallback": False})
    run(x)
    before = torchkiln.stats().graphs
    with torch._dynamo.config.patch(recompile_limit=2):
        for _ in range(3):
            assert torchkiln.memory_report(model, x).default.saved_bytes
        run(x)
        assert torchkiln.stats().graphs == before
        run(x[:2])
    assert torchkiln.stats().graphs > before


class _Broken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).sin()
        torch._dynamo.graph_break()
        return self.second(x).cos().exp()


def test_graphs_of_a_broken_model_are_put_together() -> None:
    model, x = _Broken(), torch.randn(32, 64)
    report = torchkiln.memory_report(model, x)
    assert report.graphs == 2
    run = torch.compile(model, backend="kiln", options={"fallback": False})
    assert report.default.saved_bytes == saved_bytes(run, (x,), model)
    assert report.eager_bytes == saved_bytes(model, (x,), model)
    # What the first graph hands to the second is kept for the product's gradient, and belongs to neither graph.
    assert report.outside_bytes == 32 * 64 * 4
    assert "outside of the graphs" in str(report)


def test_a_model_without_gradients_is_refused() -> None:
    model = nn.Linear(4, 4).requires_grad_(False)
    with pytest.raises(UnsupportedError, match="no graph of this call needs gradients"):
        torchkiln.memory_report(model, torch.randn(2, 4))


def test_a_model_that_dynamo_leaves_to_eager_is_told_so() -> None:
    with pytest.raises(UnsupportedError, match=r"Dynamo made no graph .* [\d,]+ bytes"):
        torchkiln.memory_report(nn.LSTM(8, 8), torch.randn(3, 2, 8))


def test_inference_mode_may_be_on() -> None:
    model, x = Mlp(depth=1), torch.randn(4, 64)
    with torch.inference_mode():
        report = torchkiln.memory_report(model, x)
        made_inside = torchkiln.memory_report(model, torch.randn(4, 64))
    assert report.eager_bytes == made_inside.eager_bytes == saved_bytes(model, (x,), model)


def test_the_first_report_of_a_process_leaves_pythons_random_numbers_alone() -> None:
    """Modules that the report needs draw some when they are imported."""
    program = """
import random, torch, torchkiln
random.seed(0)
str(torchkiln.memory_report(torch.nn.Linear(2, 2), torch.zeros(1, 2)))
assert random.random() == random.Random(0).random()
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


def test_the_table_has_eager_the_default_and_the_lines(report: MemoryReport) -> None:
    text = str(report)
    assert "Memory for the backward of Llama (1 graph" in text
    assert bytes_text(report.eager_bytes) in text
    assert "1 (default)" in text
    assert bytes_text(report.default.saved_bytes) in text
    assert "models.py" in text
    assert "\x1b" not in text


def test_both_files_are_whole_and_load_nothing(report: MemoryReport, tmp_path: Path) -> None:
    page, picture = report.save(tmp_path / "new" / "folder")
    assert sorted(path.name for path in page.parent.iterdir()) == ["report.html", "report.png"]
    content = picture.read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    assert content[-8:-4] == b"IEND"

    root = ElementTree.fromstring(page.read_text().removeprefix("<!DOCTYPE html>"))
    tags = [element.tag.rpartition("}")[2] for element in root.iter()]
    assert root.tag == "html"
    assert {"svg", "polyline", "circle", "rect", "table"} <= set(tags)
    assert "script" not in tags
    assert not [element for element in root.iter() if {"src", "href"} & set(element.attrib)]
    assert "url(" not in page.read_text()
    assert tags.count("circle") == len({(p.saved_bytes, p.peak_bytes, p.extra_seconds) for p in report.points})


class _Marked(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sin().sin()  # [/b]<b>&amp;$


def test_code_with_markup_in_it_is_shown_as_it_is() -> None:
    report = torchkiln.memory_report(_Marked(), torch.randn(4, requires_grad=True))
    assert "[/b]<b>&amp;$" in str(report)
    root = ElementTree.fromstring(report.html().removeprefix("<!DOCTYPE html>"))
    assert "[/b]<b>&amp;$" in "".join(root.itertext())
    assert report.png().startswith(b"\x89PNG")


def test_a_file_that_cannot_be_written_leaves_what_was_there(
    report: MemoryReport, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "report.html").write_text("before")

    def fail(*_paths: Any) -> None:
        raise OSError("no space")

    monkeypatch.setattr("os.replace", fail)
    with pytest.raises(OSError, match="no space"):
        report.save(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]
    assert (tmp_path / "report.html").read_text() == "before"


def test_without_matplotlib_the_error_names_the_extra_and_nothing_is_written(
    report: MemoryReport, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(KilnError, match=r"torchkiln\[report\]"):
        report.save(tmp_path / "folder")
    assert not (tmp_path / "folder").exists()
    assert report.html().startswith("<!DOCTYPE html>")


def test_train_mode_batch_norm_reports_the_same_twice() -> None:
    model, x = ConvNet(depth=1), torch.randn(2, 3, 8, 8)
    assert torchkiln.memory_report(model, x).default.lines == torchkiln.memory_report(model, x).default.lines


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.00 KiB"), (15 * 1024, "15.0 KiB"), (3 << 40, "3.00 TiB")],
)
def test_bytes_as_text(count: int, text: str) -> None:
    assert bytes_text(count) == text


def test_times_and_lines_as_text() -> None:
    assert [seconds_text(value) for value in (0, 2e-6, 0.0153, 2)] == ["0", "2 µs", "15.3 ms", "2 s"]
    assert line_text("/a/b/model.py:3 in forward: y = x[1:2]") == "model.py:3 in forward: y = x[1:2]"
    assert line_text("") == "(line not known)"
