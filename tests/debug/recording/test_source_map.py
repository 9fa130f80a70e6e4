"""Every kernel and call leads to the user's lines, through files, inlined modules and loops."""

from itertools import pairwise
from pathlib import Path

import pytest
import torch

import torchkiln
from tests.debug.recording.package.model import Model
from torchkiln.debug.recording.model import Compilation, Kernel, Line, Node, Recording

FOLDER = Path(__file__).parent / "package"
FILES = {"model": FOLDER / "model.py", "layer": FOLDER / "parts/layer.py", "activation": FOLDER / "parts/activation.py"}


def line(file: str, remark: str) -> Line:
    """The line of a file that ends with ``# remark``."""
    lines = FILES[file].read_text().splitlines()
    (number,) = [k for k, text in enumerate(lines, 1) if text.endswith(f"  # {remark}")]
    return Line(str(FILES[file]), number)


def computes(node: Node) -> bool:
    """Whether a node is an operation on elements: no view, no constant, and not what unpacks results."""
    if not node.target.startswith("aten."):
        return False
    _, name, overload = node.target.split(".")
    return not getattr(getattr(torch.ops.aten, name), overload).is_view and name not in ("full", "scalar_tensor")


@pytest.fixture(scope="module")
def inference() -> Recording:
    torch.manual_seed(0)
    with torch.no_grad():
        return torchkiln.explain(Model(), torch.randn(8, 16))


@pytest.fixture(scope="module")
def training() -> Recording:
    torch.manual_seed(0)
    return torchkiln.explain(Model(), torch.randn(8, 16))


def graph(recording: Recording, kind: str) -> Compilation:
    (found,) = [one for one in recording.compilations if one.kind == kind]
    return found


def kernels_at(recording: Recording, kind: str, place: Line) -> list[Kernel]:
    return [kernel for kernel in graph(recording, kind).kernels if place in kernel.lines]


def test_the_softmax_and_the_bias_of_the_head_are_one_kernel_of_the_head_alone(inference):
    kernels = kernels_at(inference, "inference", line("model", "head"))
    assert [kernel.lines for kernel in kernels] == [(line("model", "head"),)]


def test_a_function_of_another_file_is_in_the_kernel_that_computes_it(inference):
    (kernel,) = kernels_at(inference, "inference", line("activation", "gated"))
    assert line("activation", "clamped") in kernel.lines
    # The layer before it ends in the same kernel: nothing stands between them but pointwise operations.
    assert line("layer", "residual") in kernel.lines
    assert line("layer", "mean") not in kernel.lines


def test_the_first_kernel_is_the_scaling_of_the_first_layer(inference):
    kernel = graph(inference, "inference").kernels[0]
    assert set(kernel.lines) == {line("layer", "mean"), line("layer", "scaled")}


def test_a_line_inside_a_loop_leads_to_the_kernels_of_every_layer(inference):
    kernels = kernels_at(inference, "inference", line("layer", "repeated"))
    assert len(kernels) == 2  # of two layers, which are not equal: the second goes on with another function
    # Two rounds of the loop are two operations each, in one kernel.
    last = inference.stages_of(graph(inference, "inference"))
    nodes = {node.id: node for stage in last for node in stage.nodes}
    rounds = [n for n in kernels[0].nodes if nodes[n].label == "tanh"]
    assert len(rounds) == 2


def test_matmuls_are_library_calls_of_the_lines_that_call_the_modules(inference):
    calls = graph(inference, "inference").library_calls
    places = [call.lines for call in calls if "linear" in call.name or "mm" in call.name]
    assert places == [(line("layer", "linear"),)] * 2 + [(line("model", "head"),)]


def test_nodes_know_their_modules_and_who_called_them(inference):
    stages = inference.stages_of(graph(inference, "inference"))
    nodes = stages[0].nodes
    tanh = [node for node in nodes if node.label == "tanh"]
    assert [node.module for node in tanh] == ["layers.0", "layers.0", "layers.1", "layers.1"]
    assert {node.lines for node in tanh} == {(line("layer", "repeated"), line("model", "call of a layer"))}
    assert {node.module for node in nodes if node.label == "rsqrt"} == {"layers.0.scale", "layers.1.scale"}
    (sigmoid,) = [node for node in nodes if node.label == "sigmoid"]
    assert (sigmoid.module, sigmoid.lines) == ("", (line("activation", "gated"), line("model", "call of bounded")))


@pytest.mark.parametrize("kind", ["forward", "backward"])
def test_every_operation_of_the_last_graph_is_in_a_kernel_or_a_call(training, kind):
    compilation = graph(training, kind)
    last = [stage for stage in training.stages_of(compilation) if stage.nodes][-1]
    done = {node for part in (*compilation.kernels, *compilation.library_calls) for node in part.nodes}
    computed = [node.id for node in last.nodes if node.op == "call_function" and computes(node)]
    assert len(computed) > 10
    assert [node for node in computed if node not in done] == []


def test_backward_leads_to_the_lines_of_forward(training):
    places = {place for kernel in graph(training, "backward").kernels for place in kernel.lines}
    for file, remark in (("layer", "scaled"), ("layer", "repeated"), ("activation", "gated"), ("model", "head")):
        assert line(file, remark) in places


@pytest.mark.parametrize("name", ["inference", "training"])
def test_every_operation_comes_from_operations_of_the_stage_before(name, request):
    recording = request.getfixturevalue(name)
    for compilation in recording.compilations:
        stages = [stage for stage in recording.stages_of(compilation) if stage.nodes]
        for before, after in pairwise(stages):
            known = {node.id for node in before.nodes}
            calls = [node for node in after.nodes if node.op == "call_function"]
            assert all(set(node.comes_from) <= known for node in calls)
            assert [node.id for node in calls if not node.comes_from] == []


def test_sources_are_the_files_that_lines_name(inference):
    assert {Path(file) for file in inference.sources} >= set(FILES.values())
    text = inference.sources[str(FILES["layer"])]
    assert text.splitlines()[line("layer", "mean").line - 1].strip().startswith("mean = x.pow(2)")


def test_a_model_of_torchs_modules_alone_is_made_by_no_line_of_the_users() -> None:
    with torch.no_grad():
        recording = torchkiln.explain(torch.nn.Sequential(torch.nn.Softmax(-1)), torch.randn(4, 16))
    kernels = graph(recording, "inference").kernels
    assert kernels
    assert all(kernel.lines == () for kernel in kernels)
