"""What there is to measure: every entry builds, runs and, where it says so, trains."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from torchkiln.bench.backends import BACKENDS
from torchkiln.bench.cells import Cell, Job, Precision, Shapes
from torchkiln.bench.entries import ENTRIES
from torchkiln.bench.entries.entry import arguments, converted, loss_of, prepared, tensors
from torchkiln.bench.worker import Measured
from torchkiln.errors import OptionError

LIGHT = [name for name, entry in ENTRIES.items() if entry.group not in ("models", "serving")]
EAGER = BACKENDS["eager"].compile
TRAINABLE = [name for name in LIGHT if Job.training in ENTRIES[name].jobs]


def test_the_list_of_entries() -> None:
    names = ("models", "small", "functions", "serving")
    groups = {group: [e.name for e in ENTRIES.values() if e.group == group] for group in names}
    assert sum(map(len, groups.values())) == len(ENTRIES)
    assert [len(groups[name]) for name in ("models", "small", "serving")] == [10, 4, 12]
    for wanted in ("mish", "rope", "adamw-step", "stencil", "image-filter", "pairwise-distances", "sampling"):
        assert wanted in groups["functions"]
    assert sum(name.endswith(("loss", "smoothing")) for name in groups["functions"]) >= 3
    assert all(ENTRIES[name].needs == ("transformers",) for name in groups["models"])


@pytest.mark.parametrize("name", LIGHT)
def test_an_entry_runs_on_both_of_its_sizes(name: str) -> None:
    entry = ENTRIES[name]
    function = prepared(entry, Job.inference, torch.float32)
    shapes = []
    for variant in (0, 1):
        given = arguments(entry, variant, Job.inference, torch.float32, trainable=False)
        shapes.append([value.shape for value in given.values() if isinstance(value, Tensor)])
        with torch.no_grad():
            results = list(tensors(function(**given)))
        assert all(result.isfinite().all() for result in results)
        assert results or name == "adamw-step"
    assert shapes[0] != shapes[1] or name == "adamw-step"


@pytest.mark.parametrize("name", TRAINABLE)
def test_a_training_step_gives_gradients(name: str) -> None:
    entry = ENTRIES[name]
    function = prepared(entry, Job.training, torch.float32)
    given = arguments(entry, 1, Job.training, torch.float32, trainable=not isinstance(function, nn.Module))
    loss = loss_of(function(**given))
    assert loss.shape == ()
    leaves = list(function.parameters()) if isinstance(function, nn.Module) else list(given.values())
    loss.backward()
    gradients = [t.grad for t in leaves if isinstance(t, Tensor) and t.requires_grad]
    assert gradients
    assert all(g is not None and g.isfinite().all() for g in gradients)


@pytest.mark.parametrize("name", ["mish", "mlp-64", "focal-loss"])
def test_bfloat16_converts_what_is_floating(name: str) -> None:
    entry = ENTRIES[name]
    function = prepared(entry, Job.inference, torch.bfloat16)
    given = arguments(entry, 1, Job.inference, torch.bfloat16, trainable=False)
    kinds = {value.dtype for value in given.values()}
    assert kinds <= {torch.bfloat16, torch.int64}
    assert {t.dtype for t in tensors(function(**given))} == {torch.bfloat16}


def test_inputs_and_weights_are_the_same_in_every_process() -> None:
    entry = ENTRIES["mlp-64"]
    for torchs in (5, 7):
        torch.manual_seed(torchs)
        weights = torch.cat([p.flatten() for p in prepared(entry, Job.inference, torch.float32).parameters()])
        given = arguments(entry, 0, Job.inference, torch.float32, trainable=False)["input"]
        if torchs == 5:
            before = weights, given
    assert torch.equal(before[0], weights)
    assert torch.equal(before[1], given)


def test_a_model_of_the_library_runs_and_trains() -> None:
    entry = ENTRIES["mobilenet-v2"]
    model = prepared(entry, Job.training, torch.float32)
    loss = loss_of(model(pixel_values=torch.randn(2, 3, 64, 64)))
    loss.backward()
    assert all(p.grad is not None for p in model.parameters())


def test_nested_values_are_converted_and_found() -> None:
    nested = {"a": [torch.zeros(2), (torch.ones(1), torch.tensor(3))], "b": "text"}
    assert [t.shape for t in tensors(nested)] == [(2,), (1,)]
    assert [t.dtype for t in converted([torch.zeros(1), torch.tensor(1)], torch.bfloat16)] == [
        torch.bfloat16,
        torch.int64,
    ]


def test_what_has_no_gradient_cannot_be_trained() -> None:
    with pytest.raises(ValueError, match="cannot be trained"):
        loss_of([torch.zeros(2), torch.ones(2, dtype=torch.int64)])


def test_a_step_of_a_cell_leaves_no_gradients_behind() -> None:
    measured = Measured(Cell("mlp-64", Job.training, Precision.float32, Shapes.static), EAGER)
    measured.step()
    assert all(p.grad is None for p in measured.function.parameters())
    round_ = measured.round(0.001)
    assert round_["steps"] >= 3
    assert round_["ms"] > 0


def test_a_cell_in_int8_is_the_model_quantized() -> None:
    in_int8 = Measured(Cell("mlp-64", Job.inference, Precision.int8, Shapes.static), EAGER)
    in_float = Measured(Cell("mlp-64", Job.inference, Precision.float32, Shapes.static), EAGER)
    assert any(t.dtype == torch.int8 for t in in_int8.function.buffers())
    (quantized,), (exact,) = (list(tensors(m.function(**m.sizes[0]))) for m in (in_int8, in_float))
    assert not torch.equal(quantized, exact)
    # Three layers, each rounded to 256 steps of its range.
    assert (quantized - exact).abs().max() < 0.1 * exact.abs().max()
    assert in_int8.round(0.001)["steps"] >= 3


def test_a_function_is_not_quantized() -> None:
    with pytest.raises(OptionError, match="no weights to quantize"):
        Measured(Cell("mish", Job.inference, Precision.int8, Shapes.static), EAGER)


def test_a_wrong_result_shows_as_a_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = Measured(Cell("mish", Job.inference, Precision.float32, Shapes.static), EAGER)
    assert measured.check()["difference"] == 0.0
    right = measured.function(**measured.sizes[0])
    measured.compiled = lambda **given: right * 1.5
    assert measured.check()["difference"] == pytest.approx(0.5)
    measured.compiled = lambda **given: torch.full_like(right, float("nan"))
    assert measured.check()["difference"] == float("inf")
    measured.compiled = lambda **given: right[:1]
    assert measured.check()["difference"] == float("inf")


def test_an_entry_knows_the_packages_it_lacks() -> None:
    assert replace(ENTRIES["mish"], needs=("a_package_that_nobody_has",)).missing == ("a_package_that_nobody_has",)
    assert ENTRIES["mish"].missing == ()
