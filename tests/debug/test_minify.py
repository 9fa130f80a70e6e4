"""Minify makes a file of a few nodes that fails as the whole program does, and passes without the bug."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import torchkiln
from tests.debug import nondeterministic
from tests.debug.planted import plant, run_file
from torchkiln.cli import app
from torchkiln.debug import shrink
from torchkiln.debug.check import SlowError, check
from torchkiln.debug.command import minify_file
from torchkiln.debug.failure import Failure, failure_of_file
from torchkiln.debug.minify import captured_graphs, minify
from torchkiln.errors import UnsupportedError
from torchkiln.graph.program_text import file_text
from torchkiln.runtime.prepared_weights import PreparedGraph

minify_module = sys.modules["torchkiln.debug.minify"]  # whose name the function has
ROOT = Path(__file__).parent.parent.parent
SETUP = "from tests.debug.planted import plant\nplant({!r})"


class Network(nn.Module):
    def __init__(self, layers: int = 1) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(layers))
        self.norm = nn.LayerNorm(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = self.norm(x + torch.tanh(layer(x)).relu())
        return torch.sigmoid(x * 200).log1p()


def test_a_wrong_result_is_reduced_to_the_call_that_is_wrong(tmp_path: Path) -> None:
    file, told = tmp_path / "small.py", []
    undo = plant("nan")
    try:
        report = minify(Network(), torch.randn(3, 16), output=file, setup=SETUP.format("nan"), say=told.append)
    finally:
        undo()
    assert report.verified
    assert report.complete
    assert report.failure.kind == "non-finite"
    assert report.nodes <= 2 < report.nodes_before
    assert "sigmoid" in file.read_text()
    assert "tanh" not in file.read_text()
    assert any("elements of inputs" in line for line in told)
    assert run_file(file, WITHOUT_BUGS="1").returncode == 0


def test_weights_of_inference_stay_weights(tmp_path: Path) -> None:
    """Parameters are prepared apart from the call, in the file too."""
    file = tmp_path / "small.py"
    model = nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 4))
    undo = plant("wrong_weights")
    try:
        with torch.no_grad():
            report = minify(model, torch.randn(3, 16), output=file, setup=SETUP.format("wrong_weights"))
    finally:
        undo()
    assert report.verified
    assert report.nodes == 1
    assert file.read_text().count("static=True") == 2  # weight and bias
    assert run_file(file).returncode == 1
    assert run_file(file, WITHOUT_BUGS="1").returncode == 0


def test_a_file_that_lacks_its_setup_says_what_it_may_need(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(minify_module, "failure_of_file", lambda *_, **__: None)
    undo = plant("wrong_rewrite")
    try:
        report = minify(torch.tanh, torch.randn(9), output=tmp_path / "small.py")
    finally:
        undo()
    assert not report.verified
    assert "give it as setup=" in str(report)


def test_a_module_to_import_first_may_be_beside_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    (whole,) = captured_graphs(torch.tanh, (torch.randn(9),), {}, dynamic=False)
    file, small = tmp_path / "failing.py", tmp_path / "small.py"
    file.write_text(file_text(whole.graph_module, whole.inputs, failure="planted"))
    setup = SETUP.format("wrong_rewrite").replace("plant('", "undo = plant('")
    (tmp_path / "plants_a_rewrite.py").write_text(setup)
    try:
        done = CliRunner().invoke(app, ["minify", str(file), "--output", str(small), "--import", "plants_a_rewrite"])
    finally:
        sys.modules.pop("plants_a_rewrite").undo()
    assert done.exit_code == 0, done.output
    assert "import plants_a_rewrite" in small.read_text()
    missing = CliRunner().invoke(app, ["minify", str(file), "--output", str(small), "--import", "no_such_module"])
    assert missing.exit_code == 1
    assert "There is no module no_such_module" in missing.stderr


def test_memory_that_inputs_share_is_kept_where_the_failure_needs_it(tmp_path: Path) -> None:
    def program(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.mul_(200)
        return torch.sigmoid(y).log1p().sum()

    x = torch.linspace(0.1, 0.9, 12)
    file = tmp_path / "small.py"
    undo = plant("nan")
    try:
        report = minify(program, x, x.view(3, 4).t(), output=file, setup=SETUP.format("nan"))
    finally:
        undo()
    assert report.verified
    assert report.failure.kind == "non-finite"
    assert report.nodes <= 3
    assert "view(memory0" in file.read_text()


def test_a_crash_keeps_its_signal_and_symbolic_sizes(tmp_path: Path) -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        return torch.where(torch.isinf(x.cumsum(0) * x.shape[0]), 0.0, x).sin()

    file = tmp_path / "small.py"
    undo = plant("segfault")
    try:
        report = minify(program, torch.randn(9, 5), output=file, setup=SETUP.format("segfault"), dynamic=True)
    finally:
        undo()
    assert report.failure.kind == "died: SIGSEGV"
    assert report.verified
    assert report.nodes == 1
    assert "dynamic=True" in file.read_text()


def test_a_command_minifies_a_folder_of_debug_compile(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT / "src"), str(ROOT)]))
    undo = plant("crash_in_lowering")
    try:
        x = torch.randn(4, 4)

        def program(x: torch.Tensor) -> torch.Tensor:
            return torch.erf(x.relu() + 1) * 2

        with torch.no_grad():
            result = torch.compile(program, backend=torchkiln.debug.debug_compile)(x)
        torch.testing.assert_close(result, program(x))
        (command,) = (line for line in capfd.readouterr().out.splitlines() if line.startswith("kiln minify"))
        folder = command.split()[-1]
        text = (tmp_path / folder / "reproduce.py").read_text()
        (tmp_path / folder / "reproduce.py").write_text(
            text.replace("# setup\n", f"# setup\n{SETUP.format('crash_in_lowering')}\n")
        )
        outcome = CliRunner().invoke(app, ["minify", folder, "--output", "small.py"])
    finally:
        undo()
    assert outcome.exit_code == 0, outcome.output
    assert "1 of 4 nodes" in outcome.output
    assert "ValueError: planted" in (tmp_path / "small.py").read_text()


def test_a_program_that_is_right_is_not_minified(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="Nothing to minify"):
        minify(torch.sin, torch.randn(3), output=tmp_path / "none.py")
    assert not (tmp_path / "none.py").exists()


def test_parts_of_a_graph_compute_what_they_did_in_the_whole() -> None:
    (whole,) = captured_graphs(Network(), (torch.randn(3, 16),), {}, dynamic=False)
    values = whole.values()
    calls = whole.calls
    for start in range(0, len(calls), 3):
        piece = shrink.part(whole, calls[start:], whole.outputs, values)
        assert piece is not None
        (result,) = piece.program()(*piece.inputs)
        torch.testing.assert_close(result, values[whole.outputs[0].name])
        assert len(piece.calls) <= len(calls) - start


def test_sizes_are_made_smaller_together() -> None:
    def program(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return (x @ w).reshape(-1, 24)

    (whole,) = captured_graphs(program, (torch.randn(6, 12).t(), torch.randn(6, 24)), {}, dynamic=False)
    smaller = list(shrink.smaller_sizes(whole))
    running = []
    for candidate in smaller:
        try:
            candidate.program()(*candidate.inputs)
        except RuntimeError:
            continue
        running.append(candidate)
    assert any([tuple(value.shape) for value in candidate.inputs] == [(12, 6), (6, 2)] for candidate in running)
    assert all(candidate.inputs[0].stride(0) == 1 for candidate in running)


def test_a_file_whose_setup_is_broken_is_not_verified(tmp_path: Path) -> None:
    undo = plant("crash_in_lowering")
    try:
        report = minify(torch.erf, torch.randn(3), output=tmp_path / "small.py", setup="import no_such_module_xyz")
    finally:
        undo()
    assert "ValueError: planted" in report.failure.text
    assert not report.verified


@pytest.mark.parametrize(
    ("setup", "kind"),
    [
        (SETUP.format("nan"), "non-finite"),
        (SETUP.format("segfault"), "died: SIGSEGV"),
        ("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)", None),
        ("import time\ntime.sleep(60)", None),
        ("", None),
    ],
)
def test_a_file_fails_in_the_way_that_its_check_does(tmp_path: Path, setup: str, kind: str | None) -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(x * 200).isinf()

    def sigmoid(x: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(x * 200)

    chosen = program if kind != "non-finite" else sigmoid
    (whole,) = captured_graphs(chosen, (torch.randn(9),), {}, dynamic=False)
    file = tmp_path / "file.py"
    file.write_text(file_text(whole.graph_module, whole.inputs, failure="planted", setup=setup))
    assert failure_of_file(file, timeout=5 if "sleep" in setup else 300) == kind


_INTERRUPTED = """
import signal, sys, torch
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell has its background jobs ignore it
from tests.debug.planted import plant, run_file
from tests.debug.test_minify import Network
from torchkiln.debug import minify
plant("crash_in_lowering")
network = Network(3)
def program(x):
    return torch.erf(network(x)) * 2
