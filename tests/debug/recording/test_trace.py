"""``KILN_TRACE`` and ``kiln replay``, in processes of their own."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from benchmarks.recording import first_step
from torchkiln.cli import app
from torchkiln.debug import command
from torchkiln.debug.command import loaded_program
from torchkiln.debug.recording import collector
from torchkiln.debug.recording.command import explain_script, record_script
from torchkiln.debug.recording.folder import give_values, read_recording, read_values
from torchkiln.debug.recording.model import Stage
from torchkiln.debug.recording.replay import folders_in, replay
from torchkiln.errors import RecordingError
from torchkiln.recorder import observe

PROGRAM = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(6, 4)

    def forward(self, x):
        return torch.tanh(self.linear(x)) + x.sum(-1, keepdim=True)

torch.manual_seed(0)
net, x = Net(), torch.randn(6, 3).t()
compiled = torch.compile(net, backend="kiln")
compiled(x).sum().backward()
with torch.no_grad():
    compiled(x)
"""


def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **variables}
    return subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, text=True, check=False, timeout=300
    )


def kiln(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return run("-c", "from torchkiln.cli import main; main()", *arguments, **variables)


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trace")
    (folder / "program.py").write_text(PROGRAM)
    done = run(str(folder / "program.py"), KILN_TRACE=str(folder / "trace"), KILN_TRACE_VALUES="1")
    assert done.returncode == 0, done.stderr
    assert "KILN_TRACE" not in done.stderr  # it is no unknown setting
    return folder / "trace"


def test_every_captured_graph_has_a_folder_with_its_recording(traced):
    training, inference = folders_in(traced)
    assert [one.kind for one in read_recording(training).compilations] == ["forward", "backward"]
    kinds = [one.kind for one in read_recording(inference).compilations]
    assert kinds[0] == "inference"
    for folder in (training, inference):
        names = {path.name for path in folder.iterdir()}
        assert names >= {"recording.json", "summary.txt", "reproduce.py", "arguments.json", "arguments.safetensors"}


def test_arguments_have_their_strides_and_values(traced):
    training, _ = folders_in(traced)
    arguments = json.loads((training / "arguments.json").read_text())
    by_sizes = {tuple(one["sizes"]): one for one in arguments}
    assert by_sizes[3, 6]["strides"] == [1, 3]
    torch.manual_seed(0)
    net = torch.nn.Linear(6, 4)
    x = torch.randn(6, 3).t()
    saved = list(read_values(training).values())
    assert any(torch.equal(value, x) for value in saved if value.shape == x.shape)
    assert any(torch.equal(value, net.weight) for value in saved if value.shape == net.weight.shape)


def test_a_trace_has_what_dynamo_says_of_each_function(tmp_path):
    (tmp_path / "program.py").write_text(
        "import torch\n"
        "@torch.compile(backend='kiln')\n"
        "def broken(x):\n"
        "    y = torch.tanh(x)\n"
        "    torch._dynamo.graph_break()\n"
        "    return y * 2\n"
        "def main():\n"
        "    net = torch.nn.Linear(3, 3)\n"
        "    torch.compile(net, backend='kiln')(torch.ones(2, 3))\n"
        "main()\n"
        "broken(torch.ones(3))\n"
        "broken(torch.ones(3, dtype=torch.float64))\n"
    )
    done = run(str(tmp_path / "program.py"), KILN_TRACE=str(tmp_path / "trace"))
    assert done.returncode == 0, done.stderr
    recordings = [read_recording(folder) for folder in folders_in(tmp_path / "trace")]
    whole, first, rest, *_ = recordings
    assert whole.guards  # of a module that is gone at the end
    assert not whole.graph_breaks
    assert {one.function for one in first.guards} == {"broken"}
    assert "float64" in first.guards[1].text or "Double" in first.guards[1].text
    (broken,) = first.graph_breaks
    assert broken.line is not None
    assert broken.line.line == 5
    assert "Explanation" not in broken.reason
    assert not rest.graph_breaks
    assert [one.function for one in first.recompilations] == ["broken"]
    folder = folders_in(tmp_path / "trace")[1]
    assert "broken" in (folder / "guards.txt").read_text()
    assert "Graph breaks" in (folder / "summary.txt").read_text()


def test_replay_in_a_fresh_process_compiles_the_same_kernels_and_agrees_with_eager(traced):
    training, _ = folders_in(traced)
    done = kiln("replay", str(training))
    assert done.returncode == 0, done.stderr
    assert "forward" in done.stdout
    assert "backward" in done.stdout
    assert "with the values that were saved" in done.stdout
    assert "the same kernels as recorded" in done.stdout
    assert "agrees with eager" in done.stdout


def test_a_graph_of_inference_is_replayed_as_one(traced):
    _, inference = folders_in(traced)
    replayed = replay(inference)
    assert replayed.failure == ""
    assert {one.kind for one in replayed.after.compilations} == {"inference"}
    assert replayed.same_kernels


def test_weights_are_prepared_in_a_replay_as_they_were(tmp_path):
    (tmp_path / "program.py").write_text(
        "import torch\n"
        "model = torch.nn.Linear(1024, 1024)\n"
        "with torch.no_grad():\n"
        "    torch.compile(model, backend='kiln', options={'adaptive': False})(torch.randn(64, 1024))\n"
    )
    done = run(str(tmp_path / "program.py"), KILN_TRACE=str(tmp_path / "trace"))
    assert done.returncode == 0, done.stderr
    (folder,) = folders_in(tmp_path / "trace")
    assert {one.kind for one in read_recording(folder).compilations} == {"inference", "weights"}
    replayed = replay(folder)
    assert replayed.failure == ""
    assert {one.kind for one in replayed.after.compilations} == {"inference", "weights"}
    assert replayed.same_kernels


def test_expanded_arguments_are_replayed_with_their_values(tmp_path):
    script = tmp_path / "program.py"
    script.write_text(
        "import torch\n"
        "torch.compile(lambda x: x.sin().sum(0), backend='kiln')(torch.arange(5.0).expand(3, 5))\n"
    )
    done = run(str(script), KILN_TRACE=str(tmp_path / "trace"), KILN_TRACE_VALUES="1")
    assert done.returncode == 0, done.stderr
    (folder,) = folders_in(tmp_path / "trace")
    done = replay(folder)
    assert done.failure == ""
    assert done.saved_values
    assert done.same_kernels


def test_without_values_replay_takes_random_ones(traced, tmp_path):
    folder = shutil.copytree(folders_in(traced)[0], tmp_path / "copy")
    (folder / "arguments.safetensors").unlink()
    replayed = replay(folder)
    assert (replayed.failure, replayed.saved_values) == ("", False)
    assert replayed.same_kernels


def test_replay_tells_of_a_graph_that_fails(traced, tmp_path):
    folder = shutil.copytree(folders_in(traced)[0], tmp_path / "copy")
    program = (folder / "reproduce.py").read_text()
    (folder / "reproduce.py").write_text(program.replace("torch.tanh(", "torch.ops.aten.no_such_operator("))
    assert "no_such_operator" in replay(folder).failure


def test_damaged_values_are_refused(traced, tmp_path):
    folder = shutil.copytree(folders_in(traced)[0], tmp_path / "copy")
    (folder / "arguments.safetensors").write_bytes(b"\xff" * 20)
    with pytest.raises(RecordingError, match="damaged"):
        replay(folder)


def test_a_folder_that_cannot_be_written_stops_no_program(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM + "\nprint('done')\n")
    (tmp_path / "file").write_text("in the way")
    done = run(str(tmp_path / "program.py"), KILN_TRACE=str(tmp_path / "file"))
    assert done.returncode == 0, done.stderr
    assert done.stdout == "done\n"
    assert "not traced" in done.stderr


def test_a_folder_without_a_program_is_refused_in_one_line(tmp_path):
    done = CliRunner().invoke(app, ["replay", str(tmp_path)])
    assert done.exit_code == 1
    assert len(done.stderr.strip().splitlines()) == 1
    assert "reproduce.py" in done.stderr


def test_explain_runs_a_script_with_its_arguments_and_writes_the_recording(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, torch\n"
        "f = torch.compile(lambda x: torch.tanh(x) * 2, backend='kiln')\n"
        "for _ in range(3): f(torch.ones(int(sys.argv[2])))\n"
        "print('given', sys.argv[1:])\n"
    )
    done = kiln("explain", str(script), "--json", str(tmp_path / "out.json"), "--size", "5")
    assert done.returncode == 0, done.stderr
    assert "given ['--size', '5']" in done.stdout
    assert "kernel0" in done.stdout
    content = json.loads((tmp_path / "out.json").read_text())
    (compilation,) = content["compilations"]
    assert compilation["inputs"][0]["sizes"] == [5]
    assert compilation["measured_calls"] == 3
    assert compilation["kernels"][0]["seconds"] > 0


def test_explain_of_a_script_that_raises_shows_what_was_recorded_and_fails(tmp_path, capfd):
    script = tmp_path / "script.py"
    script.write_text(
        "import torch\ntorch.compile(lambda x: x + 1, backend='kiln')(torch.ones(3))\nraise ValueError('stop here')\n"
    )
    assert explain_script(script, [], Console(width=120)) == 1
    shown = capfd.readouterr()
    assert "stop here" in shown.err
    assert "kernel0" in shown.out


def test_a_recording_says_what_the_cache_has(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, torch\n"
        "f = torch.compile(lambda x: torch.tanh(x) * 3, backend='kiln')\n"
        "f(torch.ones(int(sys.argv[1])))\n"
    )
    variables = {"KILN_CACHE": "1", "KILN_CACHE_DIR": str(tmp_path / "cache"), "KILN_ADAPTIVE": "0"}
    assert run(str(script), "5", **variables).returncode == 0
    found = {}
    for size in ("5", "7"):
        done = kiln("explain", str(script), size, "--json", str(tmp_path / size), **variables)
        assert done.returncode == 0, done.stderr
        (compilation,) = json.loads((tmp_path / size).read_text())["compilations"]
        assert len(compilation["kernels"]) == 1  # compiled all the same
        (found[size],) = compilation["cache"]
    assert found["5"]["hit"], found["5"]["why"]
    assert not found["7"]["hit"]
    assert "inputs" in found["7"]["why"]


def test_the_example_is_explained_with_its_page(tmp_path):
    script = Path(__file__).parents[3] / "examples" / "transformer.py"
    page = tmp_path / "report.html"
    done = kiln("explain", str(script), "--html", str(page), "--layers", "1", "--width", "32", "--steps", "2")
    assert done.returncode == 0, done.stderr
    assert "loss after 2 steps" in done.stdout
    assert "transformer.py:45" in done.stdout  # the line of the MLP
    assert page.read_text().startswith("<!")


def test_a_finished_graph_is_written_without_the_stages_of_others(monkeypatch):
    made = []
    monkeypatch.setattr(collector, "Stage", lambda *fields: made.append(fields) or Stage(*fields))
    counts = []

    def finished(number: int) -> None:
        made.clear()
        (compilation,) = collecting.recording("one", captures={number}).compilations
        counts.append((len(made), len(compilation.stages)))

    collecting = collector.Collector(finished=finished, keep_code=False)
    with observe(collecting):
        for function in (lambda x: x.sin() + 1, lambda x: x.cos() + 1, lambda x: x.exp() + 1):
            torch.compile(function, backend="kiln")(torch.ones(5))
    assert len(counts) == 3
    assert all(built == own > 0 for built, own in counts)


def test_a_dynamic_graph_is_replayed_with_the_same_symbolic_sizes(tmp_path):
    (tmp_path / "program.py").write_text(
        "import torch\n"
        "f = torch.compile(lambda x, w: torch.tanh(x) * x.shape[0] + w, backend='kiln')\n"
        "for n in (4, 6):\n"
        "    f(torch.ones(n, 5), torch.ones(5))\n"
    )
    done = run(str(tmp_path / "program.py"), KILN_TRACE=str(tmp_path / "trace"))
    assert done.returncode == 0, done.stderr
    _, folder = folders_in(tmp_path / "trace")
    (recorded,) = read_recording(folder).compilations
    assert any(isinstance(size, str) for one in recorded.inputs for size in one.sizes)
    replayed = replay(folder)
    assert replayed.failure == ""
    (again,) = replayed.after.compilations
    assert [(one.dtype, [isinstance(n, str) for n in one.sizes]) for one in again.inputs] == [
        (one.dtype, [isinstance(n, str) for n in one.sizes]) for one in recorded.inputs
    ]
    assert replayed.same_kernels


def test_arguments_that_share_memory_share_it_in_a_replay(tmp_path):
    (tmp_path / "program.py").write_text(
        "import torch\n"
        "def step(x, y):\n"
        "    x.add_(1)\n"
        "    return y * 2\n"
        "x = torch.arange(20.0).view(4, 5)\n"
        "torch.compile(step, backend='kiln')(x, x.t()[:3])\n"
    )
    done = run(str(tmp_path / "program.py"), KILN_TRACE=str(tmp_path / "trace"), KILN_TRACE_VALUES="1")
    assert done.returncode == 0, done.stderr
    (folder,) = folders_in(tmp_path / "trace")
    program, inputs, _ = loaded_program(folder / "reproduce.py")
    given = inputs()
    assert give_values(given, folder)
    (doubled,) = program(*given)
    assert torch.equal(doubled, (torch.arange(20.0).view(4, 5).t()[:3] + 1) * 2)
    replayed = replay(folder)
    assert replayed.failure == ""
    assert replayed.same_kernels


def test_minify_of_a_folder_takes_the_saved_values(traced, monkeypatch, tmp_path):
    given = []
    monkeypatch.setattr(command, "minify", lambda program, *inputs, **options: given.extend(inputs))
    training, _ = folders_in(traced)
    saved = read_values(training)
    command.minify_file(training, output=tmp_path / "o.py", seconds=1, slower=None, imports=[], say=print)
    assert len(saved) == 3
    for position, value in saved.items():
        assert torch.equal(given[position], value)


def test_replay_goes_on_after_folders_that_cannot_be_replayed(traced, tmp_path):
    good = folders_in(traced)[1]
    for name in ("1_syntax", "2_damaged", "3_crash", "4_good"):
        shutil.copytree(good, tmp_path / name)
    (tmp_path / "1_syntax" / "reproduce.py").write_text("def program(:\n")
    (tmp_path / "2_damaged" / "recording.json").write_text("{")
    (tmp_path / "3_crash" / "reproduce.py").write_text("import os\nos.kill(os.getpid(), 11)\n")
    done = kiln("replay", str(tmp_path))
    assert done.returncode == 1
    syntax, damaged, crash, last = f"\n{done.stdout}".split(f"\n{tmp_path}")[1:]
    assert "SyntaxError" in syntax
    assert "damaged" in damaged
    assert "SIGSEGV" in crash
    assert "agrees with eager" in last
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("option", ["--html", "--json", "--folder"])
def test_outputs_that_cannot_be_written_are_refused_before_the_script_runs(option, tmp_path):
    script = tmp_path / "script.py"
    script.write_text("print('it ran')\n")
    (tmp_path / "file").write_text("in the way")
    done = CliRunner().invoke(app, ["explain", str(script), option, str(tmp_path / "file" / "output")])
    assert done.exit_code == 1
    assert "it ran" not in done.stdout
    assert len(done.stderr.strip().splitlines()) == 1
    assert "cannot be written" in done.stderr


@pytest.mark.parametrize(
    ("end", "code"), [("raise KeyboardInterrupt", 130), ("sys.exit(3)", 3), ("sys.exit('no')", 1), ("sys.exit()", 0)]
)
def test_explain_reports_and_passes_on_how_the_script_ends(end, code, tmp_path, capfd):
    script = tmp_path / "script.py"
    script.write_text(f"import sys, torch\ntorch.compile(lambda x: x + 1, backend='kiln')(torch.ones(3))\n{end}\n")
    assert explain_script(script, [], Console(width=120)) == code
    assert "kernel0" in capfd.readouterr().out


def test_the_benchmark_of_collecting_makes_the_recording(monkeypatch):
    made = []
    whole = collector.Collector.recording
    monkeypatch.setattr(collector.Collector, "recording", lambda self, name: made.append(whole(self, name)))
    seconds = first_step(1, collect=True)
    assert seconds > 0
    assert [one.kind for one in made[0].compilations] == ["forward", "backward"]


def test_a_graph_is_replayed_in_the_modes_it_was_compiled_in(tmp_path):
    script = tmp_path / "program.py"
    script.write_text(
        "import torch\n"
        "f = torch.compile(lambda x: (x @ x).relu() + torch.ones(4), backend='kiln')\n"
        "x = torch.randn(4, 4)\n"
        "with torch.autocast('cpu', torch.bfloat16):\n"
        "    f(x)\n"
        "torch.set_default_dtype(torch.float64)\n"
        "f(x)\n"
    )
    done = run(str(script), KILN_TRACE=str(tmp_path / "trace"))
    assert done.returncode == 0, done.stderr
    folders = folders_in(tmp_path / "trace")
    assert len(folders) == 2
    for folder in folders:
        replayed = replay(folder)
        assert replayed.failure == ""
        assert replayed.same_kernels
    assert torch.get_default_dtype() is torch.float32
    assert not torch.is_autocast_enabled("cpu")


def test_replay_names_the_graphs_that_have_no_program(traced, tmp_path):
    copied = tmp_path / "trace"
    shutil.copytree(folders_in(traced)[0], copied / "1_001")
    (copied / "1_002").mkdir()
    (copied / "1_002" / "not_replayable.txt").write_text("a graph with bodies\n")
    done = CliRunner().invoke(app, ["replay", str(copied)])
    assert done.exit_code == 0, done.output
    assert "agrees with eager" in done.output
    assert f"{copied / '1_002'}: not replayed, it has no program (a graph with bodies)" in done.output


def test_what_threads_of_a_script_compile_is_recorded(tmp_path):
    script = tmp_path / "program.py"
    script.write_text(
        "import threading, time, torch\n"
        "from concurrent.futures import ThreadPoolExecutor\n"
        "pool = ThreadPoolExecutor(1)\n"
        "pool.submit(int).result()\n"
        "def work():\n"
        "    time.sleep(0.5)\n"
        "    torch.compile(torch.sin, backend='kiln')(torch.ones(3))\n"
        "threading.Thread(target=work).start()\n"
    )
    recording, code = record_script(script, [])
    assert code == 0
    assert [one.kind for one in recording.compilations] == ["inference"]


def test_a_trace_of_another_version_is_replayed_without_comparing_kernels(traced, tmp_path):
    copied = tmp_path / "1_001"
    shutil.copytree(folders_in(traced)[0], copied)
    recorded = json.loads((copied / "recording.json").read_text())
    (copied / "recording.json").write_text(json.dumps({**recorded, "version": 0}))
    done = CliRunner().invoke(app, ["replay", str(copied)])
    assert done.exit_code == 0, done.output
    assert "kernels are not compared: This recording has format 0" in done.output
    assert "agrees with eager" in done.output
