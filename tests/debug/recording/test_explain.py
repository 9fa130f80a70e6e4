"""``explain`` on programs whose answers are known: stages, passes, fusions, kernels, calls, memory, breaks."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import torchkiln
from torchkiln.cli import app
from torchkiln.debug.recompilations import why_recompiled
from torchkiln.debug.recording.collector import Collector
from torchkiln.debug.recording.dynamo import noting
from torchkiln.debug.recording.folder import read_recording
from torchkiln.debug.recording.graphs import lines_of
from torchkiln.debug.recording.limits import raised_limits
from torchkiln.debug.recording.model import Bandwidth, Fusion, GraphBreak, Limits, Line, Recording
from torchkiln.debug.recording.summary import shares_of, summary_text
from torchkiln.errors import FallbackWarning, RecordingError
from torchkiln.recorder import observe


def softmax(x, w, b):
    return torch.softmax(x @ w + b, -1)


@pytest.fixture(scope="module")
def recording() -> Recording:
    torch.manual_seed(0)
    return torchkiln.explain(softmax, torch.randn(32, 64), torch.randn(64, 128), torch.randn(128))


def test_one_graph_goes_through_all_stages_in_order(recording):
    (compilation,) = recording.compilations
    assert compilation.kind == "inference"
    assert [stage.name for stage in recording.stages_of(compilation)] == [
        "captured graph",
        "captured graph after passes",
        "inference graph as traced",
        "inference graph",
        "inference graph after passes",
        "program",
        "fused groups",
        "plan",
        "code",
    ]
    labels = [node.label for node in recording.stages_of(compilation)[4].nodes if node.op == "call_function"]
    assert labels == ["mm", "add", "_softmax"]


def test_inputs_are_as_they_were_given(recording):
    (compilation,) = recording.compilations
    assert [(one.dtype, one.sizes, one.strides) for one in compilation.inputs] == [
        ("float32", (32, 64), (64, 1)),
        ("float32", (64, 128), (128, 1)),
        ("float32", (128,), (1,)),
    ]


def test_add_and_softmax_are_one_kernel_with_their_bytes(recording):
    (kernel,) = recording.compilations[0].kernels
    assert set(kernel.nodes) == {"add", "_softmax"}
    # What the matmul made and the bias are read, the result is written.
    assert kernel.bytes == 4 * (32 * 128 + 128 + 32 * 128)
    assert kernel.launches == 1
    assert "define" in kernel.llvm
    assert "@kernel0(" in kernel.llvm
    assert kernel.assembly.startswith("kernel0:")
    assert kernel.assembly.split()[-1].startswith("ret")


def test_the_matmul_is_a_library_call_with_its_operations_and_a_reason(recording):
    (call,) = recording.compilations[0].library_calls
    assert call.name == "aten.mm.default"
    assert call.operations == 2 * 32 * 64 * 128
    assert "lowering" in call.reason


def test_times_are_measured(recording):
    compilation = recording.compilations[0]
    assert compilation.measured_calls > 1
    steps = [*compilation.kernels, *compilation.library_calls]
    assert all(step.seconds is not None and step.seconds > 0 for step in steps)
    # The best call has all its steps in it, and of each step the least time counts.
    assert recording.compiled_seconds is not None
    assert sum(step.seconds for step in steps) < 10 * recording.compiled_seconds
    assert recording.eager_seconds > 0
    assert recording.limits.operations_per_second > 1e8


def test_fusion_says_what_was_fused_and_why_the_matmul_was_not(recording):
    fusions = recording.compilations[0].fusions
    assert ("inline", ("_softmax",), ("add",), True) in [(f.kind, f.first, f.second, f.fused) for f in fusions]
    refused = [f for f in fusions if f.kind == "fuse" and f.first == ("mm",)]
    assert refused
    assert {f.reason for f in refused} == {"a library call, not a kernel"}


def test_loops_over_different_sizes_are_not_fused_and_the_reason_is_given():
    def two(x):
        return x.exp(), x[:3].sin()

    (compilation,) = torchkiln.explain(two, torch.randn(8, 4)).compilations
    refused = [f for f in compilation.fusions if f.kind == "fuse" and not f.fused]
    assert [{*f.first, *f.second} for f in refused] == [{"exp", "sin"}]
    assert refused[0].reason == "they iterate over different numbers of points"
    assert len(compilation.kernels) == 2


def test_fusion_decisions_are_there_once_and_the_table_has_both_kinds():
    def function(x):
        total = x.sum()
        return torch.tanh(x) * total, torch.tanh(x) @ x, total.exp()

    recording = torchkiln.explain(function, torch.randn(8, 8))
    (compilation,) = recording.compilations
    assert len(set(compilation.fusions)) == len(compilation.fusions) > 0
    kinds = (Fusion("inline", ("a",), ("b",), False, "too long"), Fusion("fuse", ("a",), ("b",), False, "too wide"))
    text = str(replace(recording, compilations=(replace(compilation, fusions=kinds),)))
    assert re.search(r"too long +not inlined +1", text)
    assert re.search(r"too wide +not fused +1", text)


def test_memory_is_that_of_the_matmul_and_the_result(recording):
    memory = recording.compilations[0].memory
    matrix = 4 * 32 * 128
    assert memory.peak_bytes == 2 * matrix
    assert [(step.name, step.live_bytes) for step in memory.steps] == [
        ("aten.mm.default", matrix),
        ("kernel0", 2 * matrix),
    ]
    assert [(life.first, life.last, life.bytes) for life in memory.buffers] == [(0, 1, matrix), (1, 1, matrix)]


def test_the_most_of_all_steps_is_the_peak():
    def function(x):
        small = torch.relu(torch.mm(x, x))[:8] @ x
        return torch.mm(small, x).exp(), small.sin(), x.sin(), x.cos()

    (compilation,) = torchkiln.explain(function, torch.randn(256, 256)).compilations
    memory = compilation.memory
    alive = [sum(b.bytes for b in memory.buffers if b.first <= k <= b.last) for k in range(len(memory.steps))]
    assert max(alive) < memory.peak_bytes  # the arena is larger than what lives in it then
    assert max(step.live_bytes for step in memory.steps) == memory.peak_bytes


def test_passes_have_times_and_texts_that_are_stored_once(recording):
    assert len(set(recording.texts)) == len(recording.texts)
    assert all(one.seconds >= 0 for one in recording.passes)
    for one in recording.passes:
        assert (one.before != one.after) == (one.changed and recording.texts[one.before] != recording.texts[one.after])
    (normalize,) = [one for one in recording.passes if one.name == "normalize"]
    assert normalize.changed
    assert "matmul" in recording.texts[normalize.after]


def test_guards_are_those_of_the_function(recording):
    assert "___check_global_state" in recording.guards[0].text or "GLOBAL_STATE" in recording.guards[0].text
    assert any("size=[32, 64]" in one.text for one in recording.guards)


def test_a_graph_break_has_its_reason_and_line():
    def broken(x):
        y = x + 1
        print("between")
        return y * 2

    recording = torchkiln.explain(broken, torch.randn(4))
    assert len(recording.compilations) == 2
    (found,) = recording.graph_breaks
    assert Path(found.line.file) == Path(__file__)
    assert "print" in Path(__file__).read_text().splitlines()[found.line.line - 1]
    assert found.reason


def test_training_records_forward_and_backward_and_leaves_the_module_as_it_was():
    torch.manual_seed(0)
    module = nn.Linear(8, 4)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    recording = torchkiln.explain(module, torch.randn(2, 8))
    assert [one.kind for one in recording.compilations] == ["forward", "backward"]
    forward, backward = recording.compilations
    shared = set(forward.stages) & set(backward.stages)
    assert [recording.stages[number].name for number in sorted(shared)][-2:] == [
        "joint graph as traced",
        "joint graph after passes",
    ]
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert module.weight.grad is None


def test_a_graph_that_runs_eagerly_says_why(monkeypatch):
    def broken(*_, **__):
        raise RuntimeError("nothing is lowered today")

    monkeypatch.setattr("torchkiln.compiler.lower", broken)
    with torchkiln.settings(fallback=True), pytest.warns(FallbackWarning):
        recording = torchkiln.explain(lambda x: x.sin(), torch.randn(3))
    (compilation,) = recording.compilations
    assert "nothing is lowered today" in compilation.fallback
    assert [stage.name for stage in recording.stages_of(compilation)][-1] == "inference graph after passes"
    assert compilation.kernels == ()


def test_symbolic_sizes_are_expressions():
    def scaled(x):
        return x * x.shape[0]

    x = torch.randn(6, 3)
    torch._dynamo.mark_dynamic(x, 0)
    compiled = torch.compile(scaled, backend="kiln", dynamic=True)
    collector = Collector()
    with observe(collector):
        compiled(x)
    (compilation,) = collector.recording("scaled").compilations
    (tensor,) = [one for one in compilation.inputs if one.dtype == "float32"]
    numbers = {one.value for one in compilation.inputs if one.dtype == "int"}
    assert isinstance(tensor.sizes[0], str)
    assert tensor.sizes[0] in numbers


@pytest.mark.parametrize(
    ("dynamic", "marked", "symbolic"), [(None, False, 0), (None, True, 1), (False, False, 0), (True, False, 2)]
)
def test_sizes_are_symbolic_as_for_torch_compile(dynamic, marked, symbolic):
    x = torch.randn(6, 3)
    if marked:
        torch._dynamo.maybe_mark_dynamic(x, 0)
    recording = torchkiln.explain(torch.tanh, x, dynamic=dynamic)
    (tensor,) = [one for one in recording.compilations[0].inputs if one.dtype == "float32"]
    assert sum(isinstance(size, str) for size in tensor.sizes) == symbolic


@pytest.mark.parametrize(("dynamic", "symbolic"), [(None, [0, 1]), (False, [0, 0]), (True, [1, 1])])
def test_a_script_that_does_not_say_has_the_symbolic_sizes_of_the_command(dynamic, symbolic, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import torch\n"
        "torch._dynamo.reset()\n"
        "step = torch.compile(lambda x: x.tanh() * 2, backend='kiln')\n"
        "says = torch.compile(lambda x: x.exp(), backend='kiln', dynamic=False)\n"
        "[step(torch.ones(size)) for size in (3, 5)]\n"
        "says(torch.ones(3))\n"
    )
    before = torch._dynamo.config.get_config_copy()
    out = tmp_path / "out.json"
    options = {None: [], False: ["--static"], True: ["--dynamic"]}[dynamic]
    assert CliRunner().invoke(app, ["explain", str(script), "--json", str(out), *options]).exit_code == 0
    *compiled, said = Recording.from_json(json.loads(out.read_text())).compilations
    found = [sum(isinstance(n, str) for one in graph.inputs for n in one.sizes) for graph in (*compiled, said)]
    assert found == [*(symbolic[:1] if dynamic else symbolic), 0]
    assert torch._dynamo.config.get_config_copy() == before


def test_the_summary_names_what_took_time(recording):
    text = str(recording)
    for expected in ("softmax", "codegen", "kernel0", "aten.mm.default", "Memory of a call", "not measured"):
        assert (expected in text) == (expected != "not measured")


def test_a_folder_gives_the_recording_back_and_files_to_read(recording, tmp_path):
    recording.save(tmp_path / "saved")
    assert read_recording(tmp_path / "saved") == recording
    graph = tmp_path / "saved" / "1.inference"
    (kernel,) = graph.parent.glob("*/kernel0.txt")
    assert "_softmax" in kernel.read_text()
    (plan,) = graph.parent.glob("*/*_plan.txt")
    assert "aten.mm.default" in plan.read_text()


def test_a_damaged_folder_is_refused(recording, tmp_path):
    recording.save(tmp_path)
    (tmp_path / "recording.json").write_text("{")
    with pytest.raises(RecordingError, match="damaged"):
        read_recording(tmp_path)


def test_json_of_a_real_recording_gives_it_back(recording):
    assert Recording.from_json(json.loads(json.dumps(recording.to_json()))) == recording


def test_attention_stays_a_call_for_a_reason_that_names_its_matmuls():
    def attention(q, k, v):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v)

    inputs = [torch.randn(2, 2, 16, 8, requires_grad=True) for _ in range(3)]
    calls = [call for one in torchkiln.explain(attention, *inputs).compilations for call in one.library_calls]
    (reason,) = {call.reason for call in calls if "flash_attention_for_cpu_backward" in call.name}
    assert reason.startswith("its matmuls")


def test_a_limit_is_no_lower_than_the_fastest_kernel(recording):
    slow = Limits((Bandwidth(2**18, 1.0), Bandwidth(2**30, 2.0)), 3.0)
    raised = raised_limits(slow, recording)
    work = [item for one in recording.compilations for item in (*one.kernels, *one.library_calls)]
    shares = [share for item in work for share in shares_of(item, raised)]
    assert len(shares) == 2 * len(work) > 0
    assert max(shares) == pytest.approx(1.0)
    assert raised.bandwidths[1].bytes_per_second == 2.0  # nothing moved as much
    assert raised_limits(recording.limits, recording) == recording.limits


def test_texts_of_the_user_are_not_taken_for_markup(recording):
    line = Line("/drafts/[b]/model [i].py", 100)
    broken = GraphBreak("at x[idx] of model.py:100: see [/b]", line)
    shown = summary_text(replace(recording, graph_breaks=(broken,)), width=200)
    assert broken.reason in shown
    assert str(line) in shown


def test_graph_breaks_and_recompilations_outlive_a_reset_of_dynamo():
    def broken(x):
        torch._dynamo.graph_break()
        return x + 1

    with noting() as notes:
        compiled = torch.compile(broken, backend="eager", dynamic=False)
        compiled(torch.ones(3))
        compiled(torch.ones(4))
        torch._dynamo.reset()
        assert not why_recompiled().functions
        torch.compile(lambda x: x * 2, backend="eager")(torch.ones(3))
    (found,) = notes.graph_breaks()
    assert found.line is not None
    assert found.line.line == broken.__code__.co_firstlineno + 1
    assert any("size" in reason for one in notes.recompilations() for reason in one.reasons)


def test_a_function_that_compiles_nothing_has_no_speed():
    recording = torchkiln.explain(lambda: 3)
    assert recording.compilations == ()
    assert recording.eager_seconds is None
    assert recording.compiled_seconds is None
    assert "0 graphs (none)" in str(recording)


def test_saving_to_the_same_folder_again_leaves_nothing_of_before_but_the_files_of_others(recording, tmp_path):
    recording.save(tmp_path)
    (tmp_path / "notes.txt").write_text("mine")
    other = replace(recording, compilations=(), guards=())
    other.save(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"notes.txt", "recording.json", "summary.txt"}
    assert read_recording(tmp_path) == other


def test_a_line_of_source_that_looks_like_a_frame_is_none():
    node = torch.fx.Graph().placeholder("x")
    source = """raise OSError('File "elsewhere.py", line 7, in f')"""
    node.meta["stack_trace"] = f'  File "/a/my "model".py", line 3, in forward\n    {source}\n'
    assert lines_of(node) == (Line('/a/my "model".py', 3),)