print(minify(program, torch.randn(3, 16), output=sys.argv[1], say=lambda line: print(line, flush=True)))
"""


def test_interrupts_end_the_search_and_then_the_verification_and_leave_the_best_so_far(tmp_path: Path) -> None:
    file = tmp_path / "small.py"
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    command = [sys.executable, "-c", _INTERRUPTED, str(file)]
    with subprocess.Popen(
        command, env={**os.environ, "PYTHONPATH": paths}, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        next(line for line in process.stdout if "elements of inputs" in line)
        assert "torch.erf(" in file.read_text()  # written while it goes on
        process.send_signal(signal.SIGINT)
        next(line for line in process.stdout if "in a process of its own" in line)
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        rest = process.stdout.read()
    assert process.returncode == 0, rest
    assert "(stopped early), does NOT fail in a process of its own" in rest
    assert "ValueError: planted" in rest
    assert "torch.erf(" in file.read_text()


def test_no_check_gets_more_time_than_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[float] = []

    def fails_slowly(*_: object, timeout: float, **__: object) -> Failure:
        limits.append(timeout)
        time.sleep(0.2)
        return Failure("planted", f"after {len(limits)} checks")

    monkeypatch.setattr(minify_module, "failure_of", fails_slowly)
    monkeypatch.setattr(minify_module, "failure_of_file", lambda *_, **__: "planted")
    report = minify(Network(9), torch.randn(3, 16), output=tmp_path / "small.py", seconds=0.5)
    assert not report.complete
    assert report.verified
    *search, last = limits
    assert search == sorted(search, reverse=True)
    assert 2 <= len(search) <= 3
    assert search[0] == 0.5
    assert last <= 60
    assert f"after {len(search)} checks" in (tmp_path / "small.py").read_text()


def test_a_program_that_differs_from_itself_in_eager_is_not_minified(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"nothing can be judged .*eager differs from itself, first at node"):
        minify(nondeterministic.counted_up, torch.randn(3), output=tmp_path / "none.py")


def test_a_slow_call_is_found_whatever_the_copies_of_its_inputs_take(tmp_path: Path) -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        return torch.cos(x[:9]).relu() * 2

    x = torch.randn(1 << 25)  # of which a copy takes longer than the planted call
    undo = plant("slow_call")
    try:
        with pytest.raises(SlowError):
            check(program, [x], slower=5)
        small = minify(
            program, x[:99], output=tmp_path / "small.py", setup=SETUP.format("slow_call"), slower=5, seconds=60
        )
    finally:
        undo()
    check(program, [x], slower=1000)
    assert small.failure.kind == "SlowError"
    assert small.verified
    assert small.nodes <= 2
    assert "slower=5" in (tmp_path / "small.py").read_text()


def test_time_is_taken_with_weights_that_are_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, prepared = nn.Linear(8, 8), []
    prepare = PreparedGraph._prepare

    def counted(graph: PreparedGraph, *given: Any, **options: Any) -> Any:
        prepared.append(graph)
        return prepare(graph, *given, **options)

    monkeypatch.setattr(PreparedGraph, "_prepare", counted)
    with torch.no_grad():
        check(lambda x: nn.functional.linear(x, layer.weight.sigmoid()), [torch.randn(3, 8)], slower=1e6)
    assert len(prepared) == 3  # for the results of two calls, and once for all times


def test_a_command_keeps_the_settings_and_modes_of_a_file(tmp_path: Path) -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        return torch.sin(x.relu() + 1) * 2

    (whole,) = captured_graphs(program, (torch.randn(9),), {}, dynamic=False)
    file, small = tmp_path / "file.py", tmp_path / "small.py"
    modes = {"autocast": "bfloat16", "default_dtype": "float64"}
    options = {"dynamic": False, "settings": {"inline_limit": 3}, "modes": modes}
    setup = SETUP.format("crash_with_inline_limit")
    file.write_text(file_text(whole.graph_module, whole.inputs, failure="planted", setup=setup, options=options))
    undo = plant("crash_with_inline_limit")
    try:
        report = minify_file(file, output=small, seconds=60, slower=None, imports=(), say=lambda _: None)
    finally:
        undo()
    assert report.verified
    assert report.nodes == 1
    assert "settings={'inline_limit': 3}" in small.read_text()
    assert f"modes={modes}" in small.read_text()
