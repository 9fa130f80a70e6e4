"""Backends for looking at graphs compute what eager does; those that stop early find bugs on their side only."""

from __future__ import annotations

import operator
import os
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.debug.planted import plant
from torchkiln.debug import (
    debug_compile,
    draw_graph_compile,
    kiln_eager,
    kiln_passes,
    nop,
    print_compile,
    ts_compile,
    why_recompiled,
)
from torchkiln.errors import UnsupportedError

ROOT = Path(__file__).parent.parent.parent


def _program(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.sin(x @ w).softmax(-1) * torch.tanh(x)


@pytest.mark.parametrize("backend", [nop, kiln_eager, kiln_passes, print_compile])
def test_results_and_gradients_are_eagers(backend: object) -> None:
    x, w = torch.randn(4, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)
    expected = _program(x, w)
    gradients = torch.autograd.grad(expected.sum(), (x, w))
    result = torch.compile(_program, backend=backend)(x, w)
    torch.testing.assert_close(result, expected)
    torch.testing.assert_close(torch.autograd.grad(result.sum(), (x, w)), gradients)


def test_a_wrong_pass_shows_with_passes_and_not_with_capture_alone() -> None:
    x, w = torch.randn(4, 4), torch.randn(4, 4)
    undo = plant("wrong_rewrite")
    try:
        captured = torch.compile(_program, backend=kiln_eager)(x, w)
        torch._dynamo.reset()
        passes = torch.compile(_program, backend=kiln_passes)(x, w)
    finally:
        undo()
    assert torch.equal(captured, _program(x, w))
    assert not torch.allclose(passes, _program(x, w), rtol=1e-5, atol=1e-6)


def test_passes_of_weights_run_with_passes() -> None:
    layer, x = nn.Linear(4, 4), torch.randn(3, 4)
    undo = plant("wrong_weights")
    try:
        with torch.no_grad():
            passes = torch.compile(layer, backend=kiln_passes)(x)
    finally:
        undo()
    with torch.no_grad():
        torch.testing.assert_close(passes, nn.functional.linear(x, layer.weight * 1.01, layer.bias))
    assert not torch.allclose(passes, layer(x), rtol=1e-4)


def test_wrong_code_does_not_show_with_passes() -> None:
    x = torch.randn(50)
    undo = plant("wrong_constant")
    try:
        assert torch.allclose(torch.compile(torch.exp, backend=kiln_passes)(x), x.exp())
    finally:
        undo()


def test_the_graph_is_printed_and_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    x = torch.randn(4, 4)
    torch.compile(torch.tanh, backend=print_compile)(x)
    assert "torch.tanh" in capsys.readouterr().out
    torch._dynamo.reset()

    def draw(gm: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> object:
        return draw_graph_compile(gm, inputs, folder=tmp_path)

    torch.compile(lambda x: torch.tanh(x) + 1, backend=draw)(x)
    (file,) = tmp_path.glob("graph_*.dot")
    assert str(file) in capsys.readouterr().out
    text = file.read_text()
    assert '-> "output"' in text
    assert "torch.float32 [4, 4]" in text


def test_torchscript_gives_eagers_results() -> None:
    network = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 2)).eval()
    x = torch.randn(3, 8)
    kept: list[object] = []

    def backend(gm: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> object:
        kept.append(ts_compile(gm, inputs))
        return kept[0]

    with torch.no_grad():
        result = torch.compile(network, backend=backend)(x)
        torch.testing.assert_close(result, network(x))
    assert isinstance(kept[0], torch.ScriptMethod)


def test_torchscript_takes_lists_of_whole_and_other_numbers() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        return x + torch.tensor([[1.0, 2], [3, 4]]) + torch.tensor([1, 2])

    x = torch.randn(2, 2)
    assert torch.equal(torch.compile(program, backend=ts_compile)(x), program(x))


def test_torchscript_takes_functional_graphs_of_overloads() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.gelu(x.t() + 1, approximate="tanh").sum(0)

    x = torch.randn(3, 4)
    graph = torch.fx.experimental.proxy_tensor.make_fx(function)(x)
    torch.testing.assert_close(ts_compile(graph, [x])(x), function(x))


def _with_try(x: torch.Tensor) -> torch.Tensor:
    try:
        return x.sin()
    except RuntimeError:
        return x


def test_the_node_that_torchscript_cannot_take_is_named() -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_function(_with_try, (graph.call_function(torch.sin, (x,)),)))
    module = torch.fx.GraphModule({}, graph)
    with pytest.raises(UnsupportedError, match="TorchScript cannot take node _with_try, a call of"):
        ts_compile(module, [torch.randn(3)])


