"""What is asked for, in words: names, groups, and one clear sentence for what does not exist."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from torchkiln.bench import backends as known_backends
from torchkiln.bench.backends import BACKENDS
from torchkiln.bench.cells import Cell, Job, Precision, Shapes
from torchkiln.bench.command import Request, request
from torchkiln.bench.entries import ENTRIES, entry
from torchkiln.bench.interleave import QUICK
from torchkiln.errors import OptionError


def ask(
    models: str = "mlp-64",
    backends: str = "eager,kiln",
    jobs: str = "inference",
    precisions: str = "float32",
    shapes: str = "static",
    *,
    quick: bool = False,
    threads: int = 2,
) -> Request:
    return request(models, backends, jobs, precisions, shapes, quick=quick, threads=threads)


def test_all_combinations_of_the_jobs_an_entry_has() -> None:
    asked = ask("mlp-64,sampling", jobs="inference,training", precisions="float32,bfloat16", shapes="static,dynamic")
    mine = [cell for cell in asked.cells if cell.entry == "mlp-64"]
    assert len(mine) == len(set(mine)) == 8
    sampled = [cell for cell in asked.cells if cell.entry == "sampling"]
    assert {cell.job for cell in sampled} == {Job.inference}
    assert len(sampled) == 4
    assert str(sampled[0]) == "sampling inference float32 static"
    assert sampled[-1].precision is Precision.bfloat16
    assert sampled[-1].shapes is Shapes.dynamic


def test_int8_is_for_inference_of_static_sizes() -> None:
    asked = ask("mlp-64", jobs="inference,training", precisions="float32,int8", shapes="static,dynamic")
    (quantized,) = [cell for cell in asked.cells if cell.precision is Precision.int8]
    assert (quantized.job, quantized.shapes) == (Job.inference, Shapes.static)
    assert len(asked.cells) == 5


def test_a_group_stands_for_its_entries_once_each() -> None:
    asked = ask("mlp-64, small,")
    assert [cell.entry for cell in asked.cells] == ["mlp-64", "lstm-loop", "tiny-transformer", "actor-critic"]


def test_without_models_every_entry_but_those_of_serving_is_meant() -> None:
    assert {cell.entry for cell in ask("").cells} == {e.name for e in ENTRIES.values() if e.group != "serving"}
    assert {cell.entry for cell in ask("serving").cells} == {e.name for e in ENTRIES.values() if e.group == "serving"}


def test_quick_and_threads() -> None:
    assert ask(quick=True).effort == QUICK
    assert ask(threads=1).threads == 1
    assert ask(threads=0).threads >= 1


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"models": "brt"}, r"Unknown model 'brt' \(did you mean 'bert'\?\)"),
        ({"models": "mlp-64,nothing"}, "Unknown model 'nothing'; the valid ones are: .*functions.*mlp-64"),
        ({"backends": "inductr"}, r"Unknown backend 'inductr' \(did you mean 'inductor'\?\)"),
        ({"backends": ""}, "at least one backend of: eager, inductor"),
        ({"jobs": "trainin"}, r"Unknown job 'trainin' \(did you mean 'training'\?\)"),
        ({"precisions": "float16"}, "Unknown precision 'float16'"),
        ({"shapes": "both"}, "Unknown shapes 'both'; the valid ones are: dynamic, static"),
    ],
)
def test_names_that_do_not_exist_are_refused_in_one_sentence(given: dict[str, str], sentence: str) -> None:
    with pytest.raises(OptionError, match=sentence) as caught:
        ask(**given)
    assert "\n" not in str(caught.value)


def test_a_backend_without_its_packages_says_how_to_get_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_backends, "find_spec", lambda package: None)
    assert BACKENDS["onnxruntime-api"].missing == ("onnxruntime", "onnxscript")
    with pytest.raises(OptionError, match=r"'onnxruntime-api' needs .* pip install onnxruntime onnxscript"):
        ask(backends="eager,onnxruntime-api")


def test_models_without_transformers_say_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entry, "find_spec", lambda package: None)
    with pytest.raises(OptionError, match=r"'bert' needs transformers.*pip install 'torchkiln\[bench\]'"):
        ask("bert")
    assert ask("small,functions").cells


def test_inductor_is_frozen_by_the_environment_of_its_process() -> None:
    """Dynamo does not look at the option of one compilation."""
    program = "import torch._dynamo.utils as u, torch; torch.set_grad_enabled(False); print(u.is_parameter_freezing())"
    for name, frozen in (("inductor", "False"), ("inductor-freezing", "True")):
        environment = {**os.environ, **BACKENDS[name].environment}
        found = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
        assert found.stdout.strip() == frozen


def test_backends_are_asked_for_the_cells_they_can_convert_alone() -> None:
    def takers(precision: Precision, job: Job = Job.inference) -> set[str]:
        cell = Cell("mlp-64", job, precision, Shapes.static)
        return {name for name, backend in BACKENDS.items() if backend.takes(cell)}

    assert "openvino-api" in takers(Precision.bfloat16) - takers(Precision.int8)
    assert "onnxruntime-api" in takers(Precision.int8) - takers(Precision.bfloat16)
    assert {"kiln", "inductor"} <= takers(Precision.float32, Job.training) < takers(Precision.float32)