def test_a_recompilation_says_which_guard_failed() -> None:
    def scaled(x: torch.Tensor, factor: int) -> torch.Tensor:
        return x * factor

    compiled = torch.compile(scaled, backend=nop, dynamic=False)
    compiled(torch.ones(2), 2)
    assert why_recompiled().functions == ()
    assert str(why_recompiled()) == "no function was compiled again"
    compiled(torch.ones(3), 2)
    compiled(torch.ones(3), 5)
    (found,) = why_recompiled().functions
    assert found.function.endswith("scaled")
    assert found.file == __file__
    assert any("size mismatch at index 0. expected 2, actual 3" in reason for reason in found.reasons)
    assert any("factor == 2" in reason for reason in found.reasons)


def test_torchscript_takes_symbolic_sizes() -> None:
    def function(x: torch.Tensor, factor: int) -> torch.Tensor:
        return x.reshape(x.shape[1], -1).expand(x.shape[1], x.shape[0]) * (x.shape[0] + factor)

    compiled = torch.compile(function, backend=ts_compile, dynamic=True, fullgraph=True)
    with torch.no_grad():
        for rows, columns in ((3, 5), (4, 7)):
            x = torch.randn(rows, columns)
            assert torch.equal(compiled(x, rows), function(x, rows))


def test_the_node_that_torchscript_cannot_take_is_named_among_symbolic_sizes() -> None:
    graph = torch.fx.Graph()
    size, x = graph.placeholder("size"), graph.placeholder("x")
    size.meta["val"] = 4
    wide = graph.call_method("expand", (x, graph.call_function(operator.mul, (size, 2)), 3))
    graph.output(graph.call_function(_with_try, (wide,)))
    for node in graph.nodes:
        if node.target is operator.mul:
            node.meta["val"] = 8
    with pytest.raises(UnsupportedError, match="TorchScript cannot take node _with_try, a call of"):
        ts_compile(torch.fx.GraphModule({}, graph), [4, torch.randn(3)])


def test_graphs_of_another_run_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    graph = torch.fx.symbolic_trace(lambda x: torch.tanh(x))
    Path("graph_1.dot").write_text("of another run")
    Path("torchkiln_graph_1").mkdir()
    for backend in (draw_graph_compile, debug_compile):
        backend(graph, [torch.randn(3)])
    assert Path("graph_1.dot").read_text() == "of another run"
    assert Path("graph_2.dot").exists()
    assert Path("torchkiln_graph_2/reproduce.py").exists()
    assert not list(Path("torchkiln_graph_1").iterdir())


def test_commands_can_be_pasted_whatever_the_folder_is_called(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    graph = torch.fx.symbolic_trace(lambda x: (x + 1,))
    folder = tmp_path / "my models (ü)"
    draw_graph_compile(graph, [torch.randn(3)], folder=folder)
    debug_compile(graph, [torch.randn(3)], folder=folder)
    drawn, minified = map(shlex.split, capsys.readouterr().out.splitlines())
    assert drawn == ["dot", "-Tsvg", str(folder / "graph_1.dot"), ">", str(folder / "graph_1.svg")]
    assert minified == ["kiln", "minify", str(folder)]


def test_a_folder_that_cannot_be_written_stops_no_debug_compile(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    graph = torch.fx.symbolic_trace(lambda x: (x + 1,))
    x = torch.randn(3)
    (result,) = debug_compile(graph, [x], folder=tmp_path / "file" / "folder")(x)
    assert torch.equal(result, x + 1)
    assert "the graph is not saved" in capsys.readouterr().err


@pytest.mark.parametrize(("backend", "captured"), [("kiln_eager", True), ("kiln_passes", False)])
def test_backends_are_known_by_name(backend: str, captured: bool, tmp_path: Path) -> None:
    """In a process whose packages have the entry points of the project file, whatever is installed."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    info = tmp_path / "torchkiln-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torchkiln\nVersion: 0\n")
    names = project["entry-points"]["torch_dynamo_backends"]
    lines = "".join(f"{name} = {value}\n" for name, value in names.items())
    (info / "entry_points.txt").write_text(f"[torch_dynamo_backends]\n{lines}")
    program = f"""
import torch
from tests.debug.planted import plant
plant("wrong_rewrite")
x = torch.randn(50)
result = torch.compile(torch.tanh, backend={backend!r})(x)
for expected in (torch.tanh(x), torch.tanh(x * 1.001)):
    print(torch.allclose(result, expected, rtol=1e-5, atol=1e-6))
"""
    paths = os.pathsep.join([str(tmp_path), str(ROOT / "src"), str(ROOT)])
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(captured), str(not captured)]
